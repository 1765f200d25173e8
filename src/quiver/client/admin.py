"""Administration: topics, their offsets and the state of their partitions."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from itertools import chain
from types import TracebackType
from typing import Self, TypeVar

from msgspec import Struct

from quiver.client.cluster import Cluster
from quiver.client.group_admin import GroupAdmin
from quiver.client.offset_lookup import offset_at
from quiver.errors import (
    ConnectionLostError,
    InvalidRequestError,
    OutcomeUnknownError,
    RequestTimeoutError,
    TopicExistsError,
    UnavailableError,
    UnknownTopicError,
)
from quiver.topic_settings import check_names, check_settings
from quiver.types import (
    PARTITIONS_MAX,
    ManagerInfo,
    NodeInfo,
    PartitionMove,
    PartitionStatus,
    TopicInfo,
    check_topic_name,
)
from quiver.wire.admin_messages import (
    AddManager,
    AddPartitions,
    AlterTopic,
    GetManagers,
    GetMoves,
    ManagersReply,
    MovesReply,
    Rebalance,
    RemoveBroker,
    RemoveManager,
)
from quiver.wire.messages import (
    OFFSET_AFTER,
    OFFSET_EARLIEST,
    OFFSET_LATEST,
    CreateTopic,
    DeleteTopic,
    Done,
    GetStatus,
    ListOffset,
    ListOffsetReply,
    StatusReply,
)

R = TypeVar("R", bound=Struct)


class AsyncAdmin:
    def __init__(self, servers: str, *, request_timeout: float = 30.0, client_id: str = "") -> None:
        self._cluster = Cluster(servers, client_id or f"admin-{os.getpid()}", request_timeout)
        self.groups = GroupAdmin(self._cluster, self.nodes)

    async def create_topic(
        self, name: str, partitions: int = 1, settings: Mapping[str, object] | None = None
    ) -> TopicInfo:
        """`settings` by name (docs/settings.md), as {"retention.ms": 86_400_000}.

        Raises TopicExistsError when it is there already, InvalidTopicError for a name that is not allowed.
        """
        check_topic_name(name)
        _check_partitions(partitions)
        told = check_settings(settings or {})
        unknown_outcome = False

        async def once() -> None:
            nonlocal unknown_outcome
            connection = await self._cluster.any_connection()
            try:
                await self._cluster.call(connection, CreateTopic(name, partitions, settings=told), Done)
            except (ConnectionLostError, OutcomeUnknownError, RequestTimeoutError):
                unknown_outcome = True
                raise
            except TopicExistsError:
                if not unknown_outcome:
                    raise  # otherwise it was our first try that made it

        await self._cluster.retrying(once)
        self._cluster.forget_topic(name)
        return await self.describe_topic(name)

    async def add_partitions(self, name: str, partitions: int) -> TopicInfo:
        """The topic has so many partitions from now on. Raises InvalidRequestError when it has more already.

        Keys are spread over all partitions: records of one key that come later may go to another one.
        """
        check_topic_name(name)
        _check_partitions(partitions)
        await self._change(AddPartitions(name, partitions), Done)
        return await self.describe_topic(name)

    async def alter_topic(
        self, name: str, settings: Mapping[str, object] | None = None, unset: Sequence[str] = ()
    ) -> TopicInfo:
        """Sets settings, and lets those of `unset` be as if they had never been set. Brokers follow at once."""
        check_topic_name(name)
        told, back = check_settings(settings or {}), check_names(unset)
        await self._change(AlterTopic(name, told, back), Done)
        return await self.describe_topic(name)

    async def remove_broker(self, broker: int) -> None:
        """Begins to move everything a broker has to others; then it is forgotten. `moves` tells how far that is.

        Raises InvalidRequestError when the others could not keep its partitions.
        """
        await self._change(RemoveBroker(broker), Done)

    async def rebalance(self) -> list[PartitionMove]:
        """Begins to give every broker its share of replicas and leaders; tells what moves."""
        return (await self._change(Rebalance(), MovesReply)).moves

    async def moves(self) -> tuple[list[PartitionMove], list[int]]:
        """The partitions on their way to other brokers, and the brokers that are being removed."""
        reply = await self._change(GetMoves(), MovesReply)
        return reply.moves, reply.draining

    async def add_manager(self, manager: int, address: str) -> list[ManagerInfo]:
        """Lets a manager that is not there yet join the quorum; then it is started with that id, at that address."""
        return (await self._change(AddManager(manager, address), ManagersReply)).managers

    async def remove_manager(self, manager: int) -> list[ManagerInfo]:
        """Begins to take a manager out of the quorum, which is done when `quorum` does not show it any more.

        Raises InvalidRequestError when the others could not go on without it.
        """
        return (await self._change(RemoveManager(manager), ManagersReply)).managers

    async def quorum(self) -> list[ManagerInfo]:
        """All managers with their state, those that are awaited and those that are about to leave, too."""
        return (await self._change(GetManagers(), ManagersReply)).managers

    async def _change(self, request: Struct, reply_type: type[R]) -> R:
        return await self._cluster.retrying(lambda: self._cluster.ask_any(request, reply_type))

    async def delete_topic(self, name: str) -> None:
        """Removes the topic and its data. Raises UnknownTopicError."""
        check_topic_name(name)
        connection = await self._cluster.retrying(self._cluster.any_connection)
        await self._cluster.call(connection, DeleteTopic(name), Done)
        self._cluster.forget_topic(name)

    async def list_topics(self) -> list[str]:
        reply = await self._cluster.retrying(lambda: self._cluster.metadata([], names=True))
        return sorted(reply.names)

    async def describe_topic(self, name: str) -> TopicInfo:
        self._cluster.forget_topic(name)
        return await self._cluster.retrying(lambda: self._cluster.topic(name))

    async def describe_topics(self, names: Sequence[str] | None = None) -> dict[str, TopicInfo]:
        """Those of `names` that exist, or all, by name; asked at once."""
        wanted = None if names is None else [check_topic_name(name) for name in names]
        reply = await self._cluster.retrying(lambda: self._cluster.metadata(wanted))
        return {topic.name: topic for topic in reply.topics}

    async def offsets(self, name: str) -> dict[int, tuple[int, int]]:
        """(earliest, latest) offset by partition; latest is the next one to be given."""
        topic = await self.describe_topic(name)

        async def edges(number: int) -> tuple[int, tuple[int, int]]:
            found = [
                await self._cluster.ask(name, number, ListOffset(name, number, which), ListOffsetReply)
                for which in (OFFSET_EARLIEST, OFFSET_LATEST)
            ]
            return number, (found[0].offset, found[1].offset)

        return dict(await asyncio.gather(*(edges(partition.id) for partition in topic.partitions)))

    async def offset_at(self, name: str, partition: int, timestamp: int) -> int:
        """The offset of the first record at or after `timestamp` (microseconds); the end when there is none."""
        return await offset_at(self._cluster, name, partition, timestamp)

    async def offset_after(self, name: str, partition: int, offset: int, bytes_max: int) -> tuple[int, int]:
        """Where about `bytes_max` stored bytes from `offset` on end, and how many bytes these are."""
        request = ListOffset(name, partition, OFFSET_AFTER, offset, bytes_max)
        found = await self._cluster.ask(name, partition, request, ListOffsetReply)
        return found.offset, found.size_bytes

    async def partition_status(self, topic: str | None = None) -> list[PartitionStatus]:
        """One status for each partition: its leader's, or without a leader that of the replica that is furthest."""
        best: dict[tuple[str, int], PartitionStatus] = {}
        for status in chain(*(await self.replica_status(topic)).values()):
            known = best.get((status.topic, status.partition))
            if known is None or _weight(status) > _weight(known):
                best[status.topic, status.partition] = status
        return [best[place] for place in sorted(best)]

    async def replica_status(self, topic: str | None = None) -> dict[int, list[PartitionStatus]]:
        """What each broker says of the replicas it has, by broker id. One that does not answer is left out."""
        if topic is not None:
            check_topic_name(topic)
            await self.describe_topic(topic)  # raises when there is none; a broker may have nothing of it
        nodes = await self.nodes()

        async def ask(node: NodeInfo) -> list[PartitionStatus]:
            connection = await self._cluster.connection(node.address)
            try:
                return (await self._cluster.call(connection, GetStatus(topic), StatusReply)).partitions
            except UnknownTopicError:
                return []

        answers = await asyncio.gather(*map(ask, nodes), return_exceptions=True)
        found = {node.id: answer for node, answer in zip(nodes, answers, strict=True) if isinstance(answer, list)}
        for answer in answers:
            if isinstance(answer, BaseException) and not (isinstance(answer, UnavailableError) and found):
                raise answer
        return found

    async def nodes(self) -> list[NodeInfo]:
        return await self._cluster.retrying(self._cluster.nodes)

    async def managers(self) -> list[ManagerInfo]:
        """All managers; the primary first, when one is known."""
        reply = await self._cluster.retrying(lambda: self._cluster.metadata([]))
        return sorted(reply.managers, key=lambda one: (one.id != reply.primary, one.id))

    async def close(self) -> None:
        await self._cluster.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _check_partitions(partitions: object) -> None:
    if not isinstance(partitions, int) or isinstance(partitions, bool) or not 1 <= partitions <= PARTITIONS_MAX:
        raise InvalidRequestError(f"partitions is an int from 1 to {PARTITIONS_MAX}, not {partitions!r}")


def _weight(status: PartitionStatus) -> tuple[bool, int, int]:
    return status.role == "leader" and status.state == "online", status.term, status.next_offset
