"""Small facts kept in two alternating slots, so that a torn write never costs the older value.

Two users: the hard state (term and vote, synced before a vote leaves) and the sync mark (how far the log is known to be
on disk, written without sync). Rule: a slot counts only if its checksum is right; the higher version wins. Writes
from two threads follow each other, or both would take the same slot and the older value could stay in it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Final

from crc32c import crc32c

from quiver.errors import CorruptLogError
from quiver.log.disk import FULL_ERRNOS, Disk, File
from quiver.types import HardState

_SLOT = struct.Struct("<IQQQ")  # checksum, version, two values
_CHECKSUM = struct.Struct("<I")
_BODY = struct.Struct("<QQQ")
_SLOT_SPACING: Final = 512  # one sector each: a torn write of one cannot touch the other


class TwoSlots:
    """Two integers, written alternately to either slot of one file."""

    __slots__ = ("_file", "_version", "_writing", "damaged", "found", "values")

    def __init__(self, disk: Disk, path: str) -> None:
        self._writing = threading.Lock()
        existed = disk.exists(path)
        self._file: File = disk.open(path, create=True)
        self._version = 0
        self.values: tuple[int, int] = (0, 0)
        valid = 0
        raw = self._file.pread(2 * _SLOT_SPACING, 0)
        for start in (0, _SLOT_SPACING):
            if len(raw) >= start + _SLOT.size:
                checksum, version, first, second = _SLOT.unpack_from(raw, start)
                if checksum == crc32c(raw[start + 4 : start + _SLOT.size]):
                    valid += 1
                    if version > self._version:
                        self._version, self.values = version, (first, second)
        self.found = valid > 0
        # A slot that was never written is empty or zeros; a file with bytes but no valid slot has lost its value.
        self.damaged = existed and valid == 0 and any(raw)

    def write(self, first: int, second: int, *, sync: bool) -> None:
        with self._writing:
            self._write(first, second, sync)

    def _write(self, first: int, second: int, sync: bool) -> None:
        version = self._version + 1
        body = _BODY.pack(version, first, second)
        raw = _CHECKSUM.pack(crc32c(body)) + body
        self._file.pwrite((raw,), version % 2 * _SLOT_SPACING)
        if sync:
            self._file.datasync()
            # The second copy: with one alone, a flipped bit would silently bring back the value before. It is not
            # waited for, and the next write begins with its slot, so the synced copy is never the one at risk.
            self._file.pwrite((raw,), (version + 1) % 2 * _SLOT_SPACING)
        # Only now: a write that failed is followed by one to the same slot, never to the only good one.
        self._version = version
        self.values = (first, second)


class SyncMark(TwoSlots):
    """The end of what is known to be on disk, and the generation of its log. A mark that is too low is still true."""

    __slots__ = ("_late",)

    def __init__(self, disk: Disk, path: str) -> None:
        super().__init__(disk, path)
        self._late = 0

    def _write(self, first: int, second: int, sync: bool) -> None:
        self._late = 0  # whatever was to be written later is overtaken
        super()._write(first, second, sync)

    def raise_to(self, index: int) -> None:
        # Not synced: a lower mark after a power cut is still true, and a SIGKILL keeps it.
        self.write(index, self.values[1], sync=False)

    def raise_later(self, index: int) -> None:
        """For who answers first: this write costs as much as a fifth of a sync."""
        self._late = index

    def catch_up(self, on_error: Callable[[OSError], object]) -> None:
        """Writes what was left for later. Without space the mark stays as it is."""
        if self._late:
            try:
                with self._writing:
                    if self._late:  # else a flush in a thread has just written more
                        self._write(self._late, self.values[1], sync=False)
            except OSError as error:
                if error.errno not in FULL_ERRNOS:
                    on_error(error)


class HardStateFile:
    __slots__ = ("_slots",)

    def __init__(self, disk: Disk, directory: str) -> None:
        path = f"{directory}/hardstate"
        self._slots = TwoSlots(disk, path)
        if self._slots.damaged:
            # Guessing a vote could elect two leaders in one term.
            raise CorruptLogError.at(path, 0, "no valid copy of term and vote")
        # A killed process may have left it, or the file's name, in the page cache only. Who reads a vote acts on it.
        self._slots.write(*self._slots.values, sync=True)
        disk.sync_directory(directory)

    @property
    def value(self) -> HardState:
        return HardState(*self._slots.values)

    def write(self, state: HardState) -> None:
        """Returns when the state is on disk: a vote forgotten in a crash could elect two leaders."""
        self._slots.write(state.term, state.voted_for, sync=True)
