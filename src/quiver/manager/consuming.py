"""Registered consumers, one message at a time: where each stands, what comes next, moving on.

Rule: the position is moved past a message, on a majority of disks, before the message is handed out. It names the
position it expects, so that what is remembered here is only ever a guess: when another manager served the consumer, or
the position was set, the broker refuses, and it is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from quiver.errors import ConflictError, InvalidRequestError, OffsetOutOfRangeError, RequestError
from quiver.manager.links import BrokerLink
from quiver.manager.position_mover import PositionMover
from quiver.manager.reader import RecordReader
from quiver.metadata.state import Consumer, Topic
from quiver.wire.fields import REGISTERED
from quiver.wire.messages import CommitPosition, GetPosition, Position, PositionReply

_POSITION_TRIES_MAX: Final = 100
# Of consumers on partitions; beyond it the one that was remembered first is asked for again.
_REMEMBERED_MAX: Final = 100_000


def consumer_name(consumer_id: int) -> str:
    """A registered consumer is a group of one with a number for a name."""
    return f"{REGISTERED}{consumer_id}"


class Taken(NamedTuple):
    partition: int
    offset: int
    value: bytes | None


class Consuming:
    def __init__(self, link_of: Callable[[str, int], BrokerLink]) -> None:
        self._link_of = link_of
        self._reader = RecordReader(link_of)
        self._mover = PositionMover(link_of)
        self._turns: dict[int, int] = {}
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        self._positions: dict[tuple[int, str], int] = {}  # where we last moved a consumer to, by partition uid

    def forget(self, topic: Topic) -> None:
        self._reader.forget(topic)

    async def take(self, consumer: Consumer, topic: Topic, asked: int | None, after: int | None) -> Taken:
        """The next message; round-robin over the consumer's partitions, and empty ones are skipped."""
        partitions = _partitions_of(consumer, topic, asked)
        if after is not None and len(partitions) > 1:
            # Of which one it is the offset cannot be told; a guess would lose or repeat messages of the others.
            raise InvalidRequestError("after needs partition_id: it is an offset of one partition")
        lock = self._locks.get(consumer.id)
        if lock is None:
            lock = self._locks[consumer.id] = asyncio.Lock()
        async with lock:
            turn = self._turns.get(consumer.id, 0)
            for step in range(len(partitions)):
                number = partitions[(turn + step) % len(partitions)]
                found = await self._take(consumer, topic, number, after)
                if found is not None:
                    self._turns[consumer.id] = turn + step + 1
                    return found
        raise RequestError(f"No new message is published to {topic.name}")

    async def _take(self, consumer: Consumer, topic: Topic, partition: int, after: int | None) -> Taken | None:
        """The next record of one partition, with the position moved past it on disk; None at the end."""
        key = (consumer.id, topic.partitions[partition].uid)
        position = self._positions.pop(key, None)
        if position is not None and after in (None, position - 1):  # else another manager served it since
            kept = self._reader.kept(key[1], position)
            if kept is not None and await self._move(consumer, topic, partition, kept.offset, position):
                return Taken(partition, *kept)
        for _ in range(_POSITION_TRIES_MAX):
            known = await self._position(consumer, topic.name, partition)
            position = max(known.offset or 0, known.start_offset)
            offset = position
            if after is not None and after + 1 < position:
                # An earlier reply was lost: the same message again, the position stays.
                offset = max(after + 1, known.start_offset)
            if offset >= known.high_watermark:
                return None
            found = await self._reader.next_at(topic, partition, offset, known.high_watermark)
            expected = -1 if known.offset is None else known.offset
            if found is None:  # compaction left nothing: the consumer has read all there is
                await self._move(consumer, topic, partition, known.high_watermark - 1, expected)
                return None
            if found.offset < position or await self._move(consumer, topic, partition, found.offset, expected):
                return Taken(partition, *found)
        raise ConflictError(f"the position of consumer {consumer.id} keeps moving", current=None)

    async def _move(self, consumer: Consumer, topic: Topic, partition: int, offset: int, expected: int) -> bool:
        """Past `offset`. False: the consumer stands somewhere else, another manager served it meanwhile."""
        moved = Position(consumer_name(consumer.id), offset + 1, False, expected)
        try:
            await self._mover.move(topic.name, partition, moved)
        except ConflictError:
            return False
        self._positions[consumer.id, topic.partitions[partition].uid] = offset + 1
        if len(self._positions) > _REMEMBERED_MAX:
            del self._positions[next(iter(self._positions))]
        return True

    async def _position(self, consumer: Consumer, topic: str, partition: int) -> PositionReply:
        request = GetPosition(topic, partition, consumer_name(consumer.id))
        reply, _ = await self._link_of(topic, partition).call(request)
        assert isinstance(reply, PositionReply)
        return reply

    async def size(self, consumer: Consumer, topic: Topic, asked: int | None) -> int:
        """Messages it has still to read."""
        partitions = _partitions_of(consumer, topic, asked)
        replies = await asyncio.gather(*(self._position(consumer, topic.name, number) for number in partitions))
        return sum(r.high_watermark - max(r.offset or 0, r.start_offset) for r in replies)

    async def messages_read(self, consumer: Consumer, topic: Topic) -> int:
        """Over all its partitions."""
        partitions = _partitions_of(consumer, topic, None)
        return sum([(await self._position(consumer, topic.name, number)).offset or 0 for number in partitions])

    async def set_offset(self, consumer: Consumer, topic: Topic, asked: int | None, offset: int) -> None:
        partitions = _partitions_of(consumer, topic, asked)
        replies = [await self._position(consumer, topic.name, number) for number in partitions]
        for number, reply in zip(partitions, replies, strict=True):
            # All are judged before one is moved: a failure changes nothing.
            if not -1 <= offset < reply.high_watermark:
                raise OffsetOutOfRangeError(
                    f"Offset {offset} is out of range for partition {number} of topic {topic.name}: "
                    f"it may be -1 to {reply.high_watermark - 1}"
                )
        for number in partitions:
            moved = Position(consumer_name(consumer.id), offset + 1, True)
            await self._link_of(topic.name, number).call(CommitPosition(topic.name, number, moved))


def _partitions_of(consumer: Consumer, topic: Topic, asked: int | None) -> Sequence[int]:
    if asked is not None and not 0 <= asked < len(topic.partitions):
        raise RequestError(f"Partition {asked} does not exist in topic {topic.name}")
    if consumer.partition is not None:
        if asked not in (None, consumer.partition):
            raise RequestError(f"Consumer {consumer.id} is registered to partition {consumer.partition} only")
        return (consumer.partition,)
    return range(len(topic.partitions)) if asked is None else (asked,)
