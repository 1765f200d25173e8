"""The asyncio face of the producer.

Rule: the engine lives on the caller's own loop; no thread is started.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from quiver.client.delivery import BatchesFuture, Delivery, RecordFuture
from quiver.client.producer import ProducerEngine


class AsyncProducer:
    """Sends records from asyncio. `await producer.send(...)` hands one over; await what it returns to see it stored.

    async with AsyncProducer("127.0.0.1:9400") as producer:
        where = await (await producer.send("logs", b"hello", key=b"k"))
    """

    def __init__(self, servers: str, **settings: Any) -> None:
        self._servers = servers
        self._settings = settings
        self._engine: ProducerEngine | None = None

    def _ready(self) -> ProducerEngine:
        if self._engine is None:
            self._engine = ProducerEngine(self._servers, **self._settings)
        self._engine.check_usable()
        return self._engine

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
        headers: Any = None,
    ) -> RecordFuture:
        engine = self._ready()
        info = engine.known_topic(topic) or await engine.topic(topic)
        if not engine.has_room():
            await engine.until_room()
        return engine.add(info, value, key, partition, timestamp, headers)

    async def send_many(
        self, topic: str, records: Any, *, keys: Any = None, partition: int | None = None
    ) -> BatchesFuture:
        engine = self._ready()
        info = engine.known_topic(topic) or await engine.topic(topic)
        deliveries: list[Delivery] = []
        counts: list[int] = []
        for planned in engine.plan_many(info, records, keys, partition):
            if not engine.has_room():
                await engine.until_room(sum(counts))
            deliveries.append(engine.add_batch(info, planned))
            counts.append(planned.records.num_rows)
        return BatchesFuture(deliveries, counts)

    async def flush(self, timeout: float | None = None) -> None:
        await self._ready().flush(timeout)

    async def close(self, timeout: float | None = 30.0) -> None:
        if self._engine is not None:
            await self._engine.close(timeout)

    async def __aenter__(self) -> Self:
        self._ready()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
