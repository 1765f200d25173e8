"""What the tests of the SDK share: a broker in a thread of this process, and short ways to write and read."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop

from quiver import Admin, Consumer, Producer, Record
from quiver.cli.embedded import EmbeddedNode
from quiver.config import LogSettings, NetSettings, NodeSettings
from tests.system.kit import free_port, read_all, until, values_of

__all__ = [
    "LocalBroker",
    "fill",
    "free_port",
    "new_topic",
    "numbers",
    "poll_numbers",
    "read_all",
    "stored",
    "until",
    "values_of",
]

T = TypeVar("T")

_numbers = itertools.count(1)


class LocalBroker:
    """A real node, broker and manager, on a loop in a thread. It can be stopped and started again in its place."""

    def __init__(
        self, directory: Path, *, log: LogSettings | None = None, net: NetSettings | None = None, **settings: Any
    ) -> None:
        self._settings = NodeSettings(
            data_dir=str(directory),
            port=free_port(),
            http_port=free_port(),
            log=log or LogSettings(),
            net=net or NetSettings(),
            **settings,
        )
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="broker")
        self._thread.start()
        self._broker: EmbeddedNode | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._settings.port}"

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def start(self) -> None:
        async def begin() -> EmbeddedNode:
            broker = EmbeddedNode(self._settings)
            await broker.start()
            return broker

        self._broker = self._call(begin())

    def stop(self) -> None:
        """Gone for its clients; `start` brings it back."""
        broker, self._broker = self._broker, None
        if broker is not None:
            self._call(broker.stop())

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def new_topic(servers: str, partitions: int = 1) -> str:
    """A topic that no other test uses."""
    name = f"t{os.getpid()}-{next(_numbers)}"
    with Admin(servers) as admin:
        admin.create_topic(name, partitions)
    return name


def stored(servers: str, topic: str) -> list[bytes | None]:
    """The values of all records, by partition and offset."""
    return values_of(read_all(servers, topic))


def fill(servers: str, topic: str, count: int, batch: int = 10, first: int = 0) -> None:
    """Batches of ten by default, so that every way of reading meets ends and middles of batches."""
    with Producer(servers) as producer:
        for start in range(first, first + count, batch):
            values = [b"%d" % number for number in range(start, min(start + batch, first + count))]
            producer.send_many(topic, values).result(10)


def numbers(records: list[Record]) -> list[int]:
    return [int(record.value or b"-1") for record in records]


def poll_numbers(consumer: Consumer, count: int, max_records: int = 500) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        records = consumer.poll(min(max_records, count - len(found)), timeout=10)
        assert records
        found += numbers(records)
    return found
