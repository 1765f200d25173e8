"""Requests about how far consumers are: stored in the partition they read, answered by its leader.

Rule: a position counts once it is committed. Several that come together share an entry, and each is judged for itself.
"""

from __future__ import annotations

import asyncio
from typing import Any

from quiver.broker.hosting import Hosting
from quiver.broker.partition import Partition
from quiver.errors import OverloadedError, QuiverError, RequestError
from quiver.net.server import Flow, Reply
from quiver.wire.group_messages import GetPositions, PositionsReply, StoredPosition
from quiver.wire.leaders import Led, Place
from quiver.wire.messages import (
    CommitPosition,
    CommitPositions,
    CommitPositionsReply,
    CountClient,
    CountReply,
    ErrorReply,
    GetPosition,
    Position,
    PositionReply,
)


class PositionRequests:
    def __init__(self, hosting: Hosting) -> None:
        self._hosting = hosting
        self.handlers: dict[type, Any] = {
            CommitPosition: self._commit,
            CommitPositions: self._commit_all,
            GetPosition: self._get,
            GetPositions: self._get_all,
            CountClient: self._count_client,
        }

    async def _commit(self, request: CommitPosition, payload: memoryview, flow: Flow) -> Reply:
        partition = self._hosting.partition(request.topic, request.partition)
        await know(partition, request.position.offset)
        position = await partition.commit_position(request.position)
        return PositionReply(position, partition.start_offset, partition.high_watermark), ()

    async def _commit_all(self, request: CommitPositions, payload: memoryview, flow: Flow) -> Reply:
        partition = self._hosting.partition(request.topic, request.partition)
        await know(partition, max(position.offset for position in request.positions))
        asked = [_ask(partition, position) for position in request.positions]
        await asyncio.wait(asked)
        refused = {}
        for place, future in enumerate(asked):
            if (error := future.exception()) is None:
                continue
            if not isinstance(error, (RequestError, OverloadedError)):
                raise error  # it is about the partition; what was stored of the others is found stored when asked again
            refused[place] = ErrorReply(error.code, error.message, error.facts)
        return CommitPositionsReply(refused), ()

    async def _get(self, request: GetPosition, payload: memoryview, flow: Flow) -> Reply:
        partition = self._hosting.partition(request.topic, request.partition)
        await partition.confirm()
        position = partition.state.positions.get(request.consumer)
        return PositionReply(position, partition.start_offset, partition.high_watermark), ()

    async def _get_all(self, request: GetPositions, payload: memoryview, flow: Flow) -> Reply:
        partitions = self._led()
        found = [position for partition in partitions for position in _stored(partition, request.consumer)]
        return PositionsReply(found, list(map(_led, partitions)), self._broken()), ()

    async def _count_client(self, request: CountClient, payload: memoryview, flow: Flow) -> Reply:
        partitions = self._led()
        counts = [partition.state.client_counts.get(request.client, 0) for partition in partitions]
        return CountReply(sum(counts), list(map(_led, partitions)), counts, self._broken()), ()

    def _led(self) -> list[Partition]:
        return [found for found in self._hosting.usable() if found.leads]

    def _broken(self) -> list[Place]:
        here = self._hosting.partitions.items()
        return [
            (topic, number) for topic, some in here for number, one in some.items() if not isinstance(one, Partition)
        ]


def _ask(partition: Partition, position: Position) -> asyncio.Future[Any]:
    try:
        return partition.ask_position(position)
    except QuiverError as error:
        refused: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        refused.set_exception(error)
        return refused


def _led(partition: Partition) -> Led:
    term = 0 if partition.raft is None else partition.raft.raft.term
    return Led(partition.topic, partition.number, term)


async def know(partition: Partition, offset: int) -> None:
    """Before an offset is called out of range: a leader that was deposed without knowing it has not seen all."""
    if offset > partition.high_watermark:
        await partition.confirm()


def _stored(partition: Partition, consumer: str | None) -> list[StoredPosition]:
    """Of one consumer, or of all groups."""
    where, bounds = (partition.topic, partition.number), (partition.start_offset, partition.high_watermark)
    found = partition.state.positions_of(consumer).items()
    return [StoredPosition(*where, name, offset, *bounds) for name, offset in found]
