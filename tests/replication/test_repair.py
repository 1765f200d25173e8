"""A peer's frame is written where ours was bad only if it fills that place to the byte. Damage in a file that was
trimmed meanwhile is gone with it."""

from __future__ import annotations

import asyncio

import pytest
from crc32c import crc32c

from quiver.errors import CorruptLogError
from quiver.replication.repair import Answer, Repairer, UnrepairableError, locate, mend
from quiver.testing.faulty_disk import FaultyDisk
from quiver.wire.frame import HEADER_BYTES, Entry, Kind, encode_frame, stamp
from tests.broker.kit import InlineExecutor
from tests.replication.replica_kit import GROUP, ME, UID, Leader

PATH = "p/00000000000000000001.seg"


def frame(index: int, payload: bytes) -> bytes:
    return encode_frame(stamp(Entry(Kind.DATA, payload, crc32c(payload), 1), index, 1, index), payload)


FRAMES = [frame(index, bytes([index]) * 100) for index in range(1, 5)]


def damaged(*places: int) -> FaultyDisk:
    """A log with a flipped bit at each of these positions."""
    disk = FaultyDisk(0)
    disk.make_directory("p")
    disk.open(PATH, create=True).pwrite([b"".join(FRAMES)], 0)
    for place in places:
        disk.flip(PATH, place, 3)
    return disk


def content(disk: FaultyDisk) -> bytes:
    file = disk.open(PATH)
    return file.pread(file.size(), 0)


HEADER_OF_2, PAYLOAD_OF_2 = len(FRAMES[0]) + 20, len(FRAMES[0]) + HEADER_BYTES + 9
HEADER_OF_3 = HEADER_OF_2 + len(FRAMES[1])


@pytest.mark.parametrize("places", [(PAYLOAD_OF_2,), (HEADER_OF_2,), (HEADER_OF_2, HEADER_OF_3)])
def test_a_frame_of_a_peer_that_is_as_far_fits(places: tuple[int, ...]) -> None:
    disk = damaged(*places)
    error: CorruptLogError | None = CorruptLogError.at(PATH, len(FRAMES[0]), "bad")
    for index in range(2, 2 + len(places)):
        assert error is not None
        place = locate(disk, error)
        assert place.index == index
        mend(disk, place, Answer(FRAMES[index - 1]))
        error = CorruptLogError.at(PATH, place.position + len(FRAMES[0]), "bad")
    assert content(disk) == b"".join(FRAMES)


@pytest.mark.parametrize("place", [PAYLOAD_OF_2, HEADER_OF_2])
def test_a_shorter_frame_of_a_peer_that_compacted_further_destroys_nothing(place: int) -> None:
    disk = damaged(place)
    before = content(disk)
    where = locate(disk, CorruptLogError.at(PATH, len(FRAMES[0]), "bad"))
    with pytest.raises(UnrepairableError):
        mend(disk, where, Answer(frame(2, b""), is_alike=False))
    assert content(disk) == before
    mend(disk, where, Answer(FRAMES[1], is_alike=False))  # untouched by compaction: as long as ours
    assert content(disk) == b"".join(FRAMES)


def test_what_does_not_fit_at_the_end_is_refused_too() -> None:
    disk = damaged(HEADER_OF_3 + len(FRAMES[2]))
    with pytest.raises(UnrepairableError):
        where = locate(disk, CorruptLogError.at(PATH, 3 * len(FRAMES[0]), "bad"))
        mend(disk, where, Answer(frame(4, bytes(40)), is_alike=False))


def repair(disk: FaultyDisk, *found: CorruptLogError | None) -> list[CorruptLogError | None]:
    """Runs it after damage at the beginning of PATH; `found` is what opening the log gives, one time after the other.
    Gives what of it was not asked for."""
    left = list(found)
    repairer = Repairer(UID, ME, [*GROUP.voters], disk, InlineExecutor(), Leader())

    async def run() -> None:
        async with asyncio.timeout(5):  # a peer that is asked does not answer
            await repairer.run(CorruptLogError.at(PATH, 0, "bad"), lambda: left.pop(0))

    asyncio.run(run())
    return left


def test_damage_in_a_file_that_was_trimmed_meanwhile_is_gone() -> None:
    disk = damaged(0)
    disk.remove(PATH)
    assert repair(disk, None) == []


def test_a_log_that_lacks_a_file_begins_anew() -> None:
    disk = damaged(0)
    disk.remove(PATH)
    with pytest.raises(UnrepairableError):
        repair(disk, CorruptLogError.at(PATH, 0, "the file is missing"))
