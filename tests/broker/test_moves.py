"""A group goes to other brokers by order, one step of membership at a time, and loses nothing on the way."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence

import pytest

from quiver.errors import ConflictError, InvalidRequestError, NotLeaderError, QuiverError, UnavailableError
from quiver.raft import Membership
from quiver.replication.group import broker_of
from quiver.wire.admin_messages import ReplicasReply, SetReplicas
from quiver.wire.messages import HostTopic
from tests.broker.group_kit import UID, Group, payload_of
from tests.broker.server_kit import run

DIRECTORY = "data/broker-{}/partitions/" + UID


class Moving(Group):
    """What a manager does to a group: tells brokers what to have, and the leader who is to hold the partition."""

    epoch = 0

    async def tell(self, brokers: Sequence[int], to: Sequence[int] | None = None) -> None:
        """All that run, or those of `to`: the partition is on these brokers."""
        self.epoch += 1
        request = HostTopic("logs", [UID], [[broker << 32 for broker in brokers]], [self.epoch])
        for number in to or list(self.brokers):
            await self.ask(number, request)

    async def order(self, brokers: Sequence[int]) -> ReplicasReply:
        """Asks whoever leads."""
        while True:
            for number in list(self.brokers):
                try:
                    reply, _ = await self.ask(number, SetReplicas("logs", 0, UID, self.epoch, list(brokers)))
                except UnavailableError:
                    continue
                assert isinstance(reply, ReplicasReply)
                return reply
            await asyncio.sleep(0.01)

    async def until_done(self, brokers: Sequence[int]) -> None:
        while not (reply := await self.order(brokers)).done:  # noqa: ASYNC110  # it is the asking that tells
            await asyncio.sleep(0.01)
        assert sorted(reply.voters) == sorted(brokers)
        assert reply.learners == []

    async def move(self, brokers: Sequence[int], leaving: Sequence[int] = ()) -> None:
        """The whole way: hosted by old and new, changed, hosted by the new."""
        await self.tell([*brokers, *leaving])
        await self.until_done(brokers)
        await self.tell(brokers)

    def memberships(self, number: int) -> list[Membership]:
        raft = self.partition(number).raft
        assert raft is not None
        return [membership for _, membership in raft.raft.memberships]


def test_replica_moves_to_a_new_broker_which_then_serves_everything() -> None:
    async def main() -> None:
        async with Moving(spare=1) as group:
            await group.fill(20)
            await group.move([1, 2, 4], leaving=[3])
            await group.fill(5, first=20)
            wanted = [payload_of(b"%d" % number) for number in range(25)]
            for number in (1, 2, 4):
                await group.until(lambda number=number: _has(group, number, 25))
                assert await group.payloads(number) == wanted

    run(main())


async def _has(group: Group, number: int, count: int) -> bool:
    return (await group.status(number)).next_offset == count


def test_removed_replica_deletes_its_files_only_when_it_is_told() -> None:
    async def main() -> None:
        async with Moving(spare=1) as group:
            await group.fill(3)
            await group.tell([1, 2, 4, 3])
            await group.until_done([1, 2, 4])
            assert group.disks[3].exists(DIRECTORY.format(3))
            await group.tell([1, 2, 4])
            assert not group.disks[3].exists(DIRECTORY.format(3))
            with pytest.raises(NotLeaderError):
                group.partition(3)
            await group.stop(3)
            await group.start(3)
            with pytest.raises(NotLeaderError):
                group.partition(3)

    run(main())


def test_each_step_differs_by_one_voter_and_newcomers_learn_first() -> None:
    async def main() -> None:
        async with Moving(spare=2) as group:
            await group.fill(3)
            await group.move([1, 4, 5], leaving=[2, 3])
            steps = group.memberships(await group.leader())
            assert {broker_of(voter) for voter in steps[-1].voters} == {1, 4, 5}
            for before, after in itertools.pairwise(steps):
                assert after.is_one_step_from(before)
                for new in set(after.voters) - set(before.voters):
                    assert new in before.learners
            assert min(len(step.voters) for step in steps) == 3, "nobody leaves before the newcomers vote"

    run(main())


def test_leader_that_is_to_leave_hands_over_first() -> None:
    async def main() -> None:
        async with Moving(spare=1) as group:
            await group.fill(3)
            leader = await group.leader()
            stay = [number for number in (1, 2, 3, 4) if number != leader]
            await group.move(stay, leaving=[leader])
            assert await group.leader() == stay[0]
            await group.fill(2, first=3)

    run(main())


def test_the_first_broker_of_an_order_leads_in_the_end() -> None:
    async def main() -> None:
        async with Moving() as group:
            await group.fill(3)
            for first in (2, 3, 1):
                order = [first, *(number for number in (1, 2, 3) if number != first)]
                await group.tell(order)
                await group.until_done(order)
                assert await group.leader() == first

    run(main())


def test_a_dead_broker_is_replaced() -> None:
    async def main() -> None:
        async with Moving(spare=1) as group:
            await group.fill(5)
            dead = await group.follower()
            await group.stop(dead)
            stay = [number for number in (1, 2, 3, 4) if number != dead]
            await group.move(stay, leaving=[dead])
            await group.fill(5, first=5)
            await group.start(dead)  # it believes to be a member until a manager tells it otherwise
            await group.fill(5, first=10)
            await group.tell(stay, to=[dead])
            assert not group.disks[dead].exists(DIRECTORY.format(dead))
            assert len(await group.payloads(await group.leader())) == 15

    run(main())


def test_group_shrinks_and_grows_by_order() -> None:
    async def main() -> None:
        async with Moving(spare=1) as group:
            await group.fill(3)
            leader = await group.leader()
            await group.move([leader], leaving=[number for number in (1, 2, 3) if number != leader])
            await group.fill(2, first=3)
            everyone = [leader, *(number for number in (1, 2, 3, 4) if number != leader)]
            await group.move(everyone)
            await group.fill(1, first=5)
            await group.until(lambda: _all_have(group, 6))

    run(main())


async def _all_have(group: Group, count: int) -> bool:
    return all([await _has(group, number, count) for number in group.brokers])


def test_broker_that_had_a_replica_before_comes_back_as_another_one() -> None:
    """Under its old id, which the group began with, it would vote as if it had never promised anything."""

    async def main() -> None:
        async with Moving(spare=1) as group:
            await group.fill(3)
            before = group.partition(3).raft
            await group.move([1, 2, 4], leaving=[3])
            await group.move([1, 2, 3], leaving=[4])
            after = group.partition(3).raft
            assert before is not None and after is not None
            assert after.raft.me != before.raft.me
            assert broker_of(after.raft.me) == 3
            await group.fill(3, first=3)

    run(main())


def test_an_order_survives_a_new_leader_and_a_restart_of_everyone() -> None:
    async def main() -> None:
        async with Moving(spare=1) as group:
            await group.fill(3)
            await group.tell([1, 2, 4, 3])
            await group.stop(4)
            assert not (await group.order([1, 2, 4])).done
            for number in (1, 2, 3):
                await group.stop(number)
            for number in (1, 2, 3, 4):
                await group.start(number)
            await group.until_done([1, 2, 4])
            await group.fill(3, first=3)
            assert len(await group.payloads(await group.leader())) == 6

    run(main())


def test_nobody_is_removed_when_the_rest_would_be_no_majority() -> None:
    async def main() -> None:
        async with Moving() as group:
            await group.fill(3)
            leader = await group.leader()
            dead, stays = (number for number in (1, 2, 3) if number != leader)
            await group.stop(dead)
            await group.tell([leader, dead, stays])
            for _ in range(20):
                assert not (await group.order([leader, dead])).done
                await asyncio.sleep(0.02)
            assert {broker_of(v) for v in group.memberships(leader)[-1].voters} == {1, 2, 3}
            await group.fill(1, first=3)

    run(main())


def test_nonsense_is_refused_and_changes_nothing() -> None:
    async def main() -> None:
        async with Moving() as group:
            await group.fill(1)
            leader, follower = await group.leader(), await group.follower()

            async def refused(number: int, request: object, error: type[QuiverError], match: str) -> None:
                with pytest.raises(error, match=match):
                    await group.ask(number, request)  # type: ignore[arg-type]

            await refused(leader, SetReplicas("logs", 0, "b" * 32, 1, [1]), InvalidRequestError, "another partition")
            await refused(leader, SetReplicas("logs", 0, UID, 1, [1, 1]), InvalidRequestError, "two replicas")
            await refused(follower, SetReplicas("logs", 0, UID, 1, [1, 2, 3]), NotLeaderError, "does not lead")
            await group.ask(leader, SetReplicas("logs", 0, UID, 5, [1, 2, 3]))
            await refused(leader, SetReplicas("logs", 0, UID, 4, [1]), ConflictError, "older")
            await refused(leader, HostTopic("logs", [UID], [[]], [1]), InvalidRequestError, "needs its replicas")
            await refused(leader, HostTopic("logs", ["b" * 32], [[1]], [1]), InvalidRequestError, "other names")
            assert group.memberships(leader)[-1].voters == tuple(group.voters)

    run(main())


def test_what_an_older_word_says_is_not_done() -> None:
    async def main() -> None:
        async with Moving() as group:
            await group.fill(1)
            for _ in range(3):
                await group.tell([1, 2, 3])
            await group.ask(3, HostTopic("logs", [UID], [[1 << 32, 2 << 32]], [2]))
            assert group.partition(3) is not None

    run(main())


def test_replica_begins_with_its_founders_whatever_was_told_since() -> None:
    """Its log begins with them. Taken for voters, those that were told since would be nobody."""

    async def main() -> None:
        async with Moving() as group:
            await group.fill(1)
            await group.tell([3, 2, 1])
            await group.tell([1, 2, 3])
            for number in (1, 2, 3):
                await group.stop(number)
                group.disks[number].remove(f"{DIRECTORY.format(number)}/state")  # as if it had been killed before
            for number in (1, 2, 3):
                await group.start(number)
            await group.fill(1, first=1)
            assert group.memberships(1)[0] == Membership(tuple(group.voters))

    run(main())


def test_newcomer_asks_where_the_group_is_by_now() -> None:
    """It was told of a group that has gone elsewhere since."""

    async def main() -> None:
        async with Moving(spare=2) as group:
            await group.fill(5)
            await group.tell([1, 5], to=[5])
            await group.tell([2, 3, 4, 1, 5])
            await group.until_done([2, 3, 4])
            await group.tell([2, 3, 5, 4, 1])
            await group.until_done([2, 3, 5])

    run(main())


def test_replica_that_was_left_behind_and_is_wanted_again_asks_to_be_taken_in() -> None:
    """It was away while the group went on without it, and its own log says that it votes."""

    async def main() -> None:
        async with Moving(spare=1) as group:
            await group.fill(3)
            gone = await group.follower()
            others = [number for number in (1, 2, 3) if number != gone]
            await group.stop(gone)
            await group.tell([*others, 4, gone])
            await group.until_done([*others, 4])
            await group.fill(3, first=3)
            await group.start(gone)
            await group.tell([*others, gone, 4])
            await group.until_done([*others, gone])
            await group.fill(1, first=6)

    run(main())


def test_order_is_forgotten_with_the_lead() -> None:
    async def main() -> None:
        async with Moving() as group:
            await group.fill(1)
            leader = await group.leader()
            await group.ask(leader, SetReplicas("logs", 0, UID, 7, [leader, *{1, 2, 3} - {leader}]))
            raft = group.partition(leader).raft
            assert raft is not None and raft.admission._order.epoch == 7
            while raft.raft.leader is not None:
                await raft.hand_over(3)  # one that takes too long ends, and is to be tried again
            assert raft.admission._order.epoch == 0

    run(main())


@pytest.mark.parametrize("seed", range(4))
def test_moves_by_chance_under_load_lose_double_and_reorder_nothing(seed: int) -> None:
    """Five brokers, a partition that wanders over them, brokers that stop in the middle and are back a moment later."""
    dice = random.Random(seed)

    async def main() -> None:
        async with Moving(spare=2) as group:
            stored: list[bytes] = []
            moving = asyncio.Event()

            async def write() -> None:
                while not moving.is_set():
                    value = b"%d" % len(stored)
                    try:
                        offset = await group.produce(value, producer_id=9, sequence=len(stored))
                    except UnavailableError:
                        continue  # it stops, or its outcome is not known: the same number again is stored once
                    assert offset == len(stored)
                    stored.append(payload_of(value))

            writer = asyncio.create_task(write())
            held = [1, 2, 3]
            for _ in range(6):
                wanted = dice.sample(range(1, 6), dice.choice((2, 3, 3, 4)))
                await group.tell([*wanted, *(broker for broker in held if broker not in wanted)])
                if dice.random() < 0.7:
                    restarted = dice.randint(1, 5)
                    await group.order(wanted)
                    await group.stop(restarted)
                    await group.start(restarted)
                await group.until_done(wanted)
                await group.tell(wanted)
                held = wanted
            count = len(stored)
            while len(stored) < count + 5:  # noqa: ASYNC110  # it goes on
                await asyncio.sleep(0.01)
            moving.set()
            await writer
            for number in held:
                await group.until(lambda number=number: _has(group, number, len(stored)))
                assert await group.payloads(number) == stored
            gone = [number for number in range(1, 6) if number not in held]
            assert not any(group.disks[number].exists(DIRECTORY.format(number)) for number in gone)

    run(main())
