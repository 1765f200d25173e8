"""Consumer groups at the primary: who is still there, and what changes when somebody comes, goes or falls silent.

Membership and ownership are in the metadata. When a member was last heard of is known here alone: whoever becomes
primary gives everyone a whole session anew. A heartbeat costs no command; changes of a group that come while one is
being committed go into the log together.

Rule: a member is held to be gone only by a primary that was listening all the time. What is decided counts when it is
committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from msgspec import Struct

from quiver.clock import Clock
from quiver.errors import InvalidRequestError, NotLeaderError, QuiverError, UnknownGroupError, UnknownMemberError
from quiver.manager.quorum import MetadataQuorum
from quiver.metadata import commands
from quiver.metadata.assignment import STRATEGIES
from quiver.metadata.groups import Change, Group, Member, Released
from quiver.replication.waiting import settle
from quiver.types import GroupInfo, MemberInfo, check_topic_name
from quiver.wire.fields import REGISTERED
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
from quiver.wire.messages import Done

logger = logging.getLogger("quiver.manager")

_CHECK_S: Final = 0.1  # how often silence is looked for
_AGAIN_S: Final = 1.0  # what was decided and is not committed by then is decided again
_LATE_S: Final = 0.5  # a look that comes later than this was late: nobody could be heard meanwhile
# Between two changes of a group, for each member: all of them are told, and must not be told so often that nothing else
# is done. A group of ten is not held up; of a thousand that come one by one a few hundred share a change.
_PACE_S: Final = 0.0005

GroupRequest = JoinGroup | GroupBeat | LeaveGroup | GetGroups | DeleteGroup | FenceGroup

Key = tuple[str, str]  # group and member


class _View(NamedTuple):
    """A group as its members see it, for one generation."""

    group: Group
    held: dict[str, list[Held]]
    leaving: dict[str, list[Held]]
    coming: Counter[str]
    session_ms: dict[str, int]


class _Batch:
    """Changes of one group that wait to be proposed together."""

    def __init__(self, strategy: str) -> None:
        self.strategy = strategy
        self.joined: dict[str, Member] = {}
        self.left: dict[str, None] = {}
        self.released: list[Released] = []
        self.done: asyncio.Future[Group] = asyncio.get_running_loop().create_future()
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, whoever still waits

    def join(self, member: Member) -> None:
        self.left.pop(member.id, None)
        self.joined[member.id] = member

    def leave(self, member: str) -> None:
        self.joined.pop(member, None)
        self.left[member] = None


class Groups:
    """`release_s`: a member that was asked to let go of a partition and does not for so long loses it."""

    def __init__(self, quorum: MetadataQuorum, clock: Clock, release_s: float) -> None:
        self._quorum = quorum
        self._clock = clock
        self._release_s = release_s
        self._term = -1  # of the primary that the following is about
        self._deadlines: dict[Key, float] = {}
        self._leaving_since: dict[tuple[str, Held], float] = {}
        self._views: dict[str, _View] = {}
        self._watched: dict[str, tuple[int, asyncio.Future[bool]]] = {}  # generation, and whoever waits for another
        self._next: dict[str, _Batch] = {}
        self._proposing: dict[str, asyncio.Task[None]] = {}
        self._changed_s: dict[str, float] = {}  # when each group was last changed
        self._task: asyncio.Task[None] | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch(), name="groups")

    async def close(self) -> None:
        tasks = [*self._proposing.values(), *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._wake_all()

    async def _watch(self) -> None:
        checked_s = released_s = self._clock.monotonic_s()
        while True:
            try:
                await self._quorum.until_changed(_CHECK_S)
            except QuiverError:  # the disk of this manager: it does not lead
                await asyncio.sleep(_CHECK_S)
            if not self._quorum.leads:
                self._wake_all()
                checked_s = self._clock.monotonic_s()
                continue
            for name, (generation, changed) in list(self._watched.items()):
                group = self._quorum.state.groups.get(name)
                if group is None or group.generation != generation:
                    settle(changed, True)
                    del self._watched[name]
            now_s = self._clock.monotonic_s()
            if now_s - checked_s >= _CHECK_S:
                self._check(now_s, now_s - checked_s)
                checked_s = now_s
            if now_s - released_s >= _AGAIN_S:
                self._check_releases(now_s)
                released_s = now_s

    def _wake_all(self) -> None:
        for _, changed in self._watched.values():
            settle(changed, True)
        self._watched.clear()

    def _check(self, now_s: float, since_s: float) -> None:
        self._know_sessions()
        if since_s > _LATE_S:
            self._deadlines = {key: deadline + since_s for key, deadline in self._deadlines.items()}
        for (name, member), deadline_s in list(self._deadlines.items()):
            if deadline_s >= now_s:
                continue
            group = self._quorum.state.groups.get(name)
            if group is None or member not in self._view(group).held:
                del self._deadlines[name, member]
                continue
            self._deadlines[name, member] = now_s + _AGAIN_S  # unless it is gone by then
            logger.info("member_expired group=%s member=%s", name, member)
            self._batch(name).leave(member)

    def _check_releases(self, now_s: float) -> None:
        leaving: dict[tuple[str, Held], float] = {}
        for name, group in self._quorum.state.groups.items():
            for member, asked in self._view(group).leaving.items():
                for held in asked:
                    since = leaving[name, held] = self._leaving_since.get((name, held), now_s)
                    if now_s - since > self._release_s:
                        logger.info("partition_taken group=%s member=%s partition=%s", name, member, held)
                        self._batch(name).released.append(_released(member, held))
        self._leaving_since = leaving

    def _know_sessions(self) -> None:
        """Another primary had its own clock: everyone gets a whole session from now on."""
        if self._term == self._quorum.term:
            return
        self._term = self._quorum.term
        now_s = self._clock.monotonic_s()
        self._leaving_since.clear()
        self._deadlines = {
            (group.name, member.id): now_s + member.session_ms / 1000
            for group in self._quorum.state.groups.values()
            for member in group.members
        }

    async def answer(self, request: GroupRequest) -> Struct:
        match request:
            case JoinGroup():
                return await self.join(request)
            case GroupBeat():
                return await self.beat(request)
            case LeaveGroup():
                await self.leave(request)
                return Done()
            case GetGroups():
                return GroupsReply(self.describe(request.group))
            case DeleteGroup():
                await self.delete(request.group)
                return Done()
            case FenceGroup():
                return FenceReply(await self._quorum.propose(commands.FenceGroup(request.group)))

    # -- what members ask ----------------------------------------------------------------------------------------

    async def join(self, request: JoinGroup) -> GroupReply:
        check_group_name(request.group)
        if request.strategy not in STRATEGIES:
            raise InvalidRequestError(f"a group shares partitions by one of {', '.join(STRATEGIES)}")
        topics = tuple(sorted({check_topic_name(topic) for topic in request.topics}))
        self._know_sessions()
        group = self._quorum.state.groups.get(request.group)
        if group is not None and group.members and group.strategy != request.strategy:
            raise InvalidRequestError(f"group {group.name} shares partitions by {group.strategy}")
        member = Member(request.member, topics, request.session_ms)
        self._deadlines[request.group, member.id] = self._clock.monotonic_s() + member.session_ms / 1000
        if group is None or member not in group.members:
            batch = self._batch(request.group, request.strategy)
            batch.join(member)
            group = await asyncio.shield(batch.done)
        return self._reply(group, member.id, -1)

    async def beat(self, request: GroupBeat) -> GroupReply:
        self._know_sessions()
        name, member = request.group, request.member
        group = self._member_of(name, member)
        session_ms = self._view(group).session_ms[member]
        self._deadlines[name, member] = self._clock.monotonic_s() + session_ms / 1000
        if request.released:
            batch = self._batch(name)
            batch.released += [_released(member, held) for held in request.released]
            group = await asyncio.shield(batch.done)
        if group.generation == request.generation and request.wait_ms:
            await self._until_other(group, request.wait_ms / 1000)
            group = self._member_of(name, member)
        return self._reply(group, member, request.generation)

    async def leave(self, request: LeaveGroup) -> None:
        self._know_sessions()
        group = self._quorum.state.groups.get(request.group)
        # Who joins while this leaves may be in what waits, or in what is being committed: both go before this.
        if (group is not None and request.member in self._view(group).held) or request.group in self._proposing:
            batch = self._batch(request.group)
            batch.leave(request.member)
            await asyncio.shield(batch.done)

    def _member_of(self, name: str, member: str) -> Group:
        if not self._quorum.leads:
            raise NotLeaderError("this manager does not lead any more", leader=self._quorum.primary)
        group = self._quorum.state.groups.get(name)
        if group is None or member not in self._view(group).held:
            raise UnknownMemberError(f"{member} is not a member of group {name}, or not any more")
        return group

    async def _until_other(self, group: Group, wait_s: float) -> None:
        known = self._watched.get(group.name)
        if known is None or known[0] != group.generation:
            if known is not None:
                settle(known[1], True)
            known = group.generation, asyncio.get_running_loop().create_future()
            self._watched[group.name] = known
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await asyncio.shield(known[1])

    def _reply(self, group: Group, member: str, known: int) -> GroupReply:
        if group.generation == known:
            return GroupReply(known)
        view = self._view(group)
        held, leaving = view.held.get(member, []), view.leaving.get(member, [])
        return GroupReply(group.generation, held, leaving, view.coming[member])

    def _view(self, group: Group) -> _View:
        view = self._views.get(group.name)
        if view is None or view.group is not group:
            sessions = {member.id: member.session_ms for member in group.members}
            view = _View(group, {member: [] for member in sessions}, {}, Counter(), sessions)
            for share in group.shares:
                held = Held(share.topic, share.partition, share.epoch)
                view.held[share.owner].append(held)
                if share.owner != share.target:
                    view.leaving.setdefault(share.owner, []).append(held)
                    view.coming[share.target] += 1
            self._views[group.name] = view
        return view

    # -- changes -------------------------------------------------------------------------------------------------

    def _batch(self, name: str, strategy: str = "sticky") -> _Batch:
        """What is proposed next of a group; it is on its way as soon as what goes before is committed."""
        batch = self._next.get(name)
        if batch is None:
            batch = self._next[name] = _Batch(strategy)
            if name not in self._proposing:
                self._proposing[name] = asyncio.get_running_loop().create_task(self._propose(name))
        return batch

    async def _propose(self, name: str) -> None:
        try:
            while name in self._next:
                await self._pace(name)
                batch = self._next.pop(name)
                change = Change(list(batch.joined.values()), list(batch.left), batch.released)
                try:
                    group: Group = await self._quorum.propose(commands.ChangeGroup(name, change, batch.strategy))
                    self._count_sessions(name, batch)
                    settle(batch.done, group)
                except QuiverError as error:
                    batch.done.set_exception(error)
                self._changed_s[name] = self._clock.monotonic_s()
        finally:
            del self._proposing[name]

    def _count_sessions(self, name: str, batch: _Batch) -> None:
        """Of what is committed, whether or not anybody still waits for it: who has no session would never be missed."""
        now_s = self._clock.monotonic_s()
        for gone in batch.left:
            self._deadlines.pop((name, gone), None)
        for member in batch.joined.values():
            self._deadlines[name, member.id] = now_s + member.session_ms / 1000

    async def _pace(self, name: str) -> None:
        group = self._quorum.state.groups.get(name)
        if group is not None and name in self._changed_s:
            due_s = self._changed_s[name] + len(group.members) * _PACE_S
            await asyncio.sleep(max(0.0, due_s - self._clock.monotonic_s()))

    # -- what is asked about groups ------------------------------------------------------------------------------

    def describe(self, name: str | None) -> list[GroupInfo]:
        groups = self._quorum.state.groups
        if name is None:
            found: Iterable[Group] = groups.values()
            return [GroupInfo(group.name, group.strategy, group.generation, len(group.members)) for group in found]
        if name not in groups:
            return []
        view = self._view(groups[name])
        members = tuple(
            MemberInfo(member.id, member.topics, tuple((held.topic, held.partition) for held in view.held[member.id]))
            for member in view.group.members
        )
        return [GroupInfo(name, view.group.strategy, view.group.generation, len(members), members)]

    async def delete(self, name: str) -> None:
        """Raises GroupActiveError. A group that only has positions is none that is known here; a registered consumer
        must be: raises UnknownGroupError."""
        if name.startswith(REGISTERED):
            number = name.removeprefix(REGISTERED)
            if not (number.isascii() and number.isdigit() and len(number) < 19):
                raise InvalidRequestError(f"a registered consumer is {REGISTERED} and its number, not {name[:60]!r}")
            await self._quorum.propose(commands.UnregisterConsumer(int(number)))
            return
        with contextlib.suppress(UnknownGroupError):
            await self._quorum.propose(commands.DeleteGroup(name))
        self._views.pop(name, None)
        self._changed_s.pop(name, None)


def _released(member: str, held: Held) -> Released:
    return Released(member, held.topic, held.partition, held.epoch)


def check_group_name(name: str) -> None:
    if name.startswith(REGISTERED):
        raise InvalidRequestError(f"a group does not begin with {REGISTERED}: that is a registered consumer")
