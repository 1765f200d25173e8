"""A broker that nobody told of a cluster yet: it listens where it will serve, and waits to be added.

Rule: it says who it is and takes the addresses of managers, once, from whoever adds it. Everything else is refused: it
has opened nothing, and no message is taken before it is part of a cluster.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from quiver.config import BrokerSettings
from quiver.errors import UnavailableError
from quiver.net.server import Flow, Reply, Server
from quiver.wire.admin_messages import TakeIn, TakenIn
from quiver.wire.messages import PROTOCOL_VERSION, HelloReply

logger = logging.getLogger("quiver.broker")

_DRAIN_S: Final = 1.0  # for the answer to whoever added it


class Waiting:
    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._told: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._address = ""
        self.port = 0  # where it listened; the broker goes on there

    async def until_added(self, on_waiting: Callable[[str], None]) -> list[str]:
        """The managers of the cluster that this broker is to join. `on_waiting` is told the address."""
        settings = self._settings
        limits = (settings.message_bytes_max, settings.batch_bytes_max, settings.net.frames_in_flight_max)
        server = Server(settings.net, HelloReply(PROTOCOL_VERSION, settings.node_id, "", *limits), self._answer)
        self.port = await server.start(settings.host, settings.port)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self._address = f"{host}:{self.port}"
        try:
            logger.info("waiting_to_be_added broker=%d address=%s", settings.node_id, self._address)
            on_waiting(self._address)
            return await self._told
        finally:
            await server.stop(_DRAIN_S)

    async def _answer(self, request: Struct, payload: memoryview, flow: Flow) -> Reply:
        if not isinstance(request, TakeIn):
            raise UnavailableError(
                f"broker {self._settings.node_id} at {self._address} is part of no cluster yet: "
                f"'quiver broker add {self._address}' adds it"
            )
        if request.managers and not self._told.done():
            logger.info("added cluster=%s managers=%s", request.cluster_id, ",".join(request.managers))
            self._told.set_result(request.managers)
        return TakenIn(self._settings.node_id, self._address), ()
