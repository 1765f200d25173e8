"""Who owns a directory: an flock that the kernel drops when its holder dies, however it dies.

Rule: whether something runs is decided by the lock. The pid in the file only says whom to signal while it is held,
because a pid alone may belong to another process by now.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

_RETRY_S = 0.02


class FileLock:
    """Held from a successful `acquire` until `release` or the end of the process. Never handed to child processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def acquire(self, wait_s: float = 0.0) -> bool:
        """Takes the lock and writes our pid into it. False when another process still holds it after `wait_s`."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + wait_s
        while not _try_lock(fd, fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                os.close(fd)
                return False
            time.sleep(_RETRY_S)
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        self._fd = fd
        return True

    def release(self) -> None:
        # The file stays: unlinking it would let a second process lock a new file of the same name.
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def is_held(path: Path) -> bool:
    """Whether a live process holds the lock at `path`."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        # Shared, so that two who only look do not take each other for an owner.
        return not _try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def holder_pid(path: Path) -> int | None:
    """The pid of the process that holds the lock, None when nobody does (or it has not written its pid yet)."""
    if not is_held(path):
        return None
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
