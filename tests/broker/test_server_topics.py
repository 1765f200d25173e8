"""Topics: made, deleted, found again after a restart, and never half."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import socket

import pytest

from quiver.errors import (
    ConnectionLostError,
    DiskFullError,
    InvalidRequestError,
    InvalidTopicError,
    QuiverError,
    ShuttingDownError,
    TopicExistsError,
    UnknownTopicError,
)
from quiver.testing.faulty_disk import FaultyDisk
from quiver.wire.messages import DeleteTopic, Done, GetMetadata, MetadataReply
from tests.broker.server_kit import DIRECTORY, SETTINGS, GatedDisk, broker, connected, run, running, until
from tests.wire.kit import make_payload

PARTITIONS = f"{DIRECTORY}/partitions"
CATALOG = f"{DIRECTORY}/catalog.json"


@pytest.mark.parametrize("how", ["crash", "kill"])
def test_topics_and_their_records_survive_a_restart(how: str) -> None:
    async def main() -> None:
        disk = FaultyDisk(1)
        async with broker(disk) as client:
            await client.create("logs", 2)
            await client.create("other")
            for partition in (0, 1):
                await client.produce(make_payload(3, first=partition), partition=partition)
            before = await client.ask(GetMetadata(), MetadataReply)
        getattr(disk, how)()
        async with broker(disk) as client:
            after = await client.ask(GetMetadata(), MetadataReply)
            assert (after.cluster_id, after.topics) == (before.cluster_id, before.topics)
            assert await client.topics() == {"logs": 2, "other": 1}
            for partition in (0, 1):
                assert await client.fetch(partition=partition) == [make_payload(3, first=partition)]

    run(main())


def test_topic_can_be_made_once_and_deleted_once() -> None:
    async def main() -> None:
        disk = FaultyDisk(1)
        async with broker(disk) as client:
            await client.create()
            with pytest.raises(TopicExistsError):
                await client.create("logs", 5)
            assert await client.topics() == {"logs": 1}
            await client.produce()
            await client.delete()
            assert await client.topics() == {} and disk.list(PARTITIONS) == []
            with pytest.raises(UnknownTopicError):
                await client.delete()
            with pytest.raises(UnknownTopicError):
                await client.fetch()
            await client.create()
            assert await client.end() == 0, "a new topic of the old name is empty"

    run(main())


def test_late_word_of_a_deletion_leaves_the_topic_that_was_made_since() -> None:
    async def main() -> None:
        disk = FaultyDisk(1)
        old, new = ["1" * 32, "2" * 32], ["3" * 32]
        async with broker(disk) as client:
            await client.create("logs", 2, uids=old)
            await client.ask(DeleteTopic("logs", old[1]), Done)
            await client.create("logs", 1, uids=new)
            await client.produce()
            for late in old:
                with pytest.raises(UnknownTopicError, match="topic logs was made again"):
                    await client.ask(DeleteTopic("logs", late), Done)
            with pytest.raises(TopicExistsError) as found:
                await client.create("logs", 2, uids=old)
            assert found.value.facts["uid"] == new[0], "who is told so can see that it is another one"
            assert await client.fetch() == [make_payload(3)]
        async with broker(disk) as client:
            assert await client.fetch() == [make_payload(3)]
            await client.ask(DeleteTopic("logs", new[0]), Done)
            assert await client.topics() == {} and disk.list(PARTITIONS) == []

    run(main())


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a b", "x" * 250, "caf\u00e9"])
def test_names_that_are_not_allowed_make_and_delete_nothing(name: str) -> None:
    async def main() -> None:
        disk = FaultyDisk(1)
        async with broker(disk) as client:
            before = disk.operations
            with pytest.raises(InvalidTopicError):
                await client.create(name)
            with pytest.raises(InvalidTopicError):
                await client.delete(name)
            assert disk.operations == before

    run(main())


def test_two_that_make_the_same_topic_at_once_get_one_topic() -> None:
    async def main() -> None:
        async with broker(FaultyDisk(1)) as client:
            attempts = [client.create("logs", count) for count in (3, 3, 3, 3)]
            found = await asyncio.gather(*attempts, return_exceptions=True)
            assert sorted(type(outcome).__name__ for outcome in found) == ["NoneType"] + ["TopicExistsError"] * 3
            assert await client.topics() == {"logs": 3}

    run(main())


def test_directories_of_other_partitions_cannot_be_taken() -> None:
    async def main() -> None:
        async with broker(FaultyDisk(1)) as client:
            await client.create("logs")
            await client.produce()
            (status,) = await client.status("logs")
            fresh = "0" * 32
            for uids in ([status.uid, fresh], [fresh, fresh], [fresh], [fresh, "../../../etc"]):
                with pytest.raises(InvalidRequestError):
                    await client.create("thief", 2, uids=uids)
            assert await client.topics() == {"logs": 1}
            await client.create("given", 1, uids=[fresh])
            assert [s.uid for s in await client.status("given")] == [fresh]
            assert await client.fetch() == [make_payload(3)]

    run(main())


# -- a crash in the middle -------------------------------------------------------------------------------------------


def test_crash_while_a_topic_is_made_leaves_all_of_it_or_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def attempt(step: int) -> bool:
        disk = FaultyDisk(step)
        async with broker(disk) as client:
            await client.create("before")
            await client.produce(topic="before")
            disk.stop_at(step)
            try:
                await client.create("logs", 3)
                made = True
            except QuiverError:
                made = False
            disk.crash()
        async with broker(disk) as client:
            topics = await client.topics()
            assert topics in ({"before": 1, "logs": 3}, {"before": 1})
            assert not made or "logs" in topics, "it was promised"
            assert len(disk.list(PARTITIONS)) == sum(topics.values()), "no directory without a topic"
            if "logs" in topics:
                await client.produce(partition=2)
            else:
                await client.create("logs", 3)
            assert await client.fetch(topic="before") == [make_payload(3)]
        return made

    async def main() -> None:
        step = 1
        while not await attempt(step):
            step += 1
        assert step > 10

    with caplog.at_level(logging.CRITICAL):
        run(main())


def test_crash_while_a_topic_is_deleted_leaves_all_of_it_or_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def attempt(step: int) -> bool:
        disk = FaultyDisk(step)
        async with broker(disk) as client:
            await client.create("logs", 2)
            await client.create("other")
            await client.produce(partition=1)
            disk.stop_at(step)
            try:
                await client.delete()
                deleted = True
            except QuiverError:
                deleted = False
            disk.crash()
        async with broker(disk) as client:
            topics = await client.topics()
            assert topics in ({"logs": 2, "other": 1}, {"other": 1})
            assert not deleted or "logs" not in topics
            assert len(disk.list(PARTITIONS)) == sum(topics.values())
            if "logs" in topics:
                assert await client.fetch(partition=1) == [make_payload(3)]
        return deleted

    async def main() -> None:
        step = 1
        while not await attempt(step):
            step += 1
        assert step > 10

    with caplog.at_level(logging.CRITICAL):
        run(main())


# -- a disk that refuses ---------------------------------------------------------------------------------------------


REFUSED = [
    ("make_directory", 1),
    ("make_directory", 2),
    ("open", 1),
    ("open", 2),
    ("pwrite", 1),
    ("datasync", 1),
    ("rename", 1),
    ("sync_directory", 1),
    ("sync_directory", 2),
]


@pytest.mark.parametrize(("operation", "nth"), REFUSED)
def test_topic_that_cannot_be_stored_leaves_nothing_and_can_be_made_later(operation: str, nth: int) -> None:
    async def main() -> None:
        disk = FaultyDisk(2)
        async with broker(disk) as client:
            disk.fail(operation, errno.ENOSPC, nth)
            tasks = len(asyncio.all_tasks())
            with pytest.raises(DiskFullError, match=r"logs cannot be stored: .*No space left"):
                await client.create("logs", 2)
            assert await client.topics() == {} and disk.list(PARTITIONS) == []
            assert len(asyncio.all_tasks()) == tasks, "no owner without a topic"
            await client.create("logs", 2)
            await client.produce(partition=1)
            assert await client.fetch(partition=1) == [make_payload(3)]

    run(main())


def test_deletion_that_cannot_be_stored_changes_nothing() -> None:
    async def main() -> None:
        disk = FaultyDisk(2)
        async with broker(disk) as client:
            await client.create()
            await client.produce()
            disk.fail("datasync", errno.ENOSPC, path="catalog")
            with pytest.raises(DiskFullError, match="deletion of logs"):
                await client.delete()
            assert await client.fetch() == [make_payload(3)]
            await client.produce()
            await client.delete()

    run(main())


def test_directory_that_cannot_be_removed_goes_at_the_next_start() -> None:
    async def main() -> None:
        disk = FaultyDisk(2)
        async with broker(disk) as client:
            await client.create("logs", 3)
            disk.fail("remove", errno.EIO, 2)
            await client.delete()
            assert await client.topics() == {}
            assert len(disk.list(PARTITIONS)) == 1
        async with broker(disk):
            assert disk.list(PARTITIONS) == []

    run(main())


# -- at the same time ------------------------------------------------------------------------------------------------


def test_deletion_ends_the_fetches_that_wait() -> None:
    async def main() -> None:
        async with broker(FaultyDisk(4)) as client:
            await client.create()
            await client.produce()
            waiting = [asyncio.ensure_future(client.fetch(3, wait_ms=60_000)) for _ in range(5)]
            enough = asyncio.ensure_future(client.fetch(0, wait_ms=60_000, bytes_min=10**6))
            await client.status()  # requests are begun in order: they wait now
            await client.delete()
            found = await asyncio.gather(*waiting, enough, return_exceptions=True)
            assert {type(outcome) for outcome in found} <= {ShuttingDownError, UnknownTopicError}
            with pytest.raises(UnknownTopicError):
                await client.fetch(3)

    run(main())


def test_deletion_goes_on_when_the_asker_goes_away() -> None:
    async def main() -> None:
        disk = GatedDisk()
        async with running(disk) as node, connected(node) as client:
            await client.create("logs", 3)
            await client.produce()
            disk.close_gate("rename", "state")  # in the check-point of the first partition
            async with connected(node) as other:
                lost = other.connection.submit(DeleteTopic("logs"))
                await until(disk.waiting.is_set)
            with pytest.raises(ConnectionLostError):
                await lost
            disk.open_gate()
            await until(lambda: disk.list(PARTITIONS) == [], "the directories to go")
            assert await client.topics() == {}
            await client.create("logs", 3)

    run(main())


def test_others_are_served_while_a_large_topic_is_made() -> None:
    async def main() -> None:
        disk = GatedDisk()
        async with broker(disk) as client:
            await client.create("logs")
            disk.close_gate("make_directory")
            making = asyncio.ensure_future(client.create("large", 100))
            await until(disk.waiting.is_set)
            await client.produce()
            assert await client.fetch() == [make_payload(3)]
            assert await client.topics() == {"logs": 1}, "it does not exist before it is stored"
            disk.open_gate()
            await making
            assert await client.topics() == {"logs": 1, "large": 100}

    run(main())


def test_stop_finishes_a_topic_that_is_being_made() -> None:
    async def main() -> None:
        disk = GatedDisk()
        async with running(disk) as node, connected(node) as client:
            disk.close_gate("make_directory")
            making = asyncio.ensure_future(client.create("logs", 3))
            await until(disk.waiting.is_set)
            stopping = asyncio.ensure_future(node.stop())
            await asyncio.sleep(0)
            disk.open_gate()
            await asyncio.gather(making, stopping)
        disk.crash()
        async with broker(disk) as client:
            assert await client.topics() == {"logs": 3}

    run(main())


def test_port_that_is_taken_is_an_error_and_leaves_nothing_running() -> None:
    async def main() -> None:
        disk = FaultyDisk(5)
        async with broker(disk) as client:
            await client.create("logs", 3)
            await client.produce()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            tasks = len(asyncio.all_tasks())
            settings = dataclasses.replace(SETTINGS, port=taken.getsockname()[1])
            with pytest.raises(OSError) as caught:
                async with running(disk, settings):
                    pass
            assert caught.value.errno == errno.EADDRINUSE
            assert len(asyncio.all_tasks()) == tasks
        async with broker(disk) as client:
            assert await client.fetch() == [make_payload(3)]

    run(main())
