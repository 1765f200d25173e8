"""The Arrow record codec: Python values or Arrow tables to one payload, and payloads to Arrow batches.

Rule: columns, not rows. Nothing here loops over records in Python.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from quiver.errors import CorruptLogError, InvalidRequestError
from quiver.types import Headers

SCHEMA: Final = pa.schema(
    [
        ("timestamp", pa.timestamp("us", "UTC")),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.map_(pa.string(), pa.binary())),
    ]
)
_INT64: Final = pa.int64()
_BINARY: Final = pa.binary()
_TIMESTAMP: Final = SCHEMA.field("timestamp").type
_HEADERS: Final = SCHEMA.field("headers").type
COMPRESSIONS: Final = (None, "lz4", "zstd")
_STREAM_END_BYTES: Final = 8


def batch_from_lists(
    timestamps: Sequence[int], keys: Sequence[bytes | None] | None, values: Any, headers: Sequence[Any] | None
) -> pa.RecordBatch:
    """One batch; `keys` and `headers` None stand for none at all, one timestamp stands for all."""
    value_column = values if isinstance(values, pa.Array) else pa.array(values, _BINARY)
    count = len(value_column)
    if len(timestamps) == 1 and count > 1:
        timestamp_column = pa.repeat(pa.scalar(timestamps[0], _TIMESTAMP), count)
    else:
        timestamp_column = pa.array(timestamps, _INT64).view(_TIMESTAMP)
    key_column = pa.nulls(count, _BINARY) if keys is None else pa.array(keys, _BINARY)
    header_column = no_headers(count) if headers is None else pa.array(headers, _HEADERS)
    return pa.RecordBatch.from_arrays([timestamp_column, key_column, value_column, header_column], schema=SCHEMA)


def no_headers(count: int) -> pa.Array:
    """A headers column of nulls. pa.nulls would give every null an entry of its own: eight bytes a record."""
    return _few_without_headers().slice(0, count) if count <= _FEW else _null_headers(count)


def _null_headers(count: int) -> pa.Array:
    offsets = pa.repeat(pa.scalar(0, pa.int32()), count + 1)
    mask = pa.repeat(pa.scalar(True), count)
    return pa.MapArray.from_arrays(offsets, pa.nulls(0, pa.string()), pa.nulls(0, pa.binary()), mask=mask)


_FEW: Final = 4096


@functools.cache
def _few_without_headers() -> pa.Array:
    """Most batches are small and have none: a slice of this costs a tenth of making it.

    Made when first needed, like all that is made of Python values here: with the first of them pyarrow loads pandas,
    where that is installed, for a second.
    """
    return _null_headers(_FEW)


def batches_from_table(table: pa.Table | pa.RecordBatch, now_us: int) -> list[pa.RecordBatch]:
    """Any table with a `value` column, as batches of our schema. `key`, `timestamp` and `headers` are optional."""
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    names = set(table.column_names)
    if "value" not in names:
        raise InvalidRequestError(f"the table needs a column 'value'; it has {sorted(names)}")
    if unknown := names - set(SCHEMA.names):
        raise InvalidRequestError(f"unknown columns {sorted(unknown)}; known are {SCHEMA.names}")
    columns = []
    for field in SCHEMA:
        if field.name in names:
            try:
                column = table.column(field.name).cast(field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise InvalidRequestError(f"column {field.name!r} does not convert to {field.type}: {error}") from error
            if field.name == "timestamp":
                column = column.fill_null(pa.scalar(now_us, field.type))
        elif field.name == "timestamp":
            column = pa.repeat(pa.scalar(now_us, field.type), table.num_rows)
        elif field.name == "headers":
            column = no_headers(table.num_rows)
        else:
            column = pa.nulls(table.num_rows, field.type)
        columns.append(column)
    return [batch for batch in pa.Table.from_arrays(columns, schema=SCHEMA).to_batches() if batch.num_rows]


def largest_record_bytes(batch: pa.RecordBatch) -> int:
    """Bytes of the largest value together with its own key."""
    lengths = [pc.fill_null(pc.binary_length(batch.column(name)), 0) for name in ("key", "value")]
    return int(pc.max(pc.add(*lengths)).as_py())


def split_batch(batch: pa.RecordBatch, bytes_max: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Slices of about `bytes_max` bytes and their sizes, a quarter more at most where records allow it; no copies."""
    size = batch.nbytes
    # The slack keeps even parts of an even batch from being halved because one is a byte over.
    if size <= bytes_max + bytes_max // 4 or batch.num_rows == 1:
        yield batch, size
        return
    parts = min(batch.num_rows, -(-size // bytes_max))
    step = -(-batch.num_rows // parts)
    for start in range(0, batch.num_rows, step):
        yield from split_batch(batch.slice(start, step), bytes_max)


def encode_batch(batch: pa.RecordBatch, compression: str | None = None) -> memoryview:
    """The batch as one IPC message, without schema: the schema id of its frame stands for that."""
    if compression is None:
        return memoryview(batch.serialize()).cast("B")
    # Only the stream writer compresses; its stream is schema, batch, end mark.
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue()).cast("B")[_head_bytes(batch.schema) : -_STREAM_END_BYTES]


@functools.lru_cache(maxsize=4)
def _head_bytes(schema: pa.Schema) -> int:
    return int(schema.serialize().size)


def encode_single(timestamp: int, value: bytes) -> memoryview:
    """The payload of one record without key and headers: the bytes of `encode_batch`, at a fiftieth of its cost.

    Between two batches with values of one length only the timestamp and the value differ, and both lie where they
    always do.
    """
    if len(value) > _TEMPLATE_VALUE_BYTES_MAX:
        return encode_batch(batch_from_lists([timestamp], None, [value], None))
    template, timestamp_at, value_at = _template(len(value))
    payload = bytearray(template)
    _TIMESTAMP_BYTES.pack_into(payload, timestamp_at, timestamp)
    payload[value_at : value_at + len(value)] = value
    return memoryview(payload)


@functools.lru_cache(maxsize=1024)
def _template(value_bytes: int) -> tuple[bytes, int, int]:
    """A payload with a value of that length, and where its timestamp and its value lie."""
    return bytes(encode_batch(batch_from_lists([0], None, [bytes(value_bytes)], None))), *_places()


@functools.cache
def _places() -> tuple[int, int]:
    mark, value = 0x5452414D454D4954, b"a value to find"
    payload = bytes(encode_batch(batch_from_lists([mark], None, [value], None)))
    return payload.index(_TIMESTAMP_BYTES.pack(mark)), payload.index(value)


# Longer values do not gain from it, and the templates would not stay small.
_TEMPLATE_VALUE_BYTES_MAX: Final = 1024
_TIMESTAMP_BYTES: Final = struct.Struct("<q")


def timestamp_range(batch: pa.RecordBatch) -> tuple[int, int]:
    found = pc.min_max(batch.column("timestamp").view(pa.int64())).as_py()
    return found["min"], found["max"]


def decode_batch(payload: memoryview, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    """The batch, sharing the payload's memory, checked so that no access to it can leave that memory."""
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(payload), schema)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise CorruptLogError(f"a stored batch cannot be read: {error}") from error
    return batch


def check_headers(headers: object) -> Headers:
    """Headers as the codec takes them: pairs of str and bytes, given as a mapping or a sequence of pairs."""
    pairs: Any = headers.items() if isinstance(headers, Mapping) else headers
    try:
        checked = tuple((name, bytes_of(value, "a header value")) for name, value in pairs)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError("headers are a mapping or a sequence of (str, bytes) pairs") from error
    for name, _ in checked:
        if not isinstance(name, str):
            raise InvalidRequestError(f"a header name is a str, not {type(name).__name__}")
    return checked


def bytes_of(value: object, what: str) -> bytes:
    if type(value) is bytes:
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    hint = "; encode it first: value.encode()" if isinstance(value, str) else ""
    raise InvalidRequestError(f"{what} is bytes, not {type(value).__name__}{hint}")
