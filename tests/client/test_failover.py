"""The SDK when leaders change: brokers are played, sockets are real."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from msgspec import Struct

from quiver.aio import Admin, Consumer, Producer
from quiver.client import cluster as cluster_module
from quiver.client.cluster import Cluster
from quiver.config import NetSettings
from quiver.errors import ConnectionLostError, NotLeaderError, OffsetOutOfRangeError, UnknownPartitionError
from quiver.net.server import Flow, Reply, Server
from quiver.types import NodeInfo, PartitionInfo, TopicInfo
from quiver.wire.batch_check import SCHEMA_ID_V1
from quiver.wire.frame import Entry, FrameHeader, Kind, encode_frame, stamp
from quiver.wire.messages import (
    PROTOCOL_VERSION,
    Fetch,
    FetchReply,
    GetMetadata,
    HelloReply,
    ListOffset,
    ListOffsetReply,
    MetadataReply,
    Produce,
    ProduceReply,
)
from quiver.wire.records import decode_batch

Test = Callable[["Stage"], Coroutine[Any, Any, None]]


class Stage:
    """A topic on played brokers, which all see the same log, whatever the partition. `known` is the leader they tell
    of, `partitions` how many they know of."""

    def __init__(self, count: int) -> None:
        self.brokers = [PlayedBroker(self, number) for number in range(1, count + 1)]
        self.leader = self.known = 1
        self.partitions, self.uid = 1, "u"
        self.log: list[tuple[FrameHeader, bytes]] = []
        self.stored: set[tuple[int, int, int]] = set()

    @property
    def servers(self) -> str:
        return ",".join(broker.address for broker in self.brokers)

    def broker(self, number: int) -> PlayedBroker:
        return self.brokers[number - 1]

    @property
    def next_offset(self) -> int:
        return self.log[-1][0].next_offset if self.log else 0

    def values(self) -> list[int]:
        batches = [decode_batch(memoryview(data)) for _, data in self.log]
        return [int(value) for batch in batches for value in batch.column("value").to_pylist()]

    def append(self, request: Produce, payload: memoryview) -> ProduceReply:
        name = (request.producer_id, request.producer_epoch, request.sequence)
        if name in self.stored:
            return ProduceReply(-1, duplicate=True)
        self.stored.add(name)
        entry = Entry(
            Kind.DATA,
            payload,
            request.payload_crc,
            request.record_count,
            request.timestamp_min,
            request.timestamp_max,
            SCHEMA_ID_V1,
            request.producer_epoch,
            request.producer_id,
            request.sequence,
            0,
        )
        base = self.next_offset
        self.log.append((stamp(entry, len(self.log) + 1, 1, base), bytes(payload)))
        return ProduceReply(base)


class PlayedBroker:
    def __init__(self, stage: Stage, number: int) -> None:
        self.stage = stage
        self.number = number
        self.asked: list[Struct] = []
        self.answer_s = 0.0
        self.lose_reply = False
        self.address = ""
        self._server: Server | None = None

    async def start(self) -> None:
        hello = HelloReply(PROTOCOL_VERSION, self.number, "c", 1 << 20, 1 << 24, 1024)
        self._server = Server(NetSettings(), hello, self._answer)
        port = int(self.address.rpartition(":")[2] or 0)
        self.address = f"127.0.0.1:{await self._server.start('127.0.0.1', port)}"

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            for connection in list(server._connections):
                connection.abort()
            await server.stop(0.0)

    def freeze(self) -> None:
        """As with SIGSTOP: connections stay, nobody reads, and new ones are taken by the system alone."""
        assert self._server is not None
        self._server.admit = self._admit_frozen  # type: ignore[method-assign]
        for connection in self._server._connections:
            assert connection.transport is not None
            connection.transport.pause_reading()

    def _admit_frozen(self, connection: Any) -> bool:
        connection.transport.pause_reading()
        assert self._server is not None
        self._server._connections.add(connection)
        return True

    async def _answer(self, request: Struct, payload: memoryview, flow: Flow) -> Reply:
        self.asked.append(request)
        stage = self.stage
        if isinstance(request, GetMetadata):
            nodes = [NodeInfo(broker.number, broker.address) for broker in stage.brokers]
            replicas = tuple(broker.number for broker in stage.brokers)
            infos = tuple(PartitionInfo(number, stage.known, replicas) for number in range(stage.partitions))
            return MetadataReply("c", nodes, [TopicInfo("t", infos, uid=stage.uid)]), ()
        if self.answer_s:
            await asyncio.sleep(self.answer_s)
        if stage.leader != self.number:
            raise NotLeaderError("not me", leader=stage.known)
        if isinstance(request, Produce):
            reply = stage.append(request, payload)
            if self.lose_reply:
                await self.stop()
            return reply, ()
        if isinstance(request, ListOffset):
            return ListOffsetReply(0 if request.timestamp == -2 else stage.next_offset), ()
        assert isinstance(request, Fetch)
        if request.offset > stage.next_offset:
            raise OffsetOutOfRangeError.of("t", 0, request.offset, 0, stage.next_offset)
        found = [encode_frame(header, data) for header, data in stage.log if header.next_offset > request.offset]
        if not found:
            await asyncio.sleep(0.02)
        return FetchReply(0, stage.next_offset), found


@contextlib.asynccontextmanager
async def staged(count: int) -> AsyncIterator[Stage]:
    stage = Stage(count)
    try:
        for broker in stage.brokers:
            await broker.start()
        yield stage
    finally:
        for broker in stage.brokers:
            await broker.stop()


def play(test: Test, count: int = 3) -> None:
    async def main() -> None:
        async with staged(count) as stage:
            await test(stage)

    asyncio.run(asyncio.wait_for(main(), 100))


@pytest.fixture
def _watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_WATCH_S", 0.02), ("_QUIET_S", 0.05), ("_DEAF_S", 0.15), ("CONNECT_TIMEOUT_S", 0.2)):
        monkeypatch.setattr(cluster_module, name, value)


async def stored(producer: Producer, number: int) -> None:
    await (await producer.send("t", b"%d" % number))


def metadata_asked(stage: Stage) -> int:
    return sum(isinstance(request, GetMetadata) for broker in stage.brokers for request in broker.asked)


def all_asked(stage: Stage) -> int:
    return sum(len(broker.asked) for broker in stage.brokers)


def test_the_leader_that_a_broker_names_is_used_without_asking_for_metadata() -> None:
    async def test(stage: Stage) -> None:
        async with Producer(stage.servers) as producer:
            await stored(producer, 0)
            asked = metadata_asked(stage)
            stage.leader = stage.known = 3
            await stored(producer, 1)
            assert metadata_asked(stage) == asked
        assert stage.values() == [0, 1]

    play(test)


def test_an_election_is_waited_for_with_quick_retries() -> None:
    async def test(stage: Stage) -> None:
        async with Producer(stage.servers) as producer:
            await stored(producer, 0)
            stage.leader = stage.known = 0
            sending = asyncio.ensure_future(stored(producer, 1))
            before = all_asked(stage)
            while all_asked(stage) < before + 10:  # noqa: ASYNC110  # the producer brings it about
                await asyncio.sleep(0.01)
            stage.leader = stage.known = 2
            await sending
        assert stage.values() == [0, 1]

    play(test)


def test_a_partition_is_read_on_and_written_though_a_node_has_not_heard_of_it_yet() -> None:
    async def test(stage: Stage) -> None:
        stage.partitions = 2
        async with Producer(stage.servers) as producer, Consumer(stage.servers, ["t"], partitions={"t": [1]}) as reader:
            assert (await (await producer.send("t", b"0", partition=1))).partition == 1
            assert [record.value for record in await reader.poll(timeout=20)] == [b"0"]
            stage.partitions = 1
            stage.leader, stage.known = 2, 0  # nobody says who leads: it is asked for again
            sending = await producer.send("t", b"1", partition=1)
            while metadata_asked(stage) < 8:  # noqa: ASYNC110  # both bring it about
                await asyncio.sleep(0.01)
            stage.known = 2
            stage.partitions = 2
            await sending
            assert [record.value for record in await reader.poll(timeout=20)] == [b"1"]

    play(test)


def test_a_topic_that_was_made_again_has_its_own_partitions() -> None:
    async def test(stage: Stage) -> None:
        stage.partitions = 2
        async with Producer(stage.servers, metadata_refresh=0.01) as producer:
            await producer.send("t", b"0", partition=1)
            stage.partitions, stage.uid = 1, "other"
            with pytest.raises(UnknownPartitionError):
                while True:
                    await (await producer.send("t", b"1", partition=1))

    play(test)


@pytest.mark.parametrize("in_the_list", [True, False])
def test_a_dead_leader_is_replaced_by_what_any_other_node_says(in_the_list: bool) -> None:
    async def test(stage: Stage) -> None:
        servers = stage.servers if in_the_list else stage.broker(1).address
        async with Producer(servers) as producer:
            await stored(producer, 0)
            sends = [await producer.send("t", b"%d" % number) for number in range(1, 50)]
            await stage.broker(1).stop()
            await asyncio.sleep(0.1)
            stage.leader = stage.known = 2
            for send in sends:
                await send
        assert stage.values() == list(range(50))

    play(test)


def test_a_batch_whose_acknowledgement_died_with_the_leader_is_stored_once() -> None:
    async def test(stage: Stage) -> None:
        async with Producer(stage.servers) as producer:
            await stored(producer, 0)
            stage.broker(1).lose_reply = True
            sending = [await producer.send("t", b"%d" % number) for number in range(1, 20)]
            await asyncio.sleep(0.1)
            stage.leader = stage.known = 3
            for send in sending:
                await send
        assert stage.values() == list(range(20))

    play(test)


@pytest.mark.usefixtures("_watchful")
def test_a_frozen_leader_is_left_for_the_new_one() -> None:
    async def test(stage: Stage) -> None:
        async with Producer(stage.servers) as producer, Consumer(stage.servers, ["t"]) as consumer:
            await stored(producer, 0)
            assert [record.value for record in await consumer.poll(timeout=20)] == [b"0"]
            stage.broker(1).freeze()
            sending = asyncio.ensure_future(stored(producer, 1))
            await asyncio.sleep(0.5)
            assert not sending.done(), "the others still think that it leads"
            stage.leader = stage.known = 2
            await asyncio.wait_for(sending, 20)
            assert [record.value for record in await consumer.poll(timeout=20)] == [b"1"]
        assert stage.values() == [0, 1]

    play(test)


@pytest.mark.usefixtures("_watchful")
def test_a_slow_answer_is_waited_for() -> None:
    async def test(stage: Stage) -> None:
        stage.broker(1).answer_s = 1.0
        async with Producer(stage.servers) as producer:
            await stored(producer, 0)
        assert stage.values() == [0]
        assert sum(isinstance(request, Produce) for request in stage.broker(1).asked) == 1

    play(test)


@pytest.mark.usefixtures("_watchful")
def test_metadata_comes_from_another_node_when_the_first_is_frozen() -> None:
    async def test(stage: Stage) -> None:
        stage.broker(1).freeze()
        stage.leader = stage.known = 2
        async with Admin(stage.servers) as admin:
            assert (await admin.describe_topic("t")).partitions[0].leader == 2

    play(test)


def test_a_consumer_goes_on_where_it_was_at_the_new_leader() -> None:
    async def test(stage: Stage) -> None:
        async with Producer(stage.servers) as producer, Consumer(stage.servers, ["t"]) as consumer:
            got: list[int] = []
            for number in range(30):
                if number % 10 == 9:
                    stage.leader = stage.known = stage.leader % 3 + 1
                await stored(producer, number)
                got += [int(record.value or b"") for record in await consumer.poll(timeout=0.05)]
            while len(got) < 30:
                got += [int(record.value or b"") for record in await consumer.poll(timeout=1)]
            assert got == list(range(30))

    play(test)


def test_many_who_want_to_know_the_same_topic_ask_once() -> None:
    async def test(stage: Stage) -> None:
        cluster = Cluster(stage.servers, "test", 5.0)
        await asyncio.gather(*(cluster.topic("t") for _ in range(50)))
        assert metadata_asked(stage) == 1
        await cluster.close()

    play(test)


def test_two_brokers_that_name_each_other_are_not_asked_in_a_circle() -> None:
    async def test(stage: Stage) -> None:
        cluster = Cluster(stage.servers, "test", 0.6)
        stage.leader, stage.known = 0, 2
        with pytest.raises(NotLeaderError):
            await cluster.ask("t", 0, ListOffset("t", 0, -1), ListOffsetReply)
        assert sum(isinstance(request, ListOffset) for broker in stage.brokers for request in broker.asked) < 40
        await cluster.close()

    play(test)


def test_when_no_node_is_left_that_is_said() -> None:
    async def test(stage: Stage) -> None:
        cluster = Cluster(stage.servers, "test", 0.3)
        await cluster.topic("t")
        for broker in stage.brokers:
            await broker.stop()
        cluster.forget_topic("t")
        with pytest.raises(ConnectionLostError, match="no server answers"):
            await cluster.topic("t")
        await cluster.close()

    play(test)
