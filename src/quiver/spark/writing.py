"""Sends the rows of one task to brokers.

Rule: the same task with the same rows makes the same batches under the same name; so it may run any number of times,
also twice at once.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from quiver import Admin, Producer
from quiver.config import BATCH_BYTES_MAX, MESSAGE_BYTES_MAX
from quiver.errors import InvalidRequestError, MessageTooLargeError, ProducerFencedError, QuiverError
from quiver.spark.options import WriteOptions
from quiver.spark.pieces import ROW_BYTES, cut, row_bytes
from quiver.spark.routing import route

_REQUEST_TIMEOUT_S: Final = 60.0
_DELIVERY_TIMEOUT_S: Final = 600.0  # a task waits so long for a node that is away, then it fails


class TaskName(NamedTuple):
    """Who writes: the sink, which of its tasks, and in which of its micro-batches."""

    sink: str
    task: int
    batch: int

    @property
    def producer_id(self) -> int:
        """The same in all micro-batches: a partition remembers one producer for each task, not one for each batch."""
        return _digest(f"{self.sink}/{self.task}") % (2**62 - 1) + 1

    @property
    def turn(self) -> int:
        """Which partition is first to get rows without a key: small micro-batches do not all go to the same one."""
        return _digest(f"{self.sink}/{self.task}/{self.batch}")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def write_rows(options: WriteOptions, name: TaskName, batches: Iterator[pa.RecordBatch]) -> int:
    """Sends a task's rows; returns how many when all are acknowledged."""
    rows = map(_with_json, batches) if options.json_values else batches
    pieces = cut(map(_checked, rows))
    first = next(pieces, None)
    if first is None:
        return 0
    with Admin(options.servers, request_timeout=_REQUEST_TIMEOUT_S) as admin:
        partition_count = len(admin.describe_topic(options.topic).partitions)
    producer = Producer(
        options.servers,
        producer_id=name.producer_id,
        producer_epoch=name.batch,
        batch_bytes=BATCH_BYTES_MAX,  # what is sent is a batch: the producer must not cut it again
        delivery_timeout=_DELIVERY_TIMEOUT_S,
        block_timeout=_DELIVERY_TIMEOUT_S,
    )
    try:
        count = _send(producer, options.topic, route(first, pieces, name.turn, partition_count))
    except BaseException as error:
        # What is not sent yet must not be: the task that follows this one sends it, in order.
        with contextlib.suppress(QuiverError):
            producer.close(timeout=0.0)
        if isinstance(error, ProducerFencedError):
            raise InvalidRequestError(
                f"topic {options.topic} has rows of a later batch of this query than {name.batch}: the checkpoint "
                "was set back, or this task is a leftover"
            ) from error
        raise
    producer.close()
    return count


def _send(producer: Producer, topic: str, parts: Iterator[tuple[int, pa.Table]]) -> int:
    count, futures = 0, []
    for partition, part in parts:
        count += part.num_rows
        futures.append(producer.send_many(topic, part, partition=partition))
    for future in futures:
        future.result()
    return count


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


# -- values as JSON ------------------------------------------------------------------------------------------------

_encode = msgspec.json.Encoder().encode


def _with_json(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows with their value as JSON: times in UTC, bytes in base64, null as null."""
    place = batch.schema.get_field_index("value")
    column = batch.column(place)
    column = column.cast(_in_utc(column.type))
    texts = [None if row is None else _encode(row) for row in column.to_pylist(maps_as_pydicts="strict")]
    return batch.set_column(place, "value", pa.array(texts, pa.binary()))


def _in_utc(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return kind if kind.tz is None else pa.timestamp(kind.unit, "UTC")
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_in_utc(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_in_utc(kind.key_type), _in_utc(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_utc(kind.value_type)))
    return kind
