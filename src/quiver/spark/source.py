"""`format("quiver")`: what Spark calls to plan, read and write.

Options for reading: servers, topic (names joined by commas), startingOffsets, endingOffsets (batch only), rowsPerTask,
maxRowsPerTrigger (stream only). For writing: servers, topic; columns value (string or binary) and optionally key,
timestamp, headers.

A streaming query writes each row once, also when its last micro-batch is replayed after a crash. It must be the same
query for that: the same rowsPerTask, and rows in the same order in each task, unless a task writes no more than a few
megabytes (`pieces.PIECE_BYTES_MAX`): then their order does not matter.

Rule: objects here are pickled by Spark and sent to executors, so they hold options and plain values, never clients.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import BinaryType, DataType, MapType, StringType, StructType, TimestampType

from quiver import Admin, Consumer, Producer
from quiver.config import BATCH_BYTES_MAX, MESSAGE_BYTES_MAX
from quiver.errors import InvalidRequestError, MessageTooLargeError, QuiverError, RequestTimeoutError
from quiver.spark.offsets import OffsetRange, Offsets, limit_rows, ranges, resolve
from quiver.spark.pieces import ROW_BYTES, cut, row_bytes
from quiver.types import check_topic_name
from quiver.wire.records import SCHEMA

SPARK_SCHEMA: Final = (
    "topic string, partition int, offset bigint, timestamp timestamp, key binary, value binary, "
    "headers map<string, binary>"
)
ARROW_SCHEMA: Final = pa.schema([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), *SCHEMA])
_POLL_TIMEOUT_S: Final = 5.0
_READ_PATIENCE: Final = 24  # polls without a record before a task gives up: two minutes
_REQUEST_TIMEOUT_S: Final = 60.0
_DELIVERY_TIMEOUT_S: Final = 600.0  # a task waits so long for a node that is away, then it fails


class Options:
    """The source's options, checked."""

    def __init__(self, options: Any) -> None:
        self.servers = self._required(options, "servers")
        self.topics = [check_topic_name(name.strip()) for name in self._required(options, "topic").split(",")]
        self.starting: str = options.get("startingOffsets", "")
        self.ending: str = options.get("endingOffsets", "latest")
        self.rows_per_task = self._count(options, "rowsPerTask")
        self.rows_per_trigger = self._count(options, "maxRowsPerTrigger")

    @staticmethod
    def _required(options: Any, name: str) -> str:
        value = options.get(name)
        if not value:
            raise InvalidRequestError(f"format('quiver') needs .option({name!r}, ...)")
        return str(value)

    @staticmethod
    def _count(options: Any, name: str) -> int | None:
        value = options.get(name)
        if value is None:
            return None
        if not (str(value).isascii() and str(value).isdigit() and int(value) >= 1):
            raise InvalidRequestError(f"option {name} is a whole number of 1 or more, not {value!r}")
        return int(value)

    def edges(self) -> dict[str, dict[int, tuple[int, int]]]:
        with Admin(self.servers, request_timeout=_REQUEST_TIMEOUT_S) as admin:
            return {topic: admin.offsets(topic) for topic in self.topics}


class QuiverDataSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "quiver"

    def schema(self) -> str:
        return SPARK_SCHEMA

    def reader(self, schema: StructType) -> QuiverReader:
        return QuiverReader(Options(self.options))

    def streamReader(self, schema: StructType) -> QuiverStreamReader:
        if "endingOffsets" in self.options:
            raise InvalidRequestError("a stream has no end: endingOffsets is for batch reads")
        return QuiverStreamReader(Options(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> QuiverWriter:
        if overwrite:
            raise InvalidRequestError("a topic cannot be overwritten, only added to: use .mode('append')")
        return QuiverWriter(Options(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> QuiverStreamWriter:
        return QuiverStreamWriter(Options(self.options), schema)


class RangePartition(InputPartition):
    def __init__(self, value: OffsetRange) -> None:
        super().__init__(value)


def read_range(options: Options, wanted: OffsetRange | None) -> Iterator[pa.RecordBatch]:
    """All records of a range, in order; runs in an executor. A node that restarts meanwhile is waited for."""
    if wanted is None:
        return
    consumer = Consumer(
        options.servers,
        [wanted.topic],
        partitions={wanted.topic: [wanted.partition]},
        start=wanted.start,
        request_timeout=_REQUEST_TIMEOUT_S,
    )
    with consumer:
        position, silent = wanted.start, 0
        while position < wanted.end:
            table = consumer.poll_arrow(timeout=_POLL_TIMEOUT_S)
            silent = 0 if table.num_rows else silent + 1
            if silent >= _READ_PATIENCE:
                raise RequestTimeoutError(f"{wanted} cannot be read: nothing came from offset {position} on")
            for batch in table.to_batches():
                rows = min(batch.num_rows, wanted.end - position)
                if rows > 0:
                    yield _spark_batch(wanted.topic, batch.slice(0, rows))
                    position += rows


def _spark_batch(topic: str, batch: pa.RecordBatch) -> pa.RecordBatch:
    # Spark wants plain strings where the SDK gives a dictionary.
    columns = [pa.repeat(pa.scalar(topic, pa.string()), batch.num_rows), *batch.columns[1:]]
    return pa.RecordBatch.from_arrays(columns, schema=ARROW_SCHEMA)


class QuiverReader(DataSourceReader):
    def __init__(self, options: Options) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        edges = self._options.edges()
        start = resolve(self._options.starting or "earliest", edges, "startingOffsets")
        end = resolve(self._options.ending, edges, "endingOffsets")
        return [RangePartition(piece) for piece in ranges(start, end, self._options.rows_per_task)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_range(self._options, partition.value)


class QuiverStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Options) -> None:
        self._options = options
        self._target: Offsets | None = None

    def initialOffset(self) -> Offsets:
        return resolve(self._options.starting or "latest", self._options.edges(), "startingOffsets")

    def _latest(self) -> Offsets:
        return resolve("latest", self._options.edges(), "endingOffsets")

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._latest()

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self._options.rows_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        end = self._target or self._latest()
        return limit_rows(start, end, limit.max_rows) if isinstance(limit, ReadMaxRows) else end

    def reportLatestOffset(self) -> Offsets:
        return self._latest()

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        return [RangePartition(piece) for piece in ranges(start, end, self._options.rows_per_task)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_range(self._options, partition.value)


class Written(WriterCommitMessage):
    def __init__(self, rows: int) -> None:
        self.rows = rows


def _check_columns(options: Options, schema: StructType) -> None:
    if len(options.topics) != 1:
        raise InvalidRequestError("a sink writes to one topic")
    names = schema.fieldNames()
    if "value" not in names or set(names) - set(SCHEMA.names):
        raise InvalidRequestError(
            f"a sink takes the columns value, and optionally key, timestamp, headers; this frame has {sorted(names)}"
        )
    for field in schema.fields:
        if not _fits(field.name, field.dataType):
            wanted = {"timestamp": "timestamp", "headers": "map<string, binary>"}.get(field.name, "string or binary")
            found = field.dataType.simpleString()
            raise InvalidRequestError(f"the column {field.name} of a sink is {wanted}, not {found}")


def _fits(name: str, kind: DataType) -> bool:
    if name == "timestamp":
        return isinstance(kind, TimestampType)
    if name == "headers":
        return (
            isinstance(kind, MapType)
            and isinstance(kind.keyType, StringType)
            and isinstance(kind.valueType, (StringType, BinaryType))
        )
    return isinstance(kind, (StringType, BinaryType))


def write_rows(options: Options, name: str, batches: Iterator[pa.RecordBatch]) -> Written:
    """Sends a task's rows under a producer id that `name` gives; returns when all are acknowledged.

    The same name with the same rows again stores nothing again: that is how a task that is retried, or a micro-batch
    that is replayed after a crash, writes once.
    """
    pieces = cut(map(_checked, batches))
    first = next(pieces, None)
    if first is None:
        return Written(0)
    digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    topic, rows = options.topics[0], 0
    with Admin(options.servers, request_timeout=_REQUEST_TIMEOUT_S) as admin:
        partition_count = len(admin.describe_topic(topic).partitions)
    producer = Producer(
        options.servers,
        producer_id=digest % (2**62 - 1) + 1,
        batch_bytes=BATCH_BYTES_MAX,  # a piece is a batch: the producer must not cut it again
        delivery_timeout=_DELIVERY_TIMEOUT_S,
        block_timeout=_DELIVERY_TIMEOUT_S,
    )
    try:
        futures = []
        for number, piece in enumerate(itertools.chain([first], pieces)):
            rows += piece.num_rows
            for part, partition in _parts(piece, (digest + number) % partition_count, partition_count):
                futures.append(producer.send_many(topic, part, partition=partition))
        for future in futures:
            future.result()
    except BaseException:
        # What is not sent yet must not be: the task that follows this one sends it, in order.
        with contextlib.suppress(QuiverError):
            producer.close(timeout=0.0)
        raise
    producer.close()
    return Written(rows)


def _checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    """What the producer leaves to its caller where a batch holds many records."""
    if "headers" in batch.schema.names and batch.column("headers").items.null_count:
        raise InvalidRequestError("the value of a header may not be null")
    size = batch.num_rows and pc.max(row_bytes(batch)).as_py() - ROW_BYTES
    if size > MESSAGE_BYTES_MAX:
        raise MessageTooLargeError(
            f"a row of {size} bytes is over the limit of {MESSAGE_BYTES_MAX}", size=size, limit=MESSAGE_BYTES_MAX
        )
    return batch


def _parts(piece: pa.Table, turn: int, partition_count: int) -> Iterator[tuple[pa.Table, int | None]]:
    """(rows, partition): rows without a key to the partition whose turn it is, the others by their key."""
    if partition_count == 1 or "key" not in piece.column_names:
        yield piece, turn
        return
    is_keyed = piece["key"].is_valid()
    for part, partition in ((piece.filter(pc.invert(is_keyed)), turn), (piece.filter(is_keyed), None)):
        if part.num_rows:
            yield part.combine_chunks(), partition


class QuiverWriter(DataSourceArrowWriter):
    def __init__(self, options: Options, schema: StructType) -> None:
        _check_columns(options, schema)
        self._options = options
        self._job = uuid.uuid4().hex  # made once, on the driver: all attempts of a task share it

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        context = TaskContext.get()
        return write_rows(self._options, f"{self._job}/{context.partitionId() if context else 0}", iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Rows are durable when written; there is nothing left to do."""

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Rows of tasks that finished stay: a log cannot take them back."""


class QuiverStreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: Options, schema: StructType) -> None:
        _check_columns(options, schema)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        context = TaskContext.get()
        assert context is not None
        # Both are kept in the checkpoint, so a replayed micro-batch has the same name after a restart.
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if query is None or batch is None:
            raise InvalidRequestError("Spark did not tell the query and batch of this task; it cannot write just once")
        return write_rows(self._options, f"{query}/{batch}/{context.partitionId()}", iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Rows are durable when written; there is nothing left to do."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """The micro-batch will be run again; what is stored of it will be recognised."""
