from __future__ import annotations

import pytest

from quiver.log.index import TIMESTAMP_NONE, IndexFile, SparseIndex
from quiver.testing.faulty_disk import FaultyDisk
from tests.log.log_kit import (
    SETTINGS,
    append,
    check_contents,
    check_lookups,
    data,
    disk_with,
    fill,
    image,
    last_segment,
    open_log,
)


def make_index(count: int = 20, interval_bytes: int = 100) -> SparseIndex:
    index = SparseIndex(interval_bytes)
    for number in range(count):
        index.add(10 + number, 1000 + number * 3, number * 40, 50 + number, has_records=number % 3 != 0)
    return index


def test_entries_are_an_interval_apart() -> None:
    assert list(make_index().positions) == [0, 120, 240, 360, 480, 600, 720]


def test_position_is_at_or_before_the_frame_that_is_asked_for() -> None:
    index = make_index()
    for number in range(20):
        at = number * 40
        for found in (index.position_of_index(10 + number), index.position_of_offset(1000 + number * 3 + 2)):
            assert at - 100 - 40 < found <= at
        # The frame with number's timestamp or a later one is not before that position.
        if number % 3:
            assert index.position_of_timestamp(50 + number) <= at
    assert index.position_of_index(3) == index.position_of_offset(3) == index.position_of_timestamp(-5) == 0
    assert (
        index.position_of_index(10**6) == index.position_of_offset(10**6) == index.position_of_timestamp(10**6) == 720
    )


def test_empty_index_begins_at_zero() -> None:
    index = SparseIndex(100)
    assert index.timestamp_max == TIMESTAMP_NONE
    assert index.position_of_index(5) == index.position_of_offset(5) == index.position_of_timestamp(5) == 0


def test_truncated_index_knows_nothing_beyond() -> None:
    index = make_index()
    index.truncate(240)
    assert list(index.positions) == [0, 120]
    index.add(16, 1018, 240, 70, has_records=True)
    assert list(index.positions) == [0, 120, 240]


def test_index_file_survives_a_round_trip_and_holds_what_it_covers() -> None:
    index = make_index()
    found = IndexFile.decode(index.encode(600, 25, 1045, 1000), 100)
    assert found is not None
    assert (found.covered_bytes, found.next_index, found.next_offset, found.base_offset) == (600, 25, 1045, 1000)
    assert list(found.index.positions) == [0, 120, 240, 360, 480]
    assert found.index.timestamp_max == index.timestamp_max
    assert list(found.index.timestamps) == list(index.timestamps[:5])


def test_every_flipped_bit_and_every_cut_of_an_index_file_is_detected() -> None:
    raw = make_index().encode(800, 30, 1060, 1000)
    for bit in range(len(raw) * 8):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        assert IndexFile.decode(bytes(damaged), 100) is None
    assert all(IndexFile.decode(raw[:length], 100) is None for length in range(len(raw)))
    assert IndexFile.decode(raw + b"\0", 100) is None


@pytest.fixture(scope="module")
def sealed() -> tuple[dict[str, bytes], list]:
    """A log of several segments, its files and entries."""
    disk = FaultyDisk(0)
    log = open_log(disk)
    stored = fill(log, 25)
    assert log.segment_count > 4
    return image(disk), stored


@pytest.mark.parametrize("harm", ["missing", "empty", "zeros", "flipped", "cut", "of another segment", "older"])
def test_index_that_cannot_be_believed_is_rebuilt(sealed: tuple[dict[str, bytes], list], harm: str) -> None:
    files, stored = sealed
    names = sorted(name for name in files if name.endswith(".idx"))
    for position, name in enumerate(names):
        raw = files[name]
        other = files[names[position - 1]]
        changed = {
            "missing": None,
            "empty": b"",
            "zeros": bytes(len(raw)),
            "flipped": raw[:30] + bytes([raw[30] ^ 4]) + raw[31:],
            "cut": raw[:-3],
            "of another segment": other,
            "older": SparseIndex(SETTINGS.index_interval_bytes).encode(0, position, 0, 0),
        }[harm]
        damaged = {key: value for key, value in files.items() if key != name}
        if changed is not None:
            damaged[name] = changed
        log = open_log(disk_with(damaged))
        check_contents(log, stored)
        assert log.next_index == stored[-1].index + 1


def test_index_of_the_active_segment_may_be_older_than_the_segment(sealed: tuple[dict[str, bytes], list]) -> None:
    files, stored = sealed
    disk = disk_with(files)
    log = open_log(disk)
    job = log.begin_checkpoint(log.checkpoint._replace(index=stored[-1].index))
    job.run()
    log.finish_checkpoint(job)
    more = [fill(log, 1)[0]]
    name = last_segment(image(disk)).replace(".seg", ".idx")
    assert name in image(disk)
    check_contents(open_log(disk), stored + more)


def test_index_without_its_segment_is_forgotten() -> None:
    # A crash while a full disk gives back its space may leave one; the next segment of that name has other frames.
    disk = FaultyDisk(0)
    log = open_log(disk)
    stored = [append(log, data(number, 504)) for number in range(1, 3)]  # each its own segment
    log.flush()
    stale = SparseIndex(1)
    for index, offset, position in ((3, 4, 0), (4, 6, 100), (5, 8, 400)):
        stale.add(index, offset, position, 0, has_records=True)
    disk = disk_with(image(disk) | {"00000000000000000003.idx": stale.encode(600, 6, 10, 4)})
    log = open_log(disk)
    stored += [append(log, data(10, 104)) for _ in range(3)]  # at 0, 200 and 400
    log.flush()
    log = open_log(disk)
    assert last_segment(image(disk)) == "00000000000000000003.seg"
    check_contents(log, stored)
    check_lookups(log, stored)
