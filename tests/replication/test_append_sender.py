"""Entries that must be read from files before they are sent, while the log changes under the reader."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest

from quiver.config import LogSettings
from quiver.errors import CorruptLogError, LogFailedError
from quiver.log.partition_log import PartitionLog
from quiver.raft import AnyMessage, Append
from quiver.replication.append_sender import AppendSender
from quiver.replication.group import replica_id
from quiver.testing.faulty_disk import FaultyDisk
from quiver.wire.frame import Entry, Kind, walk_frames
from tests.broker.kit import InlineExecutor

T = TypeVar("T")

ME, PEER = replica_id(1, 7), replica_id(2, 7)


class Readers(InlineExecutor):
    """Something happens before a read begins."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self._meanwhile = meanwhile

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        self._meanwhile()
        return super().submit(fn, *args, **kwargs)


class Transport:
    def __init__(self) -> None:
        self.sent: list[list[int]] = []

    def send(
        self, broker: int, uid: str, message: AnyMessage, frames: Sequence[Any] = (), *, now: bool = False
    ) -> bool:
        whole = memoryview(b"".join(frames))
        self.sent.append([header.index for _, header, _ in walk_frames(whole)])
        return True


def sent_and_damage(meanwhile: Callable[[FaultyDisk, PartitionLog], None]) -> tuple[list[list[int]], int]:
    """Entries 1 to 5 are read for a peer; (indexes of what was sent, how often damage was told)."""
    disk = FaultyDisk(0)
    log = PartitionLog(disk, "data/log", LogSettings())
    for _ in range(5):
        log.append(1, Entry.control(Kind.NOOP, b""), 0.0)
    log.flush()
    damage: list[CorruptLogError] = []
    transport = Transport()

    async def main() -> None:
        readers = Readers(lambda: meanwhile(disk, log))
        sender = AppendSender("u", log, disk, readers, transport, damage.append, 1000)
        sender.send(Append(ME, PEER, 1, 0, 0, 5, 0))
        await asyncio.gather(*sender._reading)

    asyncio.run(main())
    return transport.sent, len(damage)


def test_what_is_read_is_sent() -> None:
    assert sent_and_damage(lambda disk, log: None) == ([[1, 2, 3, 4, 5]], 0)


def test_a_log_that_is_cut_meanwhile_is_not_damaged_and_nothing_is_sent() -> None:
    assert sent_and_damage(lambda disk, log: log.truncate_suffix(4)) == ([], 0)


def test_entries_that_came_in_their_place_are_not_sent_for_them() -> None:
    def replace(disk: FaultyDisk, log: PartitionLog) -> None:
        log.truncate_suffix(5)
        log.append(2, Entry.control(Kind.NOOP, b""), 0.0)
        log.flush()

    assert sent_and_damage(replace) == ([], 0)


def test_log_that_stopped_in_the_middle_of_a_cut_is_not_damaged() -> None:
    def stop(disk: FaultyDisk, log: PartitionLog) -> None:
        disk.fail("datasync", errno.EIO, path=".seg")
        with pytest.raises(LogFailedError):
            log.truncate_suffix(4)
        log.cuts -= 1  # as if the reading had begun after it

    assert sent_and_damage(stop) == ([], 0)


def test_damage_is_told() -> None:
    def flip(disk: FaultyDisk, log: PartitionLog) -> None:
        disk.flip(log.spans_for_index(1)[0].path, 20, 3)

    assert sent_and_damage(flip) == ([], 1)
