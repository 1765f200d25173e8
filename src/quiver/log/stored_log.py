"""What a partition's log holds, and reading it: by offset, by index, by time.

Rule: nothing is changed here, and nothing past what is synced is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quiver.config import LogSettings
from quiver.log.disk import Disk
from quiver.log.index import SparseIndex
from quiver.log.lookup import find_timestamp, offset_after
from quiver.log.segment import Segment, Span, read_chunk, scan_frames
from quiver.wire.frame import FrameHeader


class StoredLog:
    def __init__(self, disk: Disk, directory: str, settings: LogSettings, segments: list[Segment]) -> None:
        self._disk = disk
        self.directory = directory
        self.settings = settings  # may be replaced at any time: what is on disk stays as it was cut
        self._segments = segments
        self.synced_index = self.next_index  # end, exclusive, of what is on disk

    # -- what it holds -------------------------------------------------------------------------------------------

    @property
    def _active(self) -> Segment:
        return self._segments[-1]

    @property
    def first_index(self) -> int:
        return self._segments[0].first_index

    @property
    def next_index(self) -> int:
        return self._segments[-1].next_index

    @property
    def next_offset(self) -> int:
        return self._segments[-1].next_offset

    @property
    def base_offset(self) -> int:
        """The first offset whose record is still in a file."""
        return self._segments[0].base_offset

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self._segments)

    @property
    def segment_count(self) -> int:
        return len(self._segments)

    # -- read ----------------------------------------------------------------------------------------------------

    def spans_for_offset(self, offset: int) -> list[Span]:
        """Where to read to meet `offset` and what follows it."""
        return self._spans(self._find(lambda s: s.next_offset > offset), lambda i: i.position_of_offset(offset))

    def spans_for_index(self, index: int) -> list[Span]:
        return self._spans(self._find(lambda s: s.next_index > index), lambda i: i.position_of_index(index))

    def _find(self, reaches: Callable[[Segment], bool]) -> int:
        low, high = 0, len(self._segments) - 1
        while low < high:
            middle = (low + high) // 2
            if reaches(self._segments[middle]):
                high = middle
            else:
                low = middle + 1
        return low

    def _spans(self, first: int, locate: Callable[[SparseIndex], int]) -> list[Span]:
        # A segment of which nothing is stored may not even have a file yet.
        segments = [segment for segment in self._segments[first:] if segment.synced_bytes]
        spans = [Span(segment.path, 0, segment.synced_bytes) for segment in segments]
        if spans:
            index = segments[0].load_index(self._disk, self.settings.index_interval_bytes)
            spans[0] = spans[0]._replace(position=locate(index))
        return spans

    def fit(self, first: int, bytes_max: int) -> int:
        """About the last index so that the stored entries from `first` on are `bytes_max` long; `first` at least."""
        segment = self._segments[self._find(lambda s: s.next_index > first)]
        index = segment.load_index(self._disk, self.settings.index_interval_bytes)
        last = index.last_within(first, bytes_max)
        return max(first, min(segment.next_index if last is None else last, self.synced_index) - 1)

    def read(self, offset: int, bytes_max: int, index_end: int | None = None) -> memoryview:
        """Whole frames from the one that holds `offset`; blocking. See `read_chunk`."""
        limit = self.synced_index if index_end is None else min(index_end, self.synced_index)
        return read_chunk(self._disk, self.spans_for_offset(offset), offset, limit, bytes_max)

    def scan(self, index: int) -> Iterator[tuple[str, FrameHeader, memoryview]]:
        """(file, header, payload) of each stored entry from `index` on, checked; blocking."""
        for path, position, end in self.spans_for_index(index):
            for _, header, payload in scan_frames(self._disk.open(path), path, position, end):
                if header.index >= index:
                    yield path, header, payload

    def find_timestamp(self, timestamp: int, index_end: int) -> FrameHeader | None:
        """The header of the first stored frame below `index_end` with a record at or after that time; blocking."""
        interval_bytes = self.settings.index_interval_bytes
        return find_timestamp(self._disk, list(self._segments), interval_bytes, timestamp, index_end)

    def offset_after(self, offset: int, bytes_max: int) -> tuple[int, int]:
        """Where about `bytes_max` stored bytes from `offset` on end, and how many these are; blocking."""
        segments = [segment for segment in list(self._segments) if segment.next_offset > offset]
        return offset_after(self._disk, segments, self.settings.index_interval_bytes, offset, bytes_max)
