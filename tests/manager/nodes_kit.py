"""A manager and its brokers as they run, in one loop: real sockets and files, quick elections."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from quiver.aio import Admin, Producer
from quiver.cli.cluster_nodes import BrokerNode, ManagerNode
from quiver.config import NodeSettings, RaftSettings
from quiver.types import PartitionStatus

QUICK = NodeSettings(
    port=0,
    http_port=0,
    heartbeat_s=0.1,
    broker_silence_s=3.0,
    raft=RaftSettings(heartbeat_ms=20, election_ms=1000, quiesce_ms=300),
)


class Nodes:
    def __init__(self, directory: Path, settings: NodeSettings) -> None:
        self.directory = directory
        self._settings = dataclasses.replace(settings, data_dir=str(directory))
        self._manager: ManagerNode | None = None
        self._manager_port = 0
        self.brokers: dict[int, BrokerNode] = {}

    @property
    def manager(self) -> Any:
        """The manager itself, to look at what it knows."""
        assert self._manager is not None
        return self._manager._manager

    @property
    def state(self) -> Any:
        return self.manager._quorum.state

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._manager_port}"

    async def start_manager(self) -> None:
        self._manager = ManagerNode(dataclasses.replace(self._settings, port=self._manager_port))
        await self._manager.start()
        self._manager_port = int(self._manager.address.rpartition(":")[2])

    async def stop_manager(self) -> None:
        assert self._manager is not None
        manager, self._manager = self._manager, None
        await manager.stop()

    async def start(self, *brokers: int) -> None:
        async def one(broker: int) -> None:
            node = BrokerNode(dataclasses.replace(self._settings, node_id=broker, manager=self.address))
            await node.start()
            self.brokers[broker] = node

        await asyncio.gather(*map(one, brokers))
        await until(lambda: all(map(self.manager._registry.brokers.is_active, brokers)))

    async def stop(self, *brokers: int) -> None:
        await asyncio.gather(*(self.brokers.pop(broker).stop() for broker in brokers))

    async def end(self) -> None:
        """Brokers last, as everywhere: what a manager does at its end needs them."""
        if self._manager is not None:
            await self.stop_manager()
        await self.stop(*self.brokers)

    # -- what is there -------------------------------------------------------------------------------------------

    def replicas(self, topic: str) -> list[set[int]]:
        return [set(partition.replicas) for partition in self.state.topic(topic).partitions]

    def has(self, broker: int) -> list[Path]:
        """The directories of partitions that a broker has on disk."""
        return sorted((self.directory / f"broker-{broker}" / "partitions").iterdir())

    async def leaders(self, topic: str) -> dict[int, PartitionStatus]:
        """By partition; what its leader says."""
        async with Admin(self.address) as admin:
            told = await admin.replica_status(topic)
        return {one.partition: one for found in told.values() for one in found if one.role == "leader"}

    def is_still(self) -> bool:
        return not self.manager._moves.moves() and not self.manager._moves.draining()

    async def until_still(self) -> None:
        await until(self.is_still)

    async def fill(self, topic: str, count: int) -> None:
        async with Producer(self.address) as producer:
            for number in range(count):
                await producer.send(topic, b"%d" % number, key=b"%d" % number)

    async def messages(self, topic: str) -> int:
        async with Admin(self.address) as admin:
            return sum(latest - earliest for earliest, latest in (await admin.offsets(topic)).values())


async def until(holds: Callable[[], Any], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110  # other tasks bring it about
            await asyncio.sleep(0.01)


async def until_true(holds: Callable[[], Awaitable[bool]], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(directory: Path, count: int, settings: NodeSettings = QUICK) -> AsyncIterator[Nodes]:
    nodes = Nodes(directory, settings)
    try:
        await nodes.start_manager()
        await nodes.start(*range(1, count + 1))
        yield nodes
    finally:
        await nodes.end()


def play(
    directory: Path, test: Callable[[Nodes], Coroutine[Any, Any, None]], count: int = 3, settings: NodeSettings = QUICK
) -> None:
    async def main() -> None:
        async with running(directory, count, settings) as nodes:
            await test(nodes)

    asyncio.run(asyncio.wait_for(main(), 200))
