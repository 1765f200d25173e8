"""Opens what a crash left behind.

Rule: what was acknowledged is either there or reported as damaged. Three facts decide about a bad frame: sealed
segments were synced before the next one was created; the sync mark names an index below which all was synced; beyond
it, in the last segment, a bad frame is a write the crash interrupted, and the log is cut there.
"""

from __future__ import annotations

import itertools
import os
from typing import Final, NamedTuple

from quiver.config import LogSettings
from quiver.errors import CorruptLogError
from quiver.log.checkpoint import Checkpoint, encode_checkpoint, read_checkpoint
from quiver.log.disk import FULL_ERRNOS, Disk, File, SpaceError, write_beside
from quiver.log.index import SparseIndex
from quiver.log.segment import (
    SUFFIX,
    Segment,
    index_path,
    read_index,
    rebuild_index,
    remove_files,
    scan_frames,
    segment_path,
)
from quiver.log.slots import SyncMark
from quiver.wire.frame import HEADER_BYTES, FrameError, decode_header

STATE_FILE: Final = "state"
MARK_FILE: Final = "synced"
_COPY_BYTES: Final = 1024 * 1024


class Recovered(NamedTuple):
    checkpoint: Checkpoint
    segments: list[Segment]
    mark: SyncMark
    last_term: int
    cut_bytes: int


def recover(disk: Disk, directory: str, settings: LogSettings) -> Recovered:
    disk.make_directory(directory)
    names = disk.list(directory)
    for name in names:
        # An index whose segment is gone would be taken for that of the next segment with this first index.
        if name.endswith(".tmp") or (name.endswith(".idx") and name.replace(".idx", SUFFIX) not in names):
            disk.remove(f"{directory}/{name}")
    firsts = sorted(int(name.removesuffix(SUFFIX)) for name in names if name.endswith(SUFFIX))
    mark = SyncMark(disk, f"{directory}/{MARK_FILE}")
    checkpoint = _checkpoint(disk, directory, firsts)
    if mark.values[1] != checkpoint.generation:
        firsts = _finish_install(disk, directory, mark, checkpoint)
    start = checkpoint.start.index + 1 if checkpoint.catching_up else checkpoint.index + 1
    # A check-point stands for entries that were synced, also when a power cut took the mark back.
    synced_index = max(mark.values[0], start)
    if firsts and firsts[0] > start:
        raise CorruptLogError.at(segment_path(directory, start), 0, f"entries {start} to {firsts[0] - 1} are missing")
    if not firsts:
        if synced_index > start:
            raise CorruptLogError.at(segment_path(directory, start), 0, "the segment file is missing")
        index = SparseIndex(settings.index_interval_bytes)
        segment = Segment(segment_path(directory, start), start, _next_offset(checkpoint), index)
        return Recovered(checkpoint, [segment], mark, _term_before(checkpoint), 0)
    segments: list[Segment] = []
    for first, following in itertools.pairwise(firsts):
        path = segment_path(directory, first)
        if segments and first < segments[-1].next_index:
            # Its entries are in the file before it: compaction joined the two, and was cut short before this was gone.
            remove_files(disk, path)
            continue
        segment = _open_sealed(disk, path, first, settings)
        if segment.next_index != following and not (segment.next_index > following and segment.next_index in firsts):
            reason = f"entries {segment.next_index} to {following - 1} are missing"
            raise CorruptLogError.at(segment.path, segment.size_bytes, reason)
        segments.append(segment)
    base_offset = segments[-1].next_offset if segments else None
    last, last_term, cut_bytes = _open_last(
        disk, segment_path(directory, firsts[-1]), firsts[-1], base_offset, synced_index, checkpoint, settings
    )
    segments.append(last)
    if last_term is None:
        last_term = _term_at_end(disk, segments[-2], settings) if len(segments) > 1 else _term_before(checkpoint)
    assert last.file is not None
    last.file.datasync()
    disk.sync_directory(directory)
    mark.write(last.next_index, checkpoint.generation, sync=False)
    return Recovered(checkpoint, segments, mark, last_term, cut_bytes)


def _checkpoint(disk: Disk, directory: str, firsts: list[int]) -> Checkpoint:
    try:
        return read_checkpoint(disk, f"{directory}/{STATE_FILE}")
    except CorruptLogError:
        if firsts and firsts[0] == 1:
            return Checkpoint()  # nothing was trimmed: the log itself says everything
        raise


def _open_sealed(disk: Disk, path: str, first_index: int, settings: LogSettings) -> Segment:
    file = disk.open(path)
    size_bytes = file.size()
    found = read_index(disk, path, settings.index_interval_bytes)
    if found is None or found.covered_bytes != size_bytes:
        size_bytes = _without_room(file, path, size_bytes)
        found = rebuild_index(disk, path, size_bytes, settings.index_interval_bytes)
    segment = Segment(path, first_index, found.base_offset, None)  # the index is read again when a reader needs it
    segment.next_index, segment.next_offset = found.next_index, found.next_offset
    segment.size_bytes = segment.synced_bytes = size_bytes
    return segment


def _without_room(file: File, path: str, size_bytes: int) -> int:
    """Where the frames end. Cuts off room that a power cut brought back when the segment was sealed."""
    end = 0
    try:
        for at, header, _ in scan_frames(file, path, 0, size_bytes):
            end = at + header.frame_length
    except CorruptLogError:
        if _end_of_bytes(file, end, size_bytes) > end:
            raise
        file.truncate(end)
        file.datasync()
    return end


def _end_of_bytes(file: File, position: int, end: int) -> int:
    """After the last byte that is not zero; `position` when there is none behind it."""
    while end > position:
        start = max(position, end - _COPY_BYTES)
        if found := file.pread(end - start, start).rstrip(b"\0"):
            return start + len(found)
        end = start
    return position


def _open_last(
    disk: Disk,
    path: str,
    first_index: int,
    base_offset: int | None,
    synced_index: int,
    checkpoint: Checkpoint,
    settings: LogSettings,
) -> tuple[Segment, int | None, int]:
    """The segment to append to, the term of its last entry (None when it is empty), and the bytes cut off."""
    file = disk.open(path)
    size_bytes = file.size()
    segment = Segment(path, first_index, 0, SparseIndex(settings.index_interval_bytes))
    segment.file = file
    found = read_index(disk, path, settings.index_interval_bytes)
    start = 0
    if found is not None and found.index.positions and found.covered_bytes <= size_bytes:
        # Scan again from its last entry: at least one whole frame is seen, so the end and the term are known.
        at = found.index.positions[-1]
        try:
            header = decode_header(file.pread(HEADER_BYTES, at))
            if header.index == found.index.indexes[-1]:
                found.index.truncate(at)
                segment = Segment(path, first_index, found.base_offset, found.index)
                segment.file = file
                segment.next_index, segment.next_offset, start = header.index, header.base_offset, at
        except FrameError:
            pass  # the scan from the beginning finds it and judges it
    if start == 0:
        segment.base_offset = segment.next_offset = (
            base_offset if base_offset is not None else _first_base_offset(disk, path, checkpoint)
        )
    segment.size_bytes = start
    last_term: int | None = None
    unsynced_at: int | None = None
    cut_bytes = 0
    try:
        for at, header, _ in scan_frames(file, path, start, size_bytes):
            if header.index != segment.next_index or header.base_offset != segment.next_offset:
                raise CorruptLogError.at(path, at, f"found entry {header.index} instead of {segment.next_index}")
            if header.index >= synced_index and unsynced_at is None:
                unsynced_at = at
            segment.add(header, header.frame_length)
            last_term = header.term
    except CorruptLogError:
        if segment.next_index < synced_index:
            raise
        if found is not None and found.covered_bytes > segment.size_bytes:
            disk.remove(index_path(path))  # it covers bytes that are cut now
            disk.sync_directory(os.path.dirname(path))
        cut_bytes = _end_of_bytes(file, segment.size_bytes, size_bytes) - segment.size_bytes
        file.truncate(segment.size_bytes)
    if segment.next_index < synced_index:
        reason = f"the log ends before entry {segment.next_index}, but entries up to {synced_index - 1} were stored"
        raise CorruptLogError.at(path, segment.size_bytes, reason)
    segment.synced_bytes = segment.size_bytes
    if unsynced_at is not None:
        _write_again(file, unsynced_at, segment.size_bytes)
    return segment, last_term, cut_bytes


def _write_again(file: File, position: int, end: int) -> None:
    """Makes the next sync cover what a process wrote that was killed or had its sync fail.

    It is served from now on, so it must not vanish later. After a failed sync the system holds such pages as clean,
    and no sync alone would bring them to the medium.
    """
    for at in range(position, end, _COPY_BYTES):
        file.pwrite([file.pread(min(_COPY_BYTES, end - at), at)], at)


def _first_base_offset(disk: Disk, path: str, checkpoint: Checkpoint) -> int:
    try:
        return decode_header(disk.open(path).pread(HEADER_BYTES, 0)).base_offset
    except FrameError:
        return _next_offset(checkpoint)


def _next_offset(checkpoint: Checkpoint) -> int:
    """Of an empty log."""
    return checkpoint.start.next_offset if checkpoint.catching_up else checkpoint.next_offset


def _term_before(checkpoint: Checkpoint) -> int:
    """The last term of an empty log."""
    return checkpoint.start.term if checkpoint.catching_up else checkpoint.term


def install_files(disk: Disk, directory: str, mark: SyncMark, checkpoint: Checkpoint) -> None:
    """Replaces the whole log by a snapshot. Whenever it is cut short, the log is the old one or the new one.

    The check-point names a generation that the sync mark does not have yet: as long as they differ, the segments are
    those of the old log. Raises SpaceError: nothing happened.
    """
    state = f"{directory}/{STATE_FILE}"
    try:
        # From here on a missing mark is damage and not an installation that was cut short.
        mark.write(*mark.values, sync=True)
        disk.sync_directory(directory)
        mark.found = True
        prepared = write_beside(disk, state, encode_checkpoint(checkpoint))
    except OSError as error:
        if error.errno not in FULL_ERRNOS:
            raise
        if disk.exists(f"{state}.tmp"):
            disk.remove(f"{state}.tmp")
        raise SpaceError(os.strerror(error.errno)) from error
    # What follows writes over what is there, and stops the log when it fails.
    disk.rename(prepared, state)
    disk.sync_directory(directory)
    _finish_install(disk, directory, mark, checkpoint)


def _finish_install(disk: Disk, directory: str, mark: SyncMark, checkpoint: Checkpoint) -> list[int]:
    if not mark.found or mark.values[1] + 1 != checkpoint.generation:
        # Not a step of an installation: what the files are is not known, and they are not deleted on a guess.
        raise CorruptLogError.at(f"{directory}/{MARK_FILE}", 0, "the sync mark is of another log than the check-point")
    for name in disk.list(directory):
        if name.endswith((SUFFIX, ".idx")):
            disk.remove(f"{directory}/{name}")
    disk.sync_directory(directory)
    # Twice: then both copies are synced. No flipped bit brings back the generation before, and with it this deletion.
    for _ in range(2):
        mark.write(checkpoint.start.index + 1, checkpoint.generation, sync=True)
    return []


def _term_at_end(disk: Disk, segment: Segment, settings: LogSettings) -> int:
    index = segment.load_index(disk, settings.index_interval_bytes)
    term = 0
    for _, header, _ in scan_frames(disk.open(segment.path), segment.path, index.positions[-1], segment.size_bytes):
        term = header.term
    return term
