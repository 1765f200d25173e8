"""Topics change in the quorum, then on the brokers: nobody meets them in between, and a crash there is put right."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from quiver.errors import (
    DiskFullError,
    RequestError,
    TopicExistsError,
    UnavailableError,
    UnknownPartitionError,
    UnknownTopicError,
)
from quiver.manager.registry import Registry
from quiver.metadata.state import Broker
from quiver.metadata.store import sqlite_url
from quiver.testing.faulty_disk import FaultyDisk
from quiver.types import PartitionStatus
from quiver.wire.messages import CreateTopic, DeleteTopic, Done, GetStatus, StatusReply
from tests.broker.kit import SimulatedClock, settle
from tests.manager.kit import QuorumBench, abandon
from tests.metadata.kit import create, produce

ME = Broker(1, "127.0.0.1:1")


class PlayedBroker:
    """Holds topics as a broker does; each change waits while `gate` is clear, and fails with what is in `errors`."""

    def __init__(self) -> None:
        self.topics: dict[str, list[str]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.errors: list[Exception] = []
        self.changes: list[str] = []

    async def call(self, request: Struct, payload: Any = b"") -> tuple[Struct, Sequence[Any]]:
        if isinstance(request, GetStatus):
            return StatusReply(
                [
                    PartitionStatus(name, number, "online", 0, 0, 0, 1, "", uid)
                    for name, uids in self.topics.items()
                    for number, uid in enumerate(uids)
                ]
            ), ()
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        if isinstance(request, CreateTopic):
            if request.name in self.topics:
                raise TopicExistsError(f"topic {request.name} already exists", uid=self.topics[request.name][0])
            self.changes.append(f"create {request.name}")
            self.topics[request.name] = request.uids
        else:
            assert isinstance(request, DeleteTopic)
            if request.uid not in self.topics.get(request.name, ()):
                raise UnknownTopicError(f"topic {request.name} does not exist")
            self.changes.append(f"delete {request.name}")
            del self.topics[request.name]
        return Done(), ()


@pytest.fixture
def bench(tmp_path: Path) -> QuorumBench:
    return QuorumBench(FaultyDisk(0), sqlite_url(tmp_path / "metadata.db"))


@contextlib.asynccontextmanager
async def running(bench: QuorumBench, broker: PlayedBroker) -> AsyncIterator[Registry]:
    async with bench.opened() as (quorum, _, _):
        registry = Registry(quorum, SimulatedClock())
        await registry.attach_broker(ME, broker)
        yield registry


def uids_of(registry: Registry, name: str) -> list[str]:
    return [partition.uid for partition in registry._quorum.state.topic(name).partitions]


def test_a_topic_that_is_being_made_is_waited_for(bench: QuorumBench) -> None:
    async def main() -> None:
        broker = PlayedBroker()
        async with running(bench, broker) as registry:
            broker.gate.clear()
            making = asyncio.create_task(registry.create_topic("logs", 2, 3))
            await settle()
            # It is in the log already; a producer may register, but what it sends must find the partition.
            producer = await registry.register_producer("logs", 1)
            using = asyncio.create_task(registry.topic("logs"))
            await settle()
            assert not using.done()
            assert not making.done()
            broker.gate.set()
            assert await using == await making
            assert broker.topics == {"logs": uids_of(registry, "logs")}
            assert producer.id == 1

    asyncio.run(main())


def test_producers_that_register_together_make_the_topic_once(bench: QuorumBench) -> None:
    async def main() -> None:
        broker = PlayedBroker()
        async with running(bench, broker) as registry:
            producers = await asyncio.gather(*(registry.register_producer("new", None) for _ in range(30)))
            assert sorted(producer.id for producer in producers) == list(range(1, 31))
            assert broker.changes == ["create new"]
            assert broker.topics == {"new": uids_of(registry, "new")}

    asyncio.run(main())


def test_creations_of_one_name_at_once_give_one_topic(bench: QuorumBench) -> None:
    async def main() -> None:
        broker = PlayedBroker()
        async with running(bench, broker) as registry:
            creations = [registry.create_topic("new", number + 1, 3) for number in range(10)]
            answers = await asyncio.gather(*creations, return_exceptions=True)
            assert sorted(type(answer).__name__ for answer in answers) == ["Topic"] + ["TopicExistsError"] * 9
            assert broker.topics == {"new": uids_of(registry, "new")}

    asyncio.run(main())


def test_a_topic_whose_files_could_not_be_made_is_made_when_it_is_used(bench: QuorumBench) -> None:
    async def main() -> None:
        broker = PlayedBroker()
        async with running(bench, broker) as registry:
            broker.errors = [DiskFullError("full"), DiskFullError("full")]
            with pytest.raises(DiskFullError):
                await registry.create_topic("logs", 2, 3)
            with pytest.raises(DiskFullError):
                await registry.topic("logs")
            assert broker.topics == {}
            assert (await registry.topic("logs")).name == "logs"
            assert broker.topics == {"logs": uids_of(registry, "logs")}

    asyncio.run(main())


def test_a_name_is_not_given_again_before_its_old_files_are_gone(bench: QuorumBench) -> None:
    async def main() -> None:
        broker = PlayedBroker()
        async with running(bench, broker) as registry:
            await registry.create_topic("logs", 1, 3)
            broker.gate.clear()
            deletion = asyncio.create_task(registry.delete_topic("logs"))
            await settle()
            creation = asyncio.create_task(registry.create_topic("logs", 3, 3))
            await settle()
            broker.gate.set()
            await asyncio.gather(deletion, creation)
            assert broker.changes == ["create logs", "delete logs", "create logs"]
            assert broker.topics == {"logs": uids_of(registry, "logs")}
            assert len(broker.topics["logs"]) == 3

    asyncio.run(main())


def test_a_crash_between_log_and_broker_is_put_right_on_the_next_start(bench: QuorumBench) -> None:
    async def main() -> None:
        broker = PlayedBroker()
        quorum, _, _ = bench.make()
        await quorum.start()
        registry = Registry(quorum, SimulatedClock())
        await registry.attach_broker(ME, broker)
        broker.gate.clear()
        making = asyncio.create_task(registry.create_topic("logs", 2, 3))
        await settle()
        making.cancel()
        await abandon(quorum)
        broker.gate.set()
        assert broker.topics == {}
        async with running(bench, broker) as registry:
            assert broker.topics == {"logs": uids_of(registry, "logs")}

    asyncio.run(main())


def test_what_a_broker_holds_is_taken_in_when_the_log_does_not_know_it(bench: QuorumBench) -> None:
    async def main() -> None:
        broker = PlayedBroker()
        broker.topics = {"old": ["u0", "u1"]}
        for _ in range(2):
            async with running(bench, broker) as registry:
                assert uids_of(registry, "old") == ["u0", "u1"]
                assert (await registry.topic("old")).partitions[1].replicas == (1,)
                assert broker.changes == []

    asyncio.run(main())


def test_a_refused_registration_leaves_no_trace_in_the_log(bench: QuorumBench) -> None:
    """Else anyone could fill the disk with mistakes."""

    async def main() -> None:
        async with running(bench, PlayedBroker()) as registry:
            await registry.create_topic("logs", 2, 3)
            before = registry._quorum.last_transaction
            for attempt, error in (
                (registry.register_producer("logs", 2), UnknownPartitionError),
                (registry.register_producer("new", 1), UnknownPartitionError),
                (registry.register_producer("b@d", None), RequestError),
                (registry.register_consumer("logs", -1), UnknownPartitionError),
                (registry.register_consumer("none", None), UnknownTopicError),
                (registry.create_topic("logs", 1, 1), TopicExistsError),
                (registry.create_topic("", 1, 1), RequestError),
                (registry.create_topic("x", 0, 1), RequestError),
                (registry.create_topic("x", 10_001, 1), RequestError),
                (registry.create_topic("x", 1, 0), RequestError),
                (registry.create_topic("x", 1, 101), RequestError),
                (registry.delete_topic("none"), UnknownTopicError),
            ):
                with pytest.raises(error):
                    await attempt
            assert registry._quorum.last_transaction == before

    asyncio.run(main())


def test_a_partition_whose_broker_is_not_here_can_be_asked_for_again(bench: QuorumBench) -> None:
    async def main() -> None:
        async with bench.opened() as (quorum, _, _):
            registry = Registry(quorum, SimulatedClock())
            await quorum.propose(create("early"))  # before there was a broker
            await registry.attach_broker(Broker(2, "127.0.0.1:2"), PlayedBroker())
            await quorum.propose(create("logs"))
            assert registry.link_of("logs", 0)
            with pytest.raises(UnavailableError, match="no broker that holds partition 0 of topic early"):
                registry.link_of("early", 0)
            with pytest.raises(UnknownTopicError):
                registry.link_of("none", 0)

    asyncio.run(main())


def test_a_deleted_topic_takes_what_was_seen_of_its_users_along(bench: QuorumBench) -> None:
    async def main() -> None:
        async with running(bench, PlayedBroker()) as registry:
            kept = await registry.register_producer("kept", None)
            gone = await registry.register_producer("gone", None)
            reader = await registry.register_consumer("gone", None)
            assert registry.producers_seen.keys() == {kept.id, gone.id}
            await registry.delete_topic("gone")
            assert registry.producers_seen.keys() == {kept.id}
            assert registry.consumers_seen == {}
            with pytest.raises(RequestError, match=f"^Consumer {reader.id} is not registered$"):
                await registry.consumer(reader.id, None)
            with pytest.raises(RequestError, match=f"^Producer {gone.id} is not registered to topic gone$"):
                await registry.producer(gone.id, "gone")

    asyncio.run(main())


def test_a_broker_that_moved_is_known_by_its_new_endpoint(bench: QuorumBench) -> None:
    async def main() -> None:
        broker = PlayedBroker()
        async with running(bench, broker) as registry:
            transaction = registry._quorum.last_transaction
            await registry.attach_broker(ME, broker)
            assert registry._quorum.last_transaction == transaction, "nothing new, nothing written"
            await registry.attach_broker(Broker(1, "127.0.0.1:9"), broker)
            assert registry._quorum.state.brokers == {1: Broker(1, "127.0.0.1:9")}
            assert registry.broker_state(1) == "active"
            await registry._quorum.propose(produce("t", partitions=1))

    asyncio.run(main())
