"""Brokers of other nodes come in, say that they are there, and are told what they should have.

A broker joins with its id, its address and the id of its disk, and says the same again every second. The manager keeps
it in the quorum, connects to it, and after every new connection compares what it has with what it should have.

Rule: who belongs to another cluster is refused. That is also what makes it safe to delete what the quorum does not
know: only brokers that were told by this quorum what to have get that far.
"""

from __future__ import annotations

import asyncio
import logging

from quiver.errors import InvalidRequestError, QuiverError
from quiver.manager.quorum import MetadataQuorum
from quiver.manager.registry import Registry
from quiver.metadata.state import Broker
from quiver.net.remote_link import RemoteLink
from quiver.types import NodeInfo
from quiver.wire.messages import JoinCluster, JoinReply

logger = logging.getLogger("quiver.manager")


class Joining:
    def __init__(self, quorum: MetadataQuorum, registry: Registry, cluster_id: str) -> None:
        self._quorum = quorum
        self._registry = registry
        self._cluster_id = cluster_id
        self._links: dict[int, RemoteLink] = {}
        self._current: dict[int, int] = {}  # which connection of a broker it was brought up to date on
        self._updates: dict[int, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._led_term = 0
        self._door = asyncio.Lock()

    async def join(self, request: JoinCluster) -> JoinReply:
        if request.cluster_id not in ("", self._cluster_id):
            raise InvalidRequestError(
                f"broker {request.broker_id} belongs to cluster {request.cluster_id}, "
                f"this manager to cluster {self._cluster_id}"
            )
        broker = Broker(request.broker_id, request.address, request.disk_id)
        self._quorum.state.check_may_join(broker.id, broker.disk_id)  # refused without a trace in the log
        async with self._door:
            link = self._links.get(broker.id)
            known = self._quorum.state.brokers.get(broker.id)
            attached = link is not None and self._registry.brokers.link(broker.id) is link
            if link is None or not attached or link.address != broker.endpoint or not _same(known, broker):
                link = await self._take_in(broker, link)
        self._registry.brokers.heard(broker.id)
        if broker.id not in self._updates and not self._is_current(broker.id, link):
            task = asyncio.get_running_loop().create_task(self._update(broker.id, link, request.cluster_id == ""))
            self._updates[broker.id] = task
            task.add_done_callback(lambda _: self._updates.pop(broker.id))
        state = self._quorum.state
        nodes = [NodeInfo(known.id, known.endpoint) for known in state.brokers.values()]
        managers = [manager.address for manager in state.managers.values()]
        return JoinReply(self._cluster_id, nodes, state.applied, managers)

    # -- brokers that joined at another manager, or before this one led ------------------------------------------

    def follow(self) -> None:
        """Every manager has links to all brokers. Who takes over brings them up to date when they say that they are
        there: the one before may have left something undone."""
        term = self._quorum.term if self._quorum.leads else 0
        if term and term == self._led_term:
            return  # `join` sees to it
        if term != self._led_term:
            self._led_term = term
            self._current.clear()
        brokers = self._quorum.state.brokers
        for broker in brokers.values():
            link = self._links.get(broker.id)
            if link is None or link.address != broker.endpoint:
                self._attach(broker)
        for gone in [broker_id for broker_id in self._links if broker_id not in brokers]:
            self._close(self._links.pop(gone))
            self._registry.brokers.detach(gone)

    def _close(self, link: RemoteLink) -> None:
        task = asyncio.get_running_loop().create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def forget(self, broker_id: int) -> None:
        """That broker is not part of the cluster any more."""
        self._registry.brokers.detach(broker_id)
        if (task := self._updates.get(broker_id)) is not None:
            task.cancel()
        if (link := self._links.pop(broker_id, None)) is not None:
            await link.close()

    async def close(self) -> None:
        for task in list(self._updates.values()):
            task.cancel()
        await asyncio.gather(*self._updates.values(), return_exceptions=True)
        for link in self._links.values():
            await link.close()
        await asyncio.gather(*self._closing)

    async def _take_in(self, broker: Broker, link: RemoteLink | None) -> RemoteLink:
        if link is not None and link.address != broker.endpoint and link.is_open:
            # Its process lives. Two that take turns under one id would each be told what the other should have.
            raise InvalidRequestError(f"broker {broker.id} is at {link.address} already and answers there")
        await self._registry.register_broker(broker)
        logger.info("broker_joined broker=%d address=%s disk=%d", broker.id, broker.endpoint, broker.disk_id)
        return self._attach(broker)

    def _attach(self, broker: Broker) -> RemoteLink:
        if (old := self._links.get(broker.id)) is not None:
            self._close(old)
        link = self._links[broker.id] = RemoteLink(broker.endpoint, "manager", broker.id)
        self._current.pop(broker.id, None)
        self._registry.brokers.attach(broker.id, link)
        return link

    def _is_current(self, broker_id: int, link: RemoteLink) -> bool:
        outdated = broker_id in self._registry.brokers.outdated
        return link.is_open and self._current.get(broker_id) == link.connections and not outdated

    async def _update(self, broker_id: int, link: RemoteLink, newcomer: bool) -> None:
        try:
            await link.connect()
            connection = link.connections
            self._registry.brokers.outdated.discard(broker_id)
            await self._bring_up_to_date(broker_id, newcomer)
            self._current[broker_id] = connection
        except QuiverError as error:  # the next heartbeat begins it again
            self._registry.brokers.outdated.add(broker_id)
            logger.warning("broker_not_current broker=%d error=%r", broker_id, error.message)

    async def _bring_up_to_date(self, broker_id: int, newcomer: bool) -> None:
        """One topic at a time, so that others can be made meanwhile."""
        registry, quorum = self._registry, self._quorum
        has: dict[str, dict[int, str]] = {}
        for status in await registry.brokers.status(broker_id):
            has.setdefault(status.topic, {})[status.partition] = status.uid
        # Only after this it is known that what a broker has and the state has not was deleted: another manager may
        # have made it, and uids are never given again.
        await quorum.confirm()
        topics = quorum.state.topics
        for name in [*has, *(name for name in topics if name not in has)]:
            async with registry.changing:
                if newcomer and name in has and name not in topics:
                    await registry.adopt(broker_id, name, [uid for _, uid in sorted(has[name].items())])
                other = await registry.brokers.make_current(broker_id, name, has.get(name, {}), topics.get(name))
                if other:
                    await quorum.confirm()
                    if name in topics and other not in [partition.uid for partition in topics[name].partitions]:
                        await registry.brokers.replace(broker_id, other, topics[name])


def _same(known: Broker | None, said: Broker) -> bool:
    return known is not None and (known.endpoint, known.disk_id) == (said.endpoint, said.disk_id)
