"""The newest frames of a log in memory: what followers still need, and what is not yet readable from a file.

Rule: consecutive entries up to the end of the log. Bounded in bytes, except for what is not on disk.
"""

from __future__ import annotations

from collections import deque

Buffer = bytes | bytearray | memoryview
Frame = list[Buffer]

BYTES_MAX = 8 * 1024 * 1024


class FrameCache:
    __slots__ = ("_bytes", "_frames", "first")

    def __init__(self, next_index: int) -> None:
        self.first = next_index
        self._frames: deque[tuple[int, Frame]] = deque()  # length, parts
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._frames)

    def add(self, frame: Frame) -> None:
        length = sum(map(len, frame))
        self._frames.append((length, frame))
        self._bytes += length

    def pass_over(self, frame: Buffer) -> None:
        """One more entry, which is on disk already: kept only where it follows others."""
        if self._frames:
            self.add([frame])
        else:
            self.first += 1

    def drop_from(self, index: int) -> None:
        """Forgets entries from `index` on; the log ends there."""
        while self.first + len(self._frames) > index and self._frames:
            self._bytes -= self._frames.pop()[0]
        if not self._frames:
            self.first = index

    def drop_below(self, needed: int, synced_end: int) -> None:
        """Forgets entries nobody needs, and beyond the limit also needed ones, if they are on disk."""
        while self._frames and (self.first < needed or self._bytes > BYTES_MAX) and self.first < synced_end:
            self._bytes -= self._frames.popleft()[0]
            self.first += 1

    def fit(self, first: int, bytes_max: int) -> int | None:
        """The last index so that entries from `first` on are within `bytes_max`, `first` at least; None: not here."""
        at = first - self.first
        if not 0 <= at < len(self._frames):
            return None
        total = self._frames[at][0]
        while at + 1 < len(self._frames) and total + self._frames[at + 1][0] <= bytes_max:
            at += 1
            total += self._frames[at][0]
        return self.first + at

    def get(self, first: int, last: int) -> Frame | None:
        """The parts of those frames, one after the other; None when one is not here."""
        if first < self.first or last >= self.first + len(self._frames):
            return None
        parts: Frame = []
        for at in range(first - self.first, last - self.first + 1):
            parts += self._frames[at][1]
        return parts
