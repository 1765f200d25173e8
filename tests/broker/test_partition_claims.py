"""Who may move a group's position: only the member that claimed the partition last."""

from __future__ import annotations

import pytest

from quiver.broker.partition_state import PartitionState
from quiver.broker.tail import Tail
from quiver.errors import MemberFencedError
from quiver.log.checkpoint import Checkpoint
from quiver.testing.faulty_disk import FaultyDisk
from quiver.wire.group_messages import GetPositions, PositionsReply
from quiver.wire.messages import Position
from tests.broker.server_kit import broker, run
from tests.broker.state_kit import Log, positions


def refused(log: Log, *asked: Position) -> list[int]:
    header = log.append(positions(*asked))
    log.tail.clear()
    found: list[int] = log.state.apply(header, positions(*asked).payload)
    return found


def claim(epoch: int) -> Position:
    return Position("group", 0, epoch=epoch, act="claim")


def move(offset: int, epoch: int, rewind: bool = False) -> Position:
    return Position("group", offset, rewind, epoch=epoch)


def forget(epoch: int = 0) -> Position:
    return Position("group", 0, epoch=epoch, act="forget")


def test_a_claim_moves_nothing() -> None:
    log = Log()
    assert refused(log, Position("group", 5), claim(7)) == []
    assert (log.state.positions, log.state.epochs) == ({"group": 5}, {"group": 7})


def test_who_claimed_last_moves_the_position_and_nobody_else() -> None:
    log = Log()
    assert refused(log, claim(7), move(5, 7), claim(9)) == []
    assert refused(log, move(6, 7), move(4, 7, rewind=True), claim(8), forget(7)) == [0, 1, 2, 3]
    assert refused(log, claim(9), move(7, 9)) == [], "a claim may be repeated: its answer may have been lost"
    assert log.state.positions == {"group": 7}


def test_what_was_not_claimed_is_not_moved() -> None:
    log = Log()
    assert refused(log, claim(7), move(5, 8)) == [1]
    assert log.state.epochs == {"group": 7}


def test_positions_without_an_epoch_are_of_consumers_that_share_nothing() -> None:
    log = Log()
    assert refused(log, claim(7), Position("group", 5)) == []
    assert log.state.positions == {"group": 5}


def test_a_group_that_was_deleted_does_not_come_back_by_a_late_commit() -> None:
    log = Log()
    assert refused(log, claim(7), move(5, 7), claim(9), forget(9), move(6, 7)) == [4]
    assert (log.state.positions, log.state.epochs) == ({}, {})
    assert refused(log, claim(11), move(2, 11)) == [], "and is made again by who joins"


def test_claims_are_in_the_check_point() -> None:
    log = Log()
    refused(log, claim(9), move(5, 9))
    again = PartitionState(log.state.image())
    assert again.epochs == {"group": 9}
    assert again.is_fenced(move(6, 7)) and not again.is_fenced(move(6, 9))


@pytest.mark.parametrize(("claimed", "why"), [(9, "has this partition since epoch 9"), (0, "group was deleted since")])
def test_who_is_fenced_is_told_why(claimed: int, why: str) -> None:
    state = PartitionState(Checkpoint())
    if claimed:
        state.epochs["group"] = claimed
    error = Tail(state)._conflict(move(5, 7))
    assert isinstance(error, MemberFencedError) and why in error.message
    assert error.facts["epoch"] == claimed


# -- asked of a broker -------------------------------------------------------------------------------------------------


def test_claims_outlive_a_crash_of_the_broker() -> None:
    """A claim that was answered fences whoever had the partition before, whatever happens to the broker."""

    async def main() -> None:
        disk = FaultyDisk(0)
        async with broker(disk) as client:
            await client.create()
            await client.produce(count=9)
            assert await client.commit("g", 0, epoch=7, act="claim") is None
            assert await client.commit("g", 5, epoch=7) == 5
            assert await client.commit("g", 0, epoch=9, act="claim") == 5, "and says where the group is"
        disk.crash()
        async with broker(disk) as client:
            with pytest.raises(MemberFencedError, match="another member of group g has this partition since epoch 9"):
                await client.commit("g", 6, epoch=7)
            with pytest.raises(MemberFencedError):
                await client.commit("g", 0, epoch=8, act="claim")
            assert await client.position("g") == 5
            assert await client.commit("g", 6, epoch=9) == 6

    run(main())


def test_positions_are_listed_and_forgotten() -> None:
    async def main() -> None:
        disk = FaultyDisk(0)
        async with broker(disk) as client:
            await client.create(partitions=2)
            await client.produce(count=9)
            for name, offset in (("a", 3), ("b", 4), ("#7", 5)):
                await client.commit(name, offset)

            async def listed(name: str | None) -> list[tuple[str, int, str, int, int]]:
                found = (await client.ask(GetPositions(name), PositionsReply)).positions
                return [(one.topic, one.partition, one.consumer, one.offset, one.high_watermark) for one in found]

            assert await listed(None) == [("logs", 0, "a", 3, 9), ("logs", 0, "b", 4, 9)], "groups alone"
            assert await listed("b") == [("logs", 0, "b", 4, 9)]
            assert await listed("#7") == [("logs", 0, "#7", 5, 9)], "a registered consumer by its name"
            assert await listed("nobody") == []
            assert await client.commit("a", 0, act="forget") is None
            assert await client.commit("a", 0, act="forget") is None, "twice is once"
        disk.crash()
        async with broker(disk) as client:
            assert [await client.position(name) for name in ("a", "b", "#7")] == [None, 4, 5]

    run(main())
