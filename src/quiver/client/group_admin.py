"""Groups as an administrator sees them: who is in them, how far they are, and setting them back.

Rule: positions of a group are set only while it has no members; everything is checked before anything is moved. Whoever
sets them claims the partitions first, as a member would: nobody who was away moves them back, and when somebody joins
meanwhile the claim of that member wins, and nothing is moved under it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from quiver.client.cluster import Cluster
from quiver.client.offset_lookup import offset_at
from quiver.client.partitioner import check_partition
from quiver.errors import (
    GroupActiveError,
    InvalidRequestError,
    MemberFencedError,
    OffsetOutOfRangeError,
    QuiverError,
    RequestTimeoutError,
    UnavailableError,
    UnknownGroupError,
)
from quiver.types import GroupInfo, GroupPosition, GroupReset, NodeInfo, TopicInfo, check_topic_name
from quiver.wire.fields import CONSUMER_NAME_MAX, REGISTERED
from quiver.wire.group_messages import (
    DeleteGroup,
    FenceGroup,
    FenceReply,
    GetGroups,
    GetPositions,
    GroupsReply,
    PositionsReply,
    StoredPosition,
    positions_of,
)
from quiver.wire.leaders import by_leader, missed
from quiver.wire.messages import CommitPosition, Done, GetPosition, Position, PositionReply

_EDGES = ("earliest", "latest")
# Who has not answered by then has perhaps stopped; others will lead what it led, and tell of it.
_ANSWER_S = 2.0


class GroupAdmin:
    def __init__(self, cluster: Cluster, nodes: Callable[[], Awaitable[list[NodeInfo]]]) -> None:
        self._cluster = cluster
        self._nodes = nodes

    async def all(self) -> list[GroupInfo]:
        """All groups: those with members, now or before, and those that only have positions."""
        known = {group.name: group for group in await self._groups(None)}
        for position in await self._stored(None):
            known.setdefault(position.consumer, GroupInfo(position.consumer, "", 0, 0))
        return [known[name] for name in sorted(known)]

    async def describe(self, name: str) -> tuple[GroupInfo, list[GroupPosition]]:
        """Its members, and how far it is in each partition of its topics. Raises UnknownGroupError."""
        _check_name(name)
        found, stored = await self._groups(name), await self._stored(name)
        if not found and not stored:
            raise UnknownGroupError(f"group {name} does not exist")
        info = found[0] if found else GroupInfo(name, "", 0, 0)
        topics = {position.topic for position in stored} | {topic for one in info.members for topic in one.topics}
        owners = {pair: member.id for member in info.members for pair in member.partitions}
        positions = [await self._positions(name, topic, owners) for topic in sorted(topics)]
        return info, [one for of_topic in positions for one in of_topic]

    async def reset(
        self,
        name: str,
        *,
        to: str | None = None,
        offset: int | None = None,
        timestamp: int | None = None,
        topic: str | None = None,
        partition: int | None = None,
        dry_run: bool = False,
    ) -> list[GroupReset]:
        """Sets a group to 'earliest' or 'latest', an offset, or the first record at or after a time."""
        if sum(place is not None for place in (to, offset, timestamp)) != 1 or to not in (None, *_EDGES):
            raise InvalidRequestError(f"a group is set to one of {_EDGES}, to an offset or to a timestamp")
        if offset is not None and (isinstance(offset, bool) or not isinstance(offset, int) or offset < 0):
            raise InvalidRequestError(f"an offset is an int of 0 or more, not {offset!r}")
        if partition is not None and topic is None:
            raise InvalidRequestError("a partition needs its topic")
        info, positions = await self.describe(name)
        if info.member_count:
            raise GroupActiveError(f"group {name} has {info.member_count} active members; stop them first")
        if topic is not None:
            check_topic_name(topic)
            positions = await self._positions(name, topic, {})
            if partition is not None:
                positions = [positions[check_partition(topic, len(positions), partition)]]
        targets = [await self._target(one, to, offset, timestamp) for one in positions]
        found = [
            GroupReset(one.topic, one.partition, one.offset, target)
            for one, target in zip(positions, targets, strict=True)
        ]
        if not dry_run:
            places = [(one.topic, one.partition) for one in found]
            moves = [Position(name, one.after, rewind=True) for one in found]
            await self._set(name, dict(zip(places, moves, strict=True)))
        return found

    async def delete(self, name: str) -> None:
        """Forgets a group and its positions, or of the name # and a number that registered consumer. Raises
        UnknownGroupError, GroupActiveError."""
        is_registered = isinstance(name, str) and name.startswith(REGISTERED)
        if not is_registered:
            await self.describe(name)
        await self._cluster.retrying(lambda: self._cluster.ask_any(DeleteGroup(name), Done))
        gone = {(one.topic, one.partition): Position(name, 0, act="forget") for one in await self._stored(name)}
        if is_registered:
            await self._commit(name, gone, "")
        else:
            await self._set(name, gone)

    async def _target(self, position: GroupPosition, to: str | None, offset: int | None, timestamp: int | None) -> int:
        if offset is not None:
            if not position.earliest <= offset <= position.latest:
                where = (position.topic, position.partition)
                raise OffsetOutOfRangeError.of(*where, offset, position.earliest, position.latest)
            return offset
        if timestamp is not None:
            return await offset_at(self._cluster, position.topic, position.partition, timestamp)
        return position.earliest if to == "earliest" else position.latest

    async def _set(self, name: str, positions: dict[tuple[str, int], Position]) -> None:
        """Claims all, then moves all. Raises GroupActiveError when somebody has joined since the group was at rest."""
        ask = FenceGroup(name)
        epoch = (await self._cluster.retrying(lambda: self._cluster.ask_any(ask, FenceReply))).epoch
        claim = Position(name, 0, epoch=epoch, act="claim")
        await self._commit(name, dict.fromkeys(positions, claim), "nothing was changed")
        moves = {pair: msgspec.structs.replace(position, epoch=epoch) for pair, position in positions.items()}
        await self._commit(name, moves, "the partitions that it reads by now were not changed")

    async def _commit(self, name: str, positions: dict[tuple[str, int], Position], otherwise: str) -> None:
        asked = [self._cluster.ask(*pair, CommitPosition(*pair, one), PositionReply) for pair, one in positions.items()]
        done = await asyncio.gather(*asked, return_exceptions=True)
        for error in done:
            if isinstance(error, MemberFencedError):
                raise GroupActiveError(f"a member joined group {name} meanwhile; {otherwise}") from error
            if isinstance(error, BaseException):
                raise error

    async def _groups(self, name: str | None) -> list[GroupInfo]:
        ask = GetGroups(name)
        return (await self._cluster.retrying(lambda: self._cluster.ask_any(ask, GroupsReply))).groups

    async def _stored(self, name: str | None) -> list[StoredPosition]:
        """The positions that the leaders of all partitions have. A broker that is away is not needed, once others lead
        what it led."""

        async def ask(node: NodeInfo) -> PositionsReply | QuiverError:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    connection = await self._cluster.connection(node.address)
                    return await self._cluster.call(connection, GetPositions(name), PositionsReply)
            except QuiverError as error:
                return error
            except TimeoutError:
                return RequestTimeoutError(f"{node.address} does not answer")

        async def once() -> list[StoredPosition]:
            topics = (await self._cluster.metadata(None)).topics
            wanted = {(topic.name, one.id): len(one.replicas) for topic in topics for one in topic.partitions}
            answers = await asyncio.gather(*map(ask, await self._nodes()))
            replies = [answer for answer in answers if isinstance(answer, PositionsReply)]
            for topic, number in missed(wanted, replies):
                lost = next((answer for answer in answers if isinstance(answer, QuiverError)), None)
                raise lost or UnavailableError(f"nobody leads partition {number} of topic {topic} now")
            return positions_of(by_leader(replies))

        return await self._cluster.retrying(once)

    async def positions(
        self, name: str, topic: TopicInfo, owners: Mapping[tuple[str, int], str] | None = None
    ) -> list[GroupPosition]:
        """Where a name is in each partition of a topic, and from where to where that reaches: one question for each."""

        async def ask(number: int) -> GroupPosition:
            request = GetPosition(topic.name, number, name)
            reply = await self._cluster.ask(topic.name, number, request, PositionReply)
            owner = (owners or {}).get((topic.name, number), "")
            return GroupPosition(topic.name, number, reply.offset, reply.start_offset, reply.high_watermark, owner)

        return await asyncio.gather(*map(ask, range(len(topic.partitions))))

    async def commit(self, name: str, offsets: Mapping[tuple[str, int], int]) -> None:
        """Moves positions forward for a reader that is no member of the group. Never back: that is a reset."""
        _check_name(name)
        moves = {pair: Position(name, offset) for pair, offset in offsets.items()}
        await self._commit(name, moves, "its position was not moved")

    async def _positions(self, name: str, topic: str, owners: dict[tuple[str, int], str]) -> list[GroupPosition]:
        self._cluster.forget_topic(topic)
        info = await self._cluster.retrying(lambda: self._cluster.topic(topic))
        return await self.positions(name, info, owners)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= CONSUMER_NAME_MAX or name.startswith(REGISTERED):
        raise InvalidRequestError(
            f"a group has a name of 1 to {CONSUMER_NAME_MAX} characters that does not begin with {REGISTERED}"
        )
