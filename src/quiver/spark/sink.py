"""Writing to a topic, from a batch and from a stream. docs/spark.md says which columns, and what is stored once.

A partition knows a batch by four things: the sink, the task, the number of the micro-batch and the place of the batch
among those of its task (decision 13). The sink is the id of the query, which Spark keeps in the checkpoint.

Rule: objects here are pickled by Spark and sent to executors, so they hold options and plain values, never clients.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from quiver.errors import InvalidRequestError
from quiver.spark.options import WriteOptions
from quiver.spark.writing import TaskName, write_rows

_COLUMNS: Final = {
    "key": "string or binary",
    "value": "string or binary",
    "headers": "map<string, binary>",
    "partition": "int",
    "timestamp": "timestamp",
}


class Written(WriterCommitMessage):
    def __init__(self, rows: int) -> None:
        self.rows = rows


def check_frame(options: WriteOptions, schema: StructType) -> None:
    """A frame must be one of messages."""
    names = schema.fieldNames()
    if "value" not in names or set(names) - set(_COLUMNS):
        others = ", ".join(name for name in _COLUMNS if name != "value")
        raise InvalidRequestError(
            f"a sink takes the columns value, and optionally {others}; this frame has {sorted(names)}"
        )
    for field in schema.fields:
        if field.name == "value" and isinstance(field.dataType, (ArrayType, MapType, StructType)):
            if not options.json_values:
                raise InvalidRequestError(
                    "the column value of a sink is string or binary; a struct is written with "
                    ".option('valueFormat', 'json')"
                )
        elif field.name == "value" and options.json_values:
            raise InvalidRequestError("valueFormat=json is for a value that is a struct, a map or an array")
        elif not _fits(field.name, field.dataType):
            found = field.dataType.simpleString()
            raise InvalidRequestError(f"the column {field.name} of a sink is {_COLUMNS[field.name]}, not {found}")


def _fits(name: str, kind: DataType) -> bool:
    if name == "timestamp":
        return isinstance(kind, TimestampType)
    if name == "partition":
        return isinstance(kind, (ShortType, IntegerType, LongType))
    if name == "headers":
        return (
            isinstance(kind, MapType)
            and isinstance(kind.keyType, StringType)
            and isinstance(kind.valueType, (StringType, BinaryType))
        )
    return isinstance(kind, (StringType, BinaryType))


class QuiverWriter(DataSourceArrowWriter):
    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_frame(options, schema)
        self._options = options
        # Made once, on the driver: all attempts of a task share it, and no other run has it.
        self._sink = f"job/{uuid.uuid4().hex}" if options.sink is None else f"sink/{options.sink}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        context = TaskContext.get()
        name = TaskName(self._sink, context.partitionId() if context else 0, self._options.batch)
        return Written(write_rows(self._options, name, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Rows are durable when written; there is nothing left to do."""

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Rows of tasks that finished stay: a log cannot take them back."""


class QuiverStreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        if options.sink is not None:
            raise InvalidRequestError("a stream has the name of its query: option sink is for batch writes")
        check_frame(options, schema)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        context = TaskContext.get()
        assert context is not None
        # Both are kept in the checkpoint, so a replayed micro-batch has the same name after a restart.
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if query is None or batch is None:
            raise InvalidRequestError("Spark did not tell the query and batch of this task; it cannot write just once")
        name = TaskName(f"query/{query}", context.partitionId(), int(batch))
        return Written(write_rows(self._options, name, iterator))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Rows are durable when written; there is nothing left to do."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """The micro-batch will be run again; what is stored of it will be recognised."""
