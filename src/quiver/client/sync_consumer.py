"""The consumer for threads: the engine runs on the process's background loop.

Rule: one thread at a time, and it says so when it is not. Whoever comes back for more is done with what it had; that is
when partitions change hands.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from quiver.client.backlog import TopicPartition
from quiver.client.consumer import ConsumerEngine, check_count
from quiver.client.loop_thread import shared_loop
from quiver.client.runner import Course, Runner, check_on_error
from quiver.errors import ConcurrentUseError
from quiver.types import Record
from quiver.wire.rows import TABLE_SCHEMA

Told = Callable[[list[TopicPartition]], object]


class Consumer:
    """Reads topics. One thread at a time.

    with Consumer("127.0.0.1:9400", ["logs"], group="g", start="earliest") as consumer:
        for record in consumer: ...

    `start` is where to begin without a committed position, and what to do when a position fell off the log:
    'earliest', 'latest', 'committed' (raise instead), or an offset. Consumers of one group share the partitions of
    their topics. `commit_interval`: positions are stored by themselves every so many seconds, before a partition is
    handed over, and at the end; None leaves it to `commit`. `on_assigned`, `on_revoked` and `on_lost` are called with
    a list of (topic, partition) while the consumer looks for records.

    Settings: group, session_timeout=10, assignment='sticky'|'range'|'round-robin', partitions={"logs": [0, 1]} (these,
    without sharing), idle_timeout (seconds without a record that end iteration), fetch_bytes, prefetch_bytes,
    request_timeout, metadata_refresh (seconds after which partitions that were added are noticed), client_id.
    """

    def __init__(
        self,
        servers: str,
        topics: Sequence[str],
        *,
        idle_timeout: float | None = None,
        on_assigned: Told | None = None,
        on_revoked: Told | None = None,
        on_lost: Told | None = None,
        **settings: Any,
    ) -> None:
        self._io = shared_loop()
        self._servers, self._topics, self._settings = servers, topics, settings
        self._idle_timeout_s = idle_timeout
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost
        self._something = threading.Event()
        self._stop_running = threading.Event()
        self._using = threading.RLock()  # a callback may use the consumer that calls it

        async def make() -> ConsumerEngine:
            return ConsumerEngine(servers, topics, self._something.set, **settings)

        self._engine = self._io.call(make())
        self._started = False

    @contextlib.contextmanager
    def _use(self, *, start: bool = True) -> Iterator[ConsumerEngine]:
        self._engine.check_usable()
        if not self._using.acquire(blocking=False):
            raise ConcurrentUseError("a Consumer is used by one thread at a time; give each thread its own")
        try:
            if start and not self._started:
                self._io.call(self._engine.start())
                self._started = True
                self._settle(self._engine)
            yield self._engine
        finally:
            self._using.release()

    def _settle(self, engine: ConsumerEngine) -> None:
        """The reader comes back for more: now the group may take and give."""
        engine.stored.settle()
        if engine.is_unsettled:
            taken = self._io.call(engine.begin_revoke())
            if taken.lost and self._on_lost is not None:
                self._on_lost(list(taken.lost))
            if taken.revoked and self._on_revoked is not None:
                self._on_revoked(list(taken.revoked))
            self._io.call(engine.finish_revoke(taken))
            new = self._io.call(engine.adopt())
            if new and self._on_assigned is not None:
                self._on_assigned(new)

    def poll(self, max_records: int = 500, timeout: float = 1.0) -> list[Record]:
        """Up to `max_records` records; waits up to `timeout` seconds for the first, an empty list if none came."""
        check_count(max_records)
        with self._use() as engine:
            deadline_s = time.monotonic() + timeout
            while True:
                self._something.clear()
                self._settle(engine)
                if records := engine.backlog.take(max_records):
                    return records
                if not self._something.wait(max(0.0, deadline_s - time.monotonic())):
                    return []
                engine.check_usable()

    def poll_arrow(self, timeout: float = 1.0) -> pa.Table:
        """All records at hand as one Arrow table, without a Python object for any of them."""
        with self._use() as engine:
            deadline_s = time.monotonic() + timeout
            while True:
                self._something.clear()
                self._settle(engine)
                if (table := engine.backlog.take_table()) is not None:
                    return table
                if not self._something.wait(max(0.0, deadline_s - time.monotonic())):
                    return TABLE_SCHEMA.empty_table()
                engine.check_usable()

    def __iter__(self) -> Iterator[Record]:
        """Records as they come, without end unless `idle_timeout` is set or the consumer is closed.

        Nothing is taken ahead of the loop: after a `break`, a `seek` or a `poll` in between, all go on from there.
        """
        self._engine.check_usable()
        while not self._engine.is_closed:
            with self._use() as engine:
                self._something.clear()
                self._settle(engine)
                came = engine.backlog.prepare() or self._something.wait(self._idle_timeout_s)
                if not came and not engine.is_waiting:
                    return
            yield from engine.backlog.walk()

    def run(
        self,
        handler: Callable[[Record], object],
        *,
        timeout: float | None = None,
        poll_time: float = 0.1,
        poll_time_after_error: float = 1.0,
        on_error: str = "stop",
    ) -> int:
        """Calls `handler(record)` for every record, topics in parallel, one thread each; returns how many there were.

        It ends after `timeout` seconds without a record on any topic (None: never), by `stop()` from a handler or
        another thread, by Ctrl-C, or when a handler raises, which is raised here; with on_error='skip' such a record is
        logged and left out. Waiting for a share of the group's partitions is no silence. `poll_time` is how long
        one look for records takes, `poll_time_after_error` the pause while the server cannot be reached. With a group,
        positions are stored after the records of a look are handled; those of a look that was cut short come again.
        """
        course = Course(timeout, poll_time, poll_time_after_error, self._engine.has_group, check_on_error(on_error))
        self._stop_running.clear()
        with self._use(start=not self._engine.is_member) as engine, contextlib.ExitStack() as stack:
            begins = self._give_way(engine)
            settings = self._settings | {"commit_interval": None}
            readers = {
                topic: stack.enter_context(Consumer(self._servers, [topic], **settings))
                for topic in dict.fromkeys(self._topics)
            }
            for (topic, partition), offset in begins.items():
                if readers[topic].position(topic, partition) != offset:
                    readers[topic].seek(topic, partition, offset)
            handled = Runner(handler, course, self._stop_running).run(readers)
            for topic, partition in begins:
                reached = readers[topic].position(topic, partition)
                if reached is not None:
                    self._io.call(engine.seek(topic, partition, reached))  # what was handled is not polled again
            return handled

    def _give_way(self, engine: ConsumerEngine) -> dict[TopicPartition, int]:
        """Where those who run for this consumer begin. In a group they take its place, and the group tells them."""
        if not engine.is_member:
            return engine.positions
        self._io.call(engine.pause())
        self._started = False
        return {}

    def stop(self) -> None:
        """Ends `run` after the records it has at hand. From any thread."""
        self._stop_running.set()

    def commit(self) -> None:
        """Stores the positions of what was handed out; they are on disk when this returns."""
        with self._use() as engine:
            self._io.call(engine.stored.commit())

    def committed(self, topic: str, partition: int) -> int | None:
        with self._use() as engine:
            return self._io.call(engine.committed(topic, partition))

    def position(self, topic: str, partition: int) -> int | None:
        """The next offset this consumer will hand out."""
        with self._use() as engine:
            return engine.positions.get((topic, partition))

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Goes on at `offset`. Raises OffsetOutOfRangeError, which says the valid range."""
        with self._use() as engine:
            self._io.call(engine.seek(topic, partition, offset))

    def seek_to_time(self, topic: str, partition: int, timestamp: int) -> None:
        """Goes on at the first record at or after `timestamp` (microseconds since 1970 UTC)."""
        with self._use() as engine:
            offset = self._io.call(engine.offset_at(topic, partition, timestamp))
            self._io.call(engine.seek(topic, partition, offset))

    def assignment(self) -> list[TopicPartition]:
        """The partitions that are read now, sorted. In a group they change while records are looked for."""
        with self._use() as engine:
            return engine.assignment

    @property
    def is_waiting(self) -> bool:
        """It has nothing to read yet: it is not connected, or others of its group are to let go of partitions."""
        return self._engine.is_waiting

    @property
    def lost_records(self) -> int:
        """Records that retention removed before this consumer read them."""
        return self._engine.lost_records

    def close(self) -> None:
        """Leaves the group; with `commit_interval`, stores how far it was."""
        self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        if self._io.pid == os.getpid():
            self._io.call(self._engine.close(failed=failed))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(failed=kind is not None)  # what was being dealt with then is not stored as read
