"""What the simulator knows of the files of a replica, and where bits flip in them."""

from __future__ import annotations

import pytest

from quiver.config import LogSettings
from quiver.errors import CorruptLogError
from quiver.log.checkpoint import Checkpoint, encode_checkpoint
from quiver.log.disk import write_atomically
from quiver.log.partition_log import PartitionLog
from quiver.log.slots import HardStateFile
from quiver.testing.faulty_disk import FaultyDisk
from quiver.testing.sim.disk import durable_hard_state, durable_term, hard_state_places, has_sound_facts
from quiver.types import HardState
from quiver.wire.frame import Entry, Kind


@pytest.fixture
def disk() -> FaultyDisk:
    disk = FaultyDisk(1)
    disk.make_directory("p")
    HardStateFile(disk, "p").write(HardState(7, 3))
    write_atomically(disk, "p/state", encode_checkpoint(Checkpoint(5, 2, 4, b"state")))
    return disk


def test_whichever_copy_of_term_and_vote_a_bit_hits_the_other_is_found(disk: FaultyDisk) -> None:
    disk.write_back("p/hardstate")
    assert has_sound_facts(disk, "p")
    places = hard_state_places(disk, "p")
    assert len(places) == 2 * 28
    for byte in places:
        disk.flip("p/hardstate", byte, 3)
        assert not has_sound_facts(disk, "p") and hard_state_places(disk, "p") == []
        assert durable_hard_state(disk, "p") == HardState(7, 3)
        disk.flip("p/hardstate", byte, 3)


def test_with_both_copies_hit_no_vote_is_guessed(disk: FaultyDisk) -> None:
    for byte in (0, 512):
        disk.flip("p/hardstate", byte, 0)
    with pytest.raises(CorruptLogError):
        HardStateFile(disk, "p")


def test_a_flipped_bit_in_a_check_point_is_seen(disk: FaultyDisk) -> None:
    for byte in range(len(disk.content("p/state"))):
        disk.flip("p/state", byte, 7)
        assert not has_sound_facts(disk, "p")
        disk.flip("p/state", byte, 7)
    assert has_sound_facts(disk, "p")


def test_a_replica_without_files_has_nothing_that_could_be_damaged() -> None:
    disk = FaultyDisk(1)
    disk.make_directory("p")
    assert has_sound_facts(disk, "p") and hard_state_places(disk, "p") == []


def test_what_is_made_again_anyway_does_not_count_as_damage(disk: FaultyDisk) -> None:
    disk.flip("p/state", 0, 0, counts=False)
    assert disk.flips == 0
    disk.flip("p/state", 0, 0)
    assert disk.flips == 1


def test_entries_with_a_flipped_bit_and_those_behind_them_are_still_stored() -> None:
    disk = FaultyDisk(1)
    log = PartitionLog(disk, "data/log", LogSettings())

    def append(term: int) -> None:
        log.append(term, Entry.control(Kind.NOOP, b""), 0.0)
        log.flush()

    def stored() -> list[int | None]:
        return [durable_term(disk, "data/log", index) for index in range(1, 6)]

    for term in (1, 1, 2):
        append(term)
    path = log.spans_for_index(1)[0].path
    sound = disk.content(path)
    for byte in (100, 200):
        disk.flip(path, byte, 3)
    append(3)
    assert stored() == [1, 1, 2, 3, None]
    # One of the two is made good.
    file = disk.open(path)
    file.pwrite([sound[96:192]], 96)
    file.datasync()
    assert stored() == [1, 1, 2, 3, None]
    # What is written over a flipped bit and is no frame is none.
    file.pwrite([bytes(8)], 200)
    file.datasync()
    assert stored() == [1, 1, None, None, None]


def test_what_takes_the_place_of_a_flipped_bit_is_as_it_was_written() -> None:
    disk = FaultyDisk(1)
    log = PartitionLog(disk, "data/log", LogSettings())

    def append(term: int, count: int) -> None:
        for _ in range(count):
            log.append(term, Entry.control(Kind.NOOP, b""), 0.0)
            log.flush()

    def stored() -> list[int | None]:
        return [durable_term(disk, "data/log", index) for index in range(1, 5)]

    append(1, 3)
    disk.flip(log.spans_for_index(1)[0].path, 200, 3)
    assert stored() == [1, 1, 1, None]
    log.truncate_suffix(2)
    assert stored() == [1, None, None, None]
    append(2, 2)
    assert stored() == [1, 2, 2, None]
