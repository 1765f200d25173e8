"""Cuts the rows of a task into pieces: each becomes one batch of a partition, or of several by key.

A task that runs again, or a micro-batch that is replayed, must make the same batches, because the broker knows a batch
by its place among those of its producer.

Rule: pure. Where a piece ends depends on the rows alone, never on how Spark handed them over.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from quiver.config import MIB

# Rows of a task that fit into one piece are stored whole or not at all, in each partition: if they come in another
# order when the task runs again, as they may behind a shuffle, they are still recognised. So a piece is large.
PIECE_BYTES_MAX: Final = 4 * MIB
# Counted for a row, and for a header, beside its bytes. More than Arrow takes, so that a piece always fits a batch.
ROW_BYTES: Final = 64
HEADER_BYTES: Final = 16


def cut(batches: Iterable[pa.RecordBatch], bytes_max: int = PIECE_BYTES_MAX) -> Iterator[pa.Table]:
    """The same rows in tables of one chunk each, none over `bytes_max` unless a single row is."""
    waiting: list[pa.RecordBatch] = []
    filled = 0
    for batch in batches:
        ends = pc.cumulative_sum(row_bytes(batch))
        at, before = 0, 0  # rows of this batch that are placed, and what they take
        while at < batch.num_rows:
            stop = bisect.bisect_right(ends, before + bytes_max - filled, lo=at, key=lambda end: end.as_py())
            if stop == at and not waiting:
                stop += 1
            if stop > at:
                waiting.append(batch.slice(at, stop - at))
                filled += ends[stop - 1].as_py() - before
                at, before = stop, ends[stop - 1].as_py()
            if at < batch.num_rows:
                yield pa.Table.from_batches(waiting).combine_chunks()
                waiting, filled = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting).combine_chunks()


def row_bytes(batch: pa.RecordBatch) -> pa.Int64Array:
    """What each row counts for."""
    total = pa.repeat(pa.scalar(ROW_BYTES, pa.int64()), batch.num_rows)
    for name in ("key", "value"):
        if name in batch.schema.names:
            total = pc.add(total, _lengths(batch.column(name)))
    if "headers" in batch.schema.names:
        total = pc.add(total, _headers_bytes(batch.column("headers")))
    return total


def _lengths(column: pa.Array) -> pa.Int64Array:
    return pc.binary_length(column).cast(pa.int64()).fill_null(0)


def _headers_bytes(column: pa.MapArray) -> pa.Int64Array:
    each = pc.add(pc.add(_lengths(column.keys), _lengths(column.items)), HEADER_BYTES)
    ends = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(each)])
    offsets = column.offsets
    bytes_of = pc.subtract(ends.take(offsets[1:]), ends.take(offsets[:-1]))
    # A null map may span entries that nobody sees.
    return pc.if_else(column.is_valid(), bytes_of, pa.scalar(0, pa.int64()))
