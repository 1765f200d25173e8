"""Checks that a payload is one Arrow record batch of our schema, without Arrow and without touching a record.

Brokers never unpack a batch, but they must not store one that lies about its count or that no reader could open: it
would stop every consumer of the partition. A few dozen bytes of flatbuffer metadata say all that is needed.

Rule: every number is checked before it is used as a position; bad input raises InvalidBatchError and nothing else.
"""

from __future__ import annotations

import struct
from typing import Final

from quiver.errors import InvalidBatchError

SCHEMA_ID_V1: Final = 1
SCHEMA_ID_COMPACTED: Final = 2  # never produced: what compaction left of a batch (wire/rows.py)
# timestamp, key, value, headers, its entries, their keys and values
_NODES: Final = 7
# validity for each node, offsets for five of them, data for timestamp, key, value, header keys and header values
_BUFFERS: Final = 17
_KEYS: Final = 1  # their place among the nodes
_CODECS: Final = {0: "lz4", 1: "zstd"}
_TIMESTAMPS: Final = 1  # the buffer of theirs: eight bytes for each record
_CONTINUATION: Final = 0xFFFFFFFF
_RECORD_BATCH: Final = 3  # MessageHeader.RecordBatch

# Metadata that was found right, with rows and length of the body: small batches of one producer repeat it. What is said
# about a compressed batch depends on its body too, so that is looked at each time.
_shapes: dict[bytes, tuple[int, int]] = {}
_SHAPES_MAX: Final = 1024
_SHAPE_BYTES_MAX: Final = 1024

_HEAD = struct.Struct("<II")  # continuation mark, bytes of the metadata
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_I32 = struct.Struct("<i")
_I64 = struct.Struct("<q")
_PAIR = struct.Struct("<qq")


def check_batch(payload: memoryview, record_count: int, schema_id: int) -> None:
    if schema_id != SCHEMA_ID_V1:
        raise InvalidBatchError(f"unknown schema id {schema_id}")
    try:
        continuation, metadata_bytes = _HEAD.unpack_from(payload)
        if continuation == _CONTINUATION and metadata_bytes <= _SHAPE_BYTES_MAX:
            shape = bytes(payload[_HEAD.size : _HEAD.size + metadata_bytes])
            if _shapes.get(shape) == (record_count, len(payload) - _HEAD.size - metadata_bytes):
                return
        rows = _rows(payload)
    except (struct.error, IndexError) as error:
        raise InvalidBatchError("the batch is not an Arrow record batch message") from error
    if rows != record_count:
        raise InvalidBatchError(f"the batch holds {rows} records, the request says {record_count}")


def _rows(payload: memoryview) -> int:
    if len(payload) < 16 or _U32.unpack_from(payload, 0)[0] != _CONTINUATION:
        raise InvalidBatchError("the batch is not an Arrow record batch message")
    metadata_bytes = _U32.unpack_from(payload, 4)[0]
    body_at = 8 + metadata_bytes
    if body_at > len(payload):
        raise InvalidBatchError("the batch is cut short")
    metadata = payload[8:body_at]
    shape = bytes(metadata) if metadata_bytes <= _SHAPE_BYTES_MAX else b""
    message = _U32.unpack_from(metadata, 0)[0]
    kind_at, header_at, body_length_at = (_field(metadata, message, slot) for slot in (1, 2, 3))
    if not kind_at or not header_at or metadata[kind_at] != _RECORD_BATCH:
        raise InvalidBatchError("the batch is not an Arrow record batch message")
    body_bytes = _I64.unpack_from(metadata, body_length_at)[0] if body_length_at else 0
    if body_bytes != len(payload) - body_at:
        raise InvalidBatchError("the batch is not as long as it says")
    batch = header_at + _U32.unpack_from(metadata, header_at)[0]
    length_at = _field(metadata, batch, 0)
    rows = _I64.unpack_from(metadata, length_at)[0] if length_at else 0
    nodes = _vector(metadata, _field(metadata, batch, 1), _NODES)
    buffers = _vector(metadata, _field(metadata, batch, 2), _BUFFERS)
    for top_level in range(4):
        if _PAIR.unpack_from(metadata, nodes + top_level * _PAIR.size)[0] != rows:
            raise InvalidBatchError("the columns of the batch differ in length")
    for start, length in _PAIR.iter_unpack(metadata[buffers : buffers + _BUFFERS * _PAIR.size]):
        if start < 0 or length < 0 or start + length > body_bytes:
            raise InvalidBatchError("a column of the batch lies outside it")
    start, length = _PAIR.unpack_from(metadata, buffers + _TIMESTAMPS * _PAIR.size)
    compressed = _field(metadata, batch, 3)
    if compressed and length:
        # A compressed buffer begins with its real length; -1 says that it is stored as it is.
        plain = _I64.unpack_from(payload, body_at + start)[0]
        length = length - _I64.size if plain == -1 else plain
    if rows * _I64.size > length:
        # A few bytes that claim a billion records would use up a billion offsets.
        raise InvalidBatchError(f"the batch has no room for the {rows} records it claims")
    if shape and not compressed:
        if len(_shapes) >= _SHAPES_MAX:
            _shapes.clear()
        _shapes[shape] = int(rows), body_bytes
    return int(rows)


def _field(data: memoryview, table: int, slot: int) -> int:
    """Position of a flatbuffer table's field, 0 when it is absent."""
    vtable = table - _I32.unpack_from(data, table)[0]
    if vtable < 0:
        raise InvalidBatchError("the batch's metadata is damaged")
    entry = 4 + 2 * slot
    if entry + 2 > _U16.unpack_from(data, vtable)[0]:
        return 0
    relative = _U16.unpack_from(data, vtable + entry)[0]
    return table + relative if relative else 0


def _vector(data: memoryview, field: int, count: int) -> int:
    """Position of the first element of a vector that must have `count` elements of two 64-bit numbers."""
    if not field:
        raise InvalidBatchError("the batch does not have the columns of a message")
    vector: int = field + _U32.unpack_from(data, field)[0]
    if _U32.unpack_from(data, vector)[0] != count or vector + 4 + count * _PAIR.size > len(data):
        raise InvalidBatchError("the batch does not have the columns of a message")
    return vector + 4


def count_missing_keys(payload: memoryview) -> int:
    """How many records of a batch that was checked have no key, as readers see it."""
    metadata = payload[8 : 8 + _U32.unpack_from(payload, 4)[0]]
    nodes = _vector(metadata, _field(metadata, _batch(metadata), 1), _NODES)
    return int(_PAIR.unpack_from(metadata, nodes + _KEYS * _PAIR.size)[1])


def compression_of(payload: memoryview) -> str | None:
    """How the columns of a batch that was checked are compressed."""
    metadata = payload[8 : 8 + _U32.unpack_from(payload, 4)[0]]
    at = _field(metadata, _batch(metadata), 3)
    if not at:
        return None
    codec = _field(metadata, at + _U32.unpack_from(metadata, at)[0], 0)
    return _CODECS.get(metadata[codec] if codec else 0)


def _batch(metadata: memoryview) -> int:
    """The table that describes the record batch."""
    at = _field(metadata, _U32.unpack_from(metadata, 0)[0], 2)
    return int(at + _U32.unpack_from(metadata, at)[0])


def plain_bytes(metadata: memoryview, body: memoryview) -> int:
    """The room that the columns of any record batch message take in memory, compressed or not.

    A reader makes that room as the message says it, before it has seen the data.
    """
    try:
        header_at = _field(metadata, _U32.unpack_from(metadata, 0)[0], 2)
        batch = header_at + _U32.unpack_from(metadata, header_at)[0]
        buffers_at = _field(metadata, batch, 2)
        if not _field(metadata, batch, 3) or not buffers_at:
            return len(body)
        vector = buffers_at + _U32.unpack_from(metadata, buffers_at)[0]
        count = _U32.unpack_from(metadata, vector)[0]
        total = 0
        for place in range(count):
            start, length = _PAIR.unpack_from(metadata, vector + 4 + place * _PAIR.size)
            if length:
                plain = _I64.unpack_from(body, start)[0]
                total += length if plain == -1 else plain
                if start < 0 or length < 0 or plain < -1:
                    raise InvalidBatchError("a column of the batch lies outside it")
    except (struct.error, IndexError) as error:
        raise InvalidBatchError("the batch is not an Arrow record batch message") from error
    return int(total)
