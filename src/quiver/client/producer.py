"""The producing engine, behind both faces.

Rule: records are added from any thread under one short lock; everything else happens on the loop. Memory is bounded by
`buffer_bytes`: when it is full, `send` waits, and after `block_timeout` it raises.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from typing import Any, Final, NamedTuple

import pyarrow as pa
from crc32c import crc32c

from quiver.client.batcher import RECORD_OVERHEAD_BYTES, Batch, PartitionQueue, batches_of_list
from quiver.client.cluster import Cluster
from quiver.client.delivery import Delivery, RecordFuture
from quiver.client.partitioner import Partitioner
from quiver.client.sender import PartitionSender
from quiver.client.topic_watch import REFRESH_S, TopicWatch
from quiver.clock import SystemClock
from quiver.config import BATCH_BYTES_MAX, MESSAGE_BYTES_MAX, MIB
from quiver.errors import (
    BufferFullError,
    ClosedError,
    ForkedError,
    InvalidRequestError,
    MessageTooLargeError,
    RequestTimeoutError,
    UnknownPartitionError,
    UnknownTopicError,
)
from quiver.topic_settings import check_key, message_bytes_of
from quiver.types import Headers, TopicInfo
from quiver.wire.records import (
    COMPRESSIONS,
    batches_from_table,
    bytes_of,
    check_headers,
    encode_batch,
    largest_record_bytes,
    split_batch,
    timestamp_range,
)

logger = logging.getLogger("quiver.client")

# The broker remembers eight batches of each producer; fewer in flight means that every retry is recognised.
IN_FLIGHT_MAX: Final = 5
# What the Arrow format adds to the largest batch beyond what is counted for each record.
_BATCH_ROOM_BYTES: Final = 16 * 1024
# Slices of a table are allowed to be a quarter over their size; the largest must still be a batch.
_SLICE_BYTES_MAX: Final = (BATCH_BYTES_MAX - _BATCH_ROOM_BYTES) * 4 // 5
# A thread that waits for room goes on when there is this much, or an eighth of a small buffer.
_ROOM_BYTES_MIN: Final = 2 * MIB
# What a header costs beside its bytes.
_HEADER_OVERHEAD_BYTES: Final = 16
# Batches of one partition that `send_many` prepares ahead of the sender, and how many are left when it goes on: what is
# sent soon after it was made is still in the processor's cache, and the sender needs the interpreter too.
_AHEAD_MAX: Final = 4
_AHEAD_MIN: Final = 2
_PACE_S: Final = 0.1  # where nothing moves, the buffer's limit decides


class Planned(NamedTuple):
    """Records on their way into one batch. `timestamps` is their range where it is known without looking."""

    partition: int
    records: pa.RecordBatch
    timestamps: tuple[int, int] | None


class ProducerEngine:
    """What both faces share. Made on the loop that will do the sending."""

    def __init__(
        self,
        servers: str,
        *,
        linger_ms: float = 5,
        batch_bytes: int = 256 * 1024,
        buffer_bytes: int = 64 * MIB,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        compression: str | None = None,
        idempotent: bool = True,
        producer_id: int | None = None,
        producer_epoch: int | None = None,
        delivery_timeout: float = 120.0,
        request_timeout: float = 30.0,
        block_timeout: float = 60.0,
        client_id: str = "",
        metadata_refresh: float = REFRESH_S,
    ) -> None:
        if compression not in COMPRESSIONS:
            raise InvalidRequestError(f"compression is one of {COMPRESSIONS}, not {compression!r}")
        if not 0 < batch_bytes <= BATCH_BYTES_MAX:
            raise InvalidRequestError(f"batch_bytes is between 1 and {BATCH_BYTES_MAX}, not {batch_bytes}")
        if buffer_bytes < batch_bytes or linger_ms < 0:
            raise InvalidRequestError("buffer_bytes must hold at least one batch, and linger_ms is not negative")
        self._cluster = Cluster(servers, client_id or f"producer-{os.getpid()}", request_timeout)
        self._linger_s = linger_ms / 1000
        self._batch_bytes = min(batch_bytes, BATCH_BYTES_MAX - _BATCH_ROOM_BYTES)
        self._buffer_bytes = buffer_bytes
        self._room_bytes_min = min(buffer_bytes // 8, _ROOM_BYTES_MIN)
        self._message_bytes_max = message_bytes_max
        self._compression = compression
        self._delivery_timeout_s = delivery_timeout
        self.block_timeout_s = block_timeout
        # Random, not given by a server: a producer can begin without asking, and 63 bits do not meet twice.
        # Given, with an epoch, by who sends the same batches again on purpose, like a Spark task: each is stored once.
        self._producer_id = 0 if not idempotent else producer_id or secrets.randbits(62) + 1
        self._producer_epoch = producer_epoch
        self._clock = SystemClock()
        self._partitioner = Partitioner()
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._paced = self._blocked = 0  # threads that wait for the sender, for room
        self._buffered_bytes = 0
        self._unsettled: set[Delivery] = set()  # batches that have no outcome yet
        self._flushing = 0
        self._topics: dict[str, TopicInfo] = {}
        self._watch = TopicWatch(self._cluster, metadata_refresh, lambda: list(self._topics), self._seen)
        self._senders: dict[tuple[str, int], PartitionSender] = {}
        self._pid = os.getpid()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._progress = asyncio.Event()

    # -- from any thread -----------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        self._check_open()
        if self._pid != os.getpid():
            raise ForkedError("this producer was made before a fork; make a new one in the child process")

    def _check_open(self) -> None:
        # Asked again under the lock when something is added: what comes after `close` would never be sent.
        if self._closed:
            raise ClosedError("the producer is closed")

    def known_topic(self, topic: object) -> TopicInfo | None:
        return self._topics.get(topic) if isinstance(topic, str) else None

    def has_room(self) -> bool:
        return self._buffered_bytes < self._buffer_bytes

    def wait_for_room(self, accepted: int = 0) -> None:
        """Blocks the calling thread while the buffer is full; `accepted` are the records of this call that are in it.

        Until there is room for a few batches: woken for each single one, it would fight the sender for the interpreter.
        """
        with self._room:
            self._blocked += 1
            self._room.wait_for(lambda: self._has_much_room() or self._closed, self.block_timeout_s)
            self._blocked -= 1
            if not self.has_room() and not self._closed:
                raise self._buffer_full(accepted)

    def pace(self, topic: TopicInfo, partition: int) -> None:
        """Keeps a thread that hands over many batches from running far ahead of the sender."""
        queue = self._senders[topic.name, partition].queue
        if len(queue) <= _AHEAD_MAX:
            # Lets the sending thread have the interpreter now: by itself Python hands it over every 5 ms only.
            time.sleep(0)
            return
        with self._room:
            self._paced += 1
            self._room.wait_for(lambda: len(queue) <= _AHEAD_MIN or self._closed, _PACE_S)
            self._paced -= 1

    def _has_much_room(self) -> bool:
        return self._buffered_bytes <= self._buffer_bytes - self._room_bytes_min

    def _buffer_full(self, accepted: int) -> BufferFullError:
        waiting = f"{self._buffered_bytes} bytes wait to be sent for {self.block_timeout_s:g} s"
        what = f"only {accepted} records were accepted" if accepted else "this record was not accepted"
        return BufferFullError(f"{waiting}; {what}", accepted=accepted)

    def add(
        self,
        topic: TopicInfo,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        timestamp: int | None,
        headers: Any,
    ) -> RecordFuture:
        """Puts one record into its batch. Nothing is added when it is not valid."""
        if value is not None and type(value) is not bytes:
            value = bytes_of(value, "a value")
        if key is not None:
            key = bytes_of(key, "a key")
        size = (len(value) if value else 0) + (len(key) if key else 0)
        pairs: Headers | None = None
        if headers is not None:
            pairs = check_headers(headers)
            size += _headers_bytes(pairs)
        limit = self._message_bytes_max if not topic.settings else self._limit_of(topic, key is not None)
        if size > limit:
            raise _too_large(size, limit)
        if timestamp is None:
            timestamp = self._clock.now_us()
        elif type(timestamp) is not int or not -(2**63) <= timestamp < 2**63:
            raise InvalidRequestError("a timestamp is an int of microseconds since 1970 UTC")
        size += RECORD_OVERHEAD_BYTES
        with self._lock:
            self._check_open()
            number = self._partitioner.choose(topic.name, len(topic.partitions), partition, key)
            sender = self._senders.get((topic.name, number))
            if sender is None:
                sender = self._new_sender(topic.name, number)
            future, notable = sender.queue.add(value, key, pairs, timestamp, size, self._loop.time())
            self._buffered_bytes += size
            if notable:
                self._unsettled.add(future.delivery)
        if notable:
            self._wake(sender)
        return future

    def add_batch(self, topic: TopicInfo, planned: Planned) -> Delivery:
        """Encodes in the calling thread and queues the result."""
        partition, records, timestamps = planned
        batch = Batch(Delivery(topic.name, partition), self._loop.time())
        batch.record_count = records.num_rows
        batch.timestamp_min, batch.timestamp_max = timestamps or timestamp_range(records)
        batch.payload = encode_batch(records, self._compression)
        batch.payload_crc = crc32c(batch.payload)
        batch.size_bytes = len(batch.payload)
        with self._lock:
            self._check_open()
            sender = self._senders.get((topic.name, partition))
            if sender is None:
                sender = self._new_sender(topic.name, partition)
            sender.queue.add_encoded(batch)
            self._buffered_bytes += batch.size_bytes
            self._unsettled.add(batch.delivery)
        self._wake(sender)
        return batch.delivery

    def _wake(self, sender: PartitionSender) -> None:
        """Soon, not now: what a task of this loop adds in one go belongs into one batch."""
        if asyncio._get_running_loop() is self._loop:
            self._loop.call_soon(sender.wake)
        else:
            self._loop.call_soon_threadsafe(sender.wake)

    def plan_many(self, topic: TopicInfo, records: Any, keys: Any, partition: int | None) -> list[Planned]:
        """Batches of at most `batch_bytes` each. All records are checked before any is sent."""
        now_us = self._clock.now_us()
        timestamps: tuple[int, int] | None = (now_us, now_us)
        if isinstance(records, (pa.Table, pa.RecordBatch)):
            if keys is not None:
                raise InvalidRequestError("keys go into the table's column 'key'")
            batches = batches_from_table(records, now_us)
            timestamps = None if "timestamp" in records.schema.names else timestamps
        else:
            batches = list(batches_of_list(records, keys, now_us))
        planned: list[Planned] = []
        limit = self._limit_of(topic, not any(batch.column("key").null_count for batch in batches))
        for batch in batches:
            for piece, size in split_batch(batch, min(self._batch_bytes, _SLICE_BYTES_MAX)):
                if size > limit and (largest := largest_record_bytes(piece)) > limit:
                    raise _too_large(largest, limit)
                # Headers are not in the check above; a record that is over the limit by them stands alone by now.
                if piece.num_rows == 1 and size > limit + _BATCH_ROOM_BYTES // 8:
                    raise _too_large(size, limit)
                with self._lock:
                    spread = self._partitioner.spread(topic.name, len(topic.partitions), partition, piece)
                    planned.extend(Planned(number, part, timestamps) for number, part in spread)
        return planned

    def _limit_of(self, topic: TopicInfo, has_keys: bool) -> int:
        check_key(topic.name, topic.settings, has_keys)
        return message_bytes_of(topic.settings, self._message_bytes_max)

    def _new_sender(self, topic: str, partition: int) -> PartitionSender:
        queue = PartitionQueue(topic, partition, self._batch_bytes, self._linger_s)
        sender = PartitionSender(
            self._cluster,
            topic,
            partition,
            queue,
            loop=self._loop,
            producer_id=self._producer_id,
            epoch=self._producer_epoch,
            compression=self._compression,
            in_flight_max=IN_FLIGHT_MAX,
            delivery_timeout_s=self._delivery_timeout_s,
            take=self._take,
            settled=self._settled,
        )
        self._senders[topic, partition] = sender
        return sender

    # -- on the loop ---------------------------------------------------------------------------------------------

    async def topic(self, name: object) -> TopicInfo:
        found = await self._cluster.retrying(lambda: self._cluster.topic(name))  # type: ignore[arg-type]
        self._topics[found.name] = found
        self._watch.start()
        return found

    async def _seen(self, topic: TopicInfo) -> None:
        """It may have more partitions than before. One that was forgotten meanwhile is asked for by who needs it."""
        if topic.name in self._topics:
            self._topics[topic.name] = topic

    def _take(self, sender: PartitionSender, in_flight: int) -> Batch | None:
        with self._lock:
            taken = sender.queue.take(in_flight, self._flushing > 0, self._loop.time())
            if self._paced and len(sender.queue) <= _AHEAD_MIN:
                self._room.notify_all()
            return taken

    def _settled(self, batch: Batch) -> None:
        if isinstance(batch.delivery.error, (UnknownTopicError, UnknownPartitionError)):
            # Deleted, and perhaps made again with fewer partitions: the next record asks anew.
            self._topics.pop(batch.delivery.topic, None)
            self._cluster.forget_topic(batch.delivery.topic)
        with self._lock:
            self._buffered_bytes -= batch.size_bytes
            self._unsettled.discard(batch.delivery)
            if self._blocked and self._has_much_room():
                self._room.notify_all()
        self._progress.set()

    async def until_room(self, accepted: int = 0) -> None:
        try:
            async with asyncio.timeout(self.block_timeout_s):
                while not self.has_room():
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError as error:
            raise self._buffer_full(accepted) from error

    async def flush(self, timeout_s: float | None) -> None:
        """Returns when everything added before has an outcome, whatever is added meanwhile."""
        with self._lock:
            added = list(self._unsettled)
            senders = list(self._senders.values())
        self._flushing += 1
        try:
            for sender in senders:
                sender.wake()
            async with asyncio.timeout(timeout_s):
                for delivery in added:
                    while not delivery.settled:
                        self._progress.clear()
                        await self._progress.wait()
        except TimeoutError as error:
            raise RequestTimeoutError(f"{len(self._unsettled)} batches are not acknowledged yet") from error
        finally:
            self._flushing -= 1

    async def close(self, timeout_s: float | None) -> None:
        """Sends what waits, then lets go. What is not acknowledged by then fails."""
        with self._room:
            if self._closed:
                return
            self._closed = True
            self._room.notify_all()
        try:
            await self.flush(timeout_s)
        finally:
            await self._watch.stop()
            for sender in self._senders.values():
                await sender.close()
            await self._cluster.close()


def _headers_bytes(headers: Headers) -> int:
    try:
        return sum(len(name.encode()) + len(value) + _HEADER_OVERHEAD_BYTES for name, value in headers)
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"a header name is not valid text: {error}") from error


def _too_large(size: int, limit: int) -> MessageTooLargeError:
    return MessageTooLargeError(f"a message of {size} bytes is over the limit of {limit}", size=size, limit=limit)
