from __future__ import annotations

import pytest

from quiver.errors import CorruptLogError
from quiver.log.checkpoint import Checkpoint, encode_checkpoint, read_checkpoint
from quiver.testing.faulty_disk import FaultyDisk
from tests.log.log_kit import DIRECTORY, SETTINGS, Driver, check_contents, contents, disk_with, fill, image, open_log

STATE = f"{DIRECTORY}/state"


def driver(count: int) -> Driver:
    made = Driver(FaultyDisk(0))
    made.open()
    made.entries = fill(made.live, count)
    made.acked = made.live.synced_index
    return made


def test_checkpoint_survives_a_round_trip() -> None:
    for checkpoint in (Checkpoint(), Checkpoint(7, 3, 99, b"state"), Checkpoint(2**63, 2**40, 2**50, bytes(5000))):
        disk = disk_with({"state": encode_checkpoint(checkpoint)})
        assert read_checkpoint(disk, STATE) == checkpoint


def test_missing_checkpoint_is_an_empty_one() -> None:
    assert read_checkpoint(disk_with({}), STATE) == Checkpoint()


def test_every_flipped_bit_and_every_cut_of_a_checkpoint_is_detected() -> None:
    raw = encode_checkpoint(Checkpoint(7, 3, 99, b"state"))
    for bit in range(len(raw) * 8):
        disk = disk_with({"state": raw})
        disk.flip(STATE, bit // 8, bit % 8)
        with pytest.raises(CorruptLogError):
            read_checkpoint(disk, STATE)
    for length in range(len(raw)):
        with pytest.raises(CorruptLogError):
            read_checkpoint(disk_with({"state": raw[:length]}), STATE)
    with pytest.raises(CorruptLogError):
        read_checkpoint(disk_with({"state": raw + b"x"}), STATE)


def test_reopened_log_starts_from_its_checkpoint() -> None:
    made = driver(12)
    made.write_checkpoint(9)
    log = open_log(made.disk)
    assert (log.checkpoint.index, log.checkpoint.state) == (9, b"state after 9")
    assert log.checkpoint.next_offset == made.entries[8].base_offset + made.entries[8].record_count
    assert [header.index for _, header, _ in log.scan(log.checkpoint.index + 1)] == [10, 11, 12]


def test_checkpoint_is_due_after_its_bytes_and_not_again_until_as_many_more() -> None:
    made = driver(2)
    assert not made.live.checkpoint_due
    while not made.live.checkpoint_due:
        made.entries += fill(made.live, 1)
    assert made.live.size_bytes >= SETTINGS.checkpoint_bytes
    made.write_checkpoint(5)
    assert not made.live.checkpoint_due


def test_damaged_checkpoint_of_an_untrimmed_log_is_rebuilt_from_the_log() -> None:
    made = driver(12)
    made.write_checkpoint(9)
    made.disk.flip(STATE, 20, 1)
    log = open_log(made.disk)
    assert log.checkpoint == Checkpoint()
    check_contents(log, made.entries)


def test_damaged_checkpoint_of_a_trimmed_log_is_reported() -> None:
    made = driver(12)
    made.write_checkpoint(9)
    made.trim(10)
    assert made.live.first_index > 1
    made.disk.flip(STATE, 20, 1)
    with pytest.raises(CorruptLogError) as caught:
        open_log(made.disk)
    assert caught.value.facts["path"] == STATE


def test_missing_checkpoint_of_a_trimmed_log_is_reported() -> None:
    made = driver(12)
    made.write_checkpoint(9)
    made.trim(10)
    made.disk.remove(STATE)
    with pytest.raises(CorruptLogError, match="missing"):
        open_log(made.disk)


def test_log_that_ends_before_its_checkpoint_is_reported() -> None:
    # What the check-point stands for was on disk when it was written; a shorter log has lost acknowledged entries.
    made = driver(3)
    made.write_checkpoint(3)
    files = image(made.disk)
    del files["synced"]
    first = "00000000000000000001.seg"
    for length in range(len(files[first])):
        with pytest.raises(CorruptLogError):
            open_log(disk_with({**files, first: files[first][:length]}))
    check_contents(open_log(disk_with(files)), made.entries)


def test_log_can_begin_with_a_checkpoint_alone() -> None:
    # As a replica that was sent a snapshot begins.
    disk = disk_with({"state": encode_checkpoint(Checkpoint(100, 4, 250, b"snapshot"))})
    log = open_log(disk)
    assert (log.first_index, log.next_index, log.next_offset, log.base_offset) == (101, 101, 250, 250)
    assert log.last_term == 4
    stored = fill(log, 6, term=5)
    assert (stored[0].index, stored[0].base_offset) == (101, 250)
    log = open_log(disk)
    check_contents(log, stored)
    assert (log.first_index, log.last_term) == (101, 5)
    log.truncate_suffix(101)
    assert (log.next_index, log.next_offset, log.last_term, contents(log)) == (101, 250, 4, [])
    log = open_log(disk)
    assert (log.next_index, log.next_offset, log.last_term, contents(log)) == (101, 250, 4, [])


def test_failed_checkpoint_leaves_the_old_one() -> None:
    for operation in ("pwrite", "datasync", "rename", "sync_directory"):
        made = driver(12)
        made.write_checkpoint(5)
        made.disk.fail(operation, 28, path=DIRECTORY)
        with pytest.raises(OSError):
            made.write_checkpoint(9)
        made.kill()
        made.open()
        assert made.live.checkpoint.index in (5, 9)
        made.crash()
        made.open()
