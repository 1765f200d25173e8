"""Records of the v1 API to Arrow batches and back: JSON, NDJSON, Arrow streams.

Rule: everything is judged before anything is stored, and every size before it is used. Loaded with the first request
that needs it, since it loads Arrow. Long work gives way to others now and then.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa
from msgspec import UNSET

from quiver.errors import CorruptLogError, InvalidRequestError, MessageTooLargeError
from quiver.manager.v1_media import ARROW, NDJSON
from quiver.manager.v1_shapes import RECORDS_MAX, HeaderIn, HeaderOut, Produce, RecordIn, RecordOut
from quiver.metadata.state import Topic
from quiver.topic_settings import check_key
from quiver.types import Record
from quiver.wire.batch_check import plain_bytes
from quiver.wire.frame import FrameError, Kind, walk_frames
from quiver.wire.records import batch_from_lists, batches_from_table, largest_record_bytes
from quiver.wire.rows import TABLE_SCHEMA, Rows, offset_column, rows_of, to_records

FETCH_SCHEMA: Final = TABLE_SCHEMA.remove(TABLE_SCHEMA.get_field_index("topic"))  # the path says it
_STEP_RECORDS: Final = 2_000  # between two chances for others
_HEADER_OVERHEAD_BYTES: Final = 8
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND: Final = datetime.timedelta(microseconds=1)

_produce_decoder = msgspec.json.Decoder(Produce)
_record_decoder = msgspec.json.Decoder(RecordIn)

# The partition of a record that names none, by its key.
Choose = Callable[[bytes | None], int]


class Limits(NamedTuple):
    message_bytes_max: int
    body_bytes_max: int
    partitions: int
    topic: Topic

    def check_key(self, has_key: bool) -> None:
        check_key(self.topic.name, self.topic.settings, has_key)


class _Columns:
    """Records of one partition, column by column."""

    __slots__ = ("headers", "keys", "timestamps", "values")

    def __init__(self) -> None:
        self.timestamps: list[int] = []
        self.keys: list[bytes | None] = []
        self.values: list[bytes | None] = []
        self.headers: list[list[tuple[str, bytes]] | None] = []

    def batch(self) -> pa.RecordBatch:
        keys = self.keys if any(key is not None for key in self.keys) else None
        headers = self.headers if any(self.headers) else None
        return batch_from_lists(self.timestamps, keys, self.values, headers)


async def batches_of(
    media: str, body: bytes, limits: Limits, now_us: int, choose: Choose, partition: int | None
) -> dict[int, list[pa.RecordBatch]]:
    """The records of a body by partition, in their order. `partition`: all belong there."""
    if media == ARROW:
        return _from_arrow(body, limits, now_us, choose, partition)
    records = await _lines(body) if media == NDJSON else _json(body)
    found: dict[int, _Columns] = {}
    for place, record in enumerate(records):
        if place % _STEP_RECORDS == _STEP_RECORDS - 1:
            await asyncio.sleep(0)
        try:
            _add(found, record, limits, now_us, choose, partition)
        except (InvalidRequestError, MessageTooLargeError) as error:
            where = f"record {place + 1}" if media == NDJSON else f"records[{place}]"
            raise type(error)(f"{where}: {error.message}", **error.facts) from error
    return {number: [columns.batch()] for number, columns in found.items()}


# -- JSON and NDJSON -------------------------------------------------------------------------------------------------


def _json(body: bytes) -> list[RecordIn]:
    try:
        records = _produce_decoder.decode(body).records
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not as it should be: {error}") from error
    if len(records) > RECORDS_MAX:
        raise _too_many()
    return records


async def _lines(body: bytes) -> list[RecordIn]:
    records: list[RecordIn] = []
    for number, line in enumerate(body.split(b"\n"), 1):
        if number % _STEP_RECORDS == 0:
            await asyncio.sleep(0)
        if not line or line.isspace():
            continue
        try:
            records.append(_record_decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequestError(f"line {number} is not a record: {error}") from error
        if len(records) > RECORDS_MAX:
            raise _too_many()
    if not records:
        raise InvalidRequestError("the body has no records")
    return records


def _add(
    found: dict[int, _Columns], record: RecordIn, limits: Limits, now_us: int, choose: Choose, partition: int | None
) -> None:
    value = _either("value", record.value, record.value_base64)
    key = _key(record)
    limits.check_key(key is not None)
    headers = _headers(record.headers)
    size = len(value or b"") + len(key or b"") + _header_bytes(headers)
    if size > limits.message_bytes_max:
        raise _too_large(size, limits)
    number = _place(record.partition, limits, partition)
    columns = found.setdefault(choose(key) if number is None else number, _Columns())
    columns.timestamps.append(_time_us(record.timestamp, now_us))
    columns.keys.append(key)
    columns.values.append(value)
    columns.headers.append(headers)


def _place(asked: int | None, limits: Limits, partition: int | None) -> int | None:
    if asked is None:
        return partition
    if partition is not None and asked != partition:
        raise InvalidRequestError(f"partition {asked} in a request for partition {partition}")
    if not 0 <= asked < limits.partitions:
        raise InvalidRequestError(f"there is no partition {asked}; the topic has {limits.partitions}")
    return asked


def _either(name: str, text: Any, raw: Any) -> bytes | None:
    if (text is UNSET) == (raw is UNSET):
        raise InvalidRequestError(f"one of {name} and {name}_base64 is needed, and not both")
    found: bytes | str | None = raw if text is UNSET else text
    return found.encode() if isinstance(found, str) else found


def _key(record: RecordIn) -> bytes | None:
    if record.key is not None and record.key_base64 is not None:
        raise InvalidRequestError("key and key_base64 cannot both be given")
    return record.key_base64 if record.key is None else record.key.encode()


def _headers(headers: dict[str, str] | list[HeaderIn] | None) -> list[tuple[str, bytes]] | None:
    if not headers:
        return None
    if isinstance(headers, dict):
        return [(name, value.encode()) for name, value in headers.items()]
    return [(header.name, _either("value", header.value, header.value_base64) or b"") for header in headers]


def _header_bytes(headers: Sequence[tuple[str, bytes | None]] | None) -> int:
    return sum(len(name.encode()) + len(value or b"") + _HEADER_OVERHEAD_BYTES for name, value in headers or ())


def _time_us(timestamp: int | datetime.datetime | None, now_us: int) -> int:
    if isinstance(timestamp, datetime.datetime):
        return (timestamp - _EPOCH) // _MICROSECOND
    return now_us if timestamp is None else timestamp


def _too_many() -> MessageTooLargeError:
    return MessageTooLargeError(f"a request takes at most {RECORDS_MAX} records", limit=RECORDS_MAX)


def _too_large(size: int, limits: Limits) -> MessageTooLargeError:
    limit = limits.message_bytes_max
    return MessageTooLargeError(f"a record of {size} bytes is over the limit of {limit}", size=size, limit=limit)


# -- Arrow in --------------------------------------------------------------------------------------------------------


def _from_arrow(
    body: bytes, limits: Limits, now_us: int, choose: Choose, partition: int | None
) -> dict[int, list[pa.RecordBatch]]:
    found: dict[int, list[pa.RecordBatch]] = {}
    total = 0
    for batch in _read_stream(body, limits):
        total += batch.num_rows
        if total > RECORDS_MAX:
            raise _too_many()
        asked = batch.column("partition").to_pylist() if "partition" in batch.schema.names else None
        if asked is not None:
            batch = batch.drop_columns(["partition"])
        for stored in batches_from_table(batch, now_us):
            _check_records(stored, limits)
            for number, part in _split(stored, asked, limits, choose, partition):
                found.setdefault(number, []).append(part)
    if not found:
        raise InvalidRequestError("the body has no records")
    return {number: [pa.concat_batches(parts)] if len(parts) > 1 else parts for number, parts in found.items()}


def _read_stream(body: bytes, limits: Limits) -> Iterator[pa.RecordBatch]:
    """The batches of a stream. What a message claims is checked before Arrow believes it."""
    try:
        reader = pa.ipc.MessageReader.open_stream(pa.py_buffer(body))
        schema = pa.ipc.read_schema(reader.read_next_message())
        _check_schema(schema)
        for message in _rest(reader):
            if message.type != "record batch":
                raise InvalidRequestError(f"a {message.type} message is not supported")
            size = plain_bytes(memoryview(message.metadata), memoryview(message.body or b""))
            if size > limits.body_bytes_max:
                # A few compressed bytes could claim all the memory there is.
                raise MessageTooLargeError(
                    f"a batch of {size} bytes is over the limit of {limits.body_bytes_max}",
                    size=size,
                    limit=limits.body_bytes_max,
                )
            batch = pa.ipc.read_record_batch(message, schema)
            if batch.num_rows > RECORDS_MAX:
                raise _too_many()
            batch.validate(full=True)
            yield batch
    except StopIteration:
        raise InvalidRequestError("the body is empty, not an Arrow IPC stream") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InvalidRequestError(f"the body is not a valid Arrow IPC stream: {error}") from error


def _rest(reader: pa.ipc.MessageReader) -> Iterator[pa.ipc.Message]:
    while True:
        try:
            yield reader.read_next_message()
        except StopIteration:
            return


def _check_schema(schema: pa.Schema) -> None:
    """Only types whose size in memory is bounded by the bytes that came: no dictionaries, no views, no extensions."""
    known = {"value": _is_bytes, "key": _is_bytes, "timestamp": _is_time, "headers": _is_headers}
    if len(set(schema.names)) != len(schema.names):
        raise InvalidRequestError("two columns have the same name")
    if "value" not in schema.names:
        raise InvalidRequestError(f"the stream needs a column 'value'; it has {schema.names[:20]}")
    for field in schema:
        fits = known.get(field.name, pa.types.is_integer if field.name == "partition" else None)
        if fits is None:
            raise InvalidRequestError(f"unknown column {field.name[:60]!r}; known are {[*known, 'partition']}")
        if not fits(field.type):
            raise InvalidRequestError(f"column {field.name!r} cannot be of type {str(field.type)[:60]}")


def _is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_binary(kind) or types.is_string(kind) or types.is_large_binary(kind) or types.is_large_string(kind)
    )


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_int64(kind))


def _is_headers(kind: pa.DataType) -> bool:
    if not pa.types.is_map(kind):
        return False
    names = pa.types.is_string(kind.key_type) or pa.types.is_large_string(kind.key_type)
    return bool(names and _is_bytes(kind.item_type))


def _check_records(batch: pa.RecordBatch, limits: Limits) -> None:
    limits.check_key(not batch.column("key").null_count)
    size = largest_record_bytes(batch)
    headers = batch.column("headers")
    if headers.null_count < len(headers):
        pairs = headers.to_pylist()
        if any(name is None for row in pairs for name, _ in row or ()):
            raise InvalidRequestError("a header has no name")
        size = max(size, *map(_header_bytes, pairs))
    if size > limits.message_bytes_max:
        raise _too_large(size, limits)


def _split(
    batch: pa.RecordBatch, asked: list[int | None] | None, limits: Limits, choose: Choose, partition: int | None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    if asked is None and (partition is not None or limits.partitions == 1):
        yield partition or 0, batch
        return
    rows: dict[int, list[int]] = {}
    keys = batch.column("key").to_pylist()
    for row, (asked_one, key) in enumerate(zip(asked or [None] * batch.num_rows, keys, strict=True)):
        number = _place(asked_one, limits, partition)
        rows.setdefault(choose(key) if number is None else number, []).append(row)
    for number, taken in rows.items():
        yield number, batch if len(taken) == batch.num_rows else batch.take(pa.array(taken, pa.int32()))


# -- out -------------------------------------------------------------------------------------------------------------


def pieces_of(payload: Sequence[Any], offset: int, records_max: int) -> tuple[list[Rows], int]:
    """The records from `offset` on in a fetch's frames, and the offset to go on at."""
    found: list[Rows] = []
    try:
        for _, header, data in walk_frames(memoryview(b"".join(payload))):
            if header.kind != Kind.DATA or header.next_offset <= offset:
                continue
            rows = rows_of(header, data).since(offset)
            taken = rows.slice(0, records_max)
            found.append(taken)
            records_max -= len(taken.offsets)
            if len(taken.offsets) < len(rows.offsets):
                return found, taken.offsets[-1] + 1
            offset = header.next_offset
            if records_max <= 0:
                break
    except FrameError as error:
        raise CorruptLogError(f"a stored batch cannot be read: {error}") from error
    return found, offset


async def records_out(partition: int, pieces: Sequence[Rows], *, all_base64: bool) -> list[RecordOut]:
    found: list[RecordOut] = []
    for piece in pieces:
        for start in range(0, len(piece.offsets), _STEP_RECORDS):
            records = to_records("", partition, piece.slice(start, _STEP_RECORDS))
            found.extend(_record_out(record, all_base64) for record in records)
            await asyncio.sleep(0)
    return found


def _record_out(record: Record, all_base64: bool) -> RecordOut:
    key, key_base64 = _text_or_bytes(record.key, all_base64)
    value, value_base64 = _text_or_bytes(record.value, all_base64)
    headers: Any = UNSET
    if record.headers:
        headers = [HeaderOut(name, *_text_or_bytes(header, all_base64)) for name, header in record.headers]
    return RecordOut(record.partition, record.offset, record.timestamp, key, key_base64, value, value_base64, headers)


def _text_or_bytes(raw: bytes | None, all_base64: bool) -> tuple[Any, Any]:
    if raw is None:
        return None, UNSET
    if not all_base64:
        try:
            return raw.decode(), UNSET
        except UnicodeDecodeError:
            pass
    return UNSET, raw


def arrow_stream(partition: int, pieces: Sequence[Rows]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, FETCH_SCHEMA) as writer:
        for piece in pieces:
            partitions = pa.repeat(pa.scalar(partition, pa.int32()), len(piece.offsets))
            offsets = offset_column(piece.offsets)
            writer.write_batch(
                pa.RecordBatch.from_arrays([partitions, offsets, *piece.batch.columns], schema=FETCH_SCHEMA)
            )
    return bytes(sink.getvalue())
