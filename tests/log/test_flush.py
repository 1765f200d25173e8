from __future__ import annotations

import threading

import pytest

from quiver.log.disk import SystemDisk
from quiver.log.flush import FlushJob
from quiver.log.partition_log import PartitionLog
from quiver.testing.faulty_disk import FaultyDisk
from tests.log.log_kit import append, check_contents, contents, control, data, fill, image, open_log


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk(0)


@pytest.fixture
def log(disk: FaultyDisk) -> PartitionLog:
    return open_log(disk)


def begin(log: PartitionLog) -> FlushJob:
    job = log.begin_flush()
    assert job is not None
    return job


def test_one_job_at_a_time(log: PartitionLog) -> None:
    append(log, data(1))
    job = begin(log)
    append(log, data(2))
    assert log.begin_flush() is None
    job.run()
    assert log.begin_flush() is None
    log.finish_flush(job, None)
    assert log.begin_flush() is not None


def test_entries_appended_during_a_job_are_covered_by_the_next(log: PartitionLog, disk: FaultyDisk) -> None:
    stored = [append(log, data(1)), append(log, data(2))]
    first = begin(log)
    stored += [append(log, data(number, 150)) for number in range(3, 12)]  # into new segments too
    first.run()
    assert log.synced_index == 1
    log.finish_flush(first, None)
    assert log.synced_index == 3
    check_contents(log, stored[:2])
    disk_then = image(disk)
    second = begin(log)
    assert (second.start.next_index, second.end.next_index) == (3, 12)
    assert image(disk) == disk_then, "a job that has not run has written nothing"
    second.run()
    log.finish_flush(second, None)
    check_contents(log, stored)
    check_contents(open_log(disk), stored)


def test_roll_between_two_jobs_seals_the_segment_of_the_first(log: PartitionLog, disk: FaultyDisk) -> None:
    stored = [append(log, data(1, 500))]
    first = begin(log)
    stored.append(append(log, data(2, 500)))  # rolls while the first job is under way
    first.run()
    log.finish_flush(first, None)
    log.flush()
    assert "00000000000000000001.idx" in image(disk)
    stored.append(append(log, control(3)))
    log.flush()
    check_contents(open_log(disk), stored)


def test_job_that_was_not_finished_is_not_acknowledged(log: PartitionLog) -> None:
    stored = fill(log, 2)
    append(log, data(3))
    begin(log).run()
    assert log.synced_index == 3
    check_contents(log, stored)


def test_nothing_to_flush_is_no_job(log: PartitionLog, disk: FaultyDisk) -> None:
    assert log.begin_flush() is None
    fill(log, 1)
    operations = disk.operations
    log.flush()
    assert (log.begin_flush(), disk.operations) == (None, operations)


def test_one_job_costs_one_sync_however_many_entries(log: PartitionLog, disk: FaultyDisk) -> None:
    fill(log, 1)
    for number in range(2, 5):
        append(log, control(number))
    before = disk.operations
    log.flush()
    assert disk.operations - before == 3  # write, datasync, mark


def test_jobs_run_in_a_thread_while_the_owner_appends(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = str(tmp_path_factory.mktemp("log"))
    log = open_log(SystemDisk(), directory=directory)
    stored = []
    for number in range(40):
        stored.append(append(log, data(number, 90)))
        job = begin(log)
        thread = threading.Thread(target=job.run)
        thread.start()
        stored += [append(log, data(100 + number, 10)), append(log, control(number))]
        done = stored[: job.end.next_index - 1]
        thread.join()
        log.finish_flush(job, None)
        assert contents(log) == done
    log.flush()
    check_contents(open_log(SystemDisk(), directory=directory), stored)
