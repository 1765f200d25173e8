"""An acknowledgement of which only a commit comes needs no turn of the owner; any other waits for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from quiver.broker.partition import Partition
from quiver.raft.messages import AppendReply, HeartbeatReply, Join, VoteReply
from quiver.replication.raft_replica import RaftReplica
from quiver.wire.frame import Entry, Kind
from tests.broker.kit import settle
from tests.manager.kit import until
from tests.replication.replica_kit import LEADER, ME, OTHER, Follower, Held, Turns

NOTHING = memoryview(b"")


class Led:
    """A partition's replica that leads two others; the test speaks for these."""

    def __init__(self, path: Path) -> None:
        kit = Follower("partition", path, Held(None))
        assert isinstance(kit.owner, Partition)
        self.partition: Partition = kit.owner
        self.replica: RaftReplica = kit.replica
        self.told = kit.leader.told
        self._turns = Turns(self.partition)

    @property
    def turns(self) -> int:
        return self._turns.count

    async def begin(self) -> None:
        self.partition.start()
        self.replica.raft.campaign()
        for pre in (True, False):
            self.replica.receive(VoteReply(OTHER, ME, 1, granted=True, pre=pre), NOTHING)
            await settle()
        for peer in (LEADER, OTHER):
            self.reply(peer, 1)
            await settle()
        await until(lambda: self.partition.leads)

    def reply(self, peer: int, match: int) -> bool:
        return self.replica.receive(
            AppendReply(peer, ME, self.replica.raft.term, match), NOTHING, self.partition.settle
        )

    async def propose(self) -> asyncio.Task[object]:
        """One more entry, on its own disk and sent to the others."""
        produce = asyncio.create_task(self.partition.produce(Entry.control(Kind.DATA, b"value")))
        last = self.replica.raft.terms.last
        await until(lambda: self.replica.raft.synced_index == self.replica.raft.terms.last > last)
        await settle()
        return produce


def test_what_only_commits_is_answered_without_a_turn(tmp_path: Path) -> None:
    async def scenario() -> None:
        led = Led(tmp_path)
        await led.begin()
        for number in range(3):
            produce = await led.propose()
            turns, last = led.turns, led.replica.raft.terms.last
            assert not led.reply(OTHER, last)
            assert led.partition.state.applied_index == led.replica.raft.commit == last
            assert led.partition._log.mark.values[0] == last + 1, "the mark is raised, too"
            assert not led.reply(LEADER, last), "late"
            await produce
            assert led.turns == turns, number
        assert len(led.replica._sender.cache) == 1, "what all had by the last commit is not kept"
        await led.partition.stop()

    asyncio.run(scenario())


def _reads(led: Led) -> None:
    led.replica.read()


def _is_asked_to_join(led: Led) -> None:
    led.replica.admission.asked(Join(OTHER + 1, ME, 0), led.replica.raft)


def _is_ordered(led: Led) -> None:
    led.replica.admission.order(1, (1, 2, 3))


def _loses_a_link(led: Led) -> None:
    led.replica.link_changed(3, up=False)


def _has_another_message(led: Led) -> None:
    led.replica.receive(HeartbeatReply(OTHER, ME, led.replica.raft.term), NOTHING)


def _hands_over(led: Led) -> None:
    led.replica.raft.transfer(LEADER)


def _was_full(led: Led) -> None:
    led.replica.raft.may_lead = False


@pytest.mark.parametrize(
    "busy", [_reads, _is_asked_to_join, _is_ordered, _loses_a_link, _has_another_message, _hands_over, _was_full]
)
def test_where_more_is_to_be_done_it_waits_for_a_turn(busy: Callable[[Led], None], tmp_path: Path) -> None:
    async def scenario() -> None:
        led = Led(tmp_path)
        await led.begin()
        produce = await led.propose()
        busy(led)
        turns, last = led.turns, led.replica.raft.terms.last
        assert led.reply(OTHER, last), "it is to have a turn"
        assert led.replica.raft.commit < last
        await produce
        assert led.turns > turns
        await led.partition.stop()

    asyncio.run(scenario())


def test_who_takes_commits_in_its_turns_only_has_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        led = Led(tmp_path)
        await led.begin()
        produce = await led.propose()
        last = led.replica.raft.terms.last
        assert led.replica.receive(AppendReply(OTHER, ME, led.replica.raft.term, last), NOTHING)
        assert led.replica.raft.commit < last
        await produce
        await led.partition.stop()

    asyncio.run(scenario())


def test_a_mistake_in_what_follows_a_commit_stops_the_partition_as_in_a_turn(tmp_path: Path) -> None:
    async def scenario() -> None:
        led = Led(tmp_path)
        await led.begin()
        produce = await led.propose()

        def broken(*_: object) -> None:
            raise RuntimeError("a bug")

        led.partition.state.apply = broken  # type: ignore[method-assign, assignment]
        assert not led.reply(OTHER, led.replica.raft.terms.last)
        with pytest.raises(Exception, match="a bug"):
            await produce
        assert led.partition._log.failure is not None
        assert led.replica.raft.failed

    asyncio.run(scenario())
