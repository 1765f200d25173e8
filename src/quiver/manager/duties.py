"""What only the primary does: requests of SDKs, brokers and other managers, one call each.

Rule: whoever asks for them here has made sure that this manager leads, or is alone.
"""

from __future__ import annotations

import contextlib

from msgspec import Struct

from quiver.errors import InvalidRequestError, TopicExistsError, UnknownTopicError
from quiver.manager.classic import ClassicApi
from quiver.manager.gateway import Gateway
from quiver.manager.groups import Groups
from quiver.manager.joining import Joining
from quiver.manager.links import Reply
from quiver.manager.moves import Moves
from quiver.manager.quorum import MetadataQuorum
from quiver.manager.registry import Registry
from quiver.manager.relay import as_reply, as_request
from quiver.manager.seats import Seats
from quiver.manager.standing import Standing
from quiver.types import ManagerInfo, NodeInfo, PartitionInfo, TopicInfo
from quiver.wire.admin_messages import (
    AddManager,
    AddPartitions,
    AlterTopic,
    GetConsumers,
    GetManagers,
    GetMoves,
    ManagersReply,
    MovesReply,
    Rebalance,
    RemoveBroker,
    RemoveManager,
)
from quiver.wire.group_messages import DeleteGroup, FenceGroup, GetGroups, GroupBeat, JoinGroup, LeaveGroup
from quiver.wire.messages import CreateTopic, DeleteTopic, Done, GetMetadata, JoinCluster, MetadataReply
from quiver.wire.quorum_messages import ManagerBeat, RelayHttp


class Duties:
    """`joining`: None for an embedded node, whose broker is its own."""

    def __init__(
        self,
        quorum: MetadataQuorum,
        registry: Registry,
        moves: Moves,
        groups: Groups,
        classic: ClassicApi,
        standing: Standing,
        door: Gateway,
        joining: Joining | None,
        seats: Seats,
        cluster_id: str,
    ) -> None:
        self._quorum = quorum
        self._registry = registry
        self._moves = moves
        self._groups = groups
        self._classic = classic
        self._standing = standing
        self._door = door
        self._joining = joining
        self._seats = seats
        self._cluster_id = cluster_id

    async def do(self, request: Struct, payload: memoryview) -> Reply:
        match request:
            case CreateTopic():
                return await self._create_topic(request)
            case DeleteTopic():
                await self._classic.delete_topic(request.name)
                return Done(), ()
            case JoinCluster():
                if self._joining is None:
                    raise InvalidRequestError("this node is a cluster of its own; no broker can join it")
                return await self._joining.join(request), ()
            case AddPartitions():
                await self._registry.add_partitions(request.name, request.partitions)
                return Done(), ()
            case AlterTopic():
                await self._moves.resize(
                    await self._registry.alter_topic(request.name, request.settings, request.unset)
                )
                return Done(), ()
            case GetConsumers():
                return await self._registry.consumers_of(request.topic), ()
            case RemoveBroker():
                await self._moves.remove_broker(request.broker_id)
                return Done(), ()
            case Rebalance():
                return MovesReply(await self._moves.rebalance(), self._moves.draining()), ()
            case GetMoves():
                return MovesReply(self._moves.moves(), self._moves.draining()), ()
            case JoinGroup() | GroupBeat() | LeaveGroup() | GetGroups() | DeleteGroup() | FenceGroup():
                return await self._groups.answer(request), ()
            case AddManager() | RemoveManager() | GetManagers():
                return await self._managers(request), ()
            case ManagerBeat():
                return await self._standing.beat_of(request), ()
            case RelayHttp():
                return as_reply(await self._door.answer_here(as_request(request, payload)))
            case GetMetadata():
                return await self.metadata(request), ()
        raise InvalidRequestError(f"{type(request).__name__} is not a request for the primary")

    async def _managers(self, request: AddManager | RemoveManager | GetManagers) -> ManagersReply:
        match request:
            case AddManager():
                await self._seats.add(request.manager_id, request.address)
            case RemoveManager():
                await self._seats.remove(request.manager_id)
        return ManagersReply(self._seats.rows())

    async def metadata(self, request: GetMetadata) -> MetadataReply:
        for name in request.topics or ():
            with contextlib.suppress(UnknownTopicError):
                await self._registry.topic(name)  # who asks for one by name will use it at once
        state = self._quorum.state
        names = list(state.topics) if request.topics is None else request.topics
        leader_of = self._registry.brokers.leader_of
        topics = [
            TopicInfo(
                name,
                tuple(PartitionInfo(p.number, leader_of(p), p.replicas) for p in topic.partitions),
                topic.settings,
                topic.replication_factor,
                topic.partitions[0].uid,
            )
            for name in names
            if (topic := state.topics.get(name)) is not None
        ]
        nodes = [NodeInfo(broker.id, broker.endpoint) for broker in state.brokers.values()]
        managers = [ManagerInfo(row.id, row.address, row.http) for row in state.managers.values()]
        all_names = list(state.topics) if request.names else []
        return MetadataReply(self._cluster_id, nodes, topics, managers, self._quorum.primary, all_names)

    async def _create_topic(self, request: CreateTopic) -> Reply:
        try:
            factor, settings = request.replication_factor, request.settings
            await self._registry.create_topic(request.name, request.partitions, factor, settings)
        except TopicExistsError as error:
            raise TopicExistsError(f"topic {request.name} already exists", topic=request.name) from error
        return Done(), ()
