"""The consumer for asyncio.

Rule: whatever comes back for more is done with what it had; that is when partitions change hands.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from quiver.client.backlog import TopicPartition
from quiver.client.consumer import ConsumerEngine, check_count
from quiver.client.runner import Course, check_on_error, run_tasks
from quiver.types import Record
from quiver.wire.rows import TABLE_SCHEMA

Told = Callable[[list[TopicPartition]], object]  # may be a coroutine function


class AsyncConsumer:
    """Reads topics from asyncio: `async for record in consumer`, `await consumer.poll()`."""

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
        self._something = asyncio.Event()
        self._servers, self._topics, self._settings = servers, topics, settings
        self._idle_timeout_s = idle_timeout
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost
        self._stop_running = asyncio.Event()
        self._engine: ConsumerEngine | None = None
        self._start_lock = asyncio.Lock()

    async def _ready(self) -> ConsumerEngine:
        if self._engine is None:
            self._engine = ConsumerEngine(self._servers, self._topics, self._something.set, **self._settings)
        self._engine.check_usable()
        async with self._start_lock:
            first = await self._engine.start()
        if first:
            await self._settle(self._engine)
        return self._engine

    async def _settle(self, engine: ConsumerEngine) -> None:
        """The reader comes back for more: now the group may take and give."""
        engine.stored.settle()
        if engine.is_unsettled:
            taken = await engine.begin_revoke()
            await _tell(self._on_lost, list(taken.lost))
            await _tell(self._on_revoked, list(taken.revoked))
            await engine.finish_revoke(taken)
            await _tell(self._on_assigned, await engine.adopt())

    async def _until(self, deadline_s: float | None) -> bool:
        """Waits until there may be something to take."""
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._something.wait()
            return True
        except TimeoutError:
            return False

    async def poll(self, max_records: int = 500, timeout: float = 1.0) -> list[Record]:
        check_count(max_records)
        engine = await self._ready()
        deadline_s = asyncio.get_running_loop().time() + timeout
        while True:
            self._something.clear()
            await self._settle(engine)
            if (records := engine.backlog.take(max_records)) or not await self._until(deadline_s):
                return records
            engine.check_usable()

    async def poll_arrow(self, timeout: float = 1.0) -> pa.Table:
        engine = await self._ready()
        deadline_s = asyncio.get_running_loop().time() + timeout
        while True:
            self._something.clear()
            await self._settle(engine)
            if (table := engine.backlog.take_table()) is not None:
                return table
            if not await self._until(deadline_s):
                return TABLE_SCHEMA.empty_table()
            engine.check_usable()

    async def __aiter__(self) -> AsyncIterator[Record]:
        """Records as they come; ends after `idle_timeout` without one, or when the consumer is closed."""
        engine = await self._ready()
        idle_s = self._idle_timeout_s
        while not engine.is_closed:
            self._something.clear()
            await self._settle(engine)
            if engine.backlog.prepare():
                for record in engine.backlog.walk():
                    yield record
                continue
            came = await self._until(None if idle_s is None else asyncio.get_running_loop().time() + idle_s)
            if not came and not engine.is_waiting:
                return

    async def run(
        self,
        handler: Callable[[Record], object],
        *,
        timeout: float | None = None,
        poll_time: float = 0.1,
        poll_time_after_error: float = 1.0,
        on_error: str = "stop",
    ) -> int:
        """Calls or awaits `handler(record)` for every record, topics in parallel, as `quiver.Consumer.run` does."""
        course = Course(timeout, poll_time, poll_time_after_error, False, check_on_error(on_error))
        self._stop_running.clear()
        engine = await self._ready()
        course.commits = engine.has_group
        begins = await self._give_way(engine)
        settings = self._settings | {"commit_interval": None}
        async with contextlib.AsyncExitStack() as stack:
            readers = {
                topic: await stack.enter_async_context(AsyncConsumer(self._servers, [topic], **settings))
                for topic in dict.fromkeys(self._topics)
            }
            for (topic, partition), offset in begins.items():
                await readers[topic].seek(topic, partition, offset)
            handled = await run_tasks(handler, course, self._stop_running, readers)
            for topic, partition in begins:
                reached = await readers[topic].position(topic, partition)
                if reached is not None:
                    await engine.seek(topic, partition, reached)  # what was handled is not polled again
            return handled

    async def _give_way(self, engine: ConsumerEngine) -> dict[TopicPartition, int]:
        """Where those who run for this consumer begin. In a group they take its place, and the group tells them."""
        if engine.is_member:
            await engine.pause()
            return {}
        return engine.positions

    def stop(self) -> None:
        """Ends `run` after the records it has at hand."""
        self._stop_running.set()

    @property
    def is_waiting(self) -> bool:
        """It has nothing to read yet: it is not connected, or others of its group are to let go of partitions."""
        return self._engine is None or self._engine.is_waiting

    async def commit(self) -> None:
        """Stores the positions of what was handed out, durably, before it returns."""
        await (await self._ready()).stored.commit()

    async def committed(self, topic: str, partition: int) -> int | None:
        return await (await self._ready()).committed(topic, partition)

    async def seek(self, topic: str, partition: int, offset: int) -> None:
        await (await self._ready()).seek(topic, partition, offset)

    async def seek_to_time(self, topic: str, partition: int, timestamp: int) -> None:
        engine = await self._ready()
        await engine.seek(topic, partition, await engine.offset_at(topic, partition, timestamp))

    async def position(self, topic: str, partition: int) -> int | None:
        return (await self._ready()).positions.get((topic, partition))

    async def assignment(self) -> list[TopicPartition]:
        """The partitions that are read now, sorted."""
        return (await self._ready()).assignment

    async def close(self) -> None:
        """Leaves the group; with `commit_interval`, stores how far it was."""
        if self._engine is not None:
            await self._engine.close()

    async def __aenter__(self) -> Self:
        await self._ready()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._engine is not None:
            await self._engine.close(failed=kind is not None)


async def _tell(whom: Told | None, partitions: list[TopicPartition]) -> None:
    if whom is not None and partitions:
        done = whom(partitions)
        if inspect.isawaitable(done):
            await done
