"""A disk that fails stops the log; a disk that is full does not."""

from __future__ import annotations

import errno

import pytest

from quiver.errors import CorruptLogError, DiskFullError, LogFailedError
from quiver.log.disk import SpaceError
from quiver.log.flush import FlushJob
from quiver.log.partition_log import PartitionLog
from quiver.testing.faulty_disk import FaultyDisk, SimulatedCrash
from tests.log.log_kit import (
    DIRECTORY,
    Driver,
    Stored,
    append,
    check_contents,
    check_lookups,
    contents,
    control,
    data,
    fill,
    image,
    open_log,
)


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk(0)


def run(log: PartitionLog, job: FlushJob | None) -> None:
    assert job is not None
    error: Exception | None = None
    try:
        job.run()
    except (OSError, SpaceError) as caught:
        error = caught
    log.finish_flush(job, error)


FAILURES = [
    ("pwrite", ".seg", 1),
    ("pwrite", ".seg", 2),
    ("datasync", ".seg", 1),
    ("datasync", ".seg", 2),
    ("open", ".seg", 1),
    ("sync_directory", "", 1),
    ("open", ".idx", 1),
    ("pwrite", ".idx", 1),
    ("pwrite", "synced", 1),
]


@pytest.mark.parametrize(("operation", "path", "nth"), FAILURES)
def test_failed_write_or_sync_stops_the_log_and_reads_go_on(
    disk: FaultyDisk, operation: str, path: str, nth: int
) -> None:
    log = open_log(disk)
    stored = fill(log, 5)
    for number in range(10, 14):
        append(log, data(number, 200), term=2)  # over several segments
    disk.fail(operation, errno.EIO, nth, path)
    with pytest.raises(LogFailedError):
        log.flush()
    assert isinstance(log.failure, LogFailedError)
    assert DIRECTORY in log.failure.message
    # The disk works again; the log does not believe it.
    for _ in range(3):
        with pytest.raises(LogFailedError):
            append(log, data(20))
        assert log.begin_flush() is None
        log.flush()
        with pytest.raises(LogFailedError):
            log.truncate_suffix(2)
    assert (log.synced_index, log.next_index, log.last_term) == (6, 6, 1)
    assert log.next_offset == sum(entry.record_count for entry in stored)
    check_contents(log, stored)


@pytest.mark.parametrize("operation", ["pwrite", "datasync"])
def test_entries_appended_after_a_failing_job_are_not_acknowledged_either(disk: FaultyDisk, operation: str) -> None:
    log = open_log(disk)
    stored = fill(log, 2)
    append(log, data(3))
    job = log.begin_flush()
    for number in range(4, 9):
        append(log, data(number, 200))
    disk.fail(operation, errno.EIO)
    with pytest.raises(LogFailedError):
        run(log, job)
    assert log.begin_flush() is None
    assert log.synced_index == log.next_index == 3
    check_contents(log, stored)


def test_log_stops_even_if_the_disk_cannot_be_read_any_more(disk: FaultyDisk) -> None:
    log = open_log(disk)
    fill(log, 3)
    append(log, data(4))
    disk.fail("datasync", errno.EIO)
    for nth in range(1, 5):
        disk.fail("pread", errno.EIO, nth)
    with pytest.raises(LogFailedError):
        log.flush()
    assert log.failure is not None


def test_failed_truncation_stops_the_log() -> None:
    # A segment that was forgotten but not removed would be found again by the next one of its name.
    for operation in ("pwrite", "datasync", "remove", "sync_directory", "truncate"):
        for nth in (1, 2):
            driver = Driver(FaultyDisk(nth))
            driver.open()
            driver.entries = fill(driver.live, 12)
            driver.acked = 13
            driver.disk.fail(operation, errno.EIO, nth)
            if (operation, nth) != ("truncate", 2):  # there is one
                with pytest.raises(LogFailedError):
                    driver.truncate(3)
                assert driver.live.failure is not None
            driver.kill()
            driver.disk.heal()
            driver.open()


def test_truncation_of_a_damaged_segment_changes_nothing(disk: FaultyDisk) -> None:
    log = open_log(disk)
    stored = fill(log, 12)
    name = sorted(name for name in image(disk) if name.endswith(".seg"))[-2]
    first = int(name[:20])
    disk.flip(f"{DIRECTORY}/{name}", 50, 1)
    before = image(disk)
    with pytest.raises(CorruptLogError):
        log.truncate_suffix(first + 1)
    assert image(disk) == before
    assert (log.next_index, log.failure) == (13, None)
    disk.flip(f"{DIRECTORY}/{name}", 50, 1)
    check_contents(log, stored)


# -- a full disk -------------------------------------------------------------------------------------------------------


def used(disk: FaultyDisk) -> int:
    return sum(map(len, image(disk).values()))


def without_mark(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: raw for name, raw in files.items() if name != "synced"}


def append_many(log: PartitionLog) -> list[Stored]:
    """Fills the active segment, two more, and begins a fourth."""
    return [append(log, control(n) if n % 3 == 0 else data(n, 150 + n), term=2) for n in range(20, 30)]


@pytest.mark.parametrize("before", [0, 1, 5])
def test_full_disk_undoes_the_job_and_the_log_goes_on_when_space_returns(before: int) -> None:
    whole = FaultyDisk(0)
    log = open_log(whole)
    fill(log, before)
    start = used(whole)
    append_many(log)
    log.flush()
    assert log.segment_count >= 3
    for capacity in range(start, used(whole), 23):
        disk = FaultyDisk(capacity)
        log = open_log(disk)
        stored = fill(log, before)
        files = without_mark(image(disk))
        disk.capacity_bytes = capacity
        for _ in range(2):
            append_many(log)
            with pytest.raises(DiskFullError):
                log.flush()
            assert (log.next_index, log.synced_index, log.failure) == (before + 1, before + 1, None)
            assert log.last_term == (1 if before else 0)
            # The space is given back: no part of a segment, no index of one that is not full.
            assert without_mark(image(disk)) == files
            check_contents(log, stored)
        if capacity % 2:
            disk.crash()
            log = open_log(disk)
            check_contents(log, stored)
        disk.capacity_bytes = None
        stored = stored + fill(log, 9, term=3)  # other entries, of other lengths
        check_contents(log, stored)
        check_lookups(log, stored)
        disk.crash()
        check_contents(open_log(disk), stored)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(("operation", "path", "nth"), FAILURES)
def test_space_that_runs_out_at_any_operation_costs_nothing(operation: str, path: str, nth: int, error: int) -> None:
    # Some file systems find out only when they sync.
    disk = FaultyDisk(0)
    log = open_log(disk)
    stored = fill(log, 5)
    files = without_mark(image(disk))
    append_many(log)
    disk.fail(operation, error, nth, path)
    with pytest.raises(DiskFullError):
        log.flush()
    assert without_mark(image(disk)) == files
    check_contents(log, stored)
    stored += append_many(log)
    log.flush()
    check_contents(log, stored)
    disk.crash()
    check_contents(open_log(disk), stored)


def test_entries_appended_after_a_job_without_space_are_gone_with_it(disk: FaultyDisk) -> None:
    log = open_log(disk)
    stored = fill(log, 2)
    append(log, data(3))
    job = log.begin_flush()
    append_many(log)
    disk.capacity_bytes = used(disk) + 50
    with pytest.raises(DiskFullError):
        run(log, job)
    assert (log.next_index, log.begin_flush()) == (3, None)
    disk.capacity_bytes = None
    stored += append_many(log)
    log.flush()
    check_contents(open_log(disk), stored)


def test_job_that_fits_after_one_that_did_not_is_stored_once(disk: FaultyDisk) -> None:
    log = open_log(disk)
    stored = fill(log, 3)
    disk.capacity_bytes = used(disk) + 600
    for _ in range(3):
        append(log, data(4, 700))
        with pytest.raises(DiskFullError):
            log.flush()
    stored.append(append(log, data(4, 100)))
    log.flush()
    check_contents(log, stored)
    disk.kill()
    check_contents(open_log(disk), stored)


@pytest.mark.parametrize(("operation", "nth"), [("truncate", 2), ("remove", 1), ("remove", 2), ("sync_directory", 2)])
def test_error_while_giving_back_space_stops_the_log(operation: str, nth: int) -> None:
    disk = FaultyDisk(0)
    log = open_log(disk)
    stored = fill(log, 5)
    append_many(log)
    disk.fail("pwrite", errno.ENOSPC, 3, ".seg")
    disk.fail(operation, errno.EIO, nth)
    with pytest.raises(LogFailedError):
        log.flush()
    assert log.failure is not None
    check_contents(log, stored)
    disk.kill()
    disk.heal()
    found = contents(open_log(disk))
    assert found[:5] == stored


def test_crash_while_giving_back_space_loses_nothing_and_invents_nothing() -> None:
    stopped = True
    nth = 0
    while stopped:
        nth += 1
        for seed in range(4):
            driver = Driver(FaultyDisk(seed))
            driver.open()
            driver.entries = fill(driver.live, 5)
            driver.acked = 6
            for number in range(20, 30):
                driver.append(data(number, 150 + number), term=2)
            driver.disk.fail("pwrite", errno.ENOSPC, 3, ".seg")
            driver.disk.stop_at(nth)
            stopped = False
            try:
                driver.flush()
            except SimulatedCrash:
                stopped = True
            driver.crash() if seed % 2 else driver.kill()
            driver.disk.heal()
            driver.open()
            # Other entries in the place of those that found no space.
            for number in range(40, 48):
                driver.append(data(number, 131 + number), term=3)
            driver.flush()
            driver.crash()
            driver.open()
    assert nth > 10
