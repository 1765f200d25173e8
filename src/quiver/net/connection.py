"""The client's end: requests pipelined on one connection, replies matched by correlation id.

Rule: a request ends in exactly one of reply, typed error, ConnectionLostError or RequestTimeoutError; the last two
leave its outcome unknown. A late reply to a request that timed out is dropped.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from quiver.config import FRAME_BYTES_MAX, MIB
from quiver.errors import (
    ConnectionLostError,
    ProtocolError,
    QuiverError,
    RequestTimeoutError,
    error_from_wire,
)
from quiver.net.protocol import Buffer, PacketProtocol
from quiver.wire.messages import HELLO_MAGIC, KIND_OF, PROTOCOL_VERSION, ErrorReply, Hello, HelloReply
from quiver.wire.packet import FLAG_ERROR, FLAG_REPLY, Memory, Packet

_WRITE_BUFFER_BYTES_MAX = 8 * MIB

R = TypeVar("R", bound=Struct)
Answered = Callable[[], None]
C = TypeVar("C", bound="Connection")
_decoders: dict[type[Struct], msgspec.msgpack.Decoder[Any]] = {}


def _decode_reply(reply_type: type[R], header: memoryview) -> R:
    decoder = _decoders.get(reply_type)
    if decoder is None:
        decoder = _decoders[reply_type] = msgspec.msgpack.Decoder(reply_type)
    try:
        reply: R = decoder.decode(header)
        return reply
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the server's {reply_type.__name__} cannot be read: {error}") from error


class Connection(PacketProtocol):
    """Made by `open_connection`. `limits` is what the server said in its hello."""

    limits: HelloReply

    def __init__(self, address: str, memory: Memory = bytearray) -> None:
        super().__init__(FRAME_BYTES_MAX, _WRITE_BUFFER_BYTES_MAX, memory)
        self.address = address
        self._waiting: dict[int, tuple[asyncio.Future[Packet], Answered | None]] = {}
        self._correlations = itertools.count(1)
        self.heard = 0  # how often something came
        self._refusal: QuiverError | None = None  # said to the whole connection; it may come before the first request

    def submit(
        self, request: Struct, payload: Sequence[Buffer] = (), answered: Answered | None = None
    ) -> asyncio.Future[Packet]:
        """Sends at once and returns the future reply packet; the order of calls is the order on the wire.

        `answered` is called when the future is done: of a reply at once, where a callback of it would wait for a turn.
        """
        return self._submit(request, payload, answered)[1]

    def _submit(
        self, request: Struct, payload: Sequence[Buffer], answered: Answered | None
    ) -> tuple[int, asyncio.Future[Packet]]:
        """The same; also what it waits under, for who may go away before the reply comes."""
        future: asyncio.Future[Packet] = asyncio.get_running_loop().create_future()
        correlation = next(self._correlations)
        if self._refusal is not None or not self.is_open:
            lost = ConnectionLostError(f"the connection to {self.address} is closed")
            _fail(future, answered, self._refusal or lost)
        else:
            self._waiting[correlation] = future, answered
            self.send_packet(KIND_OF[type(request)], 0, correlation, request, payload)
        return correlation, future

    async def call(
        self, request: Struct, reply_type: type[R], payload: Sequence[Buffer] = (), *, timeout_s: float
    ) -> tuple[R, memoryview]:
        correlation, future = self._submit(request, payload, None)
        try:
            async with asyncio.timeout(timeout_s):
                packet = await future
        except TimeoutError as error:
            name = type(request).__name__
            raise RequestTimeoutError(f"no reply from {self.address} to {name} within {timeout_s:g} s") from error
        finally:
            self._waiting.pop(correlation, None)
        return _decode_reply(reply_type, packet.header), packet.payload

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Ends it at once, with what was not yet written; every request on it fails as lost."""
        if self.transport is not None:
            self.transport.abort()

    # -- asyncio's side ------------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Somebody waits for a reply."""
        return bool(self._waiting)

    def part_received(self) -> None:
        self.heard += 1

    def packet_received(self, packet: Packet) -> None:
        self.heard += 1
        error = _error_of(packet) if packet.flags & FLAG_ERROR else None
        if error is not None and packet.correlation == 0:
            self._refusal = error
            self._fail_all(error)
        if not packet.flags & FLAG_REPLY:
            return
        future, answered = self._waiting.pop(packet.correlation, (None, None))
        if future is None or future.done():
            return
        if error is not None:
            _fail(future, answered, error)
        else:
            future.set_result(packet)
            if answered is not None:
                answered()

    def protocol_failed(self, error: ProtocolError) -> None:
        self._fail_all(error)
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.resume_writing()
        why = f": {exc}" if exc else ""
        self._fail_all(ConnectionLostError(f"the connection to {self.address} was lost{why}"))

    def _fail_all(self, error: QuiverError) -> None:
        waiting, self._waiting = self._waiting, {}
        for future, answered in waiting.values():
            if not future.done():
                _fail(future, answered, error)


def _fail(future: asyncio.Future[Packet], answered: Answered | None, error: QuiverError) -> None:
    future.set_exception(error)
    future.exception()  # counts as seen: one who asked and went away is no reason for asyncio to complain
    if answered is not None:
        future.get_loop().call_soon(answered)  # not now: who asks is in the middle of something


def _error_of(packet: Packet) -> QuiverError:
    reply = _decode_reply(ErrorReply, packet.header)
    return error_from_wire(reply.code, reply.message, reply.facts)


def reply_of(packet: Packet, reply_type: type[R]) -> R:
    """The typed reply of a packet that `submit` gave."""
    return _decode_reply(reply_type, packet.header)


async def open_connection(address: str, client: str, *, timeout_s: float, memory: Memory = bytearray) -> Connection:
    """Connects and shakes hands. Raises ConnectionLostError, RequestTimeoutError or what the server said."""
    return await shake_hands(Connection(address, memory), client, timeout_s=timeout_s)


async def shake_hands(connection: C, client: str, *, timeout_s: float) -> C:
    """`open_connection` for a connection of any kind."""
    address = connection.address
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            await loop.create_connection(lambda: connection, host.strip("[]"), int(port))
    except TimeoutError as error:
        raise RequestTimeoutError(f"no connection to {address} within {timeout_s:g} s") from error
    except OSError as error:
        raise ConnectionLostError(f"cannot connect to {address}: {error.strerror or error}") from error
    except UnicodeError as error:  # what the resolver says of a name with an empty or endless part
        raise ConnectionLostError(f"cannot connect to {address}: not a host name") from error
    try:
        hello = Hello(HELLO_MAGIC, PROTOCOL_VERSION, PROTOCOL_VERSION, client[:255])
        connection.limits, _ = await connection.call(hello, HelloReply, timeout_s=timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection
