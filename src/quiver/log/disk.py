"""All file access of the log, as an interface small enough to simulate.

Rule: nothing else in the log touches the operating system. Errors are OSError with errno, as the system gives them.
`quiver.testing.faulty_disk` is the other implementation: it loses unsynced writes, tears sectors and fails on order.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from typing import Final, Protocol

Buffer = bytes | bytearray | memoryview

FULL_ERRNOS: Final = frozenset((errno.ENOSPC, errno.EDQUOT))
# Linux takes at most 1024 buffers in one call.
_BUFFERS_MAX = 1024


class SpaceError(Exception):
    """The disk was full; the files are again as they were before."""


class File(Protocol):
    def pread(self, length: int, position: int) -> bytes:
        """Up to `length` bytes; fewer only at the end of the file."""
        ...

    def pwrite(self, buffers: Sequence[Buffer], position: int) -> int:
        """Writes all buffers one after the other, returns the bytes written; raises OSError if it cannot write all."""
        ...

    def size(self) -> int: ...

    def truncate(self, length: int) -> None: ...

    def allocate(self, length: int) -> None:
        """Makes the file at least so long, with zeros on space that is its own. Raises OSError when there is none."""
        ...

    def datasync(self) -> None:
        """Returns when all written bytes, and the length, are on the medium."""
        ...


class Disk(Protocol):
    def open(self, path: str, *, create: bool = False) -> File:
        """An existing file for reading and writing, or with `create` also a new one. Closed when no longer used."""
        ...

    def exists(self, path: str) -> bool: ...

    def list(self, directory: str) -> list[str]: ...

    def make_directory(self, path: str) -> None:
        """Makes it and its parents where they are missing; returns when their names are on the medium."""
        ...

    def rename(self, source: str, target: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def remove_tree(self, path: str) -> None: ...

    def sync_directory(self, path: str) -> None:
        """Makes creations, renames and removals in that directory durable."""
        ...


class SystemFile:
    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __del__(self) -> None:
        # Closed by reference count: a reader in another thread keeps the descriptor valid until it is done.
        os.close(self._fd)

    def pread(self, length: int, position: int) -> bytes:
        data = os.pread(self._fd, length, position)
        if len(data) == length or not data:
            return data
        parts = [data]
        got = len(data)
        while got < length and (data := os.pread(self._fd, length - got, position + got)):
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def pwrite(self, buffers: Sequence[Buffer], position: int) -> int:
        start = position
        for first in range(0, len(buffers), _BUFFERS_MAX):
            part = buffers if len(buffers) <= _BUFFERS_MAX else buffers[first : first + _BUFFERS_MAX]
            wanted = sum(map(len, part))
            written = os.pwritev(self._fd, part, position)
            position += written
            if written < wanted:
                # A short write is how a filling disk begins; writing the rest gives the real error.
                rest = memoryview(b"".join(part))[written:]
                while rest:
                    written = os.pwrite(self._fd, rest, position)
                    position += written
                    rest = rest[written:]
        return position - start

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def truncate(self, length: int) -> None:
        os.ftruncate(self._fd, length)

    def allocate(self, length: int) -> None:
        os.posix_fallocate(self._fd, 0, length)

    def datasync(self) -> None:
        os.fdatasync(self._fd)


class SystemDisk:
    def open(self, path: str, *, create: bool = False) -> File:
        return SystemFile(os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644))

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def list(self, directory: str) -> list[str]:
        return sorted(os.listdir(directory))

    def make_directory(self, path: str) -> None:
        parent = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(parent):
            self.make_directory(parent)
        os.makedirs(path, exist_ok=True)
        # Also when it was there: who made it may have been killed before this. Without it a power cut takes the
        # directory, and with it files that were synced.
        self.sync_directory(parent)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def remove(self, path: str) -> None:
        os.remove(path)

    def remove_tree(self, path: str) -> None:
        shutil.rmtree(path)

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_atomically(disk: Disk, path: str, data: Buffer) -> None:
    """After a crash the file is either the old or the new one, whole; after the return it is the new one."""
    disk.rename(write_beside(disk, path, data), path)
    disk.sync_directory(os.path.dirname(path))


def write_beside(disk: Disk, path: str, data: Buffer) -> str:
    """A file, whole and on disk, that may be renamed to `path`; gives its name. Whatever fails, `path` is untouched."""
    temporary = path + ".tmp"  # recovery removes it
    file = disk.open(temporary, create=True)
    file.truncate(0)
    file.pwrite([data], 0)
    file.datasync()
    return temporary
