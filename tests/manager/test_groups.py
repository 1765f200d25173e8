"""The coordinator alone, on a quorum in memory and a clock by hand: who is missed, who is told, what is proposed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quiver.errors import (
    GroupActiveError,
    InvalidRequestError,
    NotLeaderError,
    OutcomeUnknownError,
    QuiverError,
    UnknownMemberError,
)
from quiver.manager.groups import Groups
from quiver.metadata.commands import ChangeGroup, Command, CreateTopic, RegisterBroker
from quiver.metadata.state import State
from quiver.wire.group_messages import (
    DeleteGroup,
    FenceGroup,
    FenceReply,
    GetGroups,
    GroupBeat,
    GroupReply,
    GroupsReply,
    Held,
    JoinGroup,
    LeaveGroup,
)

SESSION_S = 10.0
RELEASE_S = 60.0


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def now_us(self) -> int:
        return int(self.now_s * 1e6)

    def monotonic_s(self) -> float:
        return self.now_s


class Quorum:
    """Commits what is proposed when it is let."""

    def __init__(self) -> None:
        self.state = State()
        self.leads, self.term, self.primary = True, 1, 1
        self.proposed: list[Command] = []
        self.failure: Exception | None = None
        self.may_commit = asyncio.Event()
        self.may_commit.set()
        self._changed = asyncio.Event()

    async def propose(self, command: Command) -> Any:
        self.proposed.append(command)
        await self.may_commit.wait()
        if self.failure is not None:
            raise self.failure
        result = self.state.apply(command).result
        self.change()
        return result

    def change(self) -> None:
        self._changed.set()

    async def until_changed(self, timeout_s: float) -> bool:
        await self._changed.wait()
        self._changed.clear()
        return True


class World:
    def __init__(self) -> None:
        self.clock, self.quorum = Time(), Quorum()
        self.quorum.state.apply(RegisterBroker(1, "h:1", 0))
        self.quorum.state.apply(CreateTopic("t", ["u0", "u1", "u2", "u3"], 1, 0))
        quorum: Any = self.quorum
        self.groups = Groups(quorum, self.clock, RELEASE_S)

    async def join(self, member: str, **more: Any) -> GroupReply:
        return await self.groups.join(JoinGroup("g", member, ["t"], int(SESSION_S * 1000), **more))

    async def beat(self, member: str, generation: int = 0, wait_ms: int = 0, released: Any = ()) -> GroupReply:
        return await self.groups.beat(GroupBeat("g", member, generation, wait_ms, list(released)))

    async def look(self, later_s: float = 0.0) -> None:
        """The coordinator looks round, so much later; longer times in steps, as it would."""
        while True:
            step_s = min(later_s, 0.2)
            self.clock.now_s += step_s
            await self._look()
            later_s -= step_s
            if later_s <= 0:
                return

    async def _look(self) -> None:
        self.quorum.change()
        await idle()

    @property
    def members(self) -> list[str]:
        group = self.quorum.state.groups.get("g")
        return [] if group is None else [member.id for member in group.members]

    @property
    def owners(self) -> list[str]:
        return [share.owner for share in self.quorum.state.groups["g"].shares]


async def idle() -> None:
    """Whatever is ready has run."""
    for _ in range(20):
        await asyncio.sleep(0)


def run(test: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        world = World()
        world.groups.start()
        await idle()
        try:
            await test(world)
        finally:
            await world.groups.close()

    asyncio.run(main())


def test_joins_that_come_while_one_is_committed_share_the_next_command() -> None:
    async def test(world: World) -> None:
        world.quorum.may_commit.clear()
        joins = [asyncio.ensure_future(world.join("m0"))]
        await idle()
        joins += [asyncio.ensure_future(world.join(f"m{number}")) for number in range(1, 100)]
        await idle()
        assert len(world.quorum.proposed) == 1
        world.quorum.may_commit.set()
        replies = await asyncio.gather(*joins)
        assert len(world.quorum.proposed) == 2
        assert len(world.members) == 100
        assert sum(bool(reply.held) for reply in replies) == 1, "the first has it all until it lets go"
        assert sum(reply.coming for reply in replies) == 3

    run(test)


def test_joining_twice_is_joining_once() -> None:
    async def test(world: World) -> None:
        assert await world.join("m1") == await world.join("m1")
        assert len(world.quorum.proposed) == 1

    run(test)


def test_who_is_silent_for_its_session_is_gone_and_who_beats_is_not() -> None:
    async def test(world: World) -> None:
        await world.join("loud")
        await world.join("silent")
        await world.look(SESSION_S - 1)
        await world.beat("loud")
        await world.look(0.8)
        assert world.members == ["loud", "silent"]
        await world.look(0.4)
        assert world.members == ["loud"]
        with pytest.raises(UnknownMemberError, match="silent is not a member of group g, or not any more"):
            await world.beat("silent")

    run(test)


def test_another_primary_gives_everyone_a_whole_session() -> None:
    async def test(world: World) -> None:
        await world.join("m1")
        await world.look(SESSION_S - 1)
        world.quorum.term = 2
        await world.look(SESSION_S - 1)
        assert world.members == ["m1"]
        await world.look(1.4)
        assert world.members == []

    run(test)


def test_a_primary_that_was_frozen_misses_nobody_for_that_time() -> None:
    async def test(world: World) -> None:
        await world.join("m1")
        await world.look(SESSION_S / 2)
        world.clock.now_s += 100.0
        await world.look()
        await world.look(SESSION_S / 2 - 1)
        assert world.members == ["m1"]
        await world.look(1.4)
        assert world.members == []

    run(test)


def test_who_does_not_lead_misses_nobody() -> None:
    async def test(world: World) -> None:
        await world.join("m1")
        world.quorum.leads = False
        await world.look(10 * SESSION_S)
        assert world.members == ["m1"]
        with pytest.raises(NotLeaderError):
            await world.beat("m1")

    run(test)


def test_a_beat_is_held_until_the_group_changes() -> None:
    async def test(world: World) -> None:
        first = await world.join("m1")
        beat = asyncio.ensure_future(world.beat("m1", first.generation, 5000))
        await world.look()
        assert not beat.done()
        await world.join("m2")
        reply = await beat
        assert reply.generation > first.generation
        assert len(reply.held) == 4 and len(reply.leaving) == 2

    run(test)


def test_a_beat_is_answered_when_its_time_is_over() -> None:
    async def test(world: World) -> None:
        first = await world.join("m1")
        assert await world.beat("m1", first.generation, 1) == GroupReply(first.generation)

    run(test)


def test_who_waits_at_a_manager_that_lost_its_lead_is_told() -> None:
    async def test(world: World) -> None:
        first = await world.join("m1")
        beat = asyncio.ensure_future(world.beat("m1", first.generation, 5000))
        await idle()
        world.quorum.leads = False
        await world.look()
        with pytest.raises(NotLeaderError):
            await beat

    run(test)


def test_what_is_let_go_of_goes_to_who_is_to_have_it() -> None:
    async def test(world: World) -> None:
        await world.join("m1")
        await world.join("m2")
        assert world.owners == ["m1"] * 4
        leaving = (await world.beat("m1")).leaving
        reply = await world.beat("m1", released=leaving)
        assert (len(reply.held), reply.leaving) == (2, [])
        assert sorted(world.owners) == ["m1", "m1", "m2", "m2"]

    run(test)


def test_who_does_not_let_go_loses_it_after_a_while() -> None:
    async def test(world: World) -> None:
        await world.join("m1")
        await world.join("m2")
        for _ in range(int(RELEASE_S / 5) + 2):
            assert world.owners == ["m1"] * 4
            await world.look(5.0)
            await asyncio.gather(world.beat("m1"), world.beat("m2"))
            if world.owners != ["m1"] * 4:
                break
        assert sorted(world.owners) == ["m1", "m1", "m2", "m2"]

    run(test)


def test_a_change_of_unknown_outcome_is_told_to_all_who_wait_and_the_next_one_works() -> None:
    async def test(world: World) -> None:
        world.quorum.failure = OutcomeUnknownError("the primary changed meanwhile")
        with pytest.raises(OutcomeUnknownError):
            await world.join("m1")
        world.quorum.failure = None
        await world.join("m1")
        assert world.members == ["m1"]

    run(test)


def test_who_leaves_gives_all_back_at_once_and_may_say_it_twice() -> None:
    async def test(world: World) -> None:
        await world.join("m1")
        await world.join("m2")
        for _ in range(2):
            await world.groups.answer(LeaveGroup("g", "m1"))
        assert world.owners == ["m2"] * 4
        await world.groups.answer(LeaveGroup("nobody", "m1"))
        assert len([one for one in world.quorum.proposed if isinstance(one, ChangeGroup)]) == 3

    run(test)


@pytest.mark.parametrize("is_being_committed", [False, True])
def test_a_join_that_is_taken_back_before_it_is_done_leaves_nobody_behind(is_being_committed: bool) -> None:
    async def test(world: World) -> None:
        await world.join("m1")
        world.clock.now_s += 1.0  # the next change need not wait
        world.quorum.may_commit.clear()
        joins = [] if is_being_committed else [asyncio.ensure_future(world.join("m2"))]
        await idle()
        joins.append(asyncio.ensure_future(world.join("m3")))
        await idle()
        assert len(world.quorum.proposed) == 2
        leaving = asyncio.ensure_future(world.groups.answer(LeaveGroup("g", "m3")))
        await idle()
        world.quorum.may_commit.set()
        await asyncio.gather(*joins, leaving)
        assert world.members == (["m1"] if is_being_committed else ["m1", "m2"])

    run(test)


def test_who_joined_without_waiting_for_the_answer_has_a_session_like_anybody() -> None:
    async def test(world: World) -> None:
        world.quorum.may_commit.clear()
        joining = asyncio.ensure_future(world.join("m1"))
        await idle()
        joining.cancel()
        await world.look(SESSION_S + 1)
        world.quorum.may_commit.set()
        await world.look(SESSION_S - 1)
        assert world.members == ["m1"]
        await world.look(1.4)
        assert world.members == []

    run(test)


def test_who_cannot_leave_is_gone_after_its_session() -> None:
    async def test(world: World) -> None:
        await world.join("m1")
        world.quorum.failure = OutcomeUnknownError("nobody knows")
        with pytest.raises(OutcomeUnknownError):
            await world.groups.answer(LeaveGroup("g", "m1"))
        world.quorum.failure = None
        assert world.members == ["m1"]
        await world.look(SESSION_S + 0.4)
        assert world.members == []

    run(test)


def test_what_is_asked_of_a_group() -> None:
    async def test(world: World) -> None:
        answer = world.groups.answer
        assert await answer(GetGroups("g")) == GroupsReply([])
        await world.join("m1")
        found = await answer(GetGroups("g"))
        assert isinstance(found, GroupsReply)
        assert found.groups[0].members[0].partitions == (("t", 0), ("t", 1), ("t", 2), ("t", 3))
        listed = await answer(GetGroups())
        assert isinstance(listed, GroupsReply) and [one.member_count for one in listed.groups] == [1]
        for request in (DeleteGroup("g"), FenceGroup("g")):
            with pytest.raises(GroupActiveError, match="1 active members; stop them first"):
                await answer(request)
        last = max(held.epoch for held in (await world.beat("m1")).held)
        await answer(LeaveGroup("g", "m1"))
        fenced = await answer(FenceGroup("g"))
        assert isinstance(fenced, FenceReply) and fenced.epoch > last
        for _ in range(2):
            await answer(DeleteGroup("g"))  # one that only has positions is none that is known here
        assert await answer(GetGroups("g")) == GroupsReply([])

    run(test)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (JoinGroup("#1", "m", ["t"]), "registered consumer"),
        (JoinGroup("g", "m", ["t"], strategy="fair"), "one of sticky, range, round-robin"),
        (JoinGroup("g", "m", ["a/b"]), "topic name"),
    ],
)
def test_a_join_that_cannot_be_is_refused(request_: JoinGroup, why: str) -> None:
    async def test(world: World) -> None:
        with pytest.raises(QuiverError, match=why):
            await world.groups.join(request_)
        assert not world.quorum.proposed

    run(test)


def test_a_group_has_one_strategy_until_it_is_empty() -> None:
    async def test(world: World) -> None:
        await world.join("m1", strategy="range")
        with pytest.raises(InvalidRequestError, match="group g shares partitions by range"):
            await world.join("m2")
        await world.groups.answer(LeaveGroup("g", "m1"))
        await world.join("m2")
        assert world.quorum.state.groups["g"].strategy == "sticky"

    run(test)


def test_a_release_by_who_is_not_the_owner_is_nothing() -> None:
    async def test(world: World) -> None:
        first = await world.join("m1")
        await world.join("m2")
        await world.beat("m2", released=[Held("t", 0, first.held[0].epoch)])
        assert world.owners == ["m1"] * 4

    run(test)
