"""Compaction by key: of all records of a key only the last one stays, and one that says 'deleted' not for ever.

An `Order` is an entry of the log and begins a segment, so that what it is about are whole files: those before it. They
are rewritten from the oldest to the newest, several small ones into one. Every entry keeps its frame, with index, term
and offsets as they were; a batch loses the records that are not needed (wire/rows.py).

Rule: what stays depends on the entries before the order and on nothing else, so each replica may do it when it likes. A
file is replaced in one step, and never before all older ones: whoever reads, after a crash too, finds a record or a
newer one of its key.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Final, NamedTuple

from crc32c import crc32c

from quiver.errors import CorruptLogError
from quiver.log.disk import Disk
from quiver.log.index import TIMESTAMP_NONE, SparseIndex
from quiver.log.partition_log import PartitionLog
from quiver.log.segment import Segment, index_path, remove_files, scan_frames
from quiver.wire.batch_check import SCHEMA_ID_COMPACTED, compression_of
from quiver.wire.frame import FrameHeader, Kind, encode_frame

if TYPE_CHECKING:
    from quiver.wire.rows import Rows

# Keys that are looked at together. More of them take several turns, each for the keys with one remainder of their hash.
KEYS_MAX: Final = 500_000
_WRITE_BYTES: Final = 1024 * 1024


class Order(NamedTuple):
    """All entries before `index` are to be compacted. Of those before `drop_end`, records that say 'deleted' and are
    older than `drop_before_us` go too."""

    index: int = 0  # type: ignore[assignment]  # our word; tuple.index is never called
    drop_end: int = 0
    drop_before_us: int = 0


@dataclasses.dataclass(slots=True)
class Findings:
    """What is known of the keys of one turn, and of all that was looked at."""

    latest: dict[bytes, int] = dataclasses.field(default_factory=dict)  # the last offset of each key
    turn: int = 0
    turns: int = 1
    oldest_deleted_us: int | None = None  # of the records that say 'deleted' and stay

    def has(self, key: bytes) -> bool:
        return self.turns == 1 or crc32c(key) % self.turns == self.turn

    def next_turn(self) -> None:
        self.turn += 1
        self.latest = {}


def look(disk: Disk, segment: Segment, findings: Findings) -> None:
    """Notes the keys of one segment; blocking. Segments come in log order."""
    for _, header, payload in scan_frames(disk.open(segment.path), segment.path, 0, segment.size_bytes):
        rows = _rows(header, payload)
        if rows is None:
            continue
        latest = findings.latest
        pairs = zip(rows.batch.column("key").to_pylist(), rows.offsets, strict=True)
        if findings.turns == 1:
            latest.update(pairs)
        else:
            latest.update((key, offset) for key, offset in pairs if key is not None and findings.has(key))
        latest.pop(None, None)  # type: ignore[call-overload]  # records without a key stay
        while len(findings.latest) > KEYS_MAX and findings.turn == 0:
            findings.turns *= 2
            findings.latest = {key: offset for key, offset in findings.latest.items() if findings.has(key)}


def _rows(header: FrameHeader, payload: memoryview) -> Rows | None:
    """The records of a frame; None where there are none, or where they cannot be read: such a batch stays as it is."""
    if header.kind != Kind.DATA or not payload:
        return None
    # Arrow is loaded with the first compaction: a broker that does none stays small (decision 4).
    from quiver.wire.rows import rows_of

    try:
        return rows_of(header, payload)
    except CorruptLogError:  # its checksum is right: it was produced so
        return None


@dataclasses.dataclass(slots=True)
class RewriteJob:
    """Writes what is to stay of some segments, one after the other, to one new file. May run in a thread."""

    disk: Disk
    segments: list[Segment]
    order: Order
    findings: Findings
    interval_bytes: int
    rewritten: Segment | None = None

    def run(self) -> None:
        """`rewritten` is on disk under its temporary name afterwards; None: there is nothing to change."""
        if len(self.segments) == 1 and not any(replaced is not None for *_, replaced in self._frames()):
            return
        first = self.segments[0]
        new = Segment(first.path, first.first_index, first.base_offset, SparseIndex(self.interval_bytes))
        try:
            self._write(new)
        except OSError:
            if self.disk.exists(temporary(new)):
                self.disk.remove(temporary(new))
            raise
        if self.disk.exists(index_path(new.path)):
            # Before the bytes it covers change: a stale index would point into other frames.
            self.disk.remove(index_path(new.path))
            self.disk.sync_directory(os.path.dirname(new.path))
        self.rewritten = new

    def _write(self, new: Segment) -> None:
        file = self.disk.open(temporary(new), create=True)
        file.truncate(0)
        waiting = bytearray()
        for header, payload, replaced in self._frames():
            header, frame = (header, encode_frame(header, payload)) if replaced is None else replaced
            new.add(header, header.frame_length)
            waiting += frame
            if len(waiting) >= _WRITE_BYTES:
                file.pwrite([waiting], new.size_bytes - len(waiting))
                waiting = bytearray()
        file.pwrite([waiting], new.size_bytes - len(waiting))
        file.datasync()
        new.synced_bytes = new.size_bytes

    def _frames(self) -> Iterator[tuple[FrameHeader, memoryview, tuple[FrameHeader, bytes] | None]]:
        """Each frame, and the one that takes its place, if another does."""
        for segment in self.segments:
            file = self.disk.open(segment.path)
            for _, header, payload in scan_frames(file, segment.path, 0, segment.size_bytes):
                yield header, payload, self._replace(header, payload)

    def _replace(self, header: FrameHeader, payload: memoryview) -> tuple[FrameHeader, bytes] | None:
        rows = _rows(header, payload)
        if rows is None:
            return None
        keep = self._judge(header, rows)
        if all(keep):
            return None
        import pyarrow as pa

        from quiver.wire.records import timestamp_range
        from quiver.wire.rows import Rows, encode_rows

        offsets = [offset for offset, stays in zip(rows.offsets, keep, strict=True) if stays]
        left = Rows(offsets, rows.batch.filter(pa.array(keep)))
        body = encode_rows(header, left, compression_of(payload))
        # Who looks for a time does not stop at a batch of which nothing is left.
        oldest, newest = timestamp_range(left.batch) if offsets else (TIMESTAMP_NONE, TIMESTAMP_NONE)
        new = header._replace(
            schema_id=SCHEMA_ID_COMPACTED,
            payload_length=len(body),
            payload_crc=crc32c(body),
            timestamp_min=oldest,
            timestamp_max=newest,
        )
        return new, encode_frame(new, body)

    def _judge(self, header: FrameHeader, rows: Rows) -> list[bool]:
        """Which of the records stay."""
        latest, order = self.findings.latest, self.order
        keys = rows.batch.column("key").to_pylist()
        keep = [latest.get(key, offset) == offset for key, offset in zip(keys, rows.offsets, strict=True)]
        values = rows.batch.column("value")
        if values.null_count:
            times = rows.batch.column("timestamp").cast("int64").to_pylist()
            for at, is_deleted in enumerate(values.is_null().to_pylist()):
                if is_deleted and keep[at] and keys[at] in latest:
                    if header.index < order.drop_end and times[at] < order.drop_before_us:
                        keep[at] = False
                    else:
                        self.findings.oldest_deleted_us = min(self.findings.oldest_deleted_us or times[at], times[at])
        return keep


def temporary(segment: Segment) -> str:
    return segment.path + ".tmp"  # recovery removes it


def group_segments(segments: list[Segment], bytes_max: int) -> Iterator[list[Segment]]:
    """Neighbours that are small enough to be one."""
    group: list[Segment] = []
    for segment in segments:
        if group and sum(found.size_bytes for found in group) + segment.size_bytes > bytes_max:
            yield group
            group = []
        group.append(segment)
    if group:
        yield group


@dataclasses.dataclass(slots=True)
class SettleJob:
    """After the new file has its name: makes that durable, then removes what it stands for. May run in a thread."""

    disk: Disk
    job: RewriteJob

    def run(self) -> None:
        new = self.job.rewritten
        assert new is not None
        directory = os.path.dirname(new.path)
        # The name first: without it the files that go would take their entries along.
        self.disk.sync_directory(directory)
        for segment in self.job.segments[1:]:
            remove_files(self.disk, segment.path)
        self.disk.sync_directory(directory)
        file = self.disk.open(index_path(new.path), create=True)
        file.truncate(0)
        file.pwrite([new.encode_index()], 0)  # rebuildable and checksummed, so it needs no sync of its own


async def compact(
    log: PartitionLog, disk: Disk, order: Order, threads: Executor, goes_on: Callable[[], bool]
) -> Findings | None:
    """Carries out an order. None: it was cut short, by `goes_on` or because the log was replaced or trimmed meanwhile.

    Raises OSError, CorruptLogError, and LogFailedError when the disk fails where the log cannot go on.
    """
    loop = asyncio.get_running_loop()
    findings = Findings()
    while findings.turn < findings.turns:
        segments = log.segments_before(order.index)
        for segment in segments:
            if not goes_on():
                return None
            await loop.run_in_executor(threads, look, disk, segment, findings)
        for group in group_segments(segments, log.settings.segment_bytes_max):
            job = RewriteJob(disk, group, order, findings, log.settings.index_interval_bytes)
            if not goes_on():
                return None
            await asyncio.sleep(0)  # a snapshot that waited for the group before has its turn
            if not await _rewrite(log, job, threads):
                return None
        findings.next_turn()
    return findings


async def _rewrite(log: PartitionLog, job: RewriteJob, threads: Executor) -> bool:
    """Meanwhile no snapshot may be installed: the thread would remove files of the new log. False: it is another log,
    or has lost these segments."""
    loop = asyncio.get_running_loop()
    log.is_rewriting = True
    try:
        await loop.run_in_executor(threads, job.run)
        if job.rewritten is None:
            return True
        if not log.replace_segments(job.segments, job.rewritten, temporary(job.rewritten)):
            job.disk.remove(temporary(job.rewritten))
            return False
        try:
            await loop.run_in_executor(threads, SettleJob(job.disk, job).run)
        except OSError as error:
            # Which of the two files a power cut leaves is not known; newer ones must not be replaced after that.
            raise log.stop(error) from error
        return True
    finally:
        log.is_rewriting = False
