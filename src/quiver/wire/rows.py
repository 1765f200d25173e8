"""Stored records with their offsets, as a reader takes them out of a frame.

A batch as it was produced has its records one after the other. Compaction takes records out of it: then the frame has
another schema id, and its batch one more column, `place`, that says which of the batch's offsets each record has. A
batch of which nothing is left has no payload. The frame covers the same offsets as before, so a reader goes on behind
all of them.

Rule: columns, not rows. Nothing here loops over records in Python except where the caller asked for Record objects.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple

import pyarrow as pa

from quiver.errors import CorruptLogError
from quiver.types import Record
from quiver.wire.batch_check import SCHEMA_ID_COMPACTED
from quiver.wire.frame import FrameHeader
from quiver.wire.records import SCHEMA, decode_batch, encode_batch

COMPACTED_SCHEMA: Final = pa.schema([*SCHEMA, pa.field("place", pa.int32(), nullable=False)])
TABLE_SCHEMA: Final = pa.schema(
    [
        ("topic", pa.dictionary(pa.int32(), pa.string())),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        *SCHEMA,
    ]
)


class Rows(NamedTuple):
    """Records of one frame, in order; `batch` has the columns of a record."""

    offsets: Sequence[int]
    batch: pa.RecordBatch

    def slice(self, start: int, count: int | None = None) -> Rows:
        stop = None if count is None else start + count
        return Rows(self.offsets[start:stop], self.batch.slice(start, count)) if start or count is not None else self

    def since(self, offset: int) -> Rows:
        """Those at that offset and behind it."""
        if self.offsets and self.offsets[0] >= offset:
            return self
        return self.slice(bisect_left(self.offsets, offset))


def rows_of(header: FrameHeader, payload: memoryview) -> Rows:
    """The records of a frame. Raises CorruptLogError where they cannot be read."""
    if header.schema_id != SCHEMA_ID_COMPACTED:
        batch = decode_batch(payload)
        return Rows(range(header.base_offset, header.base_offset + batch.num_rows), batch)
    if not payload:
        return Rows((), _empty())
    batch = decode_batch(payload, COMPACTED_SCHEMA)
    places: list[int] = batch.column(len(SCHEMA)).to_pylist()
    if places != sorted(set(places)) or not 0 <= places[0] <= places[-1] < header.record_count:
        raise CorruptLogError("a stored batch cannot be read: its records are not where they can be")
    offsets = [header.base_offset + place for place in places]
    return Rows(offsets, batch.select(SCHEMA.names))


def encode_rows(header: FrameHeader, rows: Rows, compression: str | None) -> memoryview:
    """The payload of a frame that has only these of its records left; `header` is as it was."""
    if not rows.offsets:
        return memoryview(b"")
    places = pa.array([offset - header.base_offset for offset in rows.offsets], pa.int32())
    return encode_batch(pa.RecordBatch.from_arrays([*rows.batch.columns, places], schema=COMPACTED_SCHEMA), compression)


@functools.cache
def _empty() -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in SCHEMA], schema=SCHEMA)


def to_table(topic: str, partition: int, rows: Rows) -> pa.RecordBatch:
    """The records with their place in the log as columns."""
    offsets, count = rows.offsets, len(rows.offsets)
    topic_column = pa.DictionaryArray.from_arrays(pa.repeat(_int32(0), count), pa.array([topic], pa.string()))
    partition_column = pa.repeat(_int32(partition), count)
    columns = [topic_column, partition_column, offset_column(offsets), *rows.batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA)


def offset_column(offsets: Sequence[int]) -> pa.Array:
    if isinstance(offsets, range):
        return pa.arange(offsets.start, offsets.stop)
    return pa.array(offsets, pa.int64())


@functools.lru_cache(maxsize=1024)
def _int32(value: int) -> pa.Scalar:
    return pa.scalar(value, pa.int32())


def to_records(topic: str, partition: int, rows: Rows) -> list[Record]:
    count = len(rows.offsets)
    timestamp, key, value, headers = rows.batch.columns
    keys = repeat(None, count) if key.null_count == count else key.to_pylist()
    if headers.null_count == count:
        header_values: Any = repeat(())
    else:
        header_values = (tuple(pairs) if pairs else () for pairs in headers.to_pylist())
    return list(
        map(
            Record,
            repeat(topic),
            repeat(partition),
            rows.offsets,
            timestamp.view(pa.int64()).to_pylist(),
            keys,
            value.to_pylist(),
            header_values,
        )
    )
