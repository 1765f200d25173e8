"""The SDK while a replica's log is damaged: real brokers, real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import Struct

from quiver.aio import Consumer
from quiver.types import NodeInfo, PartitionInfo, TopicInfo
from quiver.wire.messages import GetMetadata, MetadataReply
from tests.broker.group_kit import UID, Group, segment_files
from tests.broker.server_kit import run
from tests.broker.test_replication import SMALL, flip


def tell_leaders(group: Group) -> None:
    """As a manager would: every broker says who leads."""

    async def answer(request: Struct, payload: Any, flow: Any) -> tuple[Struct, tuple[()]]:
        nodes = [NodeInfo(number, broker.address) for number, broker in group.brokers.items()]
        info = PartitionInfo(0, await group.leader(), tuple(group.numbers))
        return MetadataReply("test", nodes, [TopicInfo("logs", (info,), {}, 3, UID)]), ()

    for broker in group.brokers.values():
        broker._others = {GetMetadata: answer}


def test_consumer_reads_on_when_the_leader_finds_a_damaged_frame() -> None:
    async def main() -> None:
        async with Group(log=SMALL) as group:
            await group.fill(100)
            await group.until_all_have(100)
            tell_leaders(group)
            hurt = await group.leader()
            flip(group.disks[hurt], segment_files(group.disks[hurt], hurt)[0], 2000)
            servers = ",".join(broker.address for broker in group.brokers.values())
            async with Consumer(servers, ["logs"], start="earliest") as consumer, asyncio.timeout(30):
                found: list[int] = []
                while len(found) < 100:
                    found += [int(record.value) for record in await consumer.poll(timeout=1.0)]
            assert found == list(range(100))
            assert await group.leader() != hurt

    run(main())
