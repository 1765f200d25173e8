from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from quiver.log.disk import SystemDisk
from quiver.log.partition_log import PartitionLog
from quiver.testing.faulty_disk import FaultyDisk
from quiver.wire.frame import ALIGNMENT, HEADER_BYTES, Kind, encode_frame, stamp, walk_frames
from tests.log.log_kit import (
    DIRECTORY,
    SETTINGS,
    Stored,
    append,
    check_contents,
    contents,
    contents_by_offset,
    control,
    data,
    fill,
    image,
    open_log,
)

ONE_SEGMENT = dataclasses.replace(SETTINGS, segment_bytes_max=10**9)


@pytest.fixture
def log() -> PartitionLog:
    return open_log(FaultyDisk(0))


def frames(chunk: memoryview) -> list[Stored]:
    return [Stored.of(header, payload) for _, header, payload in walk_frames(chunk)]


def test_new_log_is_empty(log: PartitionLog) -> None:
    assert (log.first_index, log.next_index, log.next_offset, log.base_offset) == (1, 1, 0, 0)
    assert (log.synced_index, log.size_bytes, log.last_term, log.cut_bytes) == (1, 0, 0, 0)
    assert contents(log) == []
    assert bytes(log.read(0, 1000)) == b""
    assert log.find_timestamp(0, 100) is None
    assert log.plan_retention(10**18) is None
    assert log.begin_flush() is None


def test_entries_get_dense_indexes_and_offsets(log: PartitionLog) -> None:
    stored = [append(log, data(1, records=3)), append(log, control(2)), append(log, data(3, records=1), term=2)]
    assert [(entry.index, entry.base_offset, entry.term) for entry in stored] == [(1, 0, 1), (2, 3, 1), (3, 3, 2)]
    assert (log.next_index, log.next_offset, log.last_term) == (4, 4, 2)


def test_entries_are_read_only_after_they_are_flushed(log: PartitionLog) -> None:
    stored = fill(log, 3)
    append(log, data(4))
    check_contents(log, stored)
    assert (log.synced_index, log.next_index) == (4, 5)
    assert bytes(log.read(log.next_offset - 2, 1000)) == b""
    log.flush()
    assert log.synced_index == 5
    assert len(contents(log)) == 4


def test_entries_are_there_after_reopening() -> None:
    disk = FaultyDisk(0)
    stored = fill(open_log(disk), 30, term=7)
    disk.kill()
    log = open_log(disk)
    check_contents(log, stored)
    assert (log.next_index, log.last_term, log.cut_bytes) == (31, 7, 0)
    assert log.next_offset == sum(entry.record_count for entry in stored)
    stored += fill(log, 5, term=8)
    check_contents(open_log(disk), stored)


def test_log_works_on_the_real_disk(tmp_path: Path) -> None:
    directory = f"{tmp_path}/a/b"
    log = open_log(SystemDisk(), directory=directory)
    stored = fill(log, 30)
    check_contents(log, stored)
    log = open_log(SystemDisk(), directory=directory)
    check_contents(log, stored)
    log.truncate_suffix(12)
    stored = stored[:11] + fill(log, 9, term=2)
    check_contents(open_log(SystemDisk(), directory=directory), stored)


def test_log_without_entries_can_be_opened_again() -> None:
    disk = FaultyDisk(0)
    for _ in range(3):
        log = open_log(disk)
        assert (log.next_index, contents(log)) == (1, [])


def test_reading_by_index_begins_at_that_entry() -> None:
    disk = FaultyDisk(0)
    stored = fill(open_log(disk), 25)
    for log in (open_log(disk), open_log(disk, ONE_SEGMENT)):
        for index in range(1, 28):
            found = [Stored.of(header, payload) for _, header, payload in log.scan(index)]
            assert found == stored[index - 1 :]


def test_reading_by_offset_begins_with_the_batch_that_holds_it() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk)
    stored = []
    for number in range(1, 30):
        stored.append(append(log, control(number) if number % 5 == 0 else data(number, records=number % 4 + 1)))
    log.flush()
    batches = [entry for entry in stored if entry.record_count]
    for offset in range(log.next_offset):
        expected = next(entry for entry in batches if offset < entry.base_offset + entry.record_count)
        assert expected.base_offset <= offset
        assert frames(log.read(offset, 1))[0] == expected
    assert bytes(log.read(log.next_offset, 10**6)) == b""
    assert bytes(log.read(log.next_offset + 100, 10**6)) == b""


def test_read_gives_whole_frames_up_to_the_limit(log: PartitionLog) -> None:
    stored = [append(log, data(number, 104)) for number in range(1, 4)]  # 200 bytes each, one segment
    log.flush()
    for bytes_max, count in ((1, 1), (199, 1), (200, 1), (399, 1), (400, 2), (599, 2), (600, 3), (10**6, 3)):
        assert frames(log.read(0, bytes_max)) == stored[:count]


def test_read_gives_at_least_one_batch_even_if_it_is_larger_than_the_limit() -> None:
    log = open_log(FaultyDisk(0), dataclasses.replace(SETTINGS, index_interval_bytes=10**6, segment_bytes_max=10**7))
    small, large = append(log, data(1, 10)), append(log, data(2, 3_000_000))
    after = append(log, data(3, 10))
    log.flush()
    assert frames(log.read(0, 50)) == [small]
    assert frames(log.read(2, 50)) == [large]
    # Past a large frame its payload is not needed.
    assert frames(log.read(4, 50)) == [after]
    assert contents(log) == [small, large, after]


def test_control_frames_are_passed_over_and_never_end_a_read(log: PartitionLog) -> None:
    log = open_log(FaultyDisk(0), ONE_SEGMENT)
    stored = [append(log, control(number, kind)) for number, kind in enumerate((Kind.NOOP, Kind.MEMBERSHIP))]
    stored.append(append(log, data(3)))
    stored += [append(log, control(number, Kind.POSITIONS, 300)) for number in range(4, 40)]
    stored += [append(log, data(40)), append(log, control(41, Kind.TRIM)), append(log, data(42))]
    stored.append(append(log, control(43)))
    log.flush()
    check_contents(log, stored)
    assert frames(log.read(0, 1)) == [stored[2]]
    assert frames(log.read(2, 1)) == [stored[-4]]
    # Between two batches they travel along; before the first and after the last they do not.
    assert frames(log.read(2, 10**6)) == stored[-4:-1]
    assert bytes(log.read(6, 10**6)) == b""


def test_segments_of_control_frames_only_are_passed_over(log: PartitionLog) -> None:
    first = append(log, data(1))
    for number in range(2, 60):
        append(log, control(number, payload_bytes=100))
    last = append(log, data(60))
    log.flush()
    assert log.segment_count > 5
    assert contents_by_offset(log) == [first, last]


def test_read_stops_at_the_given_index(log: PartitionLog) -> None:
    stored = fill(log, 20)
    for index_end in range(1, 23):
        found: list[Stored] = []
        while chunk := log.read(found[-1].base_offset + found[-1].record_count if found else 0, 300, index_end):
            found += frames(chunk)
        batches = [entry for entry in stored[: index_end - 1] if entry.record_count]
        assert [entry for entry in found if entry.record_count] == batches


def test_time_finds_the_first_batch_that_reaches_it() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk)
    times = [100, 300, 200, 250, 900, 400, 500, 950, 1000, 800, 1200, 1200, 1100]
    stored = []
    for number, time in enumerate(times):
        stored.append(append(log, data(number, 150, timestamp=time)))
        stored.append(append(log, control(number)))
    log.flush()
    for opened in (log, open_log(disk)):
        assert opened.segment_count > 3
        for timestamp in range(90, 1300, 5):
            expected = next(
                (entry for entry in stored if entry.record_count and entry.timestamp_max >= timestamp), None
            )
            found = opened.find_timestamp(timestamp, opened.next_index)
            assert (found and found.index) == (expected and expected.index)
        assert opened.find_timestamp(900, 9) is None
        assert opened.find_timestamp(900, 10) is not None


def test_bytes_are_counted_from_an_offset_on_within_a_step_of_the_index() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk)
    sizes = {0: 0}  # stored bytes before each batch
    at = 0
    for number in range(60):
        for entry in (data(number, 40 + number * 5 % 170, records=3), control(number)):
            frame = append(log, entry)
            at += HEADER_BYTES + len(entry.payload) + -len(entry.payload) % ALIGNMENT
            sizes[frame.base_offset + frame.record_count] = at
    log.flush()
    step = SETTINGS.index_interval_bytes + 312 + 120  # and the longest frame of each of the two kinds
    for opened in (log, open_log(disk)):
        assert opened.segment_count > 3
        assert opened.offset_after(log.next_offset, 100) == (log.next_offset, 0)
        for offset in range(0, log.next_offset, 3):
            for bytes_max in (1, 100, 999, 3000, 5 * 10**6):
                end, size_bytes = opened.offset_after(offset, bytes_max)
                assert offset < end <= log.next_offset
                assert size_bytes <= max(bytes_max, step)
                assert abs(sizes[end] - sizes[offset] - size_bytes) <= step
                if end < log.next_offset:
                    assert size_bytes + step > bytes_max, "it stops no earlier than it must"


def test_time_is_found_among_stored_entries_only(log: PartitionLog) -> None:
    append(log, data(1, timestamp=100))
    assert log.find_timestamp(50, 100) is None
    log.flush()
    append(log, data(2, timestamp=200))
    assert log.find_timestamp(150, 100) is None


def test_frame_that_would_pass_the_size_begins_a_segment() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk)
    stored = [append(log, data(number, 104)) for number in range(8)]  # 200 bytes each: three fit into 700
    log.flush()
    names = [name for name in image(disk) if name.endswith(".seg")]
    assert names == [f"{first:020d}.seg" for first in (1, 4, 7)]
    assert all(len(image(disk)[name]) == 600 for name in names[:2])
    stored.append(append(log, data(9, 5000)))  # larger than a segment: alone in its own
    stored.append(append(log, data(10, 104)))
    log.flush()
    assert log.segment_count == 5
    check_contents(log, stored)
    check_contents(open_log(disk), stored)


def test_frame_after_the_age_begins_a_segment(log: PartitionLog) -> None:
    age_s = SETTINGS.segment_age_ms_max / 1000
    append(log, data(1), now_s=1000.0)
    append(log, data(2), now_s=1000.0 + age_s - 1)
    assert log.segment_count == 1
    append(log, data(3), now_s=1000.0 + age_s)
    assert log.segment_count == 2
    append(log, data(4), now_s=1000.0 + 2 * age_s - 1)
    assert log.segment_count == 2
    log.flush()
    assert len(contents(log)) == 4


def test_appended_frame_must_follow_the_last(log: PartitionLog) -> None:
    fill(log, 2)
    entry = data(3)
    for index, base_offset in ((2, 4), (4, 4), (3, 3), (3, 5)):
        with pytest.raises(ValueError):
            header = stamp(entry, index, 1, base_offset)
            log.append_frame(header, [encode_frame(header, entry.payload)], 0.0)
    header = stamp(entry, 3, 1, 4)
    log.append_frame(header, [encode_frame(header, entry.payload)], 0.0)
    log.flush()
    assert contents(log)[-1].payload == entry.payload


def test_files_are_named_by_their_first_index() -> None:
    disk = FaultyDisk(0)
    fill(open_log(disk), 10)
    segments = [name for name in disk.list(DIRECTORY) if name.endswith(".seg")]
    assert segments[0] == "00000000000000000001.seg"
    # Every segment but the last has its index beside it.
    assert [name for name in disk.list(DIRECTORY) if name.endswith(".idx")] == [
        name.replace(".seg", ".idx") for name in segments[:-1]
    ]
