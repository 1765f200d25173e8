"""A whole broker on a disk, and a client that speaks its requests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import uvloop
from crc32c import crc32c
from msgspec import Struct

from quiver.broker.server import Broker
from quiver.config import BrokerSettings, LogSettings
from quiver.log.disk import Disk
from quiver.net.connection import Connection, open_connection
from quiver.testing.faulty_disk import FaultyDisk
from quiver.types import PartitionStatus
from quiver.wire.batch_check import SCHEMA_ID_V1
from quiver.wire.frame import walk_frames
from quiver.wire.messages import (
    CommitPosition,
    CreateTopic,
    DeleteTopic,
    Done,
    Fetch,
    FetchReply,
    GetMetadata,
    GetPosition,
    GetStatus,
    ListOffset,
    ListOffsetReply,
    MetadataReply,
    Position,
    PositionReply,
    Produce,
    ProduceReply,
    StatusReply,
)
from tests.wire.kit import make_payload

R = TypeVar("R", bound=Struct)
TIMEOUT_S = 60.0
SETTINGS = BrokerSettings(data_dir="data", port=0)
DIRECTORY = "data/broker-1"


def run(main: Coroutine[Any, Any, None]) -> None:
    async def to_its_end() -> None:
        await asyncio.wait_for(main, 120)
        for _ in range(5):  # transports that were closed last are gone a few turns later
            await asyncio.sleep(0)

    uvloop.run(to_its_end())


def with_log(**log: Any) -> BrokerSettings:
    return dataclasses.replace(SETTINGS, log=dataclasses.replace(LogSettings(), **log))


async def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Waits for something that another task or thread brings about."""
    deadline_s = asyncio.get_running_loop().time() + TIMEOUT_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline_s, f"waited too long for {what}"
        await asyncio.sleep(0.001)


class GatedDisk(FaultyDisk):
    """Operations of one kind wait at a gate until the test opens it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.gated: tuple[str, str] | None = None  # operation, part of the path
        self.waiting = threading.Event()
        self.gate = threading.Event()

    def close_gate(self, operation: str, path: str = "") -> None:
        self.waiting.clear()
        self.gate.clear()
        self.gated = (operation, path)

    def open_gate(self) -> None:
        self.gated = None
        self.gate.set()

    def step(self, operation: str, path: str) -> None:
        if self.gated is not None and operation == self.gated[0] and self.gated[1] in path:
            self.waiting.set()
            assert self.gate.wait(TIMEOUT_S), "the gate was never opened"
        super().step(operation, path)


@dataclasses.dataclass
class Client:
    connection: Connection

    async def ask(self, request: Struct, reply_type: type[R], payload: bytes = b"") -> R:
        reply, _ = await self.connection.call(request, reply_type, (payload,) if payload else (), timeout_s=TIMEOUT_S)
        return reply

    async def create(self, topic: str = "logs", partitions: int = 1, **more: Any) -> None:
        await self.ask(CreateTopic(topic, partitions, **more), Done)

    async def delete(self, topic: str = "logs") -> None:
        await self.ask(DeleteTopic(topic), Done)

    async def topics(self, *names: str) -> dict[str, int]:
        """Partition counts by topic."""
        reply = await self.ask(GetMetadata(list(names) or None), MetadataReply)
        assert len({topic.name for topic in reply.topics}) == len(reply.topics)
        return {topic.name: len(topic.partitions) for topic in reply.topics}

    async def produce(
        self, payload: bytes | None = None, count: int = 3, *, topic: str = "logs", partition: int = 0, **more: Any
    ) -> ProduceReply:
        payload = make_payload(count) if payload is None else payload
        request = Produce(topic, partition, count, 10, 20, crc32c(payload), SCHEMA_ID_V1)
        for name, value in more.items():
            request = Produce(**{**{f: getattr(request, f) for f in request.__struct_fields__}, name: value})
        return await self.ask(request, ProduceReply, payload)

    async def fetch_raw(self, request: Fetch) -> tuple[FetchReply, memoryview]:
        return await self.connection.call(request, FetchReply, timeout_s=TIMEOUT_S)

    async def fetch(
        self, offset: int = 0, *, topic: str = "logs", partition: int = 0, bytes_max: int = 10**6, **more: int
    ) -> list[bytes]:
        """The payloads of one answer."""
        _, payload = await self.fetch_raw(Fetch(topic, partition, offset, bytes_max, **more))
        return [bytes(found) for _, _, found in walk_frames(payload)]

    async def end(self, topic: str = "logs", partition: int = 0) -> int:
        return (await self.ask(ListOffset(topic, partition, -1), ListOffsetReply)).offset

    async def commit(self, consumer: str, offset: int, **more: Any) -> int | None:
        request = CommitPosition("logs", 0, Position(consumer, offset, **more))
        return (await self.ask(request, PositionReply)).offset

    async def position(self, consumer: str, topic: str = "logs") -> int | None:
        return (await self.ask(GetPosition(topic, 0, consumer), PositionReply)).offset

    async def status(self, topic: str | None = None) -> list[PartitionStatus]:
        return (await self.ask(GetStatus(topic), StatusReply)).partitions


@contextlib.asynccontextmanager
async def broker(disk: Disk | None = None, settings: BrokerSettings = SETTINGS, **more: Any) -> AsyncIterator[Client]:
    """A running broker and a client of it; both are closed at the end."""
    async with running(disk, settings, **more) as node, connected(node) as client:
        yield client


@contextlib.asynccontextmanager
async def running(disk: Disk | None = None, settings: BrokerSettings = SETTINGS, **more: Any) -> AsyncIterator[Broker]:
    node = Broker(settings, disk, **more)
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


@contextlib.asynccontextmanager
async def connected(node: Broker) -> AsyncIterator[Client]:
    connection = await open_connection(node.address, "test", timeout_s=TIMEOUT_S)
    try:
        yield Client(connection)
    finally:
        connection.close()
