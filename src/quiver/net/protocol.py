"""What both ends of a connection share: receiving packets, sending packets, knowing when the peer reads too slowly."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Final, cast

from msgspec import Struct

from quiver.errors import ProtocolError
from quiver.wire.messages import encode
from quiver.wire.packet import Memory, Packet, PacketReader, pack_prefix

Buffer = bytes | bytearray | memoryview

# To copy a payload up to this size costs less than to write it in pieces.
_JOIN_BYTES_MAX: Final = 4096


class PacketProtocol(asyncio.BufferedProtocol):
    def __init__(self, packet_bytes_max: int, write_buffer_bytes_max: int, memory: Memory = bytearray) -> None:
        self._reader = PacketReader(packet_bytes_max, memory)
        self._write_buffer_bytes_max = write_buffer_bytes_max
        self.get_buffer = self._reader.get_buffer  # type: ignore[method-assign, assignment]  # at every read
        self._read_ended: Callable[[], None] | None = None  # told when all packets that came together were received
        self._writable: asyncio.Future[None] | None = None  # set while the transport's buffer is over its limit
        self.transport: asyncio.Transport | None = None

    # -- for the two ends ----------------------------------------------------------------------------------------

    def packet_received(self, packet: Packet) -> None:
        raise NotImplementedError

    def protocol_failed(self, error: ProtocolError) -> None:
        raise NotImplementedError

    def part_received(self) -> None:
        """Bytes came that do not make a packet whole."""

    @property
    def is_open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def send_packet(
        self, kind: int, flags: int, correlation: int, message: Struct, payload: Sequence[Buffer] = ()
    ) -> None:
        assert self.transport is not None
        header = encode(message)
        payload_bytes = sum(map(len, payload)) if payload else 0
        prefix = pack_prefix(len(header) + payload_bytes, len(header), correlation, kind, flags, 0)
        if payload_bytes > _JOIN_BYTES_MAX:
            self.transport.writelines([prefix + header, *payload])
        else:
            self.transport.write(b"".join((prefix, header, *payload)))

    @property
    def is_writable(self) -> bool:
        return self._writable is None

    async def until_writable(self) -> None:
        """Waits while the peer takes in less than we send."""
        while self._writable is not None:
            await asyncio.shield(self._writable)

    # -- asyncio's side ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        transport.set_write_buffer_limits(high=self._write_buffer_bytes_max)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def buffer_updated(self, nbytes: int) -> None:
        try:
            packets = self._reader.received(nbytes)
            for packet in packets:
                if packet is not packets[0] and not self.is_open:
                    return  # one before it was its last
                self.packet_received(packet)
            if not packets:
                self.part_received()
            elif self._read_ended is not None:
                self._read_ended()
        except ProtocolError as error:
            self.protocol_failed(error)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None
