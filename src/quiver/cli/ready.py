"""The one line a started process writes to its parent: that it serves, or why it cannot.

Rule: exactly one JSON line on the descriptor given as --ready-fd, then it is closed. An end of file without a line
means that the process died before it could say anything.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TypeVar

import msgspec

EXIT_FAILED = 1
EXIT_USER_MISTAKE = 2
EXIT_REMOVED = 4  # of a node that was removed from its cluster: it need not be started again
LOG_TAIL_BYTES_MAX = 4096


class NodeReady(msgspec.Struct, frozen=True):
    """A node takes messages at `address` and HTTP requests at `http`. `primary`: the manager that leads, as it says."""

    id: int
    pid: int
    address: str
    http: str
    primary: int = 0


class StartFailed(msgspec.Struct, frozen=True):
    """A process gives up before it served; `code` is its exit code."""

    error: str
    code: int = EXIT_FAILED


class ClusterReady(msgspec.Struct, frozen=True):
    """Every node of a cluster takes messages."""

    servers: tuple[str, ...]
    http: tuple[str, ...]
    pid: int


class ReadyPipe:
    """The writing end. `fd` None is a process that nobody waits for."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def report(self, line: NodeReady | StartFailed | ClusterReady) -> None:
        """Tells the parent, once. A parent that is gone is not our error: its end is noticed elsewhere."""
        # The number may belong to a socket or a log soon after the close, so it is forgotten here.
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with contextlib.suppress(OSError):
            os.write(fd, msgspec.json.encode(line) + b"\n")
        with contextlib.suppress(OSError):
            os.close(fd)


_Ready = TypeVar("_Ready", NodeReady, ClusterReady)


def parse_report(line: bytes, ready: type[_Ready]) -> _Ready | StartFailed | None:
    """What the child said; None when it ended without a word."""
    try:
        return msgspec.json.decode(line, type=ready)
    except msgspec.MsgspecError:
        pass
    try:
        return msgspec.json.decode(line, type=StartFailed)
    except msgspec.MsgspecError:
        return None


def last_words(log_path: Path, start: int) -> str:
    """The last line that a process wrote into its log after byte `start`: of a stack trace, the error itself."""
    with log_path.open("rb") as log:
        log.seek(max(start, log_path.stat().st_size - LOG_TAIL_BYTES_MAX))
        lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it ended without a word"
