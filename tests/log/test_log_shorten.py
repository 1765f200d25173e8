"""Truncating the end, trimming the beginning, and retention, which plans the latter."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from quiver.errors import CorruptLogError
from quiver.log.checkpoint import Checkpoint
from quiver.log.partition_log import PartitionLog
from quiver.log.segment import segment_path
from quiver.testing.faulty_disk import FaultyDisk, SimulatedCrash
from tests.log.log_kit import (
    DIRECTORY,
    SETTINGS,
    Driver,
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
    open_log,
)

COUNT = 22


@pytest.fixture(scope="module")
def made() -> tuple[dict[str, bytes], list[Stored]]:
    disk = FaultyDisk(0)
    log = open_log(disk)
    stored = fill(log, 12, term=3) + fill(log, COUNT - 12, term=4)
    assert log.segment_count > 4
    return image(disk), stored


@pytest.mark.parametrize("index", range(1, COUNT + 2))
@pytest.mark.parametrize("reopened", [False, True])
def test_truncated_log_ends_before_the_index_and_goes_on_from_there(
    made: tuple[dict[str, bytes], list[Stored]], index: int, reopened: bool
) -> None:
    files, stored = made
    disk = disk_with(files)
    log = open_log(disk)
    log.truncate_suffix(index)
    if reopened:
        disk.crash()
        log = open_log(disk)
    kept = stored[: index - 1]
    assert (log.next_index, log.synced_index) == (index, index)
    assert log.next_offset == sum(entry.record_count for entry in kept)
    assert log.last_term == (kept[-1].term if kept else 0)
    check_contents(log, kept)
    # Other entries, of other lengths, in the place of the removed ones.
    for number in range(9):
        kept.append(append(log, data(1000 + number, 13 + 29 * number), term=5))
    log.flush()
    check_contents(log, kept)
    disk.crash()
    check_contents(open_log(disk), kept)


def test_truncation_without_index_files_leaves_no_hole_in_a_power_cut(
    made: tuple[dict[str, bytes], list[Stored]],
) -> None:
    files = {name: raw for name, raw in made[0].items() if not name.endswith(".idx")}
    for seed in range(15):
        disk = disk_with(files, seed)
        log = open_log(disk)
        disk.stop_at(seed + 1)
        with contextlib.suppress(SimulatedCrash):
            log.truncate_suffix(3)
        disk.crash()
        found = contents(open_log(disk))
        assert found == made[1][: len(found)] and len(found) >= 2


def test_truncating_takes_entries_in_memory_along() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk)
    stored = fill(log, 5)
    for number in range(10):
        append(log, data(50 + number, 100))  # some in segments that have no file yet
    log.truncate_suffix(3)
    assert log.next_index == 3
    assert log.begin_flush() is None
    stored = [*stored[:2], append(log, data(90, 33), term=2), append(log, data(91, 200), term=2)]
    log.flush()
    check_contents(log, stored)
    check_contents(open_log(disk), stored)


def test_entries_only_in_memory_must_be_flushed_before_truncating() -> None:
    log = open_log(FaultyDisk(0))
    fill(log, 2)
    append(log, data(3))
    append(log, data(4))
    with pytest.raises(ValueError):
        log.truncate_suffix(3)
    log.truncate_suffix(5)  # nothing to remove
    log.flush()
    assert len(contents(log)) == 4


def test_index_of_an_earlier_length_is_not_believed_after_truncation() -> None:
    # The new frames are as long in sum as the old, but begin elsewhere: an old index would point into their middle.
    disk = FaultyDisk(0)
    settings = dataclasses.replace(SETTINGS, index_interval_bytes=1)
    log = open_log(disk, settings)
    stored = [append(log, data(number, 32)) for number in range(5)]
    log.flush()
    job = log.begin_checkpoint(Checkpoint(1, 1, 2, b""))
    job.run()
    log.finish_checkpoint(job)
    log.truncate_suffix(2)
    stored = stored[:1] + [append(log, data(10, size)) for size in (56, 8, 32, 32)]
    log.flush()
    disk.kill()
    log = open_log(disk, settings)
    check_contents(log, stored)
    check_lookups(log, stored)


def test_index_of_an_earlier_length_does_not_come_back_after_a_power_cut() -> None:
    settings = dataclasses.replace(SETTINGS, index_interval_bytes=1)
    for seed in range(20):
        disk = FaultyDisk(seed)
        log = open_log(disk, settings)
        stored = [append(log, data(number, 32)) for number in range(6)]  # the sixth seals the others
        log.flush()
        assert "00000000000000000001.idx" in image(disk)
        log.truncate_suffix(2)
        stored = stored[:1] + [append(log, data(10, size)) for size in (56, 8, 32, 32)]
        log.flush()
        disk.crash()
        log = open_log(disk, settings)
        check_contents(log, stored)
        check_lookups(log, stored)


def test_checkpoint_that_is_written_during_a_truncation_does_not_bring_back_its_index() -> None:
    disk = FaultyDisk(0)
    settings = dataclasses.replace(SETTINGS, index_interval_bytes=1)
    log = open_log(disk, settings)
    stored = [append(log, data(number, 32)) for number in range(5)]
    log.flush()
    job = log.begin_checkpoint(Checkpoint(1, 1, 2, b""))
    log.truncate_suffix(2)
    stored = stored[:1] + [append(log, data(10, size)) for size in (56, 8, 32, 32)]
    log.flush()
    job.run()
    log.finish_checkpoint(job)
    disk.kill()
    log = open_log(disk, settings)
    check_contents(log, stored)
    check_lookups(log, stored)


def trimmable(checkpoint_index: int) -> Driver:
    driver = Driver(FaultyDisk(0))
    driver.open()
    driver.entries = fill(driver.live, COUNT)
    driver.acked = COUNT + 1
    driver.write_checkpoint(checkpoint_index)
    return driver


@pytest.mark.parametrize("index", range(1, COUNT + 2))
def test_trimmed_log_begins_with_the_segment_that_holds_the_index(index: int) -> None:
    driver = trimmable(COUNT)
    firsts = [int(name[:20]) for name in image(driver.disk) if name.endswith(".seg")]
    driver.trim(index)
    expected = max(first for first in firsts if first <= index)
    assert driver.live.first_index == expected
    assert driver.live.base_offset == driver.entries[expected - 1].base_offset
    # Files of removed segments are gone, those of the others are not.
    names = image(driver.disk)
    assert [int(name[:20]) for name in names if name.endswith(".seg")] == [f for f in firsts if f >= expected]
    assert all(int(name[:20]) >= expected for name in names if name.endswith(".idx"))
    driver.crash()
    driver.open()
    assert driver.live.first_index == expected
    driver.append(data(99))
    driver.flush()
    driver.crash()
    driver.open()


def test_trim_keeps_the_last_segment_that_is_on_disk() -> None:
    driver = trimmable(COUNT)
    segments = driver.live.segment_count
    driver.append(data(99, 680))  # begins a segment, in memory
    assert driver.live.segment_count == segments + 1
    assert driver.live.trim_prefix(COUNT + 1) == segments - 1
    assert driver.live.trim_prefix(COUNT + 1) == 0
    driver.flush()
    assert driver.live.trim_prefix(COUNT + 1) == 1
    driver.check()


def test_trim_that_fails_leaves_no_hole() -> None:
    for nth in (1, 2, 3, 4):
        driver = trimmable(COUNT)
        driver.disk.fail("remove", 5, nth=nth)
        with pytest.raises(OSError):
            driver.live.trim_prefix(COUNT)
        driver.live.trim_prefix(driver.live.first_index + 9)
        driver.kill()
        driver.open()


def test_hole_in_the_log_is_reported(made: tuple[dict[str, bytes], list[Stored]]) -> None:
    files, _ = made
    segments = [name for name in files if name.endswith(".seg")]
    for name in segments[:-1]:
        with pytest.raises(CorruptLogError, match="missing"):
            open_log(disk_with({key: raw for key, raw in files.items() if key != name}))
    # Without its last segment the log is merely shorter; the mark knows better.
    with pytest.raises(CorruptLogError, match="were stored"):
        open_log(disk_with({key: raw for key, raw in files.items() if key != segments[-1]}))
    with pytest.raises(CorruptLogError, match="missing") as caught:
        open_log(disk_with({key: raw for key, raw in files.items() if key not in segments}))
    assert caught.value.facts["path"] == segment_path(DIRECTORY, 1)


# -- retention -------------------------------------------------------------------------------------------------------


def log_of_times(times: list[int], **settings: int) -> PartitionLog:
    """One segment of three frames of 200 bytes for each time, in milliseconds."""
    log = open_log(FaultyDisk(0), dataclasses.replace(SETTINGS, **settings))
    for time in times:
        for number in range(3):
            append(log, data(number, 104, timestamp=time * 1000))
    log.flush()
    assert log.segment_count == len(times)
    return log


def test_retention_by_time_removes_segments_whose_newest_record_is_too_old() -> None:
    log = log_of_times([100, 200, 300, 400], retention_ms=1000)
    assert log.plan_retention(1_100_000) is None
    assert log.plan_retention(1_100_001) == (4, 6)
    assert log.plan_retention(1_200_001) == (7, 12)
    assert log.plan_retention(1_300_001) == (10, 18)


def test_retention_by_time_stops_at_the_first_segment_to_keep() -> None:
    log = log_of_times([100, 900, 100, 100], retention_ms=1000)
    assert log.plan_retention(1_500_000) == (4, 6)


def test_retention_by_size_keeps_at_least_the_limit_and_the_active_segment() -> None:
    for limit, plan in ((2400, None), (2399, None), (1801, None), (1800, (4, 6)), (700, (7, 12)), (0, (10, 18))):
        log = log_of_times([1, 2, 3, 4], retention_bytes=limit)
        assert log.size_bytes == 2400
        assert log.plan_retention(10**12) == plan


def test_without_limits_everything_is_kept() -> None:
    assert log_of_times([1, 2, 3]).plan_retention(10**18) is None


def test_idle_expired_active_segment_is_sealed_by_the_next_entry_and_trimmed() -> None:
    log = log_of_times([100, 200], retention_ms=1000)
    plan = log.plan_retention(10**9)
    assert plan == (7, 12)
    append(log, control(7))  # the trim itself
    log.flush()
    assert log.segment_count == 3
    job = log.begin_checkpoint(Checkpoint(7, 1, 12, b""))
    job.run()
    log.finish_checkpoint(job)
    assert log.trim_prefix(plan[0]) == 2
    assert (log.first_index, log.base_offset, log.next_offset) == (7, 12, 12)
    # Trimming a trim would only make another.
    assert log.plan_retention(10**9) is None
    append(log, data(8))
    log.flush()
    assert [entry.index for entry in contents(log)] == [7, 8]


def test_segment_without_records_does_not_hold_up_retention() -> None:
    log = log_of_times([100], retention_ms=1000)
    for number in range(12):
        append(log, control(number, payload_bytes=104))
    log.flush()
    for number in range(3):
        append(log, data(number, 104, timestamp=10**9))
    log.flush()
    plan = log.plan_retention(10**9)
    assert plan is not None and plan[0] >= 13
