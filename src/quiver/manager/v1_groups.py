"""Groups and registered consumers over the v1 API.

Rule: who is in a group is metadata, how far it is stands in the partitions; both are asked for, and put together here.
"""

from __future__ import annotations

from quiver.errors import InvalidRequestError, UnknownGroupError
from quiver.manager.http_server import HttpAnswer
from quiver.manager.quorum import MetadataQuorum
from quiver.manager.registry import Registry
from quiver.manager.v1_call import Call, answer
from quiver.manager.v1_shapes import Group, GroupMember, GroupPartition, GroupRow, Groups, MemberPartition
from quiver.metadata.groups import Group as GroupState
from quiver.types import GroupPosition
from quiver.wire.fields import CONSUMER_NAME_MAX, REGISTERED
from quiver.wire.group_messages import GetPositions, PositionsReply, StoredPosition, positions_of
from quiver.wire.messages import GetPosition, PositionReply


class GroupCalls:
    def __init__(self, quorum: MetadataQuorum, registry: Registry) -> None:
        self._quorum = quorum
        self._registry = registry

    async def list_groups(self, call: Call) -> HttpAnswer:
        await self._catch_up()
        rows = {group.name: GroupRow(group.name, len(group.members), group.strategy) for group in self._known()}
        for position in await self._stored(None):
            rows.setdefault(position.consumer, GroupRow(position.consumer, 0, ""))
        return answer(Groups([rows[name] for name in sorted(rows)]))

    async def describe_group(self, call: Call) -> HttpAnswer:
        await self._catch_up()
        name = group_name(call)
        known, stored = self._quorum.state.groups.get(name), await self._stored(name)
        if known is None and not stored:
            raise UnknownGroupError(f"group {name} does not exist", group=name)
        group = known or GroupState(name, "")
        partitions = await self._partitions(group, {(one.topic, one.partition): one for one in stored})
        held: dict[str, list[MemberPartition]] = {member.id: [] for member in group.members}
        for share in group.shares:
            held[share.owner].append(MemberPartition(share.topic, share.partition))
        members = [GroupMember(one.id, list(one.topics), held[one.id]) for one in group.members]
        lag = sum(one.lag for one in partitions)
        return answer(Group(name, group.strategy, group.generation, lag, members, partitions))

    async def unregister_consumer(self, call: Call) -> HttpAnswer:
        text = call.path["consumer"]
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise InvalidRequestError(f"a registered consumer has a number, not {text[:60]!r}")
        await self._registry.unregister_consumer(int(text))
        return HttpAnswer(204, b"")

    async def _catch_up(self) -> None:
        if not self._quorum.leads:
            await self._registry.refresh()

    def _known(self) -> list[GroupState]:
        return list(self._quorum.state.groups.values())

    async def _stored(self, name: str | None) -> list[StoredPosition]:
        return positions_of(await self._registry.ask_leaders(GetPositions(name), PositionsReply))

    async def _partitions(
        self, group: GroupState, stored: dict[tuple[str, int], StoredPosition]
    ) -> list[GroupPartition]:
        """Of all topics that it reads or has read, also those in which it has committed nothing."""
        owners = {(share.topic, share.partition): share.owner for share in group.shares}
        found: list[GroupPartition] = []
        for name in sorted(group.topics | {topic for topic, _ in stored}):
            topic = self._quorum.state.topics.get(name)
            for number in range(len(topic.partitions) if topic is not None else 0):
                place = (name, number)
                known = stored.get(place) or await self._ask(*place, group.name)
                bounds = (known.start_offset, known.high_watermark)
                one = GroupPosition(*place, known.offset, *bounds)
                found.append(GroupPartition(*place, known.offset, *bounds, one.lag, one.lost, owners.get(place)))
        return found

    async def _ask(self, topic: str, number: int, group: str) -> PositionReply:
        reply, _ = await self._registry.link_of(topic, number).call(GetPosition(topic, number, group))
        assert isinstance(reply, PositionReply)
        return reply


def group_name(call: Call) -> str:
    group = call.path["group"]
    if not 0 < len(group) <= CONSUMER_NAME_MAX:
        raise InvalidRequestError(f"a group has a name of 1 to {CONSUMER_NAME_MAX} characters")
    if group.startswith(REGISTERED):
        raise InvalidRequestError("names that begin with # are those of consumers that are registered by number")
    return group
