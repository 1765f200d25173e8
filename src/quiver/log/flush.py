"""Group commit: everything appended since the last flush goes to disk in one job, in log order.

Rule: a job touches only what it was given, so it may run in a thread while the owner goes on appending. One job at a
time. After a segment is synced and never before, the next one is created: only the last segment can ever be torn.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from typing import NamedTuple

from quiver.log.checkpoint import Checkpoint, encode_checkpoint
from quiver.log.disk import FULL_ERRNOS, Buffer, Disk, File, SpaceError, write_atomically
from quiver.log.segment import Segment, index_path
from quiver.log.slots import SyncMark

# A file system that cannot give room ahead takes the bytes without.
_NO_ROOM_ERRNOS = FULL_ERRNOS | {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_ROOM_BYTES_MIN = 64 * 1024
# So much of the room is written with zeros at a time, and only for writes that are small beside that.
_ZEROS = bytes(64 * 1024)
_SMALL_BYTES_MAX = 8 * 1024


class LogEnd(NamedTuple):
    next_index: int
    next_offset: int
    last_term: int


@dataclasses.dataclass(slots=True)
class SegmentWrite:
    segment: Segment
    position: int
    buffers: list[Buffer] = dataclasses.field(default_factory=list)
    size_bytes: int = 0  # of the buffers
    sealed_index: bytes | None = None  # written when this job fills the segment

    def end(self) -> int:
        return self.position + self.size_bytes


@dataclasses.dataclass(slots=True)
class FlushJob:
    disk: Disk
    directory: str
    mark: SyncMark
    writes: list[SegmentWrite]
    start: LogEnd
    end: LogEnd
    room_bytes_max: int
    marks_late: bool = False  # the mark is left to whoever answers first
    size_bytes: int = 0

    def __post_init__(self) -> None:
        for write in self.writes:
            self.size_bytes += write.size_bytes

    @property
    def only_appends(self) -> bool:
        """No file is made or sealed: one write, one sync."""
        return len(self.writes) == 1 and self.writes[0].segment.file is not None and self.writes[0].sealed_index is None

    def run(self) -> None:
        """Blocks until all of it is on disk. SpaceError: nothing happened. OSError: the log must stop."""
        created: list[Segment] = []
        try:
            for write in self.writes:
                if write.segment.file is None:
                    created.append(write.segment)
                    write.segment.file = self.disk.open(write.segment.path, create=True)
                self._make_room(write, write.segment.file)
                write.segment.file.pwrite(write.buffers, write.position)
                self._write_zeros(write, write.segment.file)
                if write.sealed_index is not None:
                    write.segment.file.truncate(write.end())
                write.segment.file.datasync()
                if write.segment in created:
                    self.disk.sync_directory(self.directory)
                if write.sealed_index is not None:
                    self._write_index(write)
            if self.marks_late:
                self.mark.raise_later(self.end.next_index)
            else:
                self.mark.raise_to(self.end.next_index)
        except OSError as error:
            if error.errno not in FULL_ERRNOS:
                raise
            self._undo(created)
            raise SpaceError(os.strerror(error.errno or errno.ENOSPC)) from error

    def _make_room(self, write: SegmentWrite, file: File) -> None:
        """Makes the file longer than its content now and then: a sync that stores no new length is a third quicker.

        Not for the first bytes: most logs of a large cluster hardly get any.
        """
        segment, end = write.segment, write.end()
        if end <= segment.room_end or write.position == 0 or write.sealed_index is not None or not self.room_bytes_max:
            return
        room_end = end + min(max(write.position, _ROOM_BYTES_MIN), self.room_bytes_max)
        try:
            file.allocate(room_end)
            segment.room_end = room_end
        except OSError as error:
            if error.errno not in _NO_ROOM_ERRNOS:
                raise
            file.truncate(write.position)  # what it got of it may be needed for the bytes themselves

    def _write_zeros(self, write: SegmentWrite, file: File) -> None:
        """Behind small writes: a sync of bytes that were written before is quicker than one of fresh room."""
        segment, end = write.segment, write.end()
        is_small = end - write.position <= _SMALL_BYTES_MAX and write.sealed_index is None
        if not is_small or not segment.zeros_end < end < segment.room_end:
            return
        segment.zeros_end = min(end + len(_ZEROS), segment.room_end)
        try:
            file.pwrite((memoryview(_ZEROS)[: segment.zeros_end - end],), end)
        except OSError as error:
            if error.errno not in FULL_ERRNOS:  # a file system that copies on write needs space for them, too
                raise

    def _write_index(self, write: SegmentWrite) -> None:
        # Rebuildable and checksummed, so it needs no sync of its own.
        assert write.sealed_index is not None
        file = self.disk.open(index_path(write.segment.path), create=True)
        file.truncate(0)
        file.pwrite([write.sealed_index], 0)

    def _undo(self, created: list[Segment]) -> None:
        """Gives back the space. Nothing of this job was acknowledged. An error here stops the log."""
        for write in self.writes:
            # Before the bytes it covers change: a stale index would point into other frames.
            if write.sealed_index is not None and self.disk.exists(index_path(write.segment.path)):
                self.disk.remove(index_path(write.segment.path))
        for segment in reversed(created):
            segment.file = None
            if self.disk.exists(segment.path):
                self.disk.remove(segment.path)
        self.disk.sync_directory(self.directory)
        for write in self.writes:
            if write.segment not in created and write.segment.file is not None:
                write.segment.cut_file(write.position)


@dataclasses.dataclass(slots=True)
class CheckpointJob:
    """Writes the index of the active segment, then the check-point. May run in a thread beside a flush."""

    disk: Disk
    path: str
    index_path: str
    index: bytes
    checkpoint: Checkpoint

    def run(self) -> None:
        write_atomically(self.disk, self.index_path, self.index)
        write_atomically(self.disk, self.path, encode_checkpoint(self.checkpoint))
