"""The two kinds of process of a cluster of several: a manager, and a broker that joins the managers.

Rule: they only compose, as the embedded node does. Here manager and brokers know each other over the network.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from quiver.broker.membership import Membership
from quiver.broker.server import Broker
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
        self, settings: NodeSettings, on_removed: Callable[[NodeRemovedError], None] = lambda error: None
    ) -> None:
        if not settings.manager:
            raise InvalidRequestError("a broker needs the address of a manager: --manager host:port")
        me = settings.node_id
        disk = SystemDisk()
        directory = f"{settings.data_dir}/broker-{me}"
        disk.make_directory(directory)
        self._peers = Peers(me, settings.net)
        self._membership = Membership(
            settings.manager,
            me,
            self._peers,
            disk,
            directory,
            heartbeat_s=settings.heartbeat_s,
            serve=lambda request, payload, flow: self._broker.serve(request, payload, flow),
            leaders=lambda: self._broker.leaders(),
            topics=lambda: self._broker.topics(),
            on_removed=on_removed,
        )
        self._broker = Broker(settings, disk, others=self._membership.handlers, peers=self._peers)

    @property
    def address(self) -> str:
        return self._broker.address

    async def start(self) -> None:
        await self._broker.start()
        try:
            await self._membership.start(self._broker.address, self._broker.disk_id, self._broker.join_cluster)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """The broker first: it still needs the others to hand its partitions over."""
        await self._broker.stop()
        await self._membership.stop()
        await self._peers.close()
