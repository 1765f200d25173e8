"""Members of a group as processes, what they tell, and the judgement of it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterable
from typing import Final, NamedTuple, Self

from tests.system.kit import ENVIRON

STOP_S_MAX: Final = 60.0


class Read(NamedTuple):
    """A member has dealt with these records of a partition."""

    partition: int
    first: int
    end: int
    at_s: float


class Piece(NamedTuple):
    """Records that one member has read. `loose`: it was gone before it could store that."""

    partition: int
    first: int
    end: int
    loose: bool


class Member:
    """A process. `reads` and `stored`, how many of these are stored, are only ever changed by the thread that reads."""

    def __init__(self, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "tests.system.group_member", *arguments]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=ENVIRON)
        self.reads: list[Read] = []
        self.stored = 0
        self.loose: list[range] = []  # the reads that were not stored when it was killed, or held to be gone
        self.lost = 0  # how often it was told so
        self.is_reading = self.was_killed = False
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            match line.split():
                case ["read", partition, first, end, at_s]:
                    self.reads.append(Read(int(partition), int(first), int(end), float(at_s)))
                case ["stored"]:
                    self.stored = len(self.reads)
                case ["assigned"]:
                    self.is_reading = True
                case ["lost"]:
                    self.lost += 1
                    self.loose.append(range(self.stored, len(self.reads)))

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self.was_killed = True
        self._process.kill()
        self._end()
        self.loose.append(range(self.stored, len(self.reads)))

    def ask_to_stop(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def stop(self) -> None:
        """Also of one that has ended: all that it told is heard, and it did not fail."""
        self.ask_to_stop()
        assert self._process.wait(STOP_S_MAX) == 0
        self._end()

    def _end(self) -> None:
        """All that it told is heard."""
        self._process.wait()
        self.ask_to_stop()
        self._thread.join(30)
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def pieces(self) -> list[Piece]:
        return [
            Piece(partition, first, end, any(number in loose for loose in self.loose))
            for number, (partition, first, end, _) in enumerate(self.reads[:])
        ]


class Members:
    """`by_hand`: they commit themselves and tell of it, else the SDK does in the background."""

    def __init__(
        self, servers: str, topic: str, session_s: float = 2.0, commit_s: float = 0.2, *, by_hand: bool = False
    ) -> None:
        self._arguments = [servers, topic, "g", str(session_s), str(commit_s), *(["by-hand"] if by_hand else [])]
        self.all: list[Member] = []

    def start(self) -> int:
        self.all.append(Member(self._arguments))
        return len(self.all) - 1

    def alive(self) -> list[Member]:
        return [member for member in self.all if member.is_alive]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.alive():
            member.kill()

    @property
    def pieces(self) -> list[Piece]:
        return [piece for member in self.all for piece in member.pieces]


class Verdict(NamedTuple):
    missing: int  # records that nobody has read
    again: int  # how often a record was read once more
    wrongly: int  # of these, the ones that nobody who is gone had left unstored
    loose: int  # what those had left unstored: no more than this may be read again

    @property
    def is_good(self) -> bool:
        return not self.missing and not self.wrongly


def judge(pieces: Iterable[Piece], counts: dict[int, int]) -> Verdict:
    """`counts` is how many records each partition has. A record is to be read once by those who did not leave it
    loose, and once more for each that did."""
    missing = again = wrongly = loose = 0
    by_partition: dict[int, list[Piece]] = {partition: [] for partition in counts}
    for piece in pieces:
        by_partition[piece.partition].append(piece)
        loose += (piece.end - piece.first) * piece.loose
    for partition, count in counts.items():
        changes = [(0, 0, 0), (count, 0, 0)]  # at an offset: so many readers more, so many of them firm
        for piece in by_partition[partition]:
            changes += [(piece.first, 1, not piece.loose), (piece.end, -1, -(not piece.loose))]
        at = readers = firm = 0
        for offset, more, more_firm in sorted(changes):
            length = offset - at
            missing += length * (readers == 0)
            again += length * max(0, readers - 1)
            wrongly += length * max(0, firm - 1)
            at, readers, firm = offset, readers + more, firm + more_firm
    return Verdict(missing, again, wrongly, loose)
