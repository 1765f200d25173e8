"""The manager as the SDK meets it on the node's framed port, from the first moment on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from quiver.config import NodeSettings
from quiver.errors import DiskFullError, TopicExistsError, UnknownTopicError
from quiver.log.disk import Disk
from quiver.manager.manager import Manager
from quiver.testing.faulty_disk import FaultyDisk
from quiver.wire.messages import CreateTopic, DeleteTopic, GetMetadata, MetadataReply
from tests.broker.kit import settle
from tests.manager.kit import Api, until
from tests.manager.test_registry import PlayedBroker
from tests.manager.v1_kit import V1


async def ask(manager: Manager, request: Struct) -> Any:
    reply, _ = await manager.handlers[type(request)](request, memoryview(b""), None)
    return reply


async def partitions_of(manager: Manager, *topics: str) -> dict[str, list[tuple[int, ...]]]:
    """What an SDK learns: the replicas of each partition."""
    reply = await ask(manager, GetMetadata(list(topics) or None))
    assert isinstance(reply, MetadataReply)
    return {topic.name: [partition.replicas for partition in topic.partitions] for topic in reply.topics}


@contextlib.asynccontextmanager
async def started(directory: Path, disk: Disk | None = None) -> AsyncIterator[Manager]:
    """It has its metadata, and no broker yet."""
    manager = Manager(NodeSettings(str(directory / "data"), port=0, http_port=0), disk)
    await manager.start()
    try:
        yield manager
    finally:
        await manager.stop_serving()
        await manager.stop()


@contextlib.asynccontextmanager
async def serving(directory: Path, broker: PlayedBroker, disk: Disk | None = None) -> AsyncIterator[Manager]:
    async with started(directory, disk) as manager:
        await manager.serve(1, "127.0.0.1:1", "cluster", broker)
        yield manager


def test_a_request_that_comes_before_the_broker_is_taken_in_waits_for_it(tmp_path: Path) -> None:
    """The port is open a moment earlier. A topic made then would have no broker for ever."""

    async def main() -> None:
        broker = PlayedBroker()
        async with started(tmp_path) as manager:
            early = [
                asyncio.create_task(ask(manager, CreateTopic("logs", 2))),
                asyncio.create_task(partitions_of(manager)),
            ]
            await settle()
            assert not any(task.done() for task in early)
            await manager.serve(1, "127.0.0.1:1", "cluster", broker)
            await asyncio.gather(*early)
            assert await partitions_of(manager) == {"logs": [(1,), (1,)]}
            assert list(broker.topics) == ["logs"]

    asyncio.run(main())


def test_a_topic_asked_for_by_name_is_ready_to_be_used(tmp_path: Path) -> None:
    async def main() -> None:
        broker = PlayedBroker()
        async with serving(tmp_path, broker) as manager:
            broker.gate.clear()
            making = asyncio.create_task(ask(manager, CreateTopic("logs")))
            await until(lambda: "logs" in manager._quorum.state.topics)
            asking = asyncio.create_task(partitions_of(manager, "logs", "none"))
            await settle()
            assert not asking.done()
            broker.gate.set()
            assert await asking == {"logs": [(1,)]}
            assert list(broker.topics) == ["logs"]
            await making

    asyncio.run(main())


def test_a_topic_that_the_disk_had_no_room_for_can_be_asked_for_again(tmp_path: Path) -> None:
    async def main() -> None:
        broker = PlayedBroker()
        async with serving(tmp_path, broker) as manager:
            broker.errors = [DiskFullError("full"), DiskFullError("full")]
            for request in (CreateTopic("logs"), GetMetadata(["logs"])):
                with pytest.raises(DiskFullError):
                    await ask(manager, request)
            assert await partitions_of(manager, "logs") == {"logs": [(1,)]}
            assert list(broker.topics) == ["logs"]

    asyncio.run(main())


def test_topics_are_made_and_deleted_in_the_words_of_the_sdk(tmp_path: Path) -> None:
    async def main() -> None:
        broker = PlayedBroker()
        async with serving(tmp_path, broker) as manager:
            await ask(manager, CreateTopic("logs", 3))
            with pytest.raises(TopicExistsError, match="topic logs already exists"):
                await ask(manager, CreateTopic("logs"))
            await ask(manager, DeleteTopic("logs"))
            with pytest.raises(UnknownTopicError):
                await ask(manager, DeleteTopic("logs"))
            assert broker.changes == ["create logs", "delete logs"]
            assert await partitions_of(manager) == {}
        async with serving(tmp_path, broker) as manager:
            assert await partitions_of(manager) == {}

    asyncio.run(main())


def test_health_tells_why_the_disk_takes_no_changes_and_when_it_does_again(tmp_path: Path) -> None:
    """Over HTTP, in both APIs; the rest is answered from what is known."""

    async def main() -> None:
        disk, broker = FaultyDisk(1), PlayedBroker()
        (tmp_path / "data" / "manager-1").mkdir(parents=True)  # of the database, which is on the real disk

        def healths(api: Api, v1: V1) -> tuple[Any, Any]:
            return api.get("/health")["trouble"], v1.request("GET", "/v1/health").body["trouble"]

        async with serving(tmp_path, broker, disk) as manager:
            await ask(manager, CreateTopic("logs"))
            with Api(manager.http_address) as api, V1(manager.http_address) as v1:
                assert await asyncio.to_thread(healths, api, v1) == (None, None)
        disk.capacity_bytes = 0
        async with serving(tmp_path, broker, disk) as manager:
            with Api(manager.http_address) as api, V1(manager.http_address) as v1:
                troubles = await asyncio.to_thread(healths, api, v1)
                assert troubles[0] == troubles[1] and "No space left" in troubles[0]
                assert await asyncio.to_thread(api.get, "/topics/partitions", topic_name="logs") == {"partitions": [0]}
                refused = await asyncio.to_thread(api.call, "POST", "/topics", topic_name="more")
                assert (refused.status, "No space left" in refused.message) == (503, True)
                disk.capacity_bytes = None
                await asyncio.to_thread(api.create, "more")
                assert await asyncio.to_thread(healths, api, v1) == (None, None)

    asyncio.run(main())
