"""The log of one partition: append, flush, truncate, trim, check-point, recover.

Rules:
- One owner. Only the `run` of jobs and `read_chunk` may run in another thread.
- An entry counts as stored from `finish_flush` on, never before.
- Recovery cuts a torn tail of the last segment and nothing else. A bad frame below the sync mark was acknowledged: that
  is damage, it is reported with file and position, and the log does not open as if it were merely short.
- A failed sync or write stops the log: it is never retried and acknowledged. A full disk undoes the job and goes on.
"""

from __future__ import annotations

from collections.abc import Callable

from quiver.config import LogSettings
from quiver.errors import DiskFullError, LogFailedError
from quiver.log.checkpoint import Checkpoint, LogStart
from quiver.log.disk import FULL_ERRNOS, Buffer, Disk, SpaceError
from quiver.log.flush import CheckpointJob, FlushJob, LogEnd, SegmentWrite
from quiver.log.index import SparseIndex
from quiver.log.recovery import STATE_FILE, install_files, recover
from quiver.log.retention import Cut, expired, read_by_all
from quiver.log.segment import Segment, index_path, remove_files, scan_frames, segment_path
from quiver.log.stored_log import StoredLog
from quiver.wire.frame import ALIGNMENT, Entry, FrameHeader, Kind, encode_header, stamp


class PartitionLog(StoredLog):
    def __init__(self, disk: Disk, directory: str, settings: LogSettings) -> None:
        """Opens the log in `directory`, made when missing. Raises CorruptLogError where acknowledged bytes are bad."""
        found = recover(disk, directory, settings)
        super().__init__(disk, directory, settings, found.segments)
        self.checkpoint: Checkpoint = found.checkpoint
        self.mark = found.mark
        self.last_term = found.last_term
        self.cut_bytes = found.cut_bytes  # the torn tail that recovery removed
        self._pending: list[SegmentWrite] = []
        self._pending_start = self._end()
        self._job: FlushJob | None = None
        self._roll_asked = False
        self._checkpoint_due_bytes = 0
        self.is_checkpointing = False  # one is being written; see `write_checkpoint`
        self.is_rewriting = False  # segments are; see `compact`
        self.cuts = 0  # how often files lost entries or were replaced: a reader may have met that
        self.failure: LogFailedError | None = None

    @property
    def checkpoint_due(self) -> bool:
        return self._checkpoint_due_bytes >= self.settings.checkpoint_bytes

    def request_checkpoint(self) -> None:
        """Makes a check-point due now, as after a trim that waits for one."""
        self._checkpoint_due_bytes = self.settings.checkpoint_bytes

    def _end(self) -> LogEnd:
        active = self._segments[-1]
        return LogEnd(active.next_index, active.next_offset, self.last_term)

    # -- append and flush ----------------------------------------------------------------------------------------

    def append(self, term: int, entry: Entry, now_s: float) -> FrameHeader:
        """Gives the entry the next index and offset. It is in memory until flushed."""
        return self.append_entry(term, entry, now_s)[0]

    def append_entry(self, term: int, entry: Entry, now_s: float) -> tuple[FrameHeader, list[Buffer]]:
        """The same; returns also the frame's bytes, in parts."""
        header, frame = self.stamp_entry(term, entry)
        self.append_frame(header, frame, now_s)
        return header, frame

    def stamp_entry(self, term: int, entry: Entry) -> tuple[FrameHeader, list[Buffer]]:
        """What the entry would be at the end of the log; nothing is appended."""
        segment = self._segments[-1]
        header = stamp(entry, segment.next_index, term, segment.next_offset)
        frame: list[Buffer] = [encode_header(header), entry.payload]
        if unaligned := -header.payload_length % ALIGNMENT:
            frame.append(bytes(unaligned))
        return header, frame

    def append_frame(self, header: FrameHeader, frame: list[Buffer], now_s: float) -> None:
        """Appends the bytes of a frame that a leader stamped."""
        if self.failure is not None:
            raise self.failure
        segment, length = self._segments[-1], header.frame_length
        if header.index != segment.next_index or header.base_offset != segment.next_offset:
            raise ValueError(
                f"frame {header.index}/{header.base_offset} does not follow {self.next_index}/{self.next_offset}"
            )
        if segment.size_bytes and self._must_roll(segment, header.kind, length, now_s):
            segment = self._roll()
        if segment.opened_at_s is None:
            segment.opened_at_s = now_s
        if not self._pending or self._pending[-1].segment is not segment:
            self._pending.append(SegmentWrite(segment, segment.size_bytes))
        self._pending[-1].buffers += frame
        self._pending[-1].size_bytes += length
        segment.add(header, length)
        self.last_term = header.term
        self._checkpoint_due_bytes += length

    def _must_roll(self, segment: Segment, kind: int, length: int, now_s: float) -> bool:
        age_s = 0.0 if segment.opened_at_s is None else now_s - segment.opened_at_s
        return (
            self._roll_asked
            or kind == Kind.COMPACT  # what it is about are whole files, on every replica
            or segment.size_bytes + length > self.settings.segment_bytes_max
            or age_s * 1000 >= self.settings.segment_age_ms_max
        )

    def _roll(self) -> Segment:
        full = self._segments[-1]
        if not self._pending or self._pending[-1].segment is not full:
            self._pending.append(SegmentWrite(full, full.size_bytes))
        self._pending[-1].sealed_index = full.encode_index()
        index = SparseIndex(self.settings.index_interval_bytes)
        path = segment_path(self.directory, full.next_index)
        self._segments.append(Segment(path, full.next_index, full.next_offset, index))
        self._roll_asked = False
        return self._segments[-1]

    def store(self, header: FrameHeader, frame: Buffer, now_s: float) -> bool:
        """Puts a frame that a leader stamped on disk, at the end of the log; blocking. Tell `stored` next. False, with
        nothing done: that takes more than one write and one sync; ask `append_frame`. Raises LogFailedError."""
        segment, length = self._segments[-1], len(frame)
        if self._pending or self._job is not None or self.failure is not None or not segment.has_room(length):
            return False
        if header.index != segment.next_index or header.base_offset != segment.next_offset:
            return False
        if self._must_roll(segment, header.kind, length, now_s):
            return False
        assert segment.file is not None
        try:
            segment.file.pwrite((frame,), segment.size_bytes)
            segment.file.datasync()
        except OSError as error:
            if error.errno in FULL_ERRNOS:
                return False  # it is tried again, and undone where it fails again
            raise self.stop(error) from error
        return True

    def stored(self, header: FrameHeader, length: int) -> None:
        """Counts a frame that `store` has put on disk."""
        segment = self._segments[-1]
        segment.add(header, length)
        segment.synced_bytes = segment.size_bytes
        self.last_term = header.term
        self._checkpoint_due_bytes += length
        self.synced_index = segment.next_index
        self._pending_start = self._end()
        self.mark.raise_later(self.synced_index)

    def begin_flush(self) -> FlushJob | None:
        """All that is appended and not yet flushed, as one job; None when there is nothing or a job is under way."""
        if self._job is not None or not self._pending or self.failure is not None:
            return None
        writes, start, end = self._pending, self._pending_start, self._end()
        room_bytes_max = self.settings.room_bytes_max
        self._job = FlushJob(self._disk, self.directory, self.mark, writes, start, end, room_bytes_max)
        self._pending, self._pending_start = [], end
        return self._job

    def finish_flush(self, job: FlushJob, error: Exception | None) -> None:
        """Takes the outcome of `job.run()`. Raises DiskFullError or LogFailedError; then the job's entries are gone."""
        assert job is self._job
        self._job = None
        if error is None:
            for write in job.writes:
                write.segment.synced_bytes = write.end()
                if write.sealed_index is not None:
                    write.segment.file = None
            self.synced_index = job.end.next_index
            return
        self._rewind(job)
        if isinstance(error, SpaceError):
            raise DiskFullError(f"no space for {self.directory}: {error}") from error
        raise self.stop(error) from error

    def stop(self, error: BaseException) -> LogFailedError:
        """Ends all appending: what this error means for the files is not known."""
        self.failure = LogFailedError(f"the log in {self.directory} stopped: {error}; nothing was acknowledged")
        return self.failure

    def _rewind(self, job: FlushJob) -> None:
        """Forgets the entries of a failed job and all appended after it; reads nothing, the disk may be bad."""
        first = job.writes[0]
        while self._active is not first.segment:
            self._segments.pop()
        segment = self._active
        segment.size_bytes = segment.synced_bytes = first.position
        segment.index.truncate(first.position)
        self._pending, self._pending_start = [], job.start
        segment.next_index, segment.next_offset, self.last_term = job.start

    def flush(self) -> None:
        """Begin, run and finish in one call, for callers without a thread."""
        if (job := self.begin_flush()) is not None:
            try:
                job.run()
            except (OSError, SpaceError) as error:
                self.finish_flush(job, error)
            else:
                self.finish_flush(job, None)

    # -- shorten -------------------------------------------------------------------------------------------------

    def truncate_suffix(self, index: int) -> None:
        """Removes entries from `index` on; blocking, and only while no flush is under way.

        Raises CorruptLogError, with nothing changed, where it cannot read what stays; LogFailedError if the disk fails.
        """
        assert self._job is None and index > self.checkpoint.index
        if self.failure is not None:
            raise self.failure
        if index >= self.next_index:
            return
        if index >= self.synced_index:
            raise ValueError("flush before truncating entries that are only in memory")
        keep = self._find(lambda s: s.next_index > index)
        segment = self._segments[keep]
        position, end = 0, None
        for at, header, _ in scan_frames(self._disk.open(segment.path), segment.path, 0, segment.synced_bytes):
            if header.index >= index:
                break
            position, end = at + header.frame_length, LogEnd(index, header.next_offset, header.term)
        if end is None:
            end = LogEnd(index, segment.base_offset, self._term_before(segment))
        segment.load_index(self._disk, self.settings.index_interval_bytes).truncate(position)
        self.cuts += 1
        try:
            self._cut_files(keep, position, index)
        except OSError as error:
            # Files and memory differ now; only recovery can tell what is there.
            raise self.stop(error) from error
        segment.size_bytes = segment.synced_bytes = position
        segment.next_index, segment.next_offset, self.last_term = end
        self._pending, self._pending_start, self.synced_index = [], end, index

    def _cut_files(self, keep: int, position: int, index: int) -> None:
        """Newest first, so that a crash in the middle leaves a shorter log and never one with a hole."""
        # Lowered first: a mark above the end would make the next recovery see damage.
        self.mark.write(index, self.mark.values[1], sync=True)
        while len(self._segments) - 1 > keep:
            self._remove_files(self._segments.pop())
            self._disk.sync_directory(self.directory)
        segment = self._active
        if self._disk.exists(index_path(segment.path)):
            # It covers bytes that are about to change.
            self._disk.remove(index_path(segment.path))
            self._disk.sync_directory(self.directory)
        segment.file = self._disk.open(segment.path)
        segment.cut_file(position)

    def _term_before(self, segment: Segment) -> int:
        for _, header, _ in self.scan(segment.first_index - 1):
            return header.term if header.index < segment.first_index else self.checkpoint.term
        return self.checkpoint.term

    def trim_prefix(self, index: int) -> int:
        """Removes whole segments below `index`, returns how many; blocking. The check-point must reach that far."""
        assert index <= self.checkpoint.index + 1
        removed = 0
        while len(self._segments) > 1 and self._segments[0].next_index <= index:
            if self._segments[1].synced_bytes == 0:
                break  # the next segment is not on disk yet
            # Forgotten only when it is gone: a later trim beyond one that stayed would leave a hole.
            self._remove_files(self._segments[0])
            del self._segments[0]
            removed += 1
        if removed:
            self._disk.sync_directory(self.directory)
        return removed

    def segments_before(self, index: int) -> list[Segment]:
        """Those whose entries are all before it."""
        return [segment for segment in self._segments[:-1] if segment.next_index <= index]

    def replace_segments(self, old: list[Segment], new: Segment, path: str) -> bool:
        """Puts the file at `path` in the place of neighbours that have the same entries. False: they are not here."""
        at = next((place for place, segment in enumerate(self._segments) if segment is old[0]), 0)
        if self._segments[at : at + len(old)] != old:
            return False
        self._disk.rename(path, new.path)
        self._segments[at : at + len(old)] = [new]
        self.cuts += 1
        return True

    def _remove_files(self, segment: Segment) -> None:
        segment.file = None
        remove_files(self._disk, segment.path)

    def plan_retention(self, now_us: int, read_to: int | None = None) -> Cut | None:
        """Where the log is to begin by its settings, or by how far it was read; None when all is kept.

        An active segment that is not needed is sealed by the next append, so that an idle topic empties too.
        """
        cut = None if read_to is None else read_by_all(self._segments, read_to)
        if read_to is None:
            cut = expired(self._disk, self._segments, self.settings, now_us)
        self._roll_asked = self._roll_asked or (cut is not None and cut.index == self.next_index)
        return cut

    def plan_trim(self, index: int, term_at: Callable[[int], int | None]) -> LogStart:
        """Where the log will begin after `trim_prefix(index)`; `term_at` knows the terms of its entries."""
        start = next((s for s in self._segments if s.next_index > index), self._active)
        if self.checkpoint.start.index == start.first_index - 1:
            return self.checkpoint.start
        return LogStart(start.first_index - 1, term_at(start.first_index - 1) or 0, start.base_offset)

    # -- check-point ---------------------------------------------------------------------------------------------

    def begin_checkpoint(self, checkpoint: Checkpoint) -> CheckpointJob:
        """A job that makes `checkpoint` the point from which recovery replays. Never beyond what is committed."""
        assert self.checkpoint.index <= checkpoint.index < self.synced_index
        segment = self._active
        self._checkpoint_due_bytes = 0
        # Below the check-point only: no later truncation reaches there, so this index is true whenever it is written.
        index = segment.index.encode_below(checkpoint.index + 1, segment.first_index, segment.base_offset)
        path = f"{self.directory}/{STATE_FILE}"
        return CheckpointJob(self._disk, path, index_path(segment.path), index, checkpoint)

    def finish_checkpoint(self, job: CheckpointJob) -> None:
        """Call after `job.run()` returned: from now on entries up to that point may be trimmed."""
        self.checkpoint = job.checkpoint

    def install(self, checkpoint: Checkpoint) -> None:
        """Forgets all entries and begins after `checkpoint.start`; blocking. SpaceError: the log is as it was."""
        assert self._job is None and not self.is_checkpointing and not self.is_rewriting
        if self.failure is not None:
            raise self.failure
        self.cuts += 1
        try:
            install_files(self._disk, self.directory, self.mark, checkpoint)
        except OSError as error:
            raise self.stop(error) from error
        first, base_offset = checkpoint.start.index + 1, checkpoint.start.next_offset
        index = SparseIndex(self.settings.index_interval_bytes)
        self._segments = [Segment(segment_path(self.directory, first), first, base_offset, index)]
        self.checkpoint = checkpoint
        self.last_term = checkpoint.start.term
        self._pending, self._pending_start, self.synced_index = [], self._end(), first
