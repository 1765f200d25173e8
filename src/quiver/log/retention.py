"""Which segments are past their time or their share of the disk, or were read by everybody."""

from __future__ import annotations

from typing import Final, NamedTuple

from quiver.config import LogSettings
from quiver.log.disk import Disk
from quiver.log.segment import Segment

# An active segment that was read whole is given up when it is at least so long; a shorter one is worth no new file.
_READ_BYTES_MIN: Final = 64 * 1024


class Cut(NamedTuple):
    """The first entry that stays and the first offset that can be read. Files go whole: the entry begins one."""

    index: int  # type: ignore[assignment]  # our word; tuple.index is never called
    offset: int


def expired(disk: Disk, segments: list[Segment], settings: LogSettings, now_us: int) -> Cut | None:
    """By time and size; the active segment only by its age."""
    oldest_us = None if settings.retention_ms is None else now_us - settings.retention_ms * 1000
    excess = 0
    if settings.retention_bytes is not None:
        excess = sum(segment.size_bytes for segment in segments) - settings.retention_bytes
    cut: Cut | None = None
    for segment in segments:
        active = segment is segments[-1]
        if segment.size_bytes == 0 or (active and segment.base_offset == segment.next_offset):
            break  # trimming entries without records would only make another
        newest_us = segment.load_index(disk, settings.index_interval_bytes).timestamp_max
        too_old = oldest_us is not None and newest_us < oldest_us
        surplus = excess >= segment.size_bytes and not active
        if not too_old and not surplus:
            break
        excess -= segment.size_bytes
        cut = Cut(segment.next_index, segment.next_offset)
    return cut


def read_by_all(segments: list[Segment], read_to: int) -> Cut:
    """Everybody has read up to that offset. It is given up to the record; what it frees are whole segments."""
    active = segments[-1]
    for segment in segments:
        if segment.next_offset > read_to:
            return Cut(segment.first_index, read_to)
    whole = active.base_offset < active.next_offset and active.size_bytes >= _READ_BYTES_MIN
    return Cut(active.next_index if whole else active.first_index, active.next_offset)
