"""What recovery does with a log whose last bytes are cut off or never came, byte by byte."""

from __future__ import annotations

import dataclasses

import pytest

from quiver.errors import CorruptLogError
from quiver.testing.faulty_disk import FaultyDisk
from tests.log.log_kit import (
    DIRECTORY,
    SETTINGS,
    Stored,
    append,
    check_contents,
    check_lookups,
    contents,
    control,
    data,
    disk_with,
    fill,
    image,
    last_segment,
    open_log,
)

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def acknowledged() -> tuple[Files, list[Stored]]:
    """Several segments; the last holds three frames, all acknowledged."""
    disk = FaultyDisk(0)
    log = open_log(disk)
    stored = fill(log, 9)
    stored.append(append(log, data(50, 500)))
    stored += [append(log, data(51, 99)), append(log, control(52)), append(log, data(53, 61))]
    log.flush()
    assert len(image(disk)[last_segment(image(disk))]) < 600
    return image(disk), stored


def cuts(files: Files) -> list[tuple[int, Files]]:
    name = last_segment(files)
    return [(length, {**files, name: files[name][:length]}) for length in range(len(files[name]) + 1)]


def ends_of(files: Files, stored: list[Stored]) -> list[int]:
    """Where each frame of the last segment ends."""
    first = int(last_segment(files)[:20])
    ends, end = [], 0
    for entry in stored[first - 1 :]:
        end += 96 + (len(entry.payload) + 7) // 8 * 8
        ends.append(end)
    return ends


def test_cut_of_acknowledged_bytes_is_reported_with_file_and_position(acknowledged: tuple[Files, list[Stored]]) -> None:
    files, stored = acknowledged
    ends = ends_of(files, stored)
    for length, damaged in cuts(files)[:-1]:
        disk = disk_with(damaged)
        with pytest.raises(CorruptLogError) as caught:
            open_log(disk)
        whole = max([end for end in ends if end <= length], default=0)
        assert caught.value.facts["path"] == f"{DIRECTORY}/{last_segment(files)}"
        assert caught.value.facts["position"] == whole
        # It is reported again, and nothing was cut for the repair to miss.
        with pytest.raises(CorruptLogError):
            open_log(disk)
        assert image(disk)[last_segment(files)] == damaged[last_segment(files)]
    check_contents(open_log(disk_with(files)), stored)


def test_without_a_mark_a_torn_tail_is_cut_to_whole_frames(acknowledged: tuple[Files, list[Stored]]) -> None:
    files, stored = acknowledged
    ends = ends_of(files, stored)
    first = int(last_segment(files)[:20])
    for length, damaged in cuts(files):
        del damaged["synced"]
        disk = disk_with(damaged)
        log = open_log(disk)
        whole = [end for end in ends if end <= length]
        kept = stored[: first - 1 + len(whole)]
        check_contents(log, kept)
        start = max(whole, default=0)
        assert log.cut_bytes == len(files[last_segment(files)][start:length].rstrip(b"\0"))  # zeros at the end are room
        assert (log.next_index, log.last_term) == (len(kept) + 1, 1)
        # The cut is on disk, and the log goes on after it.
        disk.crash()
        log = open_log(disk)
        assert log.cut_bytes == 0
        kept.append(append(log, data(77), term=2))
        log.flush()
        disk.crash()
        check_contents(open_log(disk), kept)


def test_torn_tail_beyond_the_mark_is_cut_and_everything_below_it_kept() -> None:
    # The process wrote more and died: the mark stands before it.
    disk = FaultyDisk(0)
    log = open_log(disk)
    stored = [append(log, data(58, 500)), append(log, data(59, 104))]
    log.flush()
    mark = image(disk)["synced"]
    more = [append(log, data(60, 99)), append(log, control(61)), append(log, data(62, 30))]
    log.flush()
    files = {**image(disk), "synced": mark}
    name = last_segment(files)
    first = int(name[:20])
    assert first == 2, "the acknowledged and the torn entries share a segment"
    ends = ends_of(files, stored + more)
    below_mark = ends[0]
    for length, damaged in cuts(files):
        if length < below_mark:
            with pytest.raises(CorruptLogError):
                open_log(disk_with(damaged))
            continue
        found = contents(open_log(disk_with(damaged)))
        assert found == (stored + more)[: first - 1 + len([end for end in ends if end <= length])]
        assert found[:2] == stored


@pytest.mark.parametrize("tail", [bytes(10), bytes(5000), b"QV" + bytes(94), b"\xff" * 200, b"QV\x01\x01"])
def test_bytes_after_the_last_frame_that_are_no_frame_are_cut(
    acknowledged: tuple[Files, list[Stored]], tail: bytes
) -> None:
    files, stored = acknowledged
    name = last_segment(files)
    disk = disk_with({**files, name: files[name] + tail})
    log = open_log(disk)
    assert log.cut_bytes == len(tail.rstrip(b"\0"))
    check_contents(log, stored)
    assert image(disk)[name] == files[name]


def test_whole_frame_that_does_not_follow_the_last_is_cut(acknowledged: tuple[Files, list[Stored]]) -> None:
    files, stored = acknowledged
    name = last_segment(files)
    disk = disk_with({**files, name: files[name] * 2})
    log = open_log(disk)
    assert log.cut_bytes == len(files[name].rstrip(b"\0"))
    check_contents(log, stored)


def test_empty_last_segment_is_appended_to(acknowledged: tuple[Files, list[Stored]]) -> None:
    files, stored = acknowledged
    disk = disk_with({**files, f"{len(stored) + 1:020d}.seg": b""})
    log = open_log(disk)
    assert log.last_term == stored[-1].term
    check_contents(log, stored)
    stored = [*stored, append(log, data(70))]
    log.flush()
    check_contents(open_log(disk), stored)


def test_cut_in_a_sealed_segment_is_reported_even_without_a_mark(acknowledged: tuple[Files, list[Stored]]) -> None:
    files, _ = acknowledged
    without = {name: raw for name, raw in files.items() if name != "synced"}
    for name in [name for name in files if name.endswith(".seg")][:-1]:
        for length in range(0, len(files[name]), 7):
            with pytest.raises(CorruptLogError) as caught:
                open_log(disk_with({**without, name: files[name][:length]}))
            assert caught.value.facts["path"] == f"{DIRECTORY}/{name}"
            assert caught.value.facts["position"] <= length


def test_file_that_shrinks_under_an_open_log_is_reported(acknowledged: tuple[Files, list[Stored]]) -> None:
    files, stored = acknowledged
    name = last_segment(files)
    for length in range(0, len(files[name]), 5):
        disk = disk_with(files)
        log = open_log(disk)
        disk.open(f"{DIRECTORY}/{name}").truncate(length)
        with pytest.raises(CorruptLogError):
            contents(log)
        with pytest.raises(CorruptLogError):
            log.read(stored[-1].base_offset, 1000)


def test_index_that_covers_bytes_that_are_cut_is_removed_with_them() -> None:
    settings = dataclasses.replace(SETTINGS, index_interval_bytes=1)
    disk = FaultyDisk(0)
    log = open_log(disk, settings)
    stored = [append(log, data(number, 32)) for number in range(6)]  # the sixth seals the others
    log.flush()
    files = image(disk)
    # As if the crash came before the second segment, and the power cut took the mark.
    del files["synced"], files["00000000000000000006.seg"]
    disk = disk_with(files)
    disk.flip(f"{DIRECTORY}/00000000000000000001.seg", 200, 0)
    disk.flip(f"{DIRECTORY}/00000000000000000001.seg", 600, 0)
    log = open_log(disk, settings)
    check_contents(log, stored[:1])
    # As long in sum as those that were cut, but they begin elsewhere.
    stored = stored[:1] + [append(log, data(10, size)) for size in (56, 8, 32, 32)]
    log.flush()
    disk.crash()
    log = open_log(disk, settings)
    check_lookups(log, stored)


def test_temporary_files_are_removed(acknowledged: tuple[Files, list[Stored]]) -> None:
    files, stored = acknowledged
    disk = disk_with({**files, "state.tmp": b"half", "00000000000000000001.idx.tmp": b""})
    check_contents(open_log(disk), stored)
    assert not [name for name in disk.list(DIRECTORY) if name.endswith(".tmp")]


def test_recovery_reads_only_what_follows_the_last_index_entry_of_the_checkpoint() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk)
    stored = [append(log, data(number, 8)) for number in range(1, 7)]  # 104 bytes each, one segment
    log.flush()
    job = log.begin_checkpoint(log.checkpoint._replace(index=6, term=1, next_offset=12))
    job.run()
    log.finish_checkpoint(job)
    # Not read, so not noticed when the log opens; noticed by who reads it.
    disk.flip(f"{DIRECTORY}/{last_segment(image(disk))}", 100, 0)
    log = open_log(disk)
    assert log.next_index == 7
    with pytest.raises(CorruptLogError) as caught:
        contents(log)
    assert caught.value.facts["position"] == 0
    assert [header.index for _, header, _ in log.scan(6)] == [6]
    assert stored[5] == Stored.of(*next(iter(log.scan(6)))[1:])
