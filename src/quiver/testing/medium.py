"""Files and directories of a faulty disk: what a process sees, what is on the medium, what a power cut leaves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final, NamedTuple

SECTOR_BYTES: Final = 512


class Write(NamedTuple):
    position: int
    data: bytes


class Resize(NamedTuple):
    length: int


def _apply(image: bytearray, change: Write | Resize) -> None:
    end = change.length if isinstance(change, Resize) else change.position + len(change.data)
    if len(image) < end:
        image.extend(bytes(end - len(image)))  # what was never written reads as zeros
    if isinstance(change, Resize):
        del image[end:]
    else:
        image[change.position : end] = change.data


class Inode:
    """`changed_from` and the frame lists belong to whoever watches the medium: what he found, and up to where that
    still holds."""

    __slots__ = ("_flipped", "cache", "changed_from", "frame_ends", "frame_terms", "medium", "unsynced")

    def __init__(self) -> None:
        self.cache = bytearray()
        self.medium = bytearray()
        self._flipped: dict[int, int] = {}  # byte of the medium -> which of its bits are not as they were written
        self.unsynced: list[Write | Resize] = []
        self.changed_from = 0
        self.frame_ends: list[int] = []
        self.frame_terms: list[int] = []

    def _note(self) -> None:
        for change in self.unsynced:
            at = change.length if isinstance(change, Resize) else change.position
            self.changed_from = min(self.changed_from, at)

    def change(self, change: Write | Resize) -> None:
        if isinstance(change, Resize) or change.data:
            _apply(self.cache, change)
            self.unsynced.append(change)

    def flip(self, byte: int, bit: int) -> None:
        for image in (self.cache, self.medium):
            if byte < len(image):
                image[byte] ^= 1 << bit
        if byte < len(self.medium):
            self._flipped[byte] = self._flipped.get(byte, 0) ^ 1 << bit

    def as_written(self) -> bytearray:
        """The medium, had no bit flipped."""
        if not self._flipped:
            return self.medium
        image = bytearray(self.medium)
        for byte, bits in self._flipped.items():
            image[byte] ^= bits
        return image

    def _bring(self, change: Write | Resize) -> None:
        """Onto the medium. What is written anew, or cut off, is as it was written."""
        _apply(self.medium, change)
        start, end = (0, 0) if isinstance(change, Resize) else (change.position, change.position + len(change.data))
        for byte in list(self._flipped):
            if start <= byte < end or byte >= len(self.medium):
                del self._flipped[byte]

    def used_bytes(self) -> int:
        return len(self.cache)

    def sync(self) -> None:
        """Room that was cut off is not data: a power cut may still bring it back."""
        self._note()
        before = bytes(self.medium) if any(isinstance(change, Resize) for change in self.unsynced) else b""
        for change in self.unsynced:
            self._bring(change)
        self.unsynced = []
        room = before[len(self.medium) :]
        if room and not room.strip(b"\0"):
            self.unsynced = [Resize(len(self.medium))]
            self.medium += room

    def settle(self, chance: random.Random) -> None:
        """Lets chance decide how much of what is unsynced reached the medium."""
        self._note()
        lengths_kept = _first_part(chance, len(self.unsynced))
        length = len(self.medium)
        for number, change in enumerate(self.unsynced):
            kept = number < lengths_kept
            if isinstance(change, Write):
                for part in _surviving_parts(chance, change):
                    self._bring(part)
                if kept:
                    length = max(length, change.position + len(change.data))
            elif kept:
                length = change.length
                self._bring(change)
        self._bring(Resize(length))
        self.unsynced = []


def _first_part(chance: random.Random, count: int) -> int:
    """How many of so many steps happened; none and all are as likely as something between."""
    return chance.choice((0, count, chance.randint(0, count)))


def _surviving_parts(chance: random.Random, write: Write) -> Iterator[Write]:
    fate = chance.choice(("survives", "vanishes", "torn"))
    if fate == "survives":
        yield write
    elif fate == "torn":
        start, end = write.position, write.position + len(write.data)
        for sector in range(start // SECTOR_BYTES, (end + SECTOR_BYTES - 1) // SECTOR_BYTES):
            first, last = max(start, sector * SECTOR_BYTES), min(end, (sector + 1) * SECTOR_BYTES)
            if chance.random() < 0.5:
                yield Write(first, write.data[first - start : last - start])


class Directory:
    __slots__ = ("medium", "now", "unsynced")

    def __init__(self) -> None:
        self.now: dict[str, Inode | Directory] = {}
        self.medium: dict[str, Inode | Directory] = {}
        self.unsynced: list[dict[str, Inode | Directory | None]] = []

    def change(self, names: dict[str, Inode | Directory | None]) -> None:
        """One operation that happens as a whole: these names now mean this, None removes them."""
        _rename(self.now, names)
        self.unsynced.append(names)

    def sync(self) -> None:
        for names in self.unsynced:
            _rename(self.medium, names)
        self.unsynced = []

    def settle(self, chance: random.Random) -> None:
        """A power cut: what is left is what the medium has."""
        del self.unsynced[_first_part(chance, len(self.unsynced)) :]
        self.sync()
        self.now = dict(self.medium)
        for item in self.now.values():
            item.settle(chance)
            if isinstance(item, Inode):
                item.cache = bytearray(item.medium)

    def used_bytes(self) -> int:
        return sum(item.used_bytes() for item in self.now.values())


def _rename(names: dict[str, Inode | Directory], changes: dict[str, Inode | Directory | None]) -> None:
    for name, item in changes.items():
        if item is None:
            names.pop(name, None)
        else:
            names[name] = item
