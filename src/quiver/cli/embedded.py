"""An embedded node: a manager and a broker in one process, one framed port, one HTTP port.

Rule: it only composes. Manager and broker know each other by requests alone, here without a socket in between.
"""

from __future__ import annotations

from msgspec import Struct

from quiver.broker.server import Broker
from quiver.config import NodeSettings
from quiver.manager.links import Buffer, Reply
from quiver.manager.manager import Manager
from quiver.net.answer import LocalFlow


class LocalLink:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._flow = LocalFlow()

    async def call(self, request: Struct, payload: Buffer = b"") -> Reply:
        return await self._broker.serve(request, memoryview(payload), self._flow)


class EmbeddedNode:
    primary = 0

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._manager = Manager(settings)
        self._broker = Broker(settings, others=self._manager.handlers)

    @property
    def address(self) -> str:
        return self._broker.address

    @property
    def http(self) -> str:
        return self._manager.http_address

    async def start(self) -> None:
        await self._manager.start()
        await self._broker.start()
        link = LocalLink(self._broker)
        await self._manager.serve(self._settings.node_id, self._broker.address, self._broker.cluster_id, link)

    async def stop(self) -> None:
        """HTTP first, so that its last requests still find the broker."""
        await self._manager.stop_serving()
        await self._broker.stop()
        await self._manager.stop()
