"""Which segments are past their time or their share of the disk."""

from __future__ import annotations

from quiver.config import LogSettings
from quiver.log.disk import Disk
from quiver.log.segment import Segment


def expired_segments(disk: Disk, segments: list[Segment], settings: LogSettings, now_us: int) -> list[Segment]:
    """Those at the beginning of the log that need not be kept; the active one among them only by its age."""
    oldest_us = None if settings.retention_ms is None else now_us - settings.retention_ms * 1000
    excess = 0
    if settings.retention_bytes is not None:
        excess = sum(segment.size_bytes for segment in segments) - settings.retention_bytes
    expired: list[Segment] = []
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
        expired.append(segment)
    return expired
