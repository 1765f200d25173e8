"""The two kinds of process of a cluster of several: a manager, and a broker that joins the managers it was given, that
it remembers, or that somebody tells it while it waits.

Rule: they only compose, as the embedded node does. Here manager and brokers know each other over the network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
from msgspec import Struct

from quiver.broker.membership import Membership, load_members
from quiver.broker.server import Broker
from quiver.broker.waiting import Waiting
from quiver.config import NodeSettings
from quiver.errors import InvalidRequestError, NodeRemovedError
from quiver.log.disk import SystemDisk
from quiver.manager.manager import Manager
from quiver.net.peers import Peers
from quiver.net.server import Flow, Reply, Server
from quiver.wire.messages import PROTOCOL_VERSION, HelloReply

_DRAIN_S = 5.0


def manager_node_id(manager_id: int) -> int:
    """What a manager calls itself in its hello: it is no broker, and must not be taken for one."""
    return -manager_id


class ManagerNode:
    """Metadata for brokers and SDKs on a framed port, the gateway on an HTTP port."""

    def __init__(
        self, settings: NodeSettings, on_removed: Callable[[NodeRemovedError], None] = lambda error: None
    ) -> None:
        self._settings = settings
        self._peers = Peers(settings.node_id, settings.net, manager_node_id)
        self._manager = Manager(settings, embedded=False, peers=self._peers, on_removed=on_removed)
        self._server: Server | None = None
        self.address = ""

    @property
    def http(self) -> str:
        return self._manager.http_address

    @property
    def primary(self) -> int:
        return self._manager.primary

    async def start(self) -> None:
        """The port first: managers find each other there. Who asks for metadata waits until it is known."""
        settings = self._settings
        limits = (settings.message_bytes_max, settings.batch_bytes_max, settings.net.frames_in_flight_max)
        hello = HelloReply(PROTOCOL_VERSION, manager_node_id(settings.node_id), "", *limits)
        server = Server(settings.net, hello, self._answer, peers=self._peers)
        port = await server.start(settings.host, settings.port)
        self._server = server
        self.address = f"[{settings.host}]:{port}" if ":" in settings.host else f"{settings.host}:{port}"
        try:
            await self._manager.start(self.address)
            server.hello_reply = msgspec.structs.replace(hello, cluster_id=self._manager.cluster_id)
            await self._manager.serve_cluster()
        except BaseException:
            await self.stop()
            raise

    async def _answer(self, request: Struct, payload: memoryview, flow: Flow) -> Reply:
        handler = self._manager.handlers.get(type(request))
        if handler is None:
            raise InvalidRequestError(f"{type(request).__name__} is not a request a manager serves")
        reply: Reply = await handler(request, payload, flow)
        return reply

    async def stop(self) -> None:
        """Another takes the lead before the links to the others end."""
        await self._manager.stop_serving()
        await self._manager.stop()
        await self._peers.close()
        if self._server is not None:
            await self._server.stop(_DRAIN_S)


class BrokerNode:
    """A broker, its links to the others, and its place in the cluster."""

    http = ""
    primary = 0

    def __init__(
        self,
        settings: NodeSettings,
        on_removed: Callable[[NodeRemovedError], None] = lambda error: None,
        on_waiting: Callable[[str], None] = lambda address: None,
    ) -> None:
        """`on_waiting` is told the address of one that knows no manager and waits to be added."""
        self._settings = settings
        self._on_removed = on_removed
        self._on_waiting = on_waiting
        self._disk = SystemDisk()
        self._directory = f"{settings.data_dir}/broker-{settings.node_id}"
        self._disk.make_directory(self._directory)
        self._peers = Peers(settings.node_id, settings.net)
        self._broker: Broker | None = None
        self._membership: Membership | None = None

    @property
    def address(self) -> str:
        return "" if self._broker is None else self._broker.address

    async def start(self) -> None:
        settings = self._settings
        if not settings.manager and not load_members(self._disk, self._directory).managers:
            waiting = Waiting(settings)
            managers = await waiting.until_added(self._on_waiting)
            settings = dataclasses.replace(settings, manager=",".join(managers), port=waiting.port)
        membership = self._make_membership(settings)
        broker = Broker(settings, self._disk, others=membership.handlers, peers=self._peers)
        self._membership, self._broker = membership, broker
        await broker.start()
        try:
            await membership.start(broker.address, broker.disk_id, broker.join_cluster)
        except BaseException:
            await self.stop()
            raise

    def _make_membership(self, settings: NodeSettings) -> Membership:
        return Membership(
            settings.manager,
            settings.node_id,
            self._peers,
            self._disk,
            self._directory,
            heartbeat_s=settings.heartbeat_s,
            serve=lambda request, payload, flow: self._here.serve(request, payload, flow),
            leaders=lambda: self._here.leaders(),
            topics=lambda: self._here.topics(),
            on_removed=self._on_removed,
        )

    @property
    def _here(self) -> Broker:
        assert self._broker is not None  # membership is asked by the broker's port alone
        return self._broker

    async def stop(self) -> None:
        """The broker first: it still needs the others to hand its partitions over."""
        if self._broker is not None:
            await self._broker.stop()
        if self._membership is not None:
            await self._membership.stop()
        await self._peers.close()
