"""Brokers that wait to be added: asked who they are, told who the managers are, awaited until they have joined.

Rule: nothing is told to a broker before it is clear that it may come. It joins by itself then, as one that was started
with the managers' addresses; what is asked for twice is done once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from quiver.errors import (
    InvalidRequestError,
    ProtocolError,
    RequestError,
    UnavailableError,
    UnsupportedVersionError,
)
from quiver.manager.quorum import MetadataQuorum
from quiver.manager.registry import Registry
from quiver.net.connection import Connection, open_connection
from quiver.wire.admin_messages import TakeIn, TakenIn
from quiver.wire.messages import NODE_CLIENT

logger = logging.getLogger("quiver.manager")

ENDPOINT_CHARACTERS_MAX: Final = 300
_CONNECT_S: Final = 2.0
_ANSWER_S: Final = 2.0
# Less than a client waits for one answer (`client/http.py`): who is late is told so, and asks again.
_JOIN_S: Final = 5.0
_LOOK_S: Final = 0.1


class Newcomers:
    def __init__(self, quorum: MetadataQuorum, registry: Registry, cluster_id: str) -> None:
        self._quorum = quorum
        self._registry = registry
        self._cluster_id = cluster_id

    async def add(self, endpoint: str) -> int:
        """The id of the broker at that endpoint, when it is part of the cluster.

        Raises RequestError when it cannot come, UnavailableError when it has not come in time.
        """
        check_endpoint(endpoint)
        connection = await self._dial(endpoint)
        try:
            if connection.limits.node_id < 0:
                raise RequestError(f"{endpoint} is manager {-connection.limits.node_id} of a cluster, not a broker")
            found = await self._ask(connection, TakeIn(self._cluster_id))
            self._check(endpoint, found)
            if not found.cluster_id:
                logger.info("broker_called broker=%d address=%s", found.broker_id, found.address)
                managers = [manager.address for manager in self._quorum.state.managers.values() if manager.address]
                await self._ask(connection, TakeIn(self._cluster_id, managers))
        except UnavailableError as error:
            raise RequestError(f"{endpoint} did not say who it is ({error.message}); try again") from error
        finally:
            connection.close()
        await self._until_joined(endpoint, found)
        return found.broker_id

    async def _dial(self, endpoint: str) -> Connection:
        client = f"{NODE_CLIENT}manager-{self._quorum.me}"
        try:
            return await open_connection(endpoint, client, timeout_s=_CONNECT_S)
        except UnavailableError as error:
            port = endpoint.rpartition(":")[2]
            raise RequestError(
                f"No broker answers at {endpoint} ({error.message}); "
                f"start one there with 'quiver broker --id N --port {port}', then add it"
            ) from error
        except (ProtocolError, UnsupportedVersionError) as error:
            raise RequestError(
                f"What answers at {endpoint} is not a broker ({error.message}); give the port of a broker"
            ) from error

    async def _ask(self, connection: Connection, request: TakeIn) -> TakenIn:
        try:
            return (await connection.call(request, TakenIn, timeout_s=_ANSWER_S))[0]
        except (InvalidRequestError, ProtocolError) as error:
            raise RequestError(
                f"{connection.address} is not a broker that can be added: it is a cluster of its own, or of an older "
                f"version; start one with 'quiver broker --id N'"
            ) from error

    def _check(self, endpoint: str, found: TakenIn) -> None:
        if found.cluster_id not in ("", self._cluster_id):
            raise RequestError(
                f"Broker {found.broker_id} at {endpoint} belongs to another cluster ({found.cluster_id}); "
                f"start one with an empty data directory"
            )
        known = self._quorum.state.brokers.get(found.broker_id)
        taken = known is not None and known.endpoint != found.address
        if known is not None and taken and self._registry.brokers.is_active(found.broker_id):
            raise RequestError(
                f"Broker {found.broker_id} of this cluster is at {known.endpoint}; "
                f"start the one at {endpoint} under another --id"
            )

    async def _until_joined(self, endpoint: str, found: TakenIn) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _JOIN_S
        while not self._has_joined(found):
            if loop.time() > deadline_s:
                raise UnavailableError(
                    f"broker {found.broker_id} at {endpoint} was told to join and has not done so within "
                    f"{_JOIN_S:g} s; its log says more"
                )
            await self._quorum.until_changed(_LOOK_S)

    def _has_joined(self, found: TakenIn) -> bool:
        known = self._quorum.state.brokers.get(found.broker_id)
        return (
            known is not None and known.endpoint == found.address and self._registry.brokers.is_active(found.broker_id)
        )


def check_endpoint(endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    bare = host[1:-1] if host[:1] == "[" and host[-1:] == "]" else host
    plain = host.isascii() and host.isprintable() and not set(host) & set(" /@?#,'\"")
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
    if not bare or not plain or (":" in host and bare is host) or not 0 < number < 65_536:
        raise InvalidRequestError(f"endpoint must be of the form host:port, not {endpoint[:100]!r}")
    if len(endpoint) > ENDPOINT_CHARACTERS_MAX:
        raise InvalidRequestError(f"endpoint must have at most {ENDPOINT_CHARACTERS_MAX} characters")
