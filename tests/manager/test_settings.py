"""Topic settings reach brokers, wherever they were when these were set; what they ask for happens."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quiver.aio import Admin, Consumer, Producer
from quiver.cli.embedded import EmbeddedNode
from quiver.errors import (
    InvalidRequestError,
    MessageTooLargeError,
    NoConsumersError,
    QuiverError,
    RequestError,
    UnavailableError,
    UnknownTopicError,
)
from quiver.metadata import commands
from quiver.wire.admin_messages import ConsumersReply
from quiver.wire.messages import CommitPosition, Position
from tests.manager.nodes_kit import QUICK, Nodes, play, until, until_true

CLEANING = dataclasses.replace(QUICK, retention_check_s=0.1)


def rules(nodes: Nodes, broker: int, topic: str = "logs") -> Any:
    """What a broker does with its partitions of a topic."""
    return next(iter(nodes.brokers[broker]._broker._hosting.partitions[topic].values())).rules


def watch_questions(nodes: Nodes) -> list[Any]:
    """What the brokers hear from now on when they ask who reads a topic."""
    heard: list[Any] = []

    def watch(hosting: Any) -> None:
        ask = hosting._consumers_of

        async def noted(topic: str) -> Any:
            try:
                heard.append(await ask(topic))
            except QuiverError as error:
                heard.append(error)
                raise
            return heard[-1]

        hosting._consumers_of = noted

    for broker in nodes.brokers.values():
        watch(broker._broker._hosting)
    return heard


def test_settings_reach_running_brokers_and_those_that_were_away(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin:
            made = await admin.create_topic("logs", 1, {"retention.ms": 5000, "segment.bytes": "4096"})
            assert made.settings == {"retention.ms": 5000, "segment.bytes": 4096}
            assert [rules(nodes, broker).log.retention_ms for broker in (1, 2, 3)] == [5000] * 3
            await nodes.stop(3)
            told = await admin.alter_topic("logs", {"retention.ms": -1, "max.message.bytes": 100}, ["segment.bytes"])
            assert told.settings == {"max.message.bytes": 100, "retention.ms": -1}
            assert [rules(nodes, broker).log.retention_ms for broker in (1, 2)] == [None] * 2
            assert rules(nodes, 1).log.segment_bytes_max == QUICK.log.segment_bytes_max
            await nodes.start(3)
            await until(lambda: rules(nodes, 3).log.retention_ms is None)
            await nodes.stop(1)
            await nodes.start(1)
            assert rules(nodes, 1).message_bytes_max == 100, "a broker knows them without being told again"
            await nodes.stop_manager()
            await nodes.start_manager()
            assert nodes.state.topic("logs").settings == told.settings

    play(tmp_path, test)


def test_more_and_fewer_replicas_are_a_setting_too(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin:
            made = await admin.create_topic("logs", 3, {"replication.factor": 1})
            assert made.settings == {} and made.replication_factor == 1
            await nodes.fill("logs", 30)
            assert [len(replicas) for replicas in nodes.replicas("logs")] == [1] * 3
            await admin.alter_topic("logs", {"replication.factor": 3})
            await nodes.until_still()
            assert nodes.replicas("logs") == [{1, 2, 3}] * 3
            for status in (await nodes.leaders("logs")).values():
                assert {replica.broker for replica in status.replicas if replica.voter} == {1, 2, 3}
            await admin.alter_topic("logs", {"replication.factor": 2})
            await nodes.until_still()
            assert [len(replicas) for replicas in nodes.replicas("logs")] == [2] * 3
            assert await nodes.messages("logs") == 30
            await nodes.fill("logs", 3)

    play(tmp_path, test)


def test_wrong_settings_change_nothing(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin:
            with pytest.raises(InvalidRequestError, match="cleanup is delete, consumed or compact"):
                await admin.create_topic("logs", 1, {"cleanup": "never"})
            assert await admin.list_topics() == []
            await admin.create_topic("logs")
            before = nodes.state.applied
            registry = nodes.manager._registry
            with pytest.raises(InvalidRequestError, match="cleanup cannot be set and unset at once"):
                await registry.alter_topic("logs", {"cleanup": "delete"}, ["cleanup"])
            with pytest.raises(InvalidRequestError, match="there is no topic setting 'x'"):
                await registry.alter_topic("logs", {"x": 1})
            with pytest.raises(UnknownTopicError):
                await admin.alter_topic("nope", {"cleanup": "delete"})
            assert nodes.state.applied == before

    play(tmp_path, test)


def test_registered_consumer_that_has_read_nothing_keeps_everything(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin, Producer(nodes.address) as producer:
            await admin.create_topic("logs", 1)
            await producer.send_many("logs", [b"x"] * 100)
            await producer.flush()
            await nodes.manager._registry.register_consumer("logs", None)
            async with Consumer(nodes.address, ["logs"], group="g") as consumer:
                assert len(await consumer.poll(timeout=10)) == 100
                await consumer.commit()
            asked = watch_questions(nodes)
            await admin.alter_topic("logs", {"cleanup": "consumed"})
            await until(lambda: len(asked) >= 3)
            assert all(answer.told == ConsumersReply([1], last=1) for answer in asked)
            assert (await admin.offsets("logs"))[0] == (0, 100)

    play(tmp_path, test, settings=CLEANING)


def test_member_that_has_committed_nothing_keeps_everything(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin, Producer(nodes.address) as producer:
            await admin.create_topic("logs", 1, {"cleanup": "consumed", "require.consumers": True})
            async with Consumer(nodes.address, ["logs"], group="slow") as slow:
                await slow.poll(timeout=0.1)  # it has joined
                await producer.send_many("logs", [b"x"] * 100)
                await producer.flush()
                async with Consumer(nodes.address, ["logs"], group="quick") as quick:
                    assert len(await quick.poll(timeout=10)) == 100
                    await quick.commit()
                assert len(await slow.poll(timeout=10)) == 100
                asked = watch_questions(nodes)
                await until(lambda: len(asked) >= 3)
                assert all(answer.told.groups == ["slow"] for answer in asked)
                assert (await admin.offsets("logs"))[0] == (0, 100)
                await slow.commit()

            async def begins_at_the_end() -> bool:
                return (await admin.offsets("logs"))[0] == (100, 100)

            await until_true(begins_at_the_end)

    play(tmp_path, test, settings=CLEANING)


@pytest.mark.parametrize("way", ["http", "sdk", "left behind"])
def test_consumer_that_is_unregistered_keeps_nothing(tmp_path: Path, way: str) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin, Producer(nodes.address) as producer:
            await admin.create_topic("logs", 1, {"cleanup": "consumed"})
            await producer.send_many("logs", [b"x"] * 10)
            await producer.flush()
            registry = nodes.manager._registry
            consumer = await registry.register_consumer("logs", None)
            await registry.link_of("logs", 0).call(CommitPosition("logs", 0, Position("#1", 4)))
            async with Consumer(nodes.address, ["logs"], group="g") as reader:
                assert (await reader.poll(timeout=10))[-1].offset == 9  # some may be gone already
                await reader.commit()

            async def begins_at(offset: int) -> bool:
                return (await admin.offsets("logs"))[0] == (offset, 10)

            await until_true(lambda: begins_at(4))
            if way == "http":
                await registry.unregister_consumer(consumer.id)
            elif way == "sdk":
                await admin.groups.delete("#1")
            else:  # nobody told the partition, as when no leader was there
                await nodes.manager._quorum.propose(commands.UnregisterConsumer(1))
            await until_true(lambda: begins_at(10))
            partition = nodes.brokers[1]._broker._hosting.partition("logs", 0)
            await until(lambda: "#1" not in partition.state.positions)
            assert consumer.id not in nodes.state.consumers
            for name, why in (("#1", "Consumer 1 is not registered"), ("#x", "# and its number"), ("#", "# and its")):
                with pytest.raises(RequestError, match=why):
                    await admin.groups.delete(name)
            assert (await registry.register_consumer("logs", None)).id == 2, "numbers are never used twice"

    play(tmp_path, test, count=1, settings=CLEANING)


def test_group_that_has_read_all_frees_the_log(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin, Producer(nodes.address) as producer:
            await admin.create_topic("logs", 1, {"cleanup": "consumed"})
            await producer.send_many("logs", [b"x"] * 100)
            await producer.flush()
            async with Consumer(nodes.address, ["logs"], group="g") as consumer:
                assert len(await consumer.poll(max_records=60, timeout=10)) > 0
                await consumer.commit()
                done = await consumer.committed("logs", 0)

                async def begins_there() -> bool:
                    return (await admin.offsets("logs"))[0] == (done, 100)

                await until_true(begins_there)
            for broker in nodes.brokers.values():
                partition = broker._broker._hosting.partition("logs", 0)
                await until(lambda partition=partition: partition.start_offset == done)

    play(tmp_path, test, settings=CLEANING)


def test_nothing_is_let_go_while_the_managers_are_away(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin, Producer(nodes.address) as producer:
            await admin.create_topic("logs", 1)
            await producer.send("logs", b"x")
            async with Consumer(nodes.address, ["logs"], group="g") as consumer:
                assert len(await consumer.poll(timeout=10)) == 1
                await consumer.commit()
            partition = nodes.brokers[1]._broker._hosting.partition("logs", 0)
            await nodes.stop_manager()
            partition.use(dataclasses.replace(partition.rules, cleanup="consumed"))
            asked = watch_questions(nodes)
            await until(lambda: len(asked) >= 3)
            assert all(isinstance(answer, UnavailableError) for answer in asked)
            assert partition.start_offset == 0, "who reads is not known"
        await nodes.start_manager()
        await until(lambda: partition.start_offset == 1)

    play(tmp_path, test, count=1, settings=CLEANING)


def test_topic_without_a_consumer_takes_nothing_if_it_is_set_so(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin, Producer(nodes.address) as producer:
            await admin.create_topic("logs", 1, {"require.consumers": True})
            with pytest.raises(NoConsumersError, match="Topic logs takes no messages while it has no consumer"):
                await (await producer.send("logs", b"x"))
            assert await nodes.messages("logs") == 0
            await nodes.manager._registry.register_consumer("logs", None)
            await (await producer.send("logs", b"x"))
            assert await nodes.messages("logs") == 1
            await admin.create_topic("free", 1)
            await (await producer.send("free", b"x"))

    play(tmp_path, test)


def test_limit_of_a_topic_holds_for_the_sdk_and_at_the_broker(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin, Producer(nodes.address) as producer:
            await admin.create_topic("small", 1, {"max.message.bytes": 10})
            await admin.create_topic("large", 1, {"max.message.bytes": 3 * 1024 * 1024})
            with pytest.raises(MessageTooLargeError, match="over the limit of 10"):
                await producer.send("small", b"x" * 11)
            with pytest.raises(MessageTooLargeError, match="over the limit of 10"):
                await producer.send_many("small", [b"x", b"x" * 11])
            await (await producer.send("small", b"x" * 10))
            await (await producer.send("large", b"x" * (2 * 1024 * 1024)))
            await admin.create_topic("later", 1)
            await (await producer.send("later", b"x"))
            await admin.alter_topic("later", {"max.message.bytes": 10})
            with pytest.raises(MessageTooLargeError):
                await (await producer.send("later", b"x" * 100_000))

    play(tmp_path, test, count=1)


@contextlib.asynccontextmanager
async def embedded(directory: Path) -> AsyncIterator[EmbeddedNode]:
    node = EmbeddedNode(dataclasses.replace(CLEANING, data_dir=str(directory)))
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


def test_embedded_node_keeps_settings_over_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with embedded(tmp_path) as node, Admin(node.address) as admin:
            await admin.create_topic("logs", 2, {"cleanup": "consumed"})
            await admin.alter_topic("logs", {"retention.ms": 7000})
            with pytest.raises(InvalidRequestError, match="one replica of everything"):
                await admin.alter_topic("logs", {"replication.factor": 2})
        async with embedded(tmp_path) as node, Admin(node.address) as admin:
            assert (await admin.describe_topic("logs")).settings == {"cleanup": "consumed", "retention.ms": 7000}
            partition = node._broker._hosting.partition("logs", 1)
            assert (partition.rules.log.retention_ms, partition.rules.cleanup) == (7000, "consumed")
            with pytest.raises(InvalidRequestError):
                await admin.alter_topic("logs", {"retention.ms": "soon"})

    asyncio.run(asyncio.wait_for(main(), 30))
