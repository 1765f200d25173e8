"""One segment: a file of frames, `<first index>.seg`, with its sparse index `<first index>.idx`.

Rule: frames are only ever added at the end. `size_bytes` counts what was appended, `synced_bytes` what is on disk;
readers never look past the latter. The file of the active segment may be longer: zeros, room for what comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from quiver.errors import CorruptLogError
from quiver.log.disk import Disk, File
from quiver.log.index import IndexFile, SparseIndex
from quiver.wire.frame import (
    HEADER_BYTES,
    FrameError,
    FrameHeader,
    FrameTruncatedError,
    checked_payload,
    decode_frame,
    decode_header,
    encode_frame,
)

SUFFIX: Final = ".seg"
_SCAN_CHUNK_BYTES: Final = 1024 * 1024


def segment_path(directory: str, first_index: int) -> str:
    return f"{directory}/{first_index:020d}{SUFFIX}"


def index_path(path: str) -> str:
    return path.removesuffix(SUFFIX) + ".idx"


def remove_files(disk: Disk, path: str) -> None:
    """Of a segment, the index first: one without its segment would be taken for that of the next of this name."""
    for found in (index_path(path), path):
        if disk.exists(found):
            disk.remove(found)


class Span(NamedTuple):
    """A part of one segment file that is safe to read: synced, from a frame's beginning, end exclusive."""

    path: str
    position: int
    end: int


class Segment:
    __slots__ = (
        "_index",
        "base_offset",
        "file",
        "first_index",
        "next_index",
        "next_offset",
        "opened_at_s",
        "path",
        "room_end",
        "size_bytes",
        "synced_bytes",
        "zeros_end",
    )

    def __init__(self, path: str, first_index: int, base_offset: int, index: SparseIndex | None) -> None:
        self.path = path
        self.first_index = first_index
        self.base_offset = base_offset
        self.next_index = first_index
        self.next_offset = base_offset
        self.size_bytes = 0
        self.synced_bytes = 0
        self.opened_at_s: float | None = None  # when its first frame was appended by this process
        self.file: File | None = None  # held by the active segment only
        self.room_end = 0  # the length of its file where that was made longer than its content
        self.zeros_end = 0  # where what is written ahead of its content ends
        self._index = index

    @property
    def index(self) -> SparseIndex:
        assert self._index is not None
        return self._index

    def load_index(self, disk: Disk, interval_bytes: int) -> SparseIndex:
        """The sparse index, read from its file the first time, or rebuilt when that cannot be believed."""
        if self._index is None:
            found = read_index(disk, self.path, interval_bytes)
            if found is None or found.covered_bytes != self.size_bytes:
                found = rebuild_index(disk, self.path, self.size_bytes, interval_bytes)
            self._index = found.index
        return self._index

    def add(self, header: FrameHeader, length: int) -> None:
        """Counts a frame of so many bytes that will be written at the end."""
        index, base_offset, record_count = header.index, header.base_offset, header.record_count
        assert self._index is not None
        self._index.add(index, base_offset, self.size_bytes, header.timestamp_max, has_records=record_count > 0)
        self.size_bytes += length
        self.next_index = index + 1
        self.next_offset = base_offset + record_count

    def has_room(self, length: int) -> bool:
        """True when so many bytes can be written through: all before them is on disk, and so is the room for them."""
        end = self.size_bytes + length
        is_synced = self.file is not None and self.synced_bytes == self.size_bytes
        return is_synced and end <= self.zeros_end and end <= self.room_end

    def cut_file(self, length: int) -> None:
        assert self.file is not None
        self.file.truncate(length)
        self.file.datasync()
        self.room_end = self.zeros_end = length

    def encode_index(self) -> bytes:
        return self.index.encode(self.size_bytes, self.next_index, self.next_offset, self.base_offset)


def scan_frames(file: File, path: str, position: int, end: int) -> Iterator[tuple[int, FrameHeader, memoryview]]:
    """(position, header, payload) of each frame, checksums checked; CorruptLogError at the first that is not whole."""
    wanted = 0
    while position < end:
        view = _read(file, path, position, min(max(_SCAN_CHUNK_BYTES, wanted), end - position))
        at = wanted = 0
        while at < len(view):
            try:
                header, payload = decode_frame(view, at)
            except FrameTruncatedError as error:
                if position + at + error.wanted > end:
                    raise CorruptLogError.at(path, position + at, error.reason) from error
                wanted = error.wanted
                break
            except FrameError as error:
                raise CorruptLogError.at(path, position + at, error.reason) from error
            yield position + at, header, payload
            at += header.frame_length
        position += at


def _read(file: File, path: str, position: int, length: int) -> memoryview:
    view = memoryview(file.pread(length, position))
    if len(view) < length:
        # Also when only a part is missing: reading again would not bring it.
        raise CorruptLogError.at(path, position + len(view), "the file is shorter than it was")
    return view


def read_index(disk: Disk, path: str, interval_bytes: int) -> IndexFile | None:
    """The index file beside a segment; None when it is missing or damaged."""
    try:
        file = disk.open(index_path(path))
        return IndexFile.decode(file.pread(file.size(), 0), interval_bytes)
    except FileNotFoundError:
        return None


def rebuild_index(disk: Disk, path: str, size_bytes: int, interval_bytes: int) -> IndexFile:
    """Reads a whole sealed segment. Raises CorruptLogError where a frame is not whole."""
    segment = Segment(path, 0, 0, SparseIndex(interval_bytes))
    for _, header, _ in scan_frames(disk.open(path), path, 0, size_bytes):
        if segment.size_bytes == 0:
            segment.base_offset = header.base_offset
        segment.add(header, header.frame_length)
    return IndexFile(segment.index, size_bytes, segment.next_index, segment.next_offset, segment.base_offset)


def read_chunk(disk: Disk, spans: list[Span], offset: int, index_end: int, bytes_max: int) -> memoryview:
    """Whole frames from the one that holds `offset`, up to `bytes_max` but at least one with records.

    Empty only when no frame with records stands in the spans below `index_end`. Every frame's checksums are checked:
    a damaged frame is never served.
    """
    for span in spans:
        file, position, wanted = disk.open(span.path), span.position, 0
        while position < span.end:
            length = min(max(bytes_max, wanted, HEADER_BYTES), span.end - position)
            view = _read(file, span.path, position, length)
            found = _cut(view, span, position, offset, index_end, bytes_max)
            if found.stop - found.start > 0:
                return view[found.start : found.stop]
            if found.finished:
                return view[:0]
            position, wanted = position + found.stop, found.wanted
    return memoryview(b"")


def read_entries(disk: Disk, spans: list[Span], first: int, last: int) -> list[memoryview]:
    """The frames of entries `first` to `last` as they are on disk, checked: a damaged frame is never sent on."""
    frames: list[memoryview] = []
    for path, position, end in spans:
        file = disk.open(path)
        for at, header, payload in scan_frames(file, path, position, end):
            if header.index > last:
                return frames
            if header.index >= first:
                if header.index != first + len(frames):
                    raise CorruptLogError.at(path, at, f"found entry {header.index}, not {first + len(frames)}")
                frames.append(memoryview(encode_frame(header, payload)))
    return frames


class _Cut(NamedTuple):
    start: int
    stop: int
    wanted: int
    finished: bool


def _cut(view: memoryview, span: Span, position: int, offset: int, index_end: int, bytes_max: int) -> _Cut:
    """Where in `view` the frames to serve begin and end; an empty cut says how to go on."""
    at = 0
    start: int | None = None
    stop = 0
    while at < len(view):
        try:
            # A frame before the wanted one may be large: its header tells where it ends, its payload is not needed.
            header = decode_header(view, at)
            if header.index >= index_end:
                return _Cut(start or 0, stop, 0, True)
            if start is not None or header.next_offset > offset:
                if start is not None and at + header.frame_length - start > bytes_max:
                    break
                checked_payload(view, at, header)
                if header.record_count:
                    start = at if start is None else start
                    stop = at + header.frame_length
        except FrameTruncatedError as error:
            if position + at + error.wanted > span.end:
                raise CorruptLogError.at(span.path, position + at, error.reason) from error
            if start is None:
                return _Cut(at, at, error.wanted, False)
            break
        except FrameError as error:
            raise CorruptLogError.at(span.path, position + at, error.reason) from error
        at += header.frame_length
    if start is None:
        return _Cut(at, at, 0, False)
    return _Cut(start, stop, 0, True)
