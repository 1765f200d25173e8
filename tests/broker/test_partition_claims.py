"""Who may move a group's position: only the member that claimed the partition last."""

from __future__ import annotations

import pytest

from quiver.broker.partition_state import PartitionState
from quiver.broker.tail import Tail
from quiver.errors import MemberFencedError
from quiver.log.checkpoint import Checkpoint
from quiver.wire.messages import Position
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
