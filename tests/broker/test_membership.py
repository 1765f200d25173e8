"""A broker's place in a cluster, with a manager that is there, away, frozen, or another one's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from quiver.broker import membership as membership_module
from quiver.broker.membership import Members, Membership
from quiver.config import NetSettings
from quiver.errors import ConnectionLostError, InvalidRequestError, QuiverError, TopicExistsError, UnavailableError
from quiver.log.disk import Disk
from quiver.net.peers import Peers
from quiver.net.server import Flow, Reply, Server
from quiver.testing.faulty_disk import FaultyDisk
from quiver.types import NodeInfo, PartitionInfo, TopicInfo
from quiver.wire.messages import (
    PROTOCOL_VERSION,
    CreateTopic,
    DeleteTopic,
    Done,
    GetMetadata,
    HelloReply,
    JoinCluster,
    JoinReply,
    MetadataReply,
)
from tests.broker.server_kit import run

NODES = [NodeInfo(1, "127.0.0.1:1"), NodeInfo(2, "127.0.0.1:2")]
LOGS = TopicInfo("logs", (PartitionInfo(0, 1, (1, 2)), PartitionInfo(1, 2, (2, 1))))
UID = "f" * 32


class PlayedManager:
    """Answers as a manager does; waits while `gate` is clear, as a frozen one."""

    def __init__(self) -> None:
        self.asked: list[Struct] = []
        self.error: QuiverError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.topics = [LOGS]
        self.transaction = 1
        self.managers: list[str] = []
        self.port = 0
        self._server: Server | None = None

    async def _answer(self, request: Struct, payload: memoryview, flow: Flow) -> Reply:
        self.asked.append(request)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        if isinstance(request, JoinCluster):
            return JoinReply("c", NODES, self.transaction, self.managers), ()
        if isinstance(request, GetMetadata):
            wanted = [topic for topic in self.topics if request.topics is None or topic.name in request.topics]
            return MetadataReply("c", NODES, wanted), ()
        return Done(), ()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = Server(NetSettings(), HelloReply(PROTOCOL_VERSION, 0, "c", 1, 1, 1), self._answer)
        self.port = await self._server.start("127.0.0.1", self.port)

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0.0)


class Flowing:
    is_writable = True

    async def until_writable(self) -> None:
        return


class Bench:
    """A broker's membership and what it did to the broker around it."""

    def __init__(self, manager: str, disk: Disk) -> None:
        self.peers = Peers(1, NetSettings())
        self.clusters: list[str] = []
        self.served: list[Struct] = []
        self.leaders: dict[tuple[str, int], int] = {}
        self.topics: list[TopicInfo] = []
        disk.make_directory("data/broker-1")
        self.member = Membership(
            manager,
            1,
            self.peers,
            disk,
            "data/broker-1",
            heartbeat_s=0.01,
            serve=self._serve,
            leaders=lambda: self.leaders,
            topics=lambda: self.topics,
        )

    async def _serve(self, request: Struct, payload: memoryview, flow: Flow) -> Reply:
        self.served.append(request)
        return Done(), ()

    async def start(self) -> None:
        await self.member.start("127.0.0.1:1", 7, self.clusters.append)

    async def stop(self) -> None:
        await self.member.stop()
        await self.peers.close()

    async def ask(self, request: Struct) -> Any:
        reply, _ = await self.member.handlers[type(request)](request, memoryview(b""), Flowing())
        return reply

    async def leaders_of(self, topic: str) -> list[int]:
        reply = await self.ask(GetMetadata([topic]))
        return [partition.leader for partition in reply.topics[0].partitions]


@contextlib.asynccontextmanager
async def joined(disk: Disk | None = None) -> AsyncIterator[tuple[PlayedManager, Bench]]:
    manager = PlayedManager()
    await manager.start()
    bench = Bench(manager.address, disk or FaultyDisk(0))
    try:
        await bench.start()
        yield manager, bench
    finally:
        manager.gate.set()
        await bench.stop()
        await manager.stop()


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # another task brings it about
            await asyncio.sleep(0.002)


def test_a_broker_joins_and_learns_its_cluster_and_the_others() -> None:
    async def main() -> None:
        async with joined() as (manager, bench):
            assert manager.asked[0] == JoinCluster(1, "127.0.0.1:1", 7, "")
            assert bench.clusters == ["c"]
            assert bench.peers.cluster_id == "c"
            assert bench.peers._addresses == {2: "127.0.0.1:2"}
            assert bench.member.joined.is_set()

    run(main())


def test_it_says_again_and_again_that_it_is_there() -> None:
    async def main() -> None:
        async with joined() as (manager, bench):
            await until(lambda: len([one for one in manager.asked if isinstance(one, JoinCluster)]) >= 4)
            assert manager.asked[-1] == JoinCluster(1, "127.0.0.1:1", 7, "c") or manager.asked[-1] == GetMetadata()
            assert bench.clusters == ["c"]

    run(main())


def test_it_waits_for_a_manager_that_is_not_there_yet() -> None:
    async def main() -> None:
        manager = PlayedManager()
        await manager.start()
        await manager.stop()
        bench = Bench(manager.address, FaultyDisk(0))
        starting = asyncio.create_task(bench.start())
        await asyncio.sleep(0.1)
        assert not starting.done()
        await manager.start()
        await starting
        assert bench.member.cluster_id == "c"
        await bench.stop()
        await manager.stop()

    run(main())


def test_it_starts_without_the_manager_when_it_knows_its_cluster() -> None:
    async def main() -> None:
        disk = FaultyDisk(0)
        async with joined(disk) as (manager, _):
            address = manager.address
        bench = Bench(address, disk)
        await bench.start()
        assert bench.clusters == ["c"]
        assert bench.peers._addresses == {2: "127.0.0.1:2"}
        assert not bench.member.joined.is_set()
        with pytest.raises(UnavailableError):
            await bench.ask(GetMetadata(["logs"]))
        assert (await bench.ask(GetMetadata())).nodes == NODES
        await bench.stop()

    run(main())


def test_a_refusal_is_the_end_of_the_start() -> None:
    async def main() -> None:
        manager = PlayedManager()
        manager.error = InvalidRequestError("broker 1 belongs to cluster x, this manager to cluster c")
        await manager.start()
        bench = Bench(manager.address, FaultyDisk(0))
        with pytest.raises(InvalidRequestError, match="belongs to cluster x"):
            await bench.start()
        await bench.stop()
        await manager.stop()

    run(main())


def test_metadata_is_the_managers_with_the_leaders_that_the_broker_knows_better() -> None:
    async def main() -> None:
        async with joined() as (manager, bench):
            assert await bench.leaders_of("logs") == [1, 2]
            bench.leaders = {("logs", 1): 3, ("other", 0): 9}
            assert await bench.leaders_of("logs") == [1, 3]
            manager.topics = []
            assert (await bench.ask(GetMetadata(["logs"]))).topics == [], "asked anew, not from memory"

    run(main())


def test_metadata_is_remembered_while_the_manager_is_away() -> None:
    async def main() -> None:
        async with joined() as (manager, bench):
            bench.leaders = {("logs", 0): 2}
            await manager.stop()
            assert await bench.leaders_of("logs") == [2, 2]
            assert (await bench.ask(GetMetadata())).topics[0].name == "logs"
            with pytest.raises(UnavailableError, match="the manager is away"):
                await bench.ask(GetMetadata(["logs", "new"]))  # it may exist: to say no would make clients give up
            manager.topics = [LOGS, TopicInfo("new", ())]
            manager.transaction = 2
            await manager.start()
            await until(lambda: bench.member._known_at == 2)
            await manager.stop()
            assert len((await bench.ask(GetMetadata(["logs", "new"]))).topics) == 2

    run(main())


def test_a_topic_made_just_before_the_manager_went_is_found_in_the_catalog() -> None:
    async def main() -> None:
        async with joined() as (manager, bench):
            await manager.stop()
            bench.topics = [TopicInfo("new", (PartitionInfo(0, 1, (1, 2)),))]
            bench.leaders = {("new", 0): 2}
            assert await bench.leaders_of("new") == [2]
            assert sorted(topic.name for topic in (await bench.ask(GetMetadata())).topics) == ["logs", "new"]
            assert sorted((await bench.ask(GetMetadata([], names=True))).names) == ["logs", "new"]

    run(main())


def test_a_frozen_manager_holds_nobody_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "_METADATA_TIMEOUT_S", 0.05)

    async def main() -> None:
        async with joined() as (manager, bench):
            manager.gate.clear()
            assert await bench.leaders_of("logs") == [1, 2]
            began = asyncio.get_running_loop().time()
            for _ in range(10):
                await bench.leaders_of("logs")
            assert asyncio.get_running_loop().time() - began < 0.05, "only the first one waits"
            with pytest.raises(UnavailableError):
                await bench.ask(CreateTopic("new"))

    run(main())


def test_changes_of_topics_are_asked_of_the_manager_and_its_own_word_is_done_here() -> None:
    async def main() -> None:
        async with joined() as (manager, bench):
            assert await bench.ask(CreateTopic("new", 2)) == Done()
            assert await bench.ask(DeleteTopic("new")) == Done()
            assert [one for one in manager.asked if isinstance(one, (CreateTopic, DeleteTopic))] == [
                CreateTopic("new", 2),
                DeleteTopic("new"),
            ]
            assert bench.served == []
            told = [CreateTopic("new", 1, 3, [UID], [[1 << 32 | 7]]), DeleteTopic("new", UID)]
            for request in told:
                assert await bench.ask(request) == Done()
            assert bench.served == told

    run(main())


def test_what_the_manager_says_no_to_reaches_the_client_as_it_is() -> None:
    async def main() -> None:
        async with joined() as (manager, bench):
            manager.error = TopicExistsError("topic logs already exists")
            with pytest.raises(TopicExistsError, match="already exists"):
                await bench.ask(CreateTopic("logs"))

    run(main())


def test_an_unknown_outcome_stays_one() -> None:
    """The admin client then knows that the topic it finds may be its own."""

    async def main() -> None:
        async with joined() as (manager, bench):
            manager.gate.clear()
            asking = asyncio.create_task(bench.ask(CreateTopic("new")))
            await until(lambda: CreateTopic("new") in manager.asked)
            await manager.stop()
            with pytest.raises(ConnectionLostError, match="may or may not have done it"):
                await asking

    run(main())


def test_a_members_file_that_cannot_be_read_is_named() -> None:
    disk = FaultyDisk(0)
    disk.make_directory("data/broker-1")
    file = disk.open("data/broker-1/members.json", create=True)
    file.pwrite([b"{"], 0)

    async def main() -> None:
        with pytest.raises(InvalidRequestError, match=r"data/broker-1/members\.json cannot be read"):
            Bench("127.0.0.1:1", disk)

    run(main())
    assert msgspec.json.decode(msgspec.json.encode(Members("c", NODES)), type=Members) == Members("c", NODES)


# -- several managers --------------------------------------------------------------------------------------------


def test_a_broker_joins_by_whichever_manager_answers_and_goes_on_with_another() -> None:
    async def main() -> None:
        first, second = PlayedManager(), PlayedManager()
        await first.start()
        await second.start()
        await first.stop()  # its port is known, nobody is there
        disk = FaultyDisk(0)
        bench = Bench(f"{first.address},{second.address}", disk)
        try:
            await bench.start()
            assert second.asked[0] == JoinCluster(1, "127.0.0.1:1", 7, "")
            await first.start()
            await second.stop()
            await until(lambda: any(isinstance(one, JoinCluster) for one in first.asked))
            assert (await bench.ask(GetMetadata(["logs"]))).topics == [LOGS]
        finally:
            await bench.stop()
            await first.stop()

    run(main())


def test_a_manager_that_cannot_answer_now_is_left_for_one_that_can() -> None:
    """As one that is cut off from the others does."""

    async def main() -> None:
        cut_off, well = PlayedManager(), PlayedManager()
        cut_off.error = UnavailableError("manager 1 is cut off from the other managers; ask another one")
        await cut_off.start()
        await well.start()
        bench = Bench(f"{cut_off.address},{well.address}", FaultyDisk(0))
        try:
            await bench.start()
            assert bench.member.joined.is_set()
            assert (await bench.ask(GetMetadata(["logs"]))).topics == [LOGS]
            assert len(cut_off.asked) == 1
        finally:
            await bench.stop()
            await cut_off.stop()
            await well.stop()

    run(main())


def test_managers_that_others_told_of_are_found_after_a_restart_though_the_first_is_gone() -> None:
    async def main() -> None:
        known, told = PlayedManager(), PlayedManager()
        await known.start()
        await told.start()
        known.managers = [known.address, told.address]
        disk = FaultyDisk(0)
        bench = Bench(known.address, disk)
        await bench.start()
        await bench.stop()
        await known.stop()
        bench = Bench(known.address, disk)
        try:
            await bench.start()
            assert any(isinstance(one, JoinCluster) for one in told.asked)
        finally:
            await bench.stop()
            await told.stop()

    run(main())
