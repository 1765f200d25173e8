"""Finds places in a log: by time, and by how many bytes lie between.

Rule: blocking, and only what is synced counts. The index decides where to look; it is exact to about one interval.
"""

from __future__ import annotations

from bisect import bisect_right

from quiver.log.disk import Disk
from quiver.log.segment import Segment, scan_frames
from quiver.wire.frame import FrameHeader


def find_timestamp(
    disk: Disk, segments: list[Segment], interval_bytes: int, timestamp: int, index_end: int
) -> FrameHeader | None:
    """The header of the first stored frame below `index_end` with a record at or after that time."""
    for segment in segments:
        index = segment.load_index(disk, interval_bytes)
        if index.timestamp_max < timestamp:
            continue
        start = index.position_of_timestamp(timestamp)
        file = disk.open(segment.path) if segment.synced_bytes else None
        if file is None:
            return None
        for _, header, _ in scan_frames(file, segment.path, start, segment.synced_bytes):
            if header.index >= index_end:
                return None
            if header.record_count and header.timestamp_max >= timestamp:
                return header
    return None


def offset_after(
    disk: Disk, segments: list[Segment], interval_bytes: int, offset: int, bytes_max: int
) -> tuple[int, int]:
    """(end, bytes): what is stored from `offset` to `end` is about that long, and not longer than `bytes_max` unless
    that is less than the index can tell apart: then it is one step of the index. The first segment holds `offset`."""
    reached, taken = offset, 0
    for segment in segments:
        index = segment.load_index(disk, interval_bytes)
        start = index.position_of_offset(offset) if reached == offset else 0
        if segment.synced_bytes - start <= bytes_max - taken:
            reached, taken = max(reached, segment.next_offset), taken + segment.synced_bytes - start
            continue
        at = bisect_right(index.positions, start + bytes_max - taken) - 1
        if at >= 0 and index.offsets[at] > reached:
            return index.offsets[at], taken + index.positions[at] - start
        if reached > offset:
            return reached, taken
        while at + 1 < len(index.offsets) and index.offsets[at + 1] <= offset:
            at += 1  # entries without records in between
        if at + 1 < len(index.offsets):
            return index.offsets[at + 1], index.positions[at + 1] - start
        return max(offset, segment.next_offset), segment.synced_bytes - start
    return reached, taken
