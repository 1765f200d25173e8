"""A request finds the leader of a partition wherever it is, and is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec import Struct

from quiver.errors import (
    ConflictError,
    ConnectionLostError,
    DiskFullError,
    LogFailedError,
    NotLeaderError,
    QuiverError,
    RequestTimeoutError,
    ShuttingDownError,
    UnavailableError,
)
from quiver.manager import links
from quiver.manager.brokers import Brokers
from quiver.manager.links import LeaderLink
from quiver.metadata.state import Partition
from quiver.types import PartitionStatus
from quiver.wire.frame import FLAG_CLIENT, FLAG_UNSEQUENCED
from quiver.wire.messages import (
    CommitPosition,
    CommitPositions,
    CommitPositionsReply,
    ErrorReply,
    GetPosition,
    GetStatus,
    Position,
    PositionReply,
    Produce,
    ProduceReply,
    StatusReply,
)
from tests.broker.kit import SimulatedClock

PARTITION = Partition(1, "logs", 0, "u0", (1, 2, 3), (1 << 32 | 1, 2 << 32 | 1, 3 << 32 | 1))
READ = GetPosition("logs", 0, "c")


class Scripted:
    """Answers what the test says; each answer once, the last for ever."""

    def __init__(self, *answers: QuiverError | Struct) -> None:
        self.answers = list(answers)
        self.asked: list[Struct] = []

    async def call(self, request: Struct, payload: Any = b"") -> tuple[Struct, Sequence[Any]]:
        self.asked.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, QuiverError):
            raise answer
        return answer, ()


def not_leader(leader: int = 0) -> NotLeaderError:
    return NotLeaderError("not me", leader=leader)


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_PAUSE_S_MIN", 0.001)
    monkeypatch.setattr(links, "_PAUSE_S_MAX", 0.002)


def on(brokers: dict[int, Scripted], request: Struct) -> tuple[Struct, Brokers]:
    known = Brokers(SimulatedClock(), 5.0)
    for broker_id, broker in brokers.items():
        known.attach(broker_id, broker)

    async def main() -> Struct:
        reply, _ = await LeaderLink(known, PARTITION).call(request)
        return reply

    return asyncio.run(asyncio.wait_for(main(), 20)), known


def test_the_first_replica_is_asked_when_nobody_knows_better() -> None:
    brokers = {1: Scripted(PositionReply(7)), 2: Scripted(not_leader(1)), 3: Scripted(not_leader(1))}
    assert on(brokers, READ)[0] == PositionReply(7)
    assert not brokers[2].asked and not brokers[3].asked


def test_the_leader_that_a_broker_names_is_asked_next_and_remembered() -> None:
    brokers = {1: Scripted(not_leader(3)), 2: Scripted(not_leader(3)), 3: Scripted(PositionReply(7))}
    reply, known = on(brokers, READ)
    assert reply == PositionReply(7)
    assert known.leader_of(PARTITION) == 3
    assert not brokers[2].asked


@pytest.mark.parametrize("error", [ConnectionLostError("gone"), RequestTimeoutError("late"), ShuttingDownError("bye")])
def test_when_the_leader_is_gone_another_one_says_who_leads(error: QuiverError) -> None:
    brokers = {1: Scripted(error), 2: Scripted(not_leader(0), not_leader(3)), 3: Scripted(PositionReply(7))}
    assert on(brokers, READ)[0] == PositionReply(7)
    assert len(brokers[1].asked) == 1


def test_an_election_is_waited_for() -> None:
    brokers = {1: Scripted(ConnectionLostError("gone")), 2: Scripted(*[not_leader()] * 20, PositionReply(7))}
    assert on(brokers, READ)[0] == PositionReply(7)


def test_the_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LEADER_SEARCH_S", 0.05)
    with pytest.raises(NotLeaderError):
        on({2: Scripted(not_leader())}, READ)
    with pytest.raises(UnavailableError, match="no broker that holds partition 0 of topic logs is here"):
        on({}, READ)


@pytest.mark.parametrize("error", [DiskFullError("full"), LogFailedError("failed")])
def test_trouble_that_is_everywhere_is_told_at_once(error: QuiverError) -> None:
    """A broker tells of its disk where it has the only replica; with others in the group it says that it does not
    lead (tests/broker/test_group_disk_trouble.py)."""
    with pytest.raises(type(error)):
        on({1: Scripted(error), 2: Scripted(PositionReply(1))}, READ)


def test_leader_that_gave_up_for_its_disk_is_not_asked_again_before_the_others() -> None:
    full = NotLeaderError("broker 1 does not lead this partition: no space", leader=0)
    brokers = {1: Scripted(full), 2: Scripted(not_leader(), not_leader(3)), 3: Scripted(PositionReply(7))}
    assert on(brokers, READ)[0] == PositionReply(7)
    assert len(brokers[1].asked) == 1


def produce(producer_id: int, flags: int = 0) -> Produce:
    return Produce("logs", 0, 1, 0, 0, 0, 1, producer_id, 0, 0, flags)


@pytest.mark.parametrize("request_", [produce(5), produce(5, FLAG_CLIENT)])
@pytest.mark.parametrize("error", [ConnectionLostError("gone"), not_leader(2)])
def test_a_batch_with_a_sequence_is_sent_again_as_it_is(request_: Produce, error: QuiverError) -> None:
    brokers = {1: Scripted(error), 2: Scripted(ProduceReply(3, duplicate=True))}
    assert on(brokers, request_)[0] == ProduceReply(3, duplicate=True)
    assert brokers[1].asked == brokers[2].asked == [request_]


@pytest.mark.parametrize("request_", [produce(0), produce(5, FLAG_CLIENT | FLAG_UNSEQUENCED)])
@pytest.mark.parametrize("error", [ConnectionLostError("gone"), not_leader(2)])
def test_a_batch_without_a_sequence_is_not_sent_again(request_: Produce, error: QuiverError) -> None:
    brokers = {1: Scripted(error), 2: Scripted(ProduceReply(3))}
    with pytest.raises(type(error)):
        on(brokers, request_)
    assert not brokers[2].asked


def test_a_batch_without_a_sequence_goes_on_while_nothing_was_done_of_it() -> None:
    """A partition that elects its leader; but once somebody may have stored it, it is not sent again."""
    refused = NotLeaderError("not me", leader=0, done=False)
    request = produce(5, FLAG_CLIENT | FLAG_UNSEQUENCED)
    brokers = {1: Scripted(refused), 2: Scripted(refused, refused, ProduceReply(3))}
    assert on(brokers, request)[0] == ProduceReply(3)
    with pytest.raises(ConnectionLostError):
        on({1: Scripted(refused, ConnectionLostError("gone"), ProduceReply(3))}, request)


def commit(offset: int, expected: int | None) -> CommitPosition:
    return CommitPosition("logs", 0, Position("#1", offset, False, expected))


def test_a_position_that_an_earlier_try_moved_is_done() -> None:
    brokers = {1: Scripted(ConnectionLostError("gone")), 2: Scripted(ConflictError("it is 8, not 7", current=8))}
    assert on(brokers, commit(8, 7))[0] == PositionReply(8)


@pytest.mark.parametrize("current", [9, 7, None])
def test_a_position_that_somebody_else_moved_is_a_conflict(current: int | None) -> None:
    brokers = {1: Scripted(ConnectionLostError("gone")), 2: Scripted(ConflictError("no", current=current))}
    with pytest.raises(ConflictError):
        on(brokers, commit(8, 7))


def test_a_conflict_at_the_first_try_is_a_conflict() -> None:
    with pytest.raises(ConflictError):
        on({1: Scripted(ConflictError("it is 8", current=8))}, commit(8, 7))


def test_of_several_positions_those_that_an_earlier_try_moved_are_done() -> None:
    def conflict(current: int) -> ErrorReply:
        return ErrorReply("ConflictError", "moved", {"current": current})

    full = ErrorReply("OverloadedError", "full", {"current": 8})
    request = CommitPositions("logs", 0, [Position(f"#{number}", 8, False, 7) for number in range(4)])
    refused = CommitPositionsReply({1: conflict(8), 2: conflict(9), 3: full})
    told = {2: conflict(9), 3: full}
    assert on({1: Scripted(ConnectionLostError("gone")), 2: Scripted(refused)}, request)[0].refused == told  # type: ignore[attr-defined]
    assert on({1: Scripted(refused)}, request)[0] == refused, "nobody tried before"


def status(broker_id: int, term: int, leader: int) -> Callable[[Brokers], None]:
    report = PartitionStatus("logs", 0, "online", 0, 0, 0, 1, "", "u0", leader, "follower", term)

    def tell(known: Brokers) -> None:
        known.attach(broker_id, Scripted(StatusReply([report])))
        asyncio.run(known.status(broker_id))

    return tell


def test_the_leader_of_the_newest_term_is_believed() -> None:
    known = Brokers(SimulatedClock(), 5.0)
    assert known.leader_of(PARTITION) == 1
    status(2, 5, 3)(known)
    assert known.leader_of(PARTITION) == 3
    status(1, 4, 1)(known)  # an old leader that has not heard of it
    assert known.leader_of(PARTITION) == 3
    status(3, 6, 0)(known)  # an election
    assert known.leader_of(PARTITION) == 3
    status(1, 6, 2)(known)
    assert known.leader_of(PARTITION) == 2
    assert known.is_active(1) and not known.is_active(9)


def test_a_silent_broker_becomes_inactive() -> None:
    clock = SimulatedClock()
    known = Brokers(clock, 5.0)
    known.attach(1, Scripted(StatusReply([])))
    assert not known.is_active(1)
    asyncio.run(known.status(1))
    assert known.active == [1]
    clock.now_s += 5
    assert known.active == [1]
    clock.now_s += 0.1
    assert known.active == []
    assert GetStatus() == known.link(1).asked[0]  # type: ignore[union-attr]


def test_a_clock_that_is_set_makes_no_broker_silent() -> None:
    clock = SimulatedClock()
    known = Brokers(clock, 5.0)
    known.attach(1, Scripted(StatusReply([])))
    asyncio.run(known.status(1))
    clock.now_us = lambda: 2_000_000_000_000_000  # type: ignore[method-assign]
    assert known.active == [1]
