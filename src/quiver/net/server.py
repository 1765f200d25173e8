"""A listening port: limits, handshake, requests in and replies out of order.

Rule: one connection's trouble is its own. Garbage, silence, a flood or a slow reader closes or slows that connection,
with a reason in the log, and changes nothing for the others. The behaviour at each limit stands in `NetSettings`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from msgspec import Struct

from quiver.config import NetSettings
from quiver.errors import InvalidRequestError, OverloadedError, ProtocolError, QuiverError, UnsupportedVersionError
from quiver.net.answer import Answer
from quiver.net.peers import PeerLink, Peers
from quiver.net.protocol import Buffer, PacketProtocol
from quiver.wire.messages import (
    HELLO_BYTES_MAX,
    HELLO_KIND,
    HELLO_MAGIC,
    KIND_OF,
    NODE_CLIENT,
    PROTOCOL_VERSION,
    Done,
    ErrorReply,
    Hello,
    HelloReply,
    Ping,
    decode_request,
    encode,
)
from quiver.wire.packet import FLAG_ERROR, FLAG_REPLY, Packet, pack_prefix
from quiver.wire.peer_messages import PeerHello, PeerMessages, PeerPing

logger = logging.getLogger("quiver.net")

Reply = tuple[Struct, Sequence[Buffer]]
Quick = Callable[[Any, memoryview, Answer], bool]
Handler = Callable[[Struct, memoryview, "Flow"], Awaitable[Reply]]

_PEER_KINDS = frozenset(KIND_OF[kind] for kind in (PeerHello, PeerMessages, PeerPing))
_PING_KIND = KIND_OF[Ping]
_SWEEP_S = 1.0
_REASONS_LOGGED_PER_SWEEP = 10


class Flow(Protocol):
    """What a handler may ask of the connection it answers on, before it makes a large reply."""

    @property
    def is_writable(self) -> bool: ...

    async def until_writable(self) -> None: ...


class ServerConnection(PacketProtocol):
    def __init__(self, server: Server) -> None:
        # A stranger may send no more than a hello; the full limit comes with the handshake.
        super().__init__(HELLO_BYTES_MAX, server.settings.write_buffer_bytes_max)
        self._server = server
        self._ready = False
        self._tasks: set[asyncio.Task[None] | Answer] = set()  # requests under way
        self._drained: asyncio.Future[None] | None = None
        self._replies: list[bytes] = []  # of this turn, not written yet
        self._bytes_in_flight = 0
        self._reading = True
        self.heard_at_s = time.monotonic()
        self.slow_since_s: float | None = None
        self.closing_since_s: float | None = None
        self.peer = "?"
        self.for_nodes_only = False  # the places for clients are taken
        self._link: PeerLink | None = None  # set once another broker made this connection its link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.peer = str(transport.get_extra_info("peername"))
        if not self._server.admit(self):
            self._refuse(0)

    def _refuse(self, correlation: int) -> None:
        limit = self._server.settings.connections_max
        error = OverloadedError(f"the server has its maximum of {limit} connections")
        self._send_error(HELLO_KIND, correlation, error)
        self.close("too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self.resume_writing()
        for task in self._tasks:
            task.cancel()
        if self._link is not None:
            self._link.lost()
        self._server.forget(self)

    # -- requests ------------------------------------------------------------------------------------------------

    def packet_received(self, packet: Packet) -> None:
        if self._link is not None:  # it needs no tasks and has limits of its own
            try:
                self._link.received(packet)
            except QuiverError as error:
                self.close(f"not our protocol: {error}", abort=True)
            return
        self.heard_at_s = time.monotonic()
        if not self._ready:
            self._handshake(packet)
            return
        if packet.kind in _PEER_KINDS:
            self._begin_link(packet)
            return
        if packet.kind == _PING_KIND:
            self.send_packet(_PING_KIND, FLAG_REPLY, packet.correlation, Done())
            return
        self._bytes_in_flight += packet.size_bytes
        if not self._serve_quickly(packet):
            task = asyncio.get_running_loop().create_task(self._serve(packet))
            self._tasks.add(task)
            task.add_done_callback(partial(self._served, packet.size_bytes))
        settings = self._server.settings
        if len(self._tasks) >= settings.frames_in_flight_max or self._bytes_in_flight >= settings.bytes_in_flight_max:
            self._read_or_pause()

    def _serve_quickly(self, packet: Packet) -> bool:
        """For the kinds of request that need no task: True when somebody has the answer and gives it."""
        if (quick := self._server.quick.get(packet.kind)) is None:
            return False
        answer = Answer(self, packet)
        self._tasks.add(answer)
        try:
            if quick(decode_request(packet.kind, packet.header), packet.payload, answer):
                return True
        except QuiverError:
            pass  # the usual way meets it again and answers it
        self._tasks.discard(answer)
        return False

    def answered(self, answer: Answer, reply: Struct) -> None:
        header = encode(reply)
        size = len(header)
        raw = pack_prefix(size, size, answer.correlation, answer.kind, FLAG_REPLY, 0) + header
        if len(self._tasks) <= 1 and not self._replies:
            if self.transport is not None and not self.transport.is_closing():
                self.transport.write(raw)
        else:
            # What one flush committed is answered with one write: each would be a system call and wake the client.
            if not self._replies:
                asyncio.get_running_loop().call_soon(self._write_replies)
            self._replies.append(raw)
        self._served(answer.size_bytes, answer)

    def refused(self, answer: Answer, error: Exception) -> None:
        if isinstance(error, QuiverError):
            self._send_error(answer.kind, answer.correlation, error)
        else:
            self._fail(answer, error)
        self._served(answer.size_bytes, answer)

    def _write_replies(self) -> None:
        replies, self._replies = self._replies, []
        if replies and self.is_open and self.transport is not None:
            self.transport.write(b"".join(replies))

    def _begin_link(self, packet: Packet) -> None:
        try:
            hello = decode_request(packet.kind, packet.header)
            if not isinstance(hello, PeerHello):
                raise ProtocolError("no link was agreed on")
        except QuiverError as error:
            self.close(f"not our protocol: {error}", abort=True)
            return
        try:
            if self._server.peers is None:
                raise InvalidRequestError("this node has no links to brokers")
            self._link = self._server.peers.accept(hello, self)
            self._read_ended = self._server.peers.read_ended
        except QuiverError as error:
            self._send_error(packet.kind, packet.correlation, error)
            self.close(f"link refused: {error}")
            return
        self._read_or_pause()
        self.send_packet(packet.kind, FLAG_REPLY, packet.correlation, Done())

    def part_received(self) -> None:
        if self._link is not None:
            self._link.heard()

    def _handshake(self, packet: Packet) -> None:
        try:
            hello = decode_request(packet.kind, packet.header)
            if packet.kind != HELLO_KIND or not isinstance(hello, Hello) or hello.magic != HELLO_MAGIC:
                raise ProtocolError("the first packet is not a hello")
            if not hello.version_min <= PROTOCOL_VERSION <= hello.version_max:
                error = UnsupportedVersionError(
                    f"this server speaks version {PROTOCOL_VERSION}, "
                    f"the client versions {hello.version_min} to {hello.version_max}"
                )
                self._send_error(HELLO_KIND, packet.correlation, error)
                self.close("no version in common")
                return
        except QuiverError as error:
            self.close(f"bad handshake: {error}")
            return
        if self.for_nodes_only and not hello.client.startswith(NODE_CLIENT):
            self._refuse(packet.correlation)
            return
        self._ready = True
        self._reader.packet_bytes_max = self._server.settings.frame_bytes_max
        self.send_packet(HELLO_KIND, FLAG_REPLY, packet.correlation, self._server.hello_reply)

    async def _serve(self, packet: Packet) -> None:
        try:
            request = decode_request(packet.kind, packet.header)
            reply, payload = await self._server.handler(request, packet.payload, self)
            if self.is_open:
                self.send_packet(packet.kind, FLAG_REPLY, packet.correlation, reply, payload)
        except ProtocolError as error:
            self.protocol_failed(error)
        except QuiverError as error:
            self._send_error(packet.kind, packet.correlation, error)
        except Exception as error:
            self._fail(packet, error)

    def _fail(self, asked: Packet | Answer, error: BaseException) -> None:
        logger.error("request_failed peer=%s kind=%d", self.peer, asked.kind, exc_info=error)
        self._send_error(asked.kind, asked.correlation, QuiverError("internal error; the server's log says more"))

    def _served(self, size_bytes: int, task: asyncio.Task[None] | Answer) -> None:
        self._tasks.discard(task)
        if not self._tasks and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._bytes_in_flight -= size_bytes
        self.heard_at_s = time.monotonic()
        if not self._reading:
            self._read_or_pause()

    def _read_or_pause(self) -> None:
        """Reads while all limits allow it; one read of small frames may pass the limit, the next waits."""
        settings = self._server.settings
        # Two brokers that both wait for the other to read would wait for ever: a link drops what is too much.
        reading = self._link is not None or (
            self._writable is None
            and len(self._tasks) < settings.frames_in_flight_max
            and self._bytes_in_flight < settings.bytes_in_flight_max
        )
        if reading != self._reading and self.is_open and self.transport is not None:
            self._reading = reading
            if reading:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def _send_error(self, kind: int, correlation: int, error: QuiverError) -> None:
        if self.is_open:
            reply = ErrorReply(error.code, error.message, error.facts)
            self.send_packet(kind, FLAG_REPLY | FLAG_ERROR, correlation, reply)

    # -- limits --------------------------------------------------------------------------------------------------

    def protocol_failed(self, error: ProtocolError) -> None:
        self.close(f"not our protocol: {error}")

    def close(self, reason: str, *, abort: bool = False) -> None:
        if self.is_open and self.transport is not None:
            self._server.log_reason(self.peer, reason)
            if abort:
                self.transport.abort()
            else:
                self._write_replies()
                self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.slow_since_s = time.monotonic()
        self._read_or_pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.slow_since_s = None
        self._read_or_pause()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def check_limits(self, now_s: float, settings: NetSettings) -> None:
        if not self.is_open:
            # Closing, but what it was sent is not read: without an end this would hold its memory and its place.
            self.closing_since_s = self.closing_since_s or now_s
            if now_s - self.closing_since_s > settings.slow_reader_timeout_s:
                self.abort()
        elif self._link is not None:
            return  # it watches itself
        elif self.slow_since_s is not None:
            if now_s - self.slow_since_s > settings.slow_reader_timeout_s:
                self.close(f"does not read its replies for {settings.slow_reader_timeout_s} s", abort=True)
        elif not self._ready:
            if now_s - self.heard_at_s > settings.handshake_timeout_s:
                self.close(f"no hello within {settings.handshake_timeout_s} s", abort=True)
        elif not self._tasks and now_s - self.heard_at_s > settings.idle_timeout_s:
            self.close(f"idle for {settings.idle_timeout_s} s")

    async def drain(self) -> None:
        """Lets the requests under way finish; new ones are refused by the handler."""
        self._drained = asyncio.get_running_loop().create_future()
        if self._tasks:
            await self._drained


class Server:
    """Serves packets on one address. `handler` may be slow; it runs in a task of its own for each request.

    `quick` has, by kind, handlers that see to it that the answer is given, or return False to go the usual way. `peers`
    takes the connections that other brokers make their links.
    """

    def __init__(
        self,
        settings: NetSettings,
        hello_reply: HelloReply,
        handler: Handler,
        quick: Mapping[int, Quick] | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.settings = settings
        self.peers = peers
        self.hello_reply = hello_reply
        self.handler = handler
        self.quick = quick or {}
        self._connections: set[ServerConnection] = set()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._empty = asyncio.Event()  # set while there is no connection
        self._empty.set()
        self._reasons_left = _REASONS_LOGGED_PER_SWEEP
        self._reasons_hidden = 0

    async def start(self, host: str, port: int) -> int:
        """Listens and returns the real port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: ServerConnection(self), host, port, backlog=1024)
        self._sweeper = loop.create_task(self._sweep())
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self, drain_s: float) -> None:
        """Stops listening, gives requests under way `drain_s`, and as long again to the delivery of replies."""
        assert self._server is not None and self._sweeper is not None
        self._server.close()
        self._sweeper.cancel()
        waiting = [asyncio.ensure_future(connection.drain()) for connection in self._connections]
        if waiting:
            await asyncio.wait(waiting, timeout=drain_s)
        for task in waiting:
            task.cancel()
        for connection in list(self._connections):
            connection.close("the server is stopping")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await self._empty.wait()
        for connection in list(self._connections):
            connection.abort()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sweeper

    def admit(self, connection: ServerConnection) -> bool:
        count, settings = len(self._connections), self.settings
        if count >= settings.connections_max + settings.node_connections_max:
            return False
        connection.for_nodes_only = count >= settings.connections_max
        self._connections.add(connection)
        self._empty.clear()
        return True

    def forget(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def log_reason(self, peer: str, reason: str) -> None:
        if self._reasons_left > 0:
            self._reasons_left -= 1
            logger.info("connection_closed peer=%s reason=%r", peer, reason)
        else:
            self._reasons_hidden += 1

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            now_s = time.monotonic()
            for connection in list(self._connections):
                connection.check_limits(now_s, self.settings)
            if self._reasons_hidden:
                logger.info("connections_closed more=%d", self._reasons_hidden)
            self._reasons_left, self._reasons_hidden = _REASONS_LOGGED_PER_SWEEP, 0
