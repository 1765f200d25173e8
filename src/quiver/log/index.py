"""The sparse index of one segment: where frames begin, by index, offset and time.

Rule: it can always be rebuilt from the segment and is never believed beyond what it says it covers.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from typing import Final

from crc32c import crc32c

_MAGIC: Final = b"QVIX"
# magic, checksum of the rest, covered bytes, next index, next offset, base offset, timestamp max, entries
_HEAD = struct.Struct("<4sIQQQQqQ")
TIMESTAMP_NONE: Final = -(2**63)


class SparseIndex:
    """Entries (index, base offset, position, highest timestamp before that position), about one per interval."""

    __slots__ = ("_interval_bytes", "indexes", "offsets", "positions", "timestamp_max", "timestamps")

    def __init__(self, interval_bytes: int) -> None:
        self._interval_bytes = interval_bytes
        self.indexes = array("Q")
        self.offsets = array("Q")
        self.positions = array("Q")
        self.timestamps = array("q")
        self.timestamp_max = TIMESTAMP_NONE

    def add(self, index: int, offset: int, position: int, timestamp_max: int, *, has_records: bool) -> None:
        """Tells of one frame, in log order."""
        if not self.positions or position - self.positions[-1] >= self._interval_bytes:
            self.indexes.append(index)
            self.offsets.append(offset)
            self.positions.append(position)
            self.timestamps.append(self.timestamp_max)
        if has_records and timestamp_max > self.timestamp_max:
            self.timestamp_max = timestamp_max

    def position_of_index(self, index: int) -> int:
        """Where to begin reading to meet the frame of that index."""
        return self._position(bisect_right(self.indexes, index) - 1)

    def position_of_offset(self, offset: int) -> int:
        return self._position(bisect_right(self.offsets, offset) - 1)

    def position_of_timestamp(self, timestamp: int) -> int:
        """Where to begin reading to meet the first frame with a record at or after that time."""
        return self._position(bisect_left(self.timestamps, timestamp) - 1)

    def _position(self, entry: int) -> int:
        return self.positions[entry] if entry >= 0 else 0

    def last_within(self, index: int, bytes_max: int) -> int | None:
        """A known index after `index` with about `bytes_max` between the two; None: the end is nearer."""
        at = bisect_right(self.indexes, index)
        if at >= len(self.indexes):
            return None
        beyond = bisect_right(self.positions, self.position_of_index(index) + bytes_max, at)
        return None if beyond >= len(self.positions) else self.indexes[max(at, beyond - 1)]

    def truncate(self, position: int) -> None:
        """Forgets frames from that position on. The highest timestamp stays: too high costs time, never a record."""
        count = bisect_left(self.positions, position)
        for part in (self.indexes, self.offsets, self.positions, self.timestamps):
            del part[count:]

    def encode(self, covered_bytes: int, next_index: int, next_offset: int, base_offset: int) -> bytes:
        """The index file for the segment's first `covered_bytes`; later entries stay out of it."""
        count = bisect_left(self.positions, covered_bytes)
        body = b"".join(
            part[:count].tobytes() for part in (self.indexes, self.offsets, self.positions, self.timestamps)
        )
        fields = (covered_bytes, next_index, next_offset, base_offset, self.timestamp_max, count)
        raw = bytearray(_HEAD.pack(_MAGIC, 0, *fields) + body)
        struct.pack_into("<I", raw, 4, crc32c(raw[8:]))
        return bytes(raw)

    def encode_below(self, index: int, first_index: int, base_offset: int) -> bytes:
        """The index file for frames below `index`, up to the last of them whose place is known."""
        last = bisect_right(self.indexes, index) - 1
        if last < 0:
            return self.encode(0, first_index, base_offset, base_offset)
        return self.encode(self.positions[last], self.indexes[last], self.offsets[last], base_offset)


class IndexFile:
    """A decoded index file: the index and what it covers. None stands for a file that cannot be believed."""

    __slots__ = ("base_offset", "covered_bytes", "index", "next_index", "next_offset")

    def __init__(self, index: SparseIndex, covered_bytes: int, next_index: int, next_offset: int, base: int) -> None:
        self.index = index
        self.covered_bytes = covered_bytes
        self.next_index = next_index
        self.next_offset = next_offset
        self.base_offset = base

    @classmethod
    def decode(cls, raw: bytes, interval_bytes: int) -> IndexFile | None:
        if len(raw) < _HEAD.size:
            return None
        magic, checksum, covered, next_index, next_offset, base, timestamp_max, count = _HEAD.unpack_from(raw)
        if magic != _MAGIC or checksum != crc32c(memoryview(raw)[8:]) or len(raw) != _HEAD.size + count * 32:
            return None
        index = SparseIndex(interval_bytes)
        index.timestamp_max = timestamp_max
        start = _HEAD.size
        for part in (index.indexes, index.offsets, index.positions, index.timestamps):
            part.frombytes(raw[start : start + count * 8])
            start += count * 8
        return cls(index, covered, next_index, next_offset, base)
