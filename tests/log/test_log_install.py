"""A log that is replaced by a snapshot: whenever that is cut short, it is the old log or the new one."""

from __future__ import annotations

import contextlib

import pytest

from quiver.errors import CorruptLogError, LogFailedError
from quiver.log.checkpoint import Checkpoint, LogStart
from quiver.log.partition_log import PartitionLog
from quiver.testing.faulty_disk import FaultyDisk, SimulatedCrash
from tests.log.log_kit import DIRECTORY, append, check_contents, contents, data, fill, open_log

# The sender's log begins after entry 100; its state counts 110 entries.
SNAPSHOT = Checkpoint(110, 4, 300, b"state", LogStart(100, 3, 250), 1, True, b"group")


def is_new(log: PartitionLog) -> bool:
    if log.checkpoint.generation == 0:
        return False
    assert log.checkpoint == SNAPSHOT
    assert (log.first_index, log.next_index, log.next_offset, log.last_term) == (101, 101, 250, 3)
    assert contents(log) == []
    return True


def test_installed_log_begins_after_the_snapshot_and_goes_on_from_there() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk)
    fill(log, 20)
    log.install(SNAPSHOT)
    assert is_new(log)
    stored = fill(log, 30, term=4)
    assert (stored[0].index, stored[0].base_offset) == (101, 250)
    check_contents(log, stored)
    disk.crash()
    check_contents(open_log(disk), stored)


def test_state_may_be_ahead_of_the_log_until_the_next_check_point() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk)
    log.install(SNAPSHOT)
    stored = fill(log, 5, term=4)  # entries 101 to 105: the state has 110
    disk.crash()
    log = open_log(disk)
    check_contents(log, stored)
    stored += fill(log, 10, term=4)
    job = log.begin_checkpoint(Checkpoint(112, 4, stored[11].base_offset, b"later", SNAPSHOT.start, 1))
    job.run()
    log.finish_checkpoint(job)
    disk.kill()
    check_contents(open_log(disk), stored)


@pytest.mark.parametrize("power", [False, True], ids=["kill", "power cut"])
def test_installation_cut_short_at_every_step_is_the_old_log_or_the_new_one(power: bool) -> None:
    outcomes = set()
    for nth in range(1, 60):
        for seed in range(4):
            disk = FaultyDisk(seed)
            log = open_log(disk)
            stored = fill(log, 20)
            disk.stop_at(nth)
            finished = False
            with contextlib.suppress(SimulatedCrash):
                log.install(SNAPSHOT)
                finished = True
            if power:
                disk.crash()
            else:
                disk.kill()
            log = open_log(disk)
            if is_new(log):
                outcomes.add("new")
                check_contents(log, fill(log, 3, term=4))
            else:
                assert not finished
                outcomes.add("old")
                check_contents(log, stored)
    assert outcomes == {"old", "new"}


def test_segments_of_the_old_log_that_reach_further_are_not_taken_for_new_ones() -> None:
    """A long tail that no leader has: its segments have names that the new log could use too."""
    for nth in range(1, 60):
        disk = FaultyDisk(nth)
        log = open_log(disk)
        fill(log, 150)
        disk.stop_at(nth)
        with contextlib.suppress(SimulatedCrash):
            log.install(SNAPSHOT)
        disk.crash()
        log = open_log(disk)
        assert is_new(log) or log.next_index == 151


def test_installing_twice() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk)
    log.install(SNAPSHOT)
    fill(log, 5, term=4)
    again = SNAPSHOT._replace(index=510, start=LogStart(500, 9, 900), generation=2)
    log.install(again)
    disk.crash()
    log = open_log(disk)
    assert log.checkpoint == again and (log.next_index, log.next_offset, log.last_term) == (501, 900, 9)


def test_lost_mark_of_an_installed_log_is_damage_and_deletes_nothing() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk)
    log.install(SNAPSHOT)
    stored = fill(log, 5, term=4)
    disk.remove(f"{DIRECTORY}/synced")
    with pytest.raises(CorruptLogError, match="sync mark"):
        open_log(disk)
    assert [name for name in disk.list(DIRECTORY) if name.endswith(".seg")]
    assert stored


@pytest.mark.parametrize("slot", [0, 512])
def test_flipped_bit_of_the_mark_does_not_install_again_and_delete_what_came_since(slot: int) -> None:
    """Also after a power cut that took what of the mark was not synced."""
    for seed in range(100):
        disk = FaultyDisk(seed)
        log = open_log(disk)
        fill(log, 20)
        log.install(SNAPSHOT)
        stored = fill(log, 1, term=4)
        disk.crash()
        disk.flip(f"{DIRECTORY}/synced", slot + 10, 3)
        check_contents(open_log(disk), stored)


def test_disk_that_fails_during_the_installation_stops_the_log() -> None:
    disk = FaultyDisk(0)
    log = open_log(disk)
    fill(log, 5)
    disk.fail("rename", 5)
    with pytest.raises(LogFailedError):
        log.install(SNAPSHOT)
    with pytest.raises(LogFailedError):
        append(log, data(1))
