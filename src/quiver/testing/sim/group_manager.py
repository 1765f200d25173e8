"""A simulated manager that also coordinates consumer groups, and tells clients where things are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quiver.errors import UnavailableError
from quiver.manager.groups import Groups
from quiver.manager.quorum import MetadataQuorum
from quiver.testing.sim.manager_cluster import ManagerCluster
from quiver.testing.sim.manager_node import ManagerNode
from quiver.testing.sim.node import Node, clock_of
from quiver.types import ManagerInfo, NodeInfo, PartitionInfo, TopicInfo
from quiver.wire.group_messages import GROUP_REQUESTS
from quiver.wire.messages import GetMetadata, MetadataReply

Told = Callable[[Node, Any, Any], None]


def manager_address(node_id: int) -> str:
    return f"m{node_id}:{9400 + node_id}"


class GroupManagerNode(ManagerNode):
    """`hosted`: how many partitions of each topic its broker is known to have. `told` sees each answer."""

    release_s = 1.0
    hosted: dict[str, int]
    told: Told
    _groups: Groups | None = None

    def _boot(self) -> None:
        self._groups = None
        super()._boot()

    async def _start(self, quorum: MetadataQuorum) -> None:
        await super()._start(quorum)
        self._groups = Groups(quorum, clock_of(self.loop), self.release_s)
        self._groups.start()

    async def _end(self) -> None:
        if self._groups is not None:
            await self._groups.close()
        await super()._end()

    async def _do(self, quorum: MetadataQuorum, request: Any) -> Any:
        if isinstance(request, GetMetadata):
            return await self._metadata(quorum, request)
        if not isinstance(request, GROUP_REQUESTS):
            return await super()._do(quorum, request)
        await quorum.until_leading()
        if self._groups is None:
            raise UnavailableError("this manager is starting")
        answer = await self._groups.answer(request)
        self.told(self, request, answer)
        return answer

    async def _metadata(self, quorum: MetadataQuorum, request: GetMetadata) -> MetadataReply:
        """As `Manager` does it: what is asked for by name is there when it is told, and is looked for at the primary
        before it is said not to exist."""
        topics = []
        for name in request.topics or ():
            if name not in quorum.state.topics:
                await quorum.confirm()
            if (topic := quorum.state.topics.get(name)) is None:
                continue
            if self.hosted.get(name, 0) < len(topic.partitions):
                raise UnavailableError(f"topic {name} is not on its broker yet")
            partitions = tuple(PartitionInfo(p.number, p.replicas[0], p.replicas) for p in topic.partitions)
            topics.append(TopicInfo(name, partitions, uid=topic.partitions[0].uid))
        nodes = [NodeInfo(broker.id, broker.endpoint) for broker in quorum.state.brokers.values()]
        managers = [ManagerInfo(number, manager_address(number), "") for number in self._network.nodes]
        return MetadataReply("sim", nodes, topics, managers, quorum.primary)


class GroupBroker(Node):
    """Where its partitions are is known to the managers alone."""

    def request(self, request: Any, payload: bytes, reply: Callable[[Any, bytes], None]) -> None:
        if isinstance(request, (GetMetadata, *GROUP_REQUESTS)):
            reply(UnavailableError("ask a manager"), b"")
        else:
            super().request(request, payload, reply)


class GroupManagerCluster(ManagerCluster):
    def _make_node(self, node_id: int) -> GroupManagerNode:
        ledger = self.ledger
        return GroupManagerNode(
            node_id, self.world, self.network, self.trace, self.plan, self.chance, ledger.leaving, ledger.stored
        )

    def equip(self, release_s: float, hosted: dict[str, int], told: Told) -> None:
        for node in self.nodes.values():
            assert isinstance(node, GroupManagerNode)
            node.release_s, node.hosted, node.told = release_s, hosted, told
