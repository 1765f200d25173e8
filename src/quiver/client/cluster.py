"""Where things are: connections to nodes, topics and their leaders, and patient retries.

Any node can be asked where things are; one that does not answer is left alone for a moment. A connection on which
somebody waits and nothing comes is asked whether anybody is there: a node may be frozen or cut off without a word.

Rule: one connection for each node, opened by whoever needs it first. What is retried here is safe to repeat.
"""

from __future__ import annotations

import asyncio
import functools
import random
import re
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from quiver.client.partitioner import check_partition
from quiver.config import PORT_DEFAULT
from quiver.errors import (
    ClosedError,
    ConnectionLostError,
    InvalidRequestError,
    NotLeaderError,
    QuiverError,
    RequestTimeoutError,
    UnavailableError,
    UnknownTopicError,
)
from quiver.net.connection import Connection, open_connection
from quiver.types import NodeInfo, PartitionInfo, TopicInfo, check_topic_name
from quiver.wire.messages import GetMetadata, MetadataReply, Ping
from quiver.wire.packet import Memory

CONNECT_TIMEOUT_S: Final = 2.0
BACKOFF_S_MIN: Final = 0.02
BACKOFF_S_MAX: Final = 1.0
# An election takes a second or so. Whoever waits for one asks often, and only after so many times with more patience.
_QUICK_S_MAX: Final = 0.1
_QUICK_ATTEMPTS: Final = 30
_WATCH_S: Final = 0.25
_QUIET_S: Final = 0.5  # nothing came for so long on a connection on which somebody waits: is anybody there?
_DEAF_S: Final = 1.0  # no answer to that for so long: nobody is
_AVOID_S: Final = 1.0  # how long a node that did not answer is left alone

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
    """Doubles, quickly to a little and late to a maximum, with jitter so that many clients do not come back at once."""
    pause_s = min(_QUICK_S_MAX, BACKOFF_S_MIN * 2.0 ** min(attempt, 10))
    if attempt > _QUICK_ATTEMPTS:
        pause_s = min(BACKOFF_S_MAX, pause_s * 2.0 ** min(attempt - _QUICK_ATTEMPTS, 10))
    return pause_s * random.uniform(0.5, 1.0)


class Cluster:
    def __init__(self, servers: str, client: str, request_timeout_s: float, memory: Memory = bytearray) -> None:
        """`memory` makes what large answers are received into."""
        self._servers = parse_servers(servers)
        self._memory = memory
        self._client = client
        self.request_timeout_s = request_timeout_s
        self._connections: dict[str, Connection] = {}
        self._opening: dict[str, asyncio.Task[Connection]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._avoided: dict[str, float] = {}  # nodes that did not answer, and until when they are left alone
        self._addresses: dict[int, str] = {}
        self._topics: dict[str, TopicInfo] = {}
        self._seen: dict[str, TopicInfo] = {}  # the same, with those whose leaders have to be asked for again
        self._asking: dict[str, asyncio.Task[MetadataReply]] = {}
        self._replicas: dict[str, list[str]] = {}  # after a failure: who has the partition and knows its leader first
        self._primary = ""  # the address of the manager that takes changes, when it is known
        self._turn = 0  # whom to ask next: another one after each disappointment
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
                open_connection(address, self._client, timeout_s=CONNECT_TIMEOUT_S, memory=self._memory)
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
            if not opening.cancelled() and isinstance(opening.exception(), RequestTimeoutError):
                self._avoid(address)
            return
        if self._closed:
            opening.result().close()
            return
        self._connections[address] = opening.result()
        self._avoided.pop(address, None)
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def any_connection(self) -> Connection:
        """A connection to some node: an open one, else the first address that answers."""
        errors: list[str] = []
        for address in self._to_ask():
            try:
                return await self.connection(address)
            except UnavailableError as error:
                errors.append(error.message)
        raise ConnectionLostError(f"no server answers: {'; '.join(errors)}")

    def _to_ask(self, topic: str | None = None) -> list[str]:
        """Addresses in the order in which to ask them: those that know best, those we talk to, all others."""
        brokers = set(self._addresses.values())
        best = self._replicas.get(topic or "", ())
        talking = [address for address, connection in self._connections.items() if connection.is_open]
        order = list(dict.fromkeys([*best, *talking, *self._servers, *self._addresses.values()]))
        turn = self._turn % len(order)
        return sorted(
            order[turn:] + order[:turn] if best or talking else order,
            key=lambda address: (
                self._is_avoided(address),
                address not in best,
                address not in talking,
                bool(brokers) and address in talking and address not in brokers,
            ),
        )

    def _avoid(self, address: str) -> None:
        self._avoided[address] = asyncio.get_running_loop().time() + _AVOID_S

    def _is_avoided(self, address: str) -> bool:
        return self._avoided.get(address, 0.0) > asyncio.get_running_loop().time()

    async def _watch(self) -> None:
        """Drops connections whose other end no longer answers: who waits there can look elsewhere."""
        loop = asyncio.get_running_loop()
        quiet: dict[Connection, tuple[int, float, bool]] = {}  # what was heard, since when no more, and whether asked
        while True:
            before_s = loop.time()
            await asyncio.sleep(_WATCH_S)
            now_s = loop.time()
            if now_s - before_s > 2 * _WATCH_S:
                quiet.clear()  # it was we who did not listen: what came meanwhile is not read yet
            for connection in list(self._connections.values()):
                heard, since_s, asked = quiet.get(connection, (-1, now_s, False))
                if heard != connection.heard or not connection.is_waiting or not connection.is_open:
                    quiet[connection] = connection.heard, now_s, False
                elif asked and now_s - since_s >= _QUIET_S + _DEAF_S:
                    self._avoid(connection.address)
                    self.drop(connection)
                elif not asked and now_s - since_s >= _QUIET_S:
                    quiet[connection] = heard, since_s, True
                    connection.submit(Ping())
            quiet = {connection: quiet[connection] for connection in self._connections.values()}

    def drop(self, connection: Connection) -> None:
        """Breaks a connection that no longer answers; the next user opens a new one."""
        connection.abort()  # to close it would wait until the peer has read everything
        if self._connections.get(connection.address) is connection:
            del self._connections[connection.address]

    async def close(self) -> None:
        self._closed = True
        tasks = [*self._opening.values(), *self._asking.values(), *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    # -- metadata ------------------------------------------------------------------------------------------------

    async def metadata(self, topics: list[str] | None = None, names: bool = False) -> MetadataReply:
        """What any node says that answers."""
        reply = await self.ask_any(GetMetadata(topics, names), MetadataReply, topics[0] if topics else None)
        self._addresses = {node.id: node.address for node in reply.nodes}
        self._primary = next((one.address for one in reply.managers if one.id == reply.primary), "")
        reply = msgspec.structs.replace(reply, topics=[self._whole(topic) for topic in reply.topics])
        for topic in reply.topics:
            self._topics[topic.name] = self._seen[topic.name] = topic
        return reply

    def _whole(self, topic: TopicInfo) -> TopicInfo:
        """A topic's partitions only get more; a node that lags may not have heard of the last ones yet."""
        seen = self._seen.get(topic.name)
        if seen is None or seen.uid != topic.uid or len(seen.partitions) <= len(topic.partitions):
            return topic
        unheard = seen.partitions[len(topic.partitions) :]
        return msgspec.structs.replace(topic, partitions=topic.partitions + unheard)

    async def primary(self) -> Connection | None:
        """The manager that takes changes. None: it is not known now; any other node passes on what it is asked."""
        if not self._primary:
            await self.metadata([])
        address = self._primary
        if not address or self._is_avoided(address):
            return None
        try:
            return await self.connection(address)
        except UnavailableError:
            self.forget_primary()
            return None

    def forget_primary(self) -> None:
        self._primary = ""

    async def ask_any(self, request: Struct, reply_type: type[R], topic: str | None = None) -> R:
        """The answer of the first node that has one. Only for requests that may be repeated."""
        errors: list[str] = []
        refused: UnavailableError | None = None
        for address in self._to_ask(topic):
            try:
                connection = await self.connection(address)
            except UnavailableError as error:
                errors.append(error.message)
                continue
            try:
                return await self.call(connection, request, reply_type)
            except UnavailableError as error:
                refused = error
        raise refused or ConnectionLostError(f"no server answers: {'; '.join(errors)}")

    async def _metadata_of(self, name: str) -> TopicInfo | None:
        """Asks for one topic; all who want to know it at once ask once."""
        asking = self._asking.get(name)
        if asking is None:
            asking = self._asking[name] = asyncio.get_running_loop().create_task(self.metadata([name]))
            asking.add_done_callback(functools.partial(self._asked, name))
        try:
            reply = await asyncio.shield(asking)
        except asyncio.CancelledError:
            if asking.cancelled():
                raise ClosedError("this client was closed") from None
            raise
        return next((topic for topic in reply.topics if topic.name == name), None)

    def _asked(self, name: str, asking: asyncio.Task[MetadataReply]) -> None:
        self._asking.pop(name, None)
        if not asking.cancelled():
            asking.exception()  # counts as seen: who asked may have gone

    async def topic(self, name: str) -> TopicInfo:
        """What is known of a topic, asked once. Raises UnknownTopicError."""
        check_topic_name(name)
        known = self._topics.get(name)
        if known is None:
            # The answer itself: another who waited for it may have found the leader gone and forgotten the topic again.
            known = await self._metadata_of(name)
        if known is None:
            raise UnknownTopicError(
                f"topic {name} does not exist; create it with Admin.create_topic or 'quiver topic create {name}'",
                topic=name,
            )
        return known

    def forget_topic(self, name: str) -> None:
        """Its leaders are asked for again."""
        self._topics.pop(name, None)

    def leader_failed(self, topic: str, partition: int, error: QuiverError) -> None:
        """The leader we know did not do it. Perhaps it said who leads now; else somebody else is asked."""
        known, leader = self._topics.get(topic), error.facts.get("leader")
        if known is not None and partition >= len(known.partitions):
            known = None  # another topic has that name by now
        if isinstance(error, NotLeaderError) and known is not None and leader in self._addresses:
            infos = list(known.partitions)
            if infos[partition].leader != leader:
                infos[partition] = PartitionInfo(partition, leader, infos[partition].replicas)
                self._topics[topic] = msgspec.structs.replace(known, partitions=tuple(infos))
                return
        self._turn += 1
        if known is not None:
            replicas = [replica for replica in known.partitions[partition].replicas if replica in self._addresses]
            self._replicas[topic] = [self._addresses[replica] for replica in replicas]
        self.forget_topic(topic)

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
        if self._is_avoided(address):
            raise ConnectionLostError(f"the leader of {topic}-{partition} at {address} does not answer")
        return await self.connection(address)

    async def replica(self, topic: str, partition: int, turn: int) -> Connection:
        """A connection to one of the brokers that hold a partition: another one each turn."""
        partitions = (await self.topic(topic)).partitions
        check_partition(topic, len(partitions), partition)
        holders = partitions[partition].replicas
        address = self._addresses.get(holders[turn % len(holders)]) if holders else None
        if address is None or self._is_avoided(address):
            raise ConnectionLostError(f"a broker that holds {topic}-{partition} does not answer")
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
            try:
                return await self.call(await self.leader(topic, partition), request, reply_type)
            except UnavailableError as error:
                self.leader_failed(topic, partition, error)
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
