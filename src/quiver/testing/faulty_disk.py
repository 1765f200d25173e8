"""A disk in memory that loses, tears and fails as real ones do; the other implementation of `quiver.log.disk`.

It models a page cache over a medium. Writes and truncations are seen at once but are on the medium only after
`datasync` of that file; creations, renames and removals only after `sync_directory`. Then:

- `crash()` is a power cut: each unsynced write survives, vanishes, or is torn at sector boundaries; of the changes of
  a file's length, and of the operations in a directory, some first part survives. Old handles are dead.
- `kill()` is the death of the process: the page cache survives, old handles are dead.
- A failed datasync forgets which pages were dirty, as Linux does: the bytes are read back until the next power cut,
  no later datasync brings them to the medium.

Rule: everything follows from the seed and the calls; no clock, no threads, no other source of chance.
"""

from __future__ import annotations

import builtins
import dataclasses
import errno
import os
import random
from collections.abc import Sequence

from quiver.log.disk import Buffer, File
from quiver.testing.medium import SECTOR_BYTES, Directory, Inode, Resize, Write


class SimulatedCrash(Exception):
    """The machine stopped here. Every operation raises it until `crash()` or `kill()` is called."""


@dataclasses.dataclass(slots=True)
class _Fault:
    operation: str
    error: int
    countdown: int
    path: str


class FaultyFile:
    __slots__ = ("_disk", "_generation", "_inode", "_path")

    def __init__(self, disk: FaultyDisk, path: str, inode: Inode) -> None:
        self._disk = disk
        self._path = path
        self._inode = inode
        self._generation = disk.generation

    def _check_alive(self) -> None:
        self._disk.check_running()
        if self._generation != self._disk.generation:
            raise OSError(errno.EBADF, "this handle was opened before a crash", self._path)

    def pread(self, length: int, position: int) -> bytes:
        self._check_alive()
        self._disk.meet_fault("pread", self._path)
        return bytes(self._inode.cache[position : position + length])

    def pwrite(self, buffers: Sequence[Buffer], position: int) -> int:
        self._check_alive()
        data = b"".join(buffers)
        try:
            self._disk.step("pwrite", self._path)
        except (OSError, SimulatedCrash):
            # Interrupted between two sectors, if not before the first.
            end = position + self._disk.chance.randint(0, len(data))
            self._inode.change(Write(position, data[: max(0, end - end % SECTOR_BYTES - position)]))
            raise
        room_bytes = self._disk.room_bytes()
        if room_bytes is not None and position + len(data) > len(self._inode.cache) + room_bytes:
            # A filling disk first writes what fits.
            fits = max(0, len(self._inode.cache) + room_bytes - position)
            self._inode.change(Write(position, data[:fits]))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
        self._inode.change(Write(position, data))
        return len(data)

    def size(self) -> int:
        self._check_alive()
        return len(self._inode.cache)

    def truncate(self, length: int) -> None:
        self._check_alive()
        self._disk.step("truncate", self._path)
        self._inode.change(Resize(length))

    def allocate(self, length: int) -> None:
        self._check_alive()
        self._disk.step("allocate", self._path)
        more_bytes, room_bytes = length - len(self._inode.cache), self._disk.room_bytes()
        if room_bytes is not None and more_bytes > room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
        if more_bytes > 0:
            self._inode.change(Resize(length))

    def datasync(self) -> None:
        self._check_alive()
        try:
            self._disk.step("datasync", self._path)
        except OSError:
            self._inode.settle(self._disk.chance)
            self._inode.unsynced = [Resize(len(self._inode.cache))]  # lengths are in the journal, pages are lost
            raise
        self._inode.sync()


class FaultyDisk:
    def __init__(self, seed: int, capacity_bytes: int | None = None) -> None:
        """`capacity_bytes` may be changed at any time; writes that pass it are cut short with ENOSPC."""
        self.chance = random.Random(seed)
        self.capacity_bytes = capacity_bytes
        self.generation = 0
        self.operations = 0  # changes and syncs so far
        self.flips = 0
        self.met: list[tuple[str, str]] = []  # (operation, path) of the ordered failures that happened
        self._root = Directory()
        self._faults: list[_Fault] = []
        self._stop_at: int | None = None

    # -- what can happen to it -----------------------------------------------------------------------------------

    def crash(self) -> None:
        """Power loss, and the machine starts again."""
        self.kill()
        self._root.settle(self.chance)

    def kill(self) -> None:
        """The process dies and all its handles with it; what it wrote is still in the page cache."""
        self.generation += 1
        self._stop_at = None

    def fail(self, operation: str, error: int, nth: int = 1, path: str = "") -> None:
        """Makes the n-th such operation from now, on a path that contains `path`, raise OSError(error), once.

        Operations are the method names of the Disk and File protocols.
        """
        self._faults.append(_Fault(operation, error, nth, path))

    def heal(self) -> None:
        """Takes back all ordered failures that have not happened."""
        self._faults = []

    def stop_at(self, nth: int) -> None:
        """Makes the n-th change or sync from now, and everything after it, raise SimulatedCrash."""
        self._stop_at = self.operations + nth

    def flip(self, path: str, byte: int, bit: int, *, counts: bool = True) -> None:
        """Bit rot: on the medium and in what is read. `counts`: somebody may say that he found damage."""
        self.flips += counts
        self._inode(path).flip(byte, bit)

    def write_back(self, path: str) -> None:
        """What every system does sooner or later by itself: what was written to that file is on the medium."""
        self._inode(path).sync()

    def content(self, path: str) -> bytes:
        """What is read from it now; empty when there is no such file."""
        found = self._find(path)
        return bytes(found.cache) if isinstance(found, Inode) else b""

    def room_bytes(self) -> int | None:
        return None if self.capacity_bytes is None else max(0, self.capacity_bytes - self._root.used_bytes())

    def check_running(self) -> None:
        if self._stop_at is not None and self.operations >= self._stop_at:
            raise SimulatedCrash

    def step(self, operation: str, path: str) -> None:
        """Counts a change or sync that is about to happen, and raises what was ordered for it."""
        self.check_running()
        self.operations += 1
        self.check_running()
        self.meet_fault(operation, path)

    def meet_fault(self, operation: str, path: str) -> None:
        for fault in list(self._faults):
            if fault.operation == operation and fault.path in path:
                fault.countdown -= 1
                if fault.countdown == 0:
                    self._faults.remove(fault)
                    self.met.append((operation, path))
                    raise OSError(fault.error, os.strerror(fault.error), path)

    # -- the Disk protocol ---------------------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False) -> File:
        directory, name = self._parent(path)
        if name not in directory.now and create:
            self.step("open", path)
            directory.change({name: Inode()})
        else:
            self.check_running()
            self.meet_fault("open", path)
        return FaultyFile(self, path, self._inode(path))

    def exists(self, path: str) -> bool:
        return self._find(path) is not None

    def list(self, directory: str) -> builtins.list[str]:
        return sorted(self._directory(directory).now)

    def make_directory(self, path: str) -> None:
        self.step("make_directory", path)
        here = self._root
        for name in _names(path):
            if name not in here.now:
                here.change({name: Directory()})
            here.sync()
            found = here.now[name]
            assert isinstance(found, Directory), f"{path} is a file"
            here = found

    def rename(self, source: str, target: str) -> None:
        assert os.path.dirname(source) == os.path.dirname(target), "only renames within one directory are simulated"
        directory, name = self._parent(source)
        found = self._find(source)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        self.step("rename", source)
        directory.change({name: None, os.path.basename(target): found})

    def remove(self, path: str) -> None:
        self._inode(path)
        self.step("remove", path)
        self._unlink(path)

    def remove_tree(self, path: str) -> None:
        for name in self.list(path):
            inner = f"{path}/{name}"
            if isinstance(self._find(inner), Directory):
                self.remove_tree(inner)
            else:
                self.remove(inner)
        self.step("remove_tree", path)
        self._unlink(path)

    def _unlink(self, path: str) -> None:
        directory, name = self._parent(path)
        directory.change({name: None})

    def sync_directory(self, path: str) -> None:
        self.step("sync_directory", path)
        self._directory(path).sync()

    # -- what a power cut would leave, for those who watch --------------------------------------------------------

    def durable(self, path: str) -> Inode | None:
        """Its `medium` is what is on disk under that name."""
        found = self._durable(path)
        return found if isinstance(found, Inode) else None

    def durable_names(self, directory: str) -> builtins.list[str]:
        found = self._durable(directory)
        return [*found.medium] if isinstance(found, Directory) else []

    def _durable(self, path: str) -> Inode | Directory | None:
        here: Inode | Directory | None = self._root
        for name in _names(path):
            here = here.medium.get(name) if isinstance(here, Directory) else None
        return here

    # -- names ---------------------------------------------------------------------------------------------------

    def _find(self, path: str) -> Inode | Directory | None:
        here: Inode | Directory | None = self._root
        for name in _names(path):
            here = here.now.get(name) if isinstance(here, Directory) else None
        return here

    def _inode(self, path: str) -> Inode:
        found = self._find(path)
        if not isinstance(found, Inode):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found

    def _directory(self, path: str) -> Directory:
        found = self._find(path)
        if not isinstance(found, Directory):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found

    def _parent(self, path: str) -> tuple[Directory, str]:
        return self._directory(os.path.dirname(path)), os.path.basename(path)


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name]
