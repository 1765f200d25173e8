"""Requests from one node of the cluster to another, over a connection that is made anew after it was lost.

Rule: no retries. A request ends as `Connection` says; the next one finds a new connection or learns that there is none.
"""

from __future__ import annotations

import asyncio
from typing import Final

from msgspec import Struct

from quiver.errors import ConnectionLostError, RequestTimeoutError
from quiver.net.connection import Connection, open_connection
from quiver.net.protocol import Buffer
from quiver.wire.admin_messages import AddPartitions
from quiver.wire.messages import NODE_CLIENT, REPLY_TO, CreateTopic, DeleteTopic, HostTopic

CONNECT_TIMEOUT_S: Final = 2.0
CALL_TIMEOUT_S: Final = 5.0
# Thousands of directories take long on a slow disk. That it is not done yet says nothing about the connection.
_SLOW_TIMEOUT_S: Final = 60.0
_SLOW: Final = (AddPartitions, CreateTopic, DeleteTopic, HostTopic)


class RemoteLink:
    """`connections` counts how often it connected: another number means that the other end may have begun anew."""

    def __init__(self, address: str, node: str, expected_id: int | None = None) -> None:
        """`node` names us to the other end. `expected_id` is the id it must have: a port may be another's by now."""
        self.address = address
        self._expected_id = expected_id
        self.connections = 0
        self._client = f"{NODE_CLIENT}{node}"
        self._connection: Connection | None = None
        self._opening: asyncio.Task[Connection] | None = None
        self._closed = False

    @property
    def is_open(self) -> bool:
        return self._connection is not None and self._connection.is_open

    async def call(
        self, request: Struct, payload: Buffer = b"", *, timeout_s: float = CALL_TIMEOUT_S
    ) -> tuple[Struct, tuple[Buffer, ...]]:
        """The typed reply and its payload. Raises what the other end answered, or that it is out of reach."""
        connection = await self.connect()
        slow = isinstance(request, _SLOW)
        reply_type, payloads = REPLY_TO[type(request)], (payload,) if payload else ()
        try:
            reply, found = await connection.call(
                request, reply_type, payloads, timeout_s=_SLOW_TIMEOUT_S if slow else timeout_s
            )
        except RequestTimeoutError:
            if not slow:
                connection.abort()
            raise
        return reply, (found,) if found else ()

    def drop(self) -> None:
        """Breaks a connection whose other end seems frozen; who waits on it is told that it is lost."""
        if self._connection is not None:
            self._connection.abort()

    async def close(self) -> None:
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._connection is not None:
            self._connection.close()

    async def connect(self) -> Connection:
        """The connection, made if there is none. Raises that the other end is out of reach."""
        if self._closed:
            raise ConnectionLostError(f"the connection to {self.address} is closed")
        if self._connection is not None and self._connection.is_open:
            return self._connection
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())
        # Shielded: one caller giving up must not break the connection of the others.
        try:
            return await asyncio.shield(self._opening)
        except asyncio.CancelledError:
            if self._closed:
                raise ConnectionLostError(f"the connection to {self.address} is closed") from None
            raise

    async def _open(self) -> Connection:
        try:
            connection = await open_connection(self.address, self._client, timeout_s=CONNECT_TIMEOUT_S)
            found = connection.limits.node_id
            if self._expected_id not in (None, found):
                connection.close()
                raise ConnectionLostError(f"{self.address} is broker {found}, not broker {self._expected_id}")
            self._connection = connection
            self.connections += 1
            return connection
        finally:
            self._opening = None
