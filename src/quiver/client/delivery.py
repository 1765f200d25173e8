"""What became of records that were handed to a producer.

Rule: one `Delivery` for each batch, however many records it holds; a record's future is a batch and a row. Settled
once, from any thread; waited for by threads and by asyncio tasks alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Generic, TypeVar

from quiver.errors import QuiverError, RequestTimeoutError
from quiver.types import BatchMetadata, RecordMetadata

T = TypeVar("T")

logger = logging.getLogger("quiver.client")

_lock = threading.Lock()  # held for a few instructions: one for all deliveries is enough


def _after_fork_in_child() -> None:
    # The client's own thread may have held the lock at the moment of the fork.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Delivery:
    __slots__ = ("_callbacks", "_gate", "base_offset", "error", "partition", "settled", "topic")

    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.base_offset = -1
        self.error: QuiverError | None = None
        self.settled = False
        # Held until it is settled. A bare lock: an Event is three objects and a third of the cost of waking a thread.
        self._gate: threading.Lock | None = None
        self._callbacks: list[Callable[[], object]] | None = None

    def settle(self, base_offset: int, error: QuiverError | None = None) -> None:
        with _lock:
            self.base_offset, self.error, self.settled = base_offset, error, True
            gate, callbacks = self._gate, self._callbacks
            self._callbacks = None
        if gate is not None:
            gate.release()
        for callback in callbacks or ():
            try:
                callback()
            except Exception:
                # It runs in the sender: the application's mistake must not stop the records behind this one.
                logger.exception("callback_failed topic=%s partition=%d", self.topic, self.partition)

    def wait(self, timeout_s: float | None) -> bool:
        if self.settled:
            return True
        with _lock:
            if self.settled:
                return True
            gate = self._gate
            if gate is None:
                gate = self._gate = threading.Lock()
                gate.acquire()
        if not gate.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return False
        gate.release()  # for the next who waits
        return True

    def when_settled(self, callback: Callable[[], object]) -> None:
        """Calls back once, at once if it is settled, in the thread that settles it otherwise."""
        with _lock:
            if not self.settled:
                self._callbacks = [*(self._callbacks or ()), callback]
                return
        callback()


class DeliveryFuture(Generic[T]):
    """Looks like a concurrent future and can be awaited."""

    __slots__ = ("_deliveries",)

    def __init__(self, deliveries: list[Delivery]) -> None:
        self._deliveries = deliveries

    def _result(self) -> T:
        raise NotImplementedError

    def done(self) -> bool:
        return all(delivery.settled for delivery in self._deliveries)

    def result(self, timeout: float | None = None) -> T:
        """Waits for the acknowledgement; raises the delivery's error, or RequestTimeoutError after `timeout` s."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._result()

    def exception(self, timeout: float | None = None) -> QuiverError | None:
        if not self.done():
            deadline_s = None if timeout is None else time.monotonic() + timeout
            for delivery in self._deliveries:
                if not delivery.wait(None if deadline_s is None else max(0.0, deadline_s - time.monotonic())):
                    raise RequestTimeoutError(f"not acknowledged within {timeout:g} s; it may still be stored")
        for delivery in self._deliveries:
            if delivery.error is not None:
                return delivery.error
        return None

    def add_done_callback(self, callback: Callable[[DeliveryFuture[T]], object]) -> None:
        """Called once all is settled, from the client's own thread: be quick and do not block there."""
        left = len(self._deliveries)
        if not left:
            callback(self)
        elif left == 1:
            self._deliveries[0].when_settled(partial(callback, self))
            return
        counter = threading.Lock()

        def one_settled() -> None:
            nonlocal left
            with counter:
                left -= 1
                last = left == 0
            if last:
                callback(self)

        for delivery in self._deliveries:
            delivery.when_settled(one_settled)

    def __await__(self) -> Generator[object, None, T]:
        if not self.done():
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()
            self.add_done_callback(partial(_wake, loop, waiter))
            yield from waiter.__await__()
        return self.result(0)


def _wake(loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None], _: object) -> None:
    """From the thread that settles it, which for a task of the client's own loop is the task's."""
    if asyncio._get_running_loop() is loop:
        _end(waiter)
    else:
        with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_end, waiter)


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class RecordFuture(DeliveryFuture[RecordMetadata]):
    __slots__ = ("_row",)

    def __init__(self, delivery: Delivery, row: int) -> None:
        self._deliveries = [delivery]
        self._row = row

    @property
    def delivery(self) -> Delivery:
        return self._deliveries[0]

    def done(self) -> bool:
        return self._deliveries[0].settled

    def _result(self) -> RecordMetadata:
        delivery = self.delivery
        # A broker that only knows that the batch is stored says -1, for every record of it.
        offset = delivery.base_offset + self._row if delivery.base_offset >= 0 else -1
        return RecordMetadata(delivery.topic, delivery.partition, offset)


class BatchesFuture(DeliveryFuture[list[BatchMetadata]]):
    """For `send_many`: where each run of records went."""

    __slots__ = ("_counts",)

    def __init__(self, deliveries: list[Delivery], counts: list[int]) -> None:
        super().__init__(deliveries)
        self._counts = counts

    def _result(self) -> list[BatchMetadata]:
        return [
            BatchMetadata(delivery.topic, delivery.partition, delivery.base_offset, count)
            for delivery, count in zip(self._deliveries, self._counts, strict=True)
        ]
