"""Where things are: connections to nodes, topics and their leaders, and patient retries.

Rule: one connection for each node, opened by whoever needs it first. What is retried here is safe to repeat.
"""

from __future__ import annotations

import asyncio
import functools
import random
import re
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from msgspec import Struct

from quiver.client.partitioner import check_partition
from quiver.config import PORT_DEFAULT
from quiver.errors import (
    ClosedError,
    ConnectionLostError,
    InvalidRequestError,
    QuiverError,
    RequestTimeoutError,
    UnavailableError,
    UnknownTopicError,
)
from quiver.net.connection import Connection, open_connection
from quiver.types import NodeInfo, TopicInfo, check_topic_name
from quiver.wire.messages import GetMetadata, MetadataReply

CONNECT_TIMEOUT_S: Final = 5.0
BACKOFF_S_MIN: Final = 0.05
BACKOFF_S_MAX: Final = 1.0

# A name of labels, or an IPv6 address in brackets: what a resolver would choke on is refused here.
_HOST = re.compile(
    r"(?=.{1,253}$)\w([\w-]{0,61}\w)?(\.\w([\w-]{0,61}\w)?)*\.?|\[[\w:.%]{2,60}\]",
    re.ASCII,
)
_PORT = re.compile(r"[0-9]{1,5}")

T = TypeVar("T")
R = TypeVar("R", bound=Struct)


def parse_servers(servers: object) -> list[str]:
    """'host:port,host' as a list of addresses; the port defaults to 9400."""
    if not isinstance(servers, str) or not servers.strip():
        raise InvalidRequestError("servers is a string of addresses: 'host:port' or 'host1:port,host2:port'")
    addresses = []
    for part in servers.split(","):
        host, separator, port = part.strip().rpartition(":")
        if not separator:
            host, port = part.strip(), str(PORT_DEFAULT)
        if not _HOST.fullmatch(host) or not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
            shown = part.strip()[:60]
            raise InvalidRequestError(f"{shown!r} is not an address like 127.0.0.1:9400")
        addresses.append(f"{host}:{port}")
    return addresses


def backoff_s(attempt: int) -> float:
    """Doubles up to a maximum, with jitter so that many clients do not come back at once."""
    return min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2.0 ** min(attempt, 10)) * random.uniform(0.5, 1.0)


class Cluster:
    def __init__(self, servers: str, client: str, request_timeout_s: float) -> None:
        self._servers = parse_servers(servers)
        self._client = client
        self.request_timeout_s = request_timeout_s
        self._connections: dict[str, Connection] = {}
        self._opening: dict[str, asyncio.Task[Connection]] = {}
        self._addresses: dict[int, str] = {}
        self._topics: dict[str, TopicInfo] = {}
        self._closed = False

    # -- connections ---------------------------------------------------------------------------------------------

    async def connection(self, address: str) -> Connection:
        if self._closed:
            raise ClosedError("this client is closed")
        found = self._connections.get(address)
        if found is not None and found.is_open:
            return found
        opening = self._opening.get(address)
        if opening is None:
            opening = asyncio.get_running_loop().create_task(
                open_connection(address, self._client, timeout_s=CONNECT_TIMEOUT_S)
            )
            self._opening[address] = opening
            opening.add_done_callback(functools.partial(self._opened, address))
        # Shielded: one caller giving up must not break the connection of the others.
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled():
                raise ClosedError("this client was closed") from None
            raise

    def _opened(self, address: str, opening: asyncio.Task[Connection]) -> None:
        # Here and not by who waits: between the two a third would find nothing and open another one.
        self._opening.pop(address, None)
        if opening.cancelled() or opening.exception() is not None:
            return
        if self._closed:
            opening.result().close()
        else:
            self._connections[address] = opening.result()

    async def any_connection(self) -> Connection:
        """A connection to some node: an open one, else the first address that answers."""
        for connection in self._connections.values():
            if connection.is_open:
                return connection
        errors: list[str] = []
        for address in dict.fromkeys([*self._servers, *self._addresses.values()]):
            try:
                return await self.connection(address)
            except UnavailableError as error:
                errors.append(error.message)
        raise ConnectionLostError(f"no server answers: {'; '.join(errors)}")

    def drop(self, connection: Connection) -> None:
        """Breaks a connection that no longer answers; the next user opens a new one."""
        connection.abort()  # to close it would wait until the peer has read everything
        if self._connections.get(connection.address) is connection:
            del self._connections[connection.address]

    async def close(self) -> None:
        self._closed = True
        openings = list(self._opening.values())
        for opening in openings:
            opening.cancel()
        await asyncio.gather(*openings, return_exceptions=True)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    # -- metadata ------------------------------------------------------------------------------------------------

    async def metadata(self, topics: list[str] | None = None) -> MetadataReply:
        connection = await self.any_connection()
        reply = await self.call(connection, GetMetadata(topics), MetadataReply)
        self._addresses = {node.id: node.address for node in reply.nodes}
        for topic in reply.topics:
            self._topics[topic.name] = topic
        return reply

    async def topic(self, name: str) -> TopicInfo:
        """What is known of a topic, asked once. Raises UnknownTopicError."""
        check_topic_name(name)
        known = self._topics.get(name)
        if known is None:
            await self.metadata([name])
            known = self._topics.get(name)
        if known is None:
            raise UnknownTopicError(
                f"topic {name} does not exist; create it with Admin.create_topic or 'quiver topic create {name}'",
                topic=name,
            )
        return known

    def forget_topic(self, name: str) -> None:
        self._topics.pop(name, None)

    async def nodes(self) -> list[NodeInfo]:
        return (await self.metadata([])).nodes

    def known_leader(self, topic: str, partition: int) -> Connection | None:
        """The leader's connection when it is known and open, without waiting."""
        found = self._topics.get(topic)
        if found is None or partition >= len(found.partitions):
            return None
        connection = self._connections.get(self._addresses.get(found.partitions[partition].leader, ""))
        return connection if connection is not None and connection.is_open else None

    async def leader(self, topic: str, partition: int) -> Connection:
        partitions = (await self.topic(topic)).partitions
        check_partition(topic, len(partitions), partition)
        address = self._addresses.get(partitions[partition].leader)
        if address is None:
            self.forget_topic(topic)
            raise ConnectionLostError(f"the address of the leader of {topic}-{partition} is not known yet")
        return await self.connection(address)

    # -- calls ---------------------------------------------------------------------------------------------------

    async def call(self, connection: Connection, request: Struct, reply_type: type[R]) -> R:
        """One request. A connection that does not answer is dropped: its other end may have vanished without a word."""
        try:
            reply, _ = await connection.call(request, reply_type, timeout_s=self.request_timeout_s)
        except RequestTimeoutError:
            self.drop(connection)
            raise
        return reply

    async def ask(self, topic: str, partition: int, request: Struct, reply_type: type[R]) -> R:
        """Asks the leader of a partition, patiently. Only for requests that may be repeated."""

        async def once() -> R:
            connection = await self.leader(topic, partition)
            try:
                return await self.call(connection, request, reply_type)
            except UnavailableError:
                self.forget_topic(topic)
                raise

        return await self.retrying(once)

    async def retrying(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Repeats while the error says that a retry may help, for as long as one request may take."""
        deadline = asyncio.get_running_loop().time() + self.request_timeout_s
        attempt = 0
        while True:
            try:
                return await operation()
            except QuiverError as error:
                pause_s = backoff_s(attempt)
                if not error.retriable or asyncio.get_running_loop().time() + pause_s > deadline:
                    raise
            await asyncio.sleep(pause_s)
            attempt += 1
