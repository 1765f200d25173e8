"""A server whose handler does what the request asks for, and a client that sends any bytes it likes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
from msgspec import Struct

from quiver.config import NetSettings
from quiver.errors import QuiverError
from quiver.net.connection import Connection, open_connection
from quiver.net.server import Flow, Reply, Server
from quiver.wire.messages import (
    HELLO_KIND,
    HELLO_MAGIC,
    KIND_OF,
    PROTOCOL_VERSION,
    GetPosition,
    Hello,
    HelloReply,
    PositionReply,
    encode,
)
from quiver.wire.packet import Packet, PacketReader, encode_prefix

Run = Callable[[Coroutine[Any, Any, None]], None]

HELLO_REPLY = HelloReply(PROTOCOL_VERSION, 7, "cluster", 1000, 2000, 3000)
HELLO = Hello(HELLO_MAGIC, PROTOCOL_VERSION, PROTOCOL_VERSION, "test")
TIMEOUT_S = 60.0


class Puppet:
    """The handler: `topic` says what to do, `partition` is what to answer.

    "echo" answers at once with the payload, "wait" when `release` lets it, "fail" with `error`, "large" with so many
    KiB as `partition` says, after it has asked for room.
    """

    def __init__(self) -> None:
        self.started: list[int] = []
        self.waiting: dict[int, asyncio.Future[None]] = {}
        self.error: BaseException = QuiverError("not set")
        self.buffered_bytes_max = 0

    async def __call__(self, request: Struct, payload: memoryview, flow: Flow) -> Reply:
        assert isinstance(request, GetPosition)
        self.started.append(request.partition)
        if request.topic == "fail":
            raise self.error
        if request.topic == "wait":
            self.waiting[request.partition] = asyncio.get_running_loop().create_future()
            await self.waiting[request.partition]
        if request.topic == "large":
            await flow.until_writable()
            transport: Any = getattr(flow, "transport", None)
            self.buffered_bytes_max = max(self.buffered_bytes_max, transport.get_write_buffer_size())
            return PositionReply(request.partition), (bytes(1024 * request.partition),)
        return PositionReply(request.partition), (payload,) if payload else ()

    def release(self, *numbers: int) -> None:
        for number in numbers or list(self.waiting):
            self.waiting.pop(number).set_result(None)


def ask(topic: str, number: int) -> GetPosition:
    return GetPosition(topic, number, "c")


@contextlib.asynccontextmanager
async def serving(settings: NetSettings | None = None, handler: Any = None) -> AsyncIterator[tuple[Puppet, str]]:
    """A running server with a puppet as handler; gives the puppet and the address."""
    puppet = handler or Puppet()
    async with started(Server(settings or NetSettings(), HELLO_REPLY, puppet)) as address:
        yield puppet, address


@contextlib.asynccontextmanager
async def started(server: Server) -> AsyncIterator[str]:
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0.0)


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[Connection]:
    connection = await open_connection(address, "test", timeout_s=TIMEOUT_S)
    try:
        yield connection
    finally:
        connection.close()


async def echo(connection: Connection, number: int = 1, payload: bytes = b"") -> None:
    """One whole round trip, checked."""
    reply, found = await connection.call(ask("echo", number), PositionReply, (payload,), timeout_s=TIMEOUT_S)
    assert (reply.offset, bytes(found)) == (number, payload)


async def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Waits for something that another task or the network brings about."""
    deadline_s = asyncio.get_running_loop().time() + TIMEOUT_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline_s, f"waited too long for {what}"
        await asyncio.sleep(0.002)


def encode_request(request: Struct, correlation: int, payload: bytes = b"") -> bytes:
    return encode_prefix(KIND_OF[type(request)], 0, correlation, encode(request), len(payload)) + payload


class RawClient:
    """A socket without manners."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = PacketReader(2**31)
        self._packets: list[Packet] = []

    @classmethod
    async def open(cls, address: str, *, receive_buffer_bytes: int | None = None) -> RawClient:
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        host, _, port = address.rpartition(":")
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        return cls(sock)

    async def __aenter__(self) -> RawClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sock.close()

    async def send(self, raw: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, raw)

    async def hello(self) -> None:
        await self.send(encode_request(HELLO, 1))
        packet = await self.packet()
        assert packet is not None and packet.kind == HELLO_KIND
        assert msgspec.msgpack.decode(packet.header, type=HelloReply) == HELLO_REPLY

    async def packet(self) -> Packet | None:
        """The next packet, or None when the other side has closed."""
        while not self._packets:
            try:
                received = await asyncio.get_running_loop().sock_recv(self._sock, 65536)
            except ConnectionResetError:
                return None
            if not received:
                return None
            while received:
                buffer = self._reader.get_buffer()
                count = min(len(buffer), len(received))
                buffer[:count] = received[:count]
                received = received[count:]
                self._packets += self._reader.received(count)
        return self._packets.pop(0)

    def reset(self) -> None:
        """Goes away without a word: the other side gets a reset."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()
