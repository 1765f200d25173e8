"""Three brokers of one partition in one loop, with real sockets between them, on simulated disks."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from crc32c import crc32c
from msgspec import Struct

from quiver.broker.partition import Partition
from quiver.broker.server import Broker
from quiver.config import BrokerSettings, LogSettings, NetSettings, RaftSettings
from quiver.errors import NotLeaderError
from quiver.net.peers import Peers
from quiver.replication.group import replica_id
from quiver.testing.faulty_disk import FaultyDisk
from quiver.types import PartitionStatus
from quiver.wire.batch_check import SCHEMA_ID_V1
from quiver.wire.frame import walk_frames
from quiver.wire.messages import (
    CreateTopic,
    Fetch,
    GetStatus,
    Produce,
    ProduceReply,
    StatusReply,
)
from quiver.wire.records import batch_from_lists, encode_batch

UID = "a" * 32
# Quick to answer, slow to elect: a machine that stalls for a moment changes no leader.
PATIENT = RaftSettings(heartbeat_ms=20, election_ms=1000, quiesce_ms=300)


def payload_of(value: bytes) -> bytes:
    return bytes(encode_batch(batch_from_lists([0], None, [value], None)))


class LocalFlow:
    is_writable = True

    async def until_writable(self) -> None:
        return


class Group:
    """Brokers 1 to `count`; each has its own disk, which outlives it. `spare` more have nothing of the partition."""

    def __init__(
        self,
        count: int = 3,
        log: LogSettings | None = None,
        spare: int = 0,
        settings: dict[str, bool | int | str] | None = None,
    ) -> None:
        self.numbers = range(1, count + spare + 1)
        self._founders = range(1, count + 1)
        self.disks = {number: FaultyDisk(number) for number in self.numbers}
        self.brokers: dict[int, Broker] = {}
        self._peers: dict[int, Peers] = {}
        self._log = log or LogSettings()
        self._settings = settings or {}  # of the topic

    async def __aenter__(self) -> Group:
        for number in self.numbers:
            await self.start(number)
        ids = [replica_id(number, self.brokers[number].disk_id) for number in self._founders]
        for number in self.numbers:
            await self.host(number, ids)
        self.voters = ids
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(self.stop(number) for number in list(self.brokers)))

    async def host(self, number: int, voters: list[int]) -> None:
        await self.ask(number, CreateTopic("logs", 1, 3, [UID], [voters], self._settings))

    async def start(self, number: int) -> None:
        settings = BrokerSettings(data_dir="data", node_id=number, port=0, raft=PATIENT, log=self._log)
        peers = Peers(number, dataclasses.replace(NetSettings(), peer_silence_s=5.0))
        peers.cluster_id = "test"
        broker = Broker(settings, self.disks[number], peers=peers)
        await broker.start()
        self.brokers[number], self._peers[number] = broker, peers
        self._tell_addresses()

    def _tell_addresses(self) -> None:
        addresses = {number: broker.address for number, broker in self.brokers.items()}
        for peers in self._peers.values():
            peers.set_addresses(addresses)

    async def stop(self, number: int) -> None:
        await self.brokers.pop(number).stop()
        del self._peers[number]

    # -- requests ------------------------------------------------------------------------------------------------

    async def ask(self, number: int, request: Struct, payload: bytes = b"") -> tuple[Any, Any]:
        return await self.brokers[number].serve(request, memoryview(payload), LocalFlow())

    async def produce(self, value: bytes, **more: int) -> int:
        """At whichever broker leads; returns the offset."""
        return await self.produce_batch(payload_of(value), **more)

    async def produce_batch(self, payload: bytes, **more: int) -> int:
        request = Produce("logs", 0, more.pop("record_count", 1), 0, 0, crc32c(payload), SCHEMA_ID_V1, **more)
        while True:
            for number in list(self.brokers):
                try:
                    reply, _ = await self.ask(number, request, payload)
                except NotLeaderError:
                    continue
                assert isinstance(reply, ProduceReply)
                return reply.base_offset
            await asyncio.sleep(0.01)

    async def fill(self, count: int, first: int = 0) -> None:
        for number in range(first, first + count):
            await self.produce(b"%d" % number)

    async def payloads(self, number: int) -> list[bytes]:
        """All of them, as that broker serves them."""
        found: list[bytes] = []
        while True:
            _, parts = await self.ask(number, Fetch("logs", 0, len(found), 1_000_000, 0, 0))
            if not parts:
                return found
            for part in parts:
                for _, header, payload in walk_frames(memoryview(part)):
                    if header.record_count:  # an election leaves entries without records
                        assert header.base_offset == len(found)
                        found.append(bytes(payload))

    async def status(self, number: int) -> PartitionStatus:
        reply, _ = await self.ask(number, GetStatus())
        assert isinstance(reply, StatusReply)
        return reply.partitions[0]

    def partition(self, number: int) -> Partition:
        found = self.brokers[number]._hosting.partition("logs", 0)
        assert found.raft is not None
        return found

    async def leader(self) -> int:
        while True:
            for number in self.brokers:
                try:
                    raft = self.partition(number).raft
                except Exception:
                    continue  # being repaired
                if raft is not None and raft.leads:
                    return number
            await asyncio.sleep(0.01)

    async def follower(self) -> int:
        leader = await self.leader()
        return next(number for number in self.brokers if number != leader)

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        while True:
            if await holds():
                return
            await asyncio.sleep(0.02)

    async def until_all_have(self, offset: int) -> None:
        async def all_have() -> bool:
            found = [await self.status(number) for number in self.brokers]
            return all(status.state == "online" and status.next_offset == offset for status in found)

        await self.until(all_have)


def segment_files(disk: FaultyDisk, number: int) -> list[str]:
    directory = f"data/broker-{number}/partitions/{UID}"
    return [f"{directory}/{name}" for name in disk.list(directory) if name.endswith(".seg")]
