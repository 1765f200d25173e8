"""The frame: one log entry as it stands on disk, travels between replicas and reaches consumers.

Rule: the same bytes everywhere. A frame is built once, by the leader; nobody re-encodes it.

    0   magic "QV"        2   version        3   kind           4   flags          6   header length
    8   payload length   12   header CRC    16   payload CRC   20   record count
    24  index            32   term          40   base offset
    48  timestamp min    56   timestamp max (microseconds of the records)
    64  schema id        68   producer epoch                   72   producer id   80  sequence
    88  transaction id (reserved, 0)                           96   payload, zero-padded to 8 bytes

All little-endian; CRCs are CRC32C. The header CRC covers the header but its own four bytes. Frames without records
(positions, trims, membership, no-ops, compactions) carry the next offset as base offset and a record count of 0.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from crc32c import crc32c

Bytes = bytes | bytearray | memoryview

HEADER_BYTES: Final = 96
VERSION: Final = 1
MAGIC: Final = b"QV"
ALIGNMENT: Final = 8
# No single entry is longer; a length beyond it is damage, not data, and is never allocated.
PAYLOAD_BYTES_MAX: Final = 64 * 1024 * 1024

_HEADER = struct.Struct("<2sBBHHIIIIQQQqqIIQQQ")
_HEADER_CRC = struct.Struct("<I")
_HEADER_CRC_AT: Final = 12
_HEADER_CRC_END: Final = 16


class Kind(enum.IntEnum):
    DATA = 1
    POSITIONS = 2
    TRIM = 3
    MEMBERSHIP = 4
    NOOP = 5
    COMMAND = 6  # of the metadata log
    COMPACT = 7


# The producer id is the number of a client name; records are counted under it.
FLAG_CLIENT: Final = 1
# The producer id is a label only: this batch has no sequence.
FLAG_UNSEQUENCED: Final = 2
# The sequence counts batches, not records: a retry is known by its place alone, whatever is in it.
FLAG_BATCHES: Final = 4


def sequence_step(flags: int, record_count: int) -> int:
    """How far a batch moves the sequence of its producer."""
    return 1 if flags & FLAG_BATCHES else record_count


_KINDS: Final = frozenset(int(kind) for kind in Kind)


class Entry(NamedTuple):
    """What a proposer wants in the log, before it has a place there."""

    kind: int
    payload: Bytes
    payload_crc: int
    record_count: int = 0
    timestamp_min: int = 0
    timestamp_max: int = 0
    schema_id: int = 0
    producer_epoch: int = 0
    producer_id: int = 0
    sequence: int = 0
    flags: int = 0

    @property
    def sequence_step(self) -> int:
        return sequence_step(self.flags, self.record_count)

    @classmethod
    def control(cls, kind: Kind, payload: bytes) -> Entry:
        return cls(kind, payload, crc32c(payload))


class FrameHeader(NamedTuple):
    kind: int
    flags: int
    payload_length: int
    payload_crc: int
    record_count: int
    index: int  # type: ignore[assignment]  # our word; tuple.index is never called
    term: int
    base_offset: int
    timestamp_min: int
    timestamp_max: int
    schema_id: int
    producer_epoch: int
    producer_id: int
    sequence: int
    transaction_id: int

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.record_count

    @property
    def frame_length(self) -> int:
        return HEADER_BYTES + (self.payload_length + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


class FrameError(Exception):
    """A frame is damaged. `position` counts from the start of the buffer that was read."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"{reason} at byte {position}")
        self.position = position
        self.reason = reason


class FrameTruncatedError(FrameError):
    """The buffer ends before the frame does; `wanted` bytes from `position` would hold all of it."""

    def __init__(self, position: int, wanted: int) -> None:
        super().__init__(position, "the frame is cut short")
        self.wanted = wanted


def padding(payload_length: int) -> bytes:
    return b"\0" * (-payload_length % ALIGNMENT)


def stamp(entry: Entry, index: int, term: int, base_offset: int) -> FrameHeader:
    """Gives an entry its place in the log."""
    kind, payload, payload_crc, record_count, *times, schema_id, epoch, producer_id, sequence, flags = entry
    place = (kind, flags, len(payload), payload_crc, record_count, index, term, base_offset)
    return tuple.__new__(FrameHeader, (*place, *times, schema_id, epoch, producer_id, sequence, 0))


def encode_header(header: FrameHeader) -> bytearray:
    kind, flags, length, payload_crc, *rest = header
    raw = bytearray(_HEADER.pack(MAGIC, VERSION, kind, flags, HEADER_BYTES, length, 0, payload_crc, *rest))
    _HEADER_CRC.pack_into(raw, _HEADER_CRC_AT, crc32c(raw[_HEADER_CRC_END:], crc32c(raw[:_HEADER_CRC_AT])))
    return raw


def encode_frame(header: FrameHeader, payload: Bytes) -> bytes:
    return b"".join((encode_header(header), payload, padding(len(payload))))


def decode_header(buffer: Bytes, position: int = 0) -> FrameHeader:
    """The header at `position`, checked. Raises FrameError where it is damaged or cut short."""
    if len(buffer) - position < HEADER_BYTES:
        raise FrameTruncatedError(position, HEADER_BYTES)
    found = _HEADER.unpack_from(buffer, position)
    magic, version, kind, flags, header_bytes, length, crc = found[:7]
    if magic != MAGIC:
        raise FrameError(position, "no frame begins here")
    raw = memoryview(buffer)[position : position + HEADER_BYTES]
    if crc32c(raw[_HEADER_CRC_END:], crc32c(raw[:_HEADER_CRC_AT])) != crc:
        raise FrameError(position, "wrong header checksum")
    # Past the checksum these were written so on purpose: by a newer version or a hostile peer.
    if version != VERSION or header_bytes != HEADER_BYTES:
        raise FrameError(position, f"unknown frame version {version}")
    if kind not in _KINDS or length > PAYLOAD_BYTES_MAX:
        raise FrameError(position, f"impossible frame of kind {kind} and {length} bytes")
    return tuple.__new__(FrameHeader, (kind, flags, length, *found[7:]))  # quicker than by its own name, as in `stamp`


def decode_frame(buffer: memoryview, position: int = 0) -> tuple[FrameHeader, memoryview]:
    """Header and payload at `position`, both checksums checked. The payload is a view, not a copy."""
    header = decode_header(buffer, position)
    return header, checked_payload(buffer, position, header)


def checked_payload(buffer: memoryview, position: int, header: FrameHeader) -> memoryview:
    """The payload of the frame at `position`, whose header is known to be right."""
    length = header.frame_length
    if len(buffer) - position < length:
        raise FrameTruncatedError(position, length)
    start = position + HEADER_BYTES
    payload = buffer[start : start + header.payload_length]
    if crc32c(payload) != header.payload_crc:
        raise FrameError(position, "wrong payload checksum")
    return payload


def walk_frames(buffer: memoryview) -> Iterator[tuple[int, FrameHeader, memoryview]]:
    """(position, header, payload) of each frame to the end of the buffer, which must end with a frame."""
    position = 0
    while position < len(buffer):
        header, payload = decode_frame(buffer, position)
        yield position, header, payload
        position += header.frame_length
