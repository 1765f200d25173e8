"""Packets: the framing of requests and replies on a connection.

    0  length of what follows the prefix    4  header length    8  correlation id    16  kind    17  flags    18  zeros
    24 header (msgpack, see messages.py), then payload: raw bytes that no hop encodes again

Rule: pure. `PacketReader` hands out a buffer to receive into and returns whole packets; it never sees a socket. A
length over the limit is refused when the prefix is read, before the body is taken in.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from quiver.errors import ProtocolError

PREFIX_BYTES: Final = 24
FLAG_REPLY: Final = 1
FLAG_ERROR: Final = 2

Memory = Callable[[int], bytearray | memoryview]

_PREFIX = struct.Struct("<IIQBBH4x")
pack_prefix = _PREFIX.pack  # length, header length, correlation id, kind, flags, zero
_BUFFER_BYTES: Final = 64 * 1024


class Packet(NamedTuple):
    kind: int
    flags: int
    correlation: int
    header: memoryview
    payload: memoryview
    size_bytes: int  # of header and payload


def encode_prefix(kind: int, flags: int, correlation: int, header: bytes, payload_bytes: int) -> bytes:
    """Prefix and header in one; the payload is written after it, as it is."""
    length = len(header) + payload_bytes
    return _PREFIX.pack(length, len(header), correlation, kind, flags, 0) + header


class PacketReader:
    """Small packets are cut out of one reused buffer; a large one is received straight into its own memory."""

    __slots__ = ("_buffer", "_end", "_large", "_large_end", "_memory", "_view", "packet_bytes_max")

    def __init__(self, packet_bytes_max: int, memory: Memory = bytearray) -> None:
        """`memory` makes what a large packet is received into."""
        self.packet_bytes_max = packet_bytes_max
        self._memory = memory
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._end = 0
        self._large: bytearray | memoryview | None = None
        self._large_end = 0

    def get_buffer(self, _: int = -1) -> memoryview:
        """Where the next received bytes go. Never empty."""
        if self._large is not None:
            return memoryview(self._large)[self._large_end :]
        return self._view[self._end :] if self._end else self._view

    def received(self, count: int) -> list[Packet]:
        """Tells that `count` bytes came into the buffer; returns the packets that are now whole."""
        if not self._end and count >= PREFIX_BYTES and self._large is None:
            # Most reads bring one whole packet and nothing else.
            length, header_length, correlation, kind, flags, zeros = _PREFIX.unpack_from(self._buffer)
            if count == PREFIX_BYTES + length and header_length <= length <= self.packet_bytes_max and not zeros:
                body = memoryview(self._buffer[PREFIX_BYTES:count])
                found = (kind, flags, correlation, body[:header_length], body[header_length:], length)
                return [tuple.__new__(Packet, found)]  # quicker than by its own name
        return self._received(count)

    def _received(self, count: int) -> list[Packet]:
        if self._large is not None:
            self._large_end += count
            if self._large_end < len(self._large):
                return []
            _, prefix = self._prefix(self._large, 0)
            packet = _packet(prefix, memoryview(self._large)[PREFIX_BYTES:])
            self._large = None
            return [packet]
        end = self._end + count
        packets: list[Packet] = []
        start = 0
        while end - start >= PREFIX_BYTES:
            total, prefix = self._prefix(self._buffer, start)
            if end - start < total:
                if total > len(self._buffer):
                    self._large = self._memory(total)
                    self._large_end = end - start
                    self._large[: self._large_end] = self._view[start:end]
                    start = end
                break
            packets.append(_packet(prefix, memoryview(self._buffer[start + PREFIX_BYTES : start + total])))
            start += total
        if start and start < end:
            self._buffer[: end - start] = self._buffer[start:end]
        self._end = end - start
        return packets

    def _prefix(self, buffer: bytearray | memoryview, start: int) -> tuple[int, tuple[int, ...]]:
        """(bytes of the whole packet, what its prefix says). Raises ProtocolError."""
        prefix = _PREFIX.unpack_from(buffer, start)
        length, header_length, _, _, _, zeros = prefix
        if length > self.packet_bytes_max:
            raise ProtocolError(f"a packet of {length} bytes is over the limit of {self.packet_bytes_max}")
        if header_length > length or zeros:
            raise ProtocolError("these bytes are not a packet")
        return PREFIX_BYTES + int(length), prefix


def _packet(prefix: tuple[int, ...], body: memoryview) -> Packet:
    length, header_length, correlation, kind, flags, _ = prefix
    found = (kind, flags, correlation, body[:header_length], body[header_length:], length)
    return tuple.__new__(Packet, found)  # quicker than by its own name
