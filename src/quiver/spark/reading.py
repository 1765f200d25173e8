"""Reads a range of one partition in an executor and gives it to Spark as Arrow batches.

Rule: a task holds a range and plain options. It finds the brokers by itself, may read from any replica, and goes on
with another when one dies; it ends with all rows of its range or with an error.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from quiver.client.range_reader import RangeReader
from quiver.errors import InvalidRequestError, OffsetOutOfRangeError
from quiver.spark.offsets import OffsetRange
from quiver.spark.options import ARROW_SCHEMA, ReadOptions
from quiver.spark.row_filter import RowFilter
from quiver.wire.records import SCHEMA
from quiver.wire.rows import Rows, offset_column

logger = logging.getLogger("quiver.spark")

_ROWS_MIN: Final = 4095
_RECORD_COLUMNS: Final = tuple(SCHEMA.names)
_PATIENCE_S: Final = 120.0  # without a record, before a task gives up


def read_range(
    options: ReadOptions, columns: tuple[str, ...], rows: RowFilter, wanted: OffsetRange | None
) -> Iterator[pa.RecordBatch]:
    """All rows of a range that the filter lets through, in order."""
    if wanted is None:  # what Spark makes of a plan without any partition
        return
    fields = [ARROW_SCHEMA.field(name) for name in columns]
    schema, places = pa.schema(fields), [(field.name, field.type) for field in fields]
    position = wanted.start
    while position < wanted.end:
        try:
            for found in _reader(options, wanted, position):
                made = _with_place(wanted, found, places, schema, rows)
                position = found.offsets[-1] + 1
                if made.num_rows:
                    yield made
            return
        except OffsetOutOfRangeError as error:
            position = _after_loss(options, wanted, position, error)


def _reader(options: ReadOptions, wanted: OffsetRange, position: int) -> Iterator[Rows]:
    # Tasks of one partition begin with different replicas, and so do tasks of different partitions.
    turn = wanted.partition + wanted.start // max(1, wanted.end - wanted.start)
    where = (wanted.topic, wanted.partition, position, wanted.end)
    with RangeReader(options.servers, *where, uid=wanted.uid, turn=turn, patience=_PATIENCE_S) as reader:
        yield from reader


def _after_loss(options: ReadOptions, wanted: OffsetRange, position: int, error: OffsetOutOfRangeError) -> int:
    earliest = error.facts.get("earliest")
    if not isinstance(earliest, int) or earliest <= position:
        raise error
    lost = min(earliest, wanted.end) - position
    what = f"{lost} records of {wanted.topic}-{wanted.partition} from offset {position} on"
    if options.fail_on_data_loss:
        raise InvalidRequestError(
            f"{what} were removed by retention before they were read; with failOnDataLoss=false they are left out"
        ) from error
    logger.warning("records_left_out topic=%s partition=%d count=%d", wanted.topic, wanted.partition, lost)
    return min(earliest, wanted.end)


def _with_place(
    wanted: OffsetRange, found: Rows, places: list[tuple[str, pa.DataType]], schema: pa.Schema, rows: RowFilter
) -> pa.RecordBatch:
    """`places`: name and type of each column that is wanted, as `schema` has them, where they cost less to look up."""
    count = len(found.offsets)
    columns = dict(zip(_RECORD_COLUMNS, found.batch.columns, strict=True))
    arrays = []
    for name, kind in places:
        if name == "topic":
            arrays.append(_constant(wanted.topic, kind, count))
        elif name == "partition":
            arrays.append(_constant(wanted.partition, kind, count))
        elif name == "offset":
            arrays.append(offset_column(found.offsets))
        else:
            arrays.append(columns[name])
    made = pa.RecordBatch.from_arrays(arrays, schema=schema)
    mask = rows.mask(columns["timestamp"])
    return made if mask is None else made.filter(mask)


def _constant(value: str | int, kind: pa.DataType, count: int) -> pa.Array:
    """The same value in every row: a slice of a longer column costs a tenth of making one for each batch."""
    return _longer(value, kind, 1 << max(count - 1, _ROWS_MIN).bit_length()).slice(0, count)


@functools.lru_cache(maxsize=16)
def _longer(value: str | int, kind: pa.DataType, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), count)
