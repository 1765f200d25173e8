"""Sends one partition's batches: pipelined, in order, each stored once.

Rules:
- A batch gets its sequence when it is first sent and keeps it for every retry; the broker stores a sequence once.
- After any failure the window is settled as a whole: what was acknowledged is done, the rest is sent again in order.
- Sequences are only ever given anew together with a new epoch. A batch of the old epoch that is still on its way
  somewhere is then refused by the broker, so it cannot slip in behind its own retry.
- Where the epoch is given, it is never changed: sequences count batches, and when one is refused or given up, all that
  follow are. Who gave the epoch sends the same batches again under the same numbers.
- A batch that was sent and is given up may be stored or not. All that were sent after it are given up with it: sending
  them in a new epoch could store them twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from crc32c import crc32c

from quiver.client.batcher import Batch, PartitionQueue
from quiver.client.cluster import Cluster, backoff_s
from quiver.errors import (
    ClosedError,
    DeliveryTimeoutError,
    InvalidRequestError,
    OutOfOrderSequenceError,
    QuiverError,
    RequestError,
    RequestTimeoutError,
)
from quiver.net.connection import Connection, reply_of
from quiver.wire.batch_check import SCHEMA_ID_V1
from quiver.wire.frame import FLAG_BATCHES, sequence_step
from quiver.wire.messages import Produce, ProduceReply
from quiver.wire.packet import Packet
from quiver.wire.records import batch_from_lists, encode_batch, encode_single

logger = logging.getLogger("quiver.client")


class InFlight(NamedTuple):
    batch: Batch
    reply: asyncio.Future[Packet]
    deadline_s: float
    connection: Connection


def encode(batch: Batch, compression: str | None) -> None:
    """Turns the collected lists into the payload, once."""
    if batch.payload is not None:
        return
    value, is_plain = batch.values[0], batch.record_count == 1 and batch.keys[0] is None and not batch.headers[0]
    if is_plain and value is not None and compression is None:
        batch.timestamp_min = batch.timestamp_max = batch.timestamps[0]
        batch.payload = encode_single(batch.timestamps[0], value)
    else:
        batch.timestamp_min, batch.timestamp_max = min(batch.timestamps), max(batch.timestamps)
        keys = batch.keys if any(key is not None for key in batch.keys) else None
        headers = batch.headers if any(batch.headers) else None
        records = batch_from_lists(batch.timestamps, keys, batch.values, headers)
        batch.payload = encode_batch(records, compression)
    batch.payload_crc = crc32c(batch.payload)
    batch.values, batch.keys, batch.headers, batch.timestamps = [], [], [], []


class PartitionSender:
    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        partition: int,
        queue: PartitionQueue,
        *,
        loop: asyncio.AbstractEventLoop,
        producer_id: int,
        epoch: int | None,
        compression: str | None,
        in_flight_max: int,
        delivery_timeout_s: float,
        take: Callable[[PartitionSender, int], Batch | None],
        settled: Callable[[Batch], None],
    ) -> None:
        self.queue = queue
        self._cluster = cluster
        self._topic = topic
        self._partition = partition
        self._producer_id = producer_id
        self._compression = compression
        self._in_flight_max = in_flight_max
        self._delivery_timeout_s = delivery_timeout_s
        self._take = take
        self._settled = settled
        self._window: deque[InFlight] = deque()
        self._is_given = epoch is not None
        self._flags = FLAG_BATCHES if self._is_given else 0
        self._epoch = epoch or 0
        self._sequence = 0
        self._loop = loop
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0  # uvloop's timers do not tell it
        self._busy = False  # the task is at work; nobody else touches the window
        self._attempt = 0
        self._task: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Something changed: look again. Only from the loop's own thread; the first call starts the sender."""
        if self._task is None:
            self._task = self._loop.create_task(self._run(), name=f"sender {self._topic}-{self._partition}")
        if self._busy or not self._pump():
            self._wake.set()

    async def close(self) -> None:
        self._busy = True  # from here on nobody sends
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        error = ClosedError("the producer was closed before this was acknowledged; it may or may not be stored")
        window, self._window = self._window, deque()  # a reply that still comes finds nothing to settle again
        for flight in window:
            self._give_up(flight.batch, error)
        while (batch := self._take(self, 0)) is not None:
            self._give_up(batch, error)
        if self._timer is not None:
            self._timer.cancel()

    # -- the loop ------------------------------------------------------------------------------------------------

    def _pump(self) -> bool:
        """The common case, done at once: takes in acknowledgements and sends what may go. False: the task must look."""
        while self._window and self._window[0].reply.done() and self._window[0].reply.exception() is None:
            flight = self._window.popleft()
            self._acknowledge(flight.batch, reply_of(flight.reply.result(), ProduceReply).base_offset)
        if self._window and (self._window[0].reply.done() or self._loop.time() >= self._window[0].deadline_s):
            return False
        while len(self._window) < self._in_flight_max and len(self.queue):
            connection = self._cluster.known_leader(self._topic, self._partition)
            if connection is None or not connection.is_writable:
                return False
            batch = self._take(self, len(self._window))
            if batch is None:
                break
            if self._is_too_old(batch):
                self.queue.put_back([batch])
                return False
            if self._encode(batch):
                self._transmit(batch, connection)
        self._arm_timer()
        return True

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._busy = True
            try:
                self._collect()
                await self._send()
            except QuiverError as error:
                await self._recover(error)
            except Exception as error:
                # A bug. Tried again until the delivery time-out, so that every record gets an outcome.
                logger.exception("sender_failed topic=%s partition=%d", self._topic, self._partition)
                await self._recover(QuiverError(f"internal error of the client: {error}"))
            self._busy = False
            self._arm_timer()

    def _collect(self) -> None:
        """Takes in replies, oldest first; raises the first error."""
        while self._window and self._window[0].reply.done():
            flight = self._window[0]
            reply = reply_of(flight.reply.result(), ProduceReply)
            self._window.popleft()
            self._acknowledge(flight.batch, reply.base_offset)
        if self._window and self._loop.time() >= self._window[0].deadline_s:
            flight = self._window[0]
            self._cluster.drop(flight.connection)  # every request on it now fails as lost: outcome unknown
            raise RequestTimeoutError(f"no acknowledgement from {flight.connection.address} in time")

    async def _send(self) -> None:
        while len(self._window) < self._in_flight_max:
            batch = self._take(self, len(self._window))
            if batch is None:
                return
            if not self._encode(batch):
                continue
            try:
                self._check_age(batch)
                connection = await self._writable_leader(batch)
            except BaseException:
                self.queue.put_back([batch])
                raise
            self._transmit(batch, connection)

    def _encode(self, batch: Batch) -> bool:
        try:
            encode(batch, self._compression)
            return True
        except Exception as error:
            # What the checks at `send` did not foresee must not stop the records behind it.
            self._give_up(batch, InvalidRequestError(f"this batch cannot be encoded: {error}"))
            return False

    def _transmit(self, batch: Batch, connection: Connection) -> None:
        if batch.sequence is None:
            batch.sequence, batch.epoch = self._sequence, self._epoch
            self._sequence += sequence_step(self._flags, batch.record_count)
        assert batch.payload is not None
        request = Produce(
            self._topic,
            self._partition,
            batch.record_count,
            batch.timestamp_min,
            batch.timestamp_max,
            batch.payload_crc,
            SCHEMA_ID_V1,
            self._producer_id,
            batch.epoch,
            batch.sequence,
            self._flags,
        )
        reply = connection.submit(request, (batch.payload,), self.wake)
        self._window.append(InFlight(batch, reply, self._deadline_s(batch), connection))

    async def _writable_leader(self, batch: Batch) -> Connection:
        """The leader's connection, once it takes more. Waiting for it must not outlast what waits for replies."""
        deadline_s = self._window[0].deadline_s if self._window else self._deadline_s(batch)
        connection: Connection | None = None
        try:
            async with asyncio.timeout_at(deadline_s):
                connection = await self._cluster.leader(self._topic, self._partition)
                await connection.until_writable()
                return connection
        except TimeoutError as error:
            if connection is not None:
                self._cluster.drop(connection)  # it does not read what it is sent
            raise RequestTimeoutError(f"the leader of {self._topic}-{self._partition} takes nothing") from error

    def _deadline_s(self, batch: Batch) -> float:
        """A reply that comes after the delivery time-out is of no use, however long a request may take."""
        return min(self._loop.time() + self._cluster.request_timeout_s, batch.created_s + self._delivery_timeout_s)

    def _is_too_old(self, batch: Batch) -> bool:
        return self._loop.time() - batch.created_s >= self._delivery_timeout_s

    def _check_age(self, batch: Batch) -> None:
        if self._is_too_old(batch):
            raise DeliveryTimeoutError(f"not delivered to {self._topic}-{self._partition} in time")

    def _arm_timer(self) -> None:
        """Wakes the loop when time alone changes what is to be done."""
        now_s = self._loop.time()
        due_s = self._window[0].deadline_s if self._window else None
        if (linger_s := self.queue.linger_left_s(now_s)) is not None and len(self._window) < self._in_flight_max:
            due_s = min(due_s or now_s + linger_s, now_s + linger_s)
        # One that rings too early does no harm, so it is only set anew to ring earlier.
        if due_s is not None and (self._timer is None or due_s < self._timer_due_s):
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_due_s = self._loop.call_at(due_s, self._ring), due_s

    def _ring(self) -> None:
        self._timer = None
        self.wake()

    # -- after a failure -----------------------------------------------------------------------------------------

    async def _recover(self, error: QuiverError) -> None:
        """Settles the window as a whole and decides what is sent again."""
        if self._window:
            # A lost connection fails all of them at once; otherwise the broker refuses what follows a refused batch.
            timeout_s = max(0.0, self._window[-1].deadline_s - self._loop.time())
            _, pending = await asyncio.wait([flight.reply for flight in self._window], timeout=timeout_s)
            if pending:
                self._cluster.drop(self._window[0].connection)
        again: list[Batch] = []
        refused: QuiverError | None = None
        for flight in self._window:
            outcome = flight.reply.exception() if flight.reply.done() else error
            if outcome is None:
                self._acknowledge(flight.batch, reply_of(flight.reply.result(), ProduceReply).base_offset)
            elif not again and refused is None and self._is_final(outcome):
                assert isinstance(outcome, QuiverError)
                refused = outcome
                self._give_up(flight.batch, outcome)
            else:
                again.append(flight.batch)
        self._window.clear()
        self.queue.put_back(again)
        if refused is not None:
            # The broker answered that it did not store it, so nothing that followed in this epoch is stored either.
            self._new_epoch(refused)
        elif isinstance(error, OutOfOrderSequenceError) and again and again[0].sequence != 0:
            # The broker has forgotten this producer: it expects an earlier sequence than any we still have.
            self._new_epoch(error)
        elif self._is_final(error) and not again:
            self._refuse_all(error)
        self._expire()
        if len(self.queue):
            self._cluster.leader_failed(self._topic, self._partition, error)
            await asyncio.sleep(backoff_s(self._attempt))
            self._attempt += 1
            self._wake.set()

    @staticmethod
    def _is_final(error: BaseException) -> bool:
        """The broker said no for good. A gap is not that: it follows from a failure before it."""
        return isinstance(error, RequestError) and not isinstance(error, OutOfOrderSequenceError)

    def _refuse_all(self, error: QuiverError) -> None:
        """Everything that waits fails, as when the topic or partition itself is gone."""
        while (batch := self._take(self, 0)) is not None:
            self._give_up(batch, error)

    def _expire(self) -> None:
        """Gives up what is past its delivery time-out."""
        expired: DeliveryTimeoutError | None = None
        sent_before = False
        while (batch := self.queue.oldest()) is not None:
            too_old = self._loop.time() - batch.created_s >= self._delivery_timeout_s
            if not too_old and not (sent_before and batch.sequence is not None):
                break
            taken = self._take(self, 0)
            assert taken is batch
            sent_before = sent_before or batch.sequence is not None
            stored = "may or may not be stored" if batch.sequence is not None else "is not stored"
            expired = DeliveryTimeoutError(
                f"not delivered to {self._topic}-{self._partition} within {self._delivery_timeout_s:g} s; it {stored}"
            )
            self._give_up(batch, expired)
        if sent_before and expired is not None:
            self._new_epoch(expired)

    def _new_epoch(self, error: QuiverError) -> None:
        if self._is_given:
            self._refuse_all(error)
            return
        self._epoch += 1
        self._sequence = 0
        for batch in self.queue.sent():
            batch.sequence = None

    def _acknowledge(self, batch: Batch, base_offset: int) -> None:
        self._attempt = 0
        self._settled(batch)
        batch.delivery.settle(base_offset)  # last: the thread it wakes waits for the interpreter until this one rests

    def _give_up(self, batch: Batch, error: QuiverError) -> None:
        batch.delivery.settle(-1, error)
        self._settled(batch)
