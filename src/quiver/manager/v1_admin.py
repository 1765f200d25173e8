"""Topics, offsets, positions of groups, brokers and health over the v1 API.

Rule: what is asked of many partitions is asked of them together, a limited number at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import quote

import msgspec

from quiver.errors import InvalidRequestError
from quiver.manager.classic import ClassicApi
from quiver.manager.http_server import HttpAnswer
from quiver.manager.moves import Moves
from quiver.manager.quorum import MetadataQuorum
from quiver.manager.registry import Registry
from quiver.manager.v1_call import Call, answer
from quiver.manager.v1_groups import group_name
from quiver.manager.v1_shapes import (
    Brokers,
    Health,
    Move,
    Moving,
    NewTopic,
    Offsets,
    OffsetsQuery,
    PartitionOffsets,
    PartitionPosition,
    PartitionRow,
    Position,
    PositionIn,
    Positions,
    Topic,
    TopicChange,
    TopicRow,
    Topics,
)
from quiver.metadata.state import Topic as TopicState
from quiver.metadata.state import check_partition
from quiver.wire.messages import (
    OFFSET_AFTER,
    CommitPosition,
    GetPosition,
    ListOffset,
    ListOffsetReply,
    PositionReply,
)
from quiver.wire.messages import Position as StoredPosition

_ASKED_AT_ONCE_MAX: Final = 256
# Nobody's name: who asks for its position learns where the log begins and ends, in one request.
_NOBODY: Final = "#"

T = TypeVar("T")


class Administration:
    def __init__(self, quorum: MetadataQuorum, registry: Registry, moves: Moves, classic: ClassicApi) -> None:
        self._quorum = quorum
        self._registry = registry
        self._moves = moves
        self._classic = classic

    # -- topics --------------------------------------------------------------------------------------------------

    async def list_topics(self, call: Call) -> HttpAnswer:
        if not self._quorum.leads:
            await self._registry.refresh()
        topics = self._quorum.state.topics.values()
        return answer(Topics([TopicRow(t.name, len(t.partitions), t.replication_factor) for t in topics]))

    async def create_topic(self, call: Call) -> HttpAnswer:
        asked: NewTopic = call.body
        topic = await self._registry.create_topic(
            asked.name, asked.partitions, asked.replication_factor, asked.settings
        )
        return answer(self._described(topic), 201, ("location", f"/v1/topics/{quote(topic.name)}"))

    async def describe_topic(self, call: Call) -> HttpAnswer:
        return answer(self._described(await self._registry.known_topic(call.path["topic"])))

    async def alter_topic(self, call: Call) -> HttpAnswer:
        asked: TopicChange = call.body
        name = call.path["topic"]
        topic = await self._registry.known_topic(name)
        if asked.partitions is not None:
            self._registry.check_growth(name, asked.partitions)  # before the settings change
        if asked.settings:
            told = {setting: value for setting, value in asked.settings.items() if value is not None}
            topic = await self._registry.alter_topic(name, told, [one for one in asked.settings if one not in told])
            await self._moves.resize(topic)
        if asked.partitions is not None:
            topic = await self._registry.add_partitions(name, asked.partitions)
        return answer(self._described(topic))

    async def delete_topic(self, call: Call) -> HttpAnswer:
        await self._classic.delete_topic(call.path["topic"])
        return HttpAnswer(204, b"")

    def _described(self, topic: TopicState) -> Topic:
        leader_of = self._registry.brokers.leader_of
        rows = [PartitionRow(p.number, leader_of(p), list(p.replicas)) for p in topic.partitions]
        return Topic(topic.name, topic.replication_factor, topic.created_us, rows, topic.settings)

    # -- offsets -------------------------------------------------------------------------------------------------

    async def offsets(self, call: Call) -> HttpAnswer:
        query: OffsetsQuery = call.query
        topic = await self._registry.topic(call.path["topic"], query.partition)
        check_partition(topic.name, len(topic.partitions), query.partition)
        numbers = range(len(topic.partitions)) if query.partition is None else [query.partition]

        async def ask(number: int) -> PartitionOffsets:
            bounds = await self._position(topic, number, _NOBODY)
            found = PartitionOffsets(number, bounds.start_offset, bounds.high_watermark)
            if query.timestamp is not None:
                at = await self._offset_at(topic, number, query.timestamp)
                found = msgspec.structs.replace(found, at_timestamp=at)
            return found

        return answer(Offsets(topic.name, await _each(numbers, ask)))

    async def _offset_at(self, topic: TopicState, partition: int, timestamp: int) -> int:
        # The last moments before 1970 mean something else on the wire; one that is earlier finds no less.
        moment = min(timestamp, OFFSET_AFTER - 1) if timestamp < 0 else timestamp
        reply, _ = await self._registry.link_of(topic.name, partition).call(ListOffset(topic.name, partition, moment))
        assert isinstance(reply, ListOffsetReply)
        return reply.offset

    # -- positions -----------------------------------------------------------------------------------------------

    async def positions(self, call: Call) -> HttpAnswer:
        group = group_name(call)
        topic = await self._registry.topic(call.path["topic"])

        async def ask(number: int) -> PartitionPosition:
            known = await self._position(topic, number, group)
            at = max(known.offset or 0, known.start_offset)
            bounds = (known.start_offset, known.high_watermark)
            return PartitionPosition(number, known.offset, *bounds, known.high_watermark - at)

        return answer(Positions(group, topic.name, await _each(range(len(topic.partitions)), ask)))

    async def position(self, call: Call) -> HttpAnswer:
        group = group_name(call)
        topic, partition = await call.place(self._registry)
        known = await self._position(topic, partition, group)
        return answer(Position(group, topic.name, partition, known.offset))

    async def commit(self, call: Call) -> HttpAnswer:
        group, asked = group_name(call), call.body
        assert isinstance(asked, PositionIn)
        topic, partition = await call.place(self._registry)
        moved = StoredPosition(group, asked.offset, asked.rewind, asked.expected)
        link = self._registry.link_of(topic.name, partition)
        reply, _ = await link.call(CommitPosition(topic.name, partition, moved))
        assert isinstance(reply, PositionReply)
        return answer(Position(group, topic.name, partition, reply.offset))

    async def _position(self, topic: TopicState, partition: int, group: str) -> PositionReply:
        link = self._registry.link_of(topic.name, partition)
        reply, _ = await link.call(GetPosition(topic.name, partition, group))
        assert isinstance(reply, PositionReply)
        return reply

    # -- the cluster ---------------------------------------------------------------------------------------------

    async def brokers(self, call: Call) -> HttpAnswer:
        return answer(msgspec.convert({"brokers": self._classic.broker_rows()}, Brokers))

    async def remove_broker(self, call: Call) -> HttpAnswer:
        text = call.path["broker"]
        if not (text.isascii() and text.isdigit() and len(text) < 11):
            raise InvalidRequestError(f"a broker has a number, not {text[:60]!r}")
        await self._moves.remove_broker(int(text))
        return answer(self._under_way(), 202)

    async def rebalance(self, call: Call) -> HttpAnswer:
        await self._moves.rebalance()
        return answer(self._under_way(), 202)

    async def moves(self, call: Call) -> HttpAnswer:
        return answer(self._under_way())

    def _under_way(self) -> Moving:
        moves = [Move(m.topic, m.partition, list(m.replicas), list(m.leaving)) for m in self._moves.moves()]
        return Moving(moves, self._moves.draining())

    async def health(self, call: Call) -> HttpAnswer:
        known = self._classic.node_health()
        is_here = any(broker["status"] != "inactive" for broker in known["brokers"]) and not known["cut_off_since"]
        health: Any = msgspec.convert(known | {"status": "ok" if is_here else "unavailable"}, Health)
        return answer(health) if is_here else answer(health, 503, ("retry-after", "1"))


async def _each(numbers: Sequence[int], ask: Callable[[int], Awaitable[T]]) -> list[T]:
    found: list[T] = []
    for start in range(0, len(numbers), _ASKED_AT_ONCE_MAX):
        found += await asyncio.gather(*map(ask, numbers[start : start + _ASKED_AT_ONCE_MAX]))
    return found
