"""Brokers join over real sockets, and have afterwards what the quorum says they should have."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from quiver.config import NetSettings
from quiver.errors import ConnectionLostError, InvalidRequestError, NotLeaderError, UnavailableError
from quiver.manager.joining import Joining
from quiver.manager.registry import Registry
from quiver.metadata.commands import RemoveBroker
from quiver.metadata.state import Broker
from quiver.metadata.store import sqlite_url
from quiver.net.server import Flow, Reply, Server
from quiver.testing.faulty_disk import FaultyDisk
from quiver.types import PartitionStatus
from quiver.wire.messages import PROTOCOL_VERSION, CreateTopic, GetStatus, HelloReply, JoinCluster, StatusReply
from tests.broker.kit import SimulatedClock
from tests.manager.kit import QuorumBench, until
from tests.manager.test_registry import PlayedBroker

Test = Callable[["Cluster"], Coroutine[Any, Any, None]]


class RemoteBroker(PlayedBroker):
    """Holds, of a topic with groups, the partitions it is a voter of; on a port of its own."""

    def __init__(self, broker_id: int, disk_id: int = 7) -> None:
        super().__init__()
        self.id = broker_id
        self.disk_id = disk_id
        self.held: dict[str, dict[int, str]] = {}
        self.voters: dict[str, list[list[int]]] = {}
        self.address = ""
        self._server: Server | None = None

    async def call(self, request: Struct, payload: Any = b"") -> tuple[Struct, Any]:
        if isinstance(request, GetStatus):
            held = [(name, *one) for name, partitions in self.held.items() for one in partitions.items()]
            return StatusReply([PartitionStatus(n, p, "online", 0, 0, 0, 1, "", uid) for n, p, uid in held]), ()
        reply = await super().call(request, payload)
        if isinstance(request, CreateTopic):
            self.voters[request.name] = request.voters
            groups = request.voters or [[self.id << 32]] * len(request.uids)
            self.held[request.name] = {
                number: uid
                for number, (uid, voters) in enumerate(zip(request.uids, groups, strict=True))
                if self.id in [voter >> 32 for voter in voters]
            }
        else:
            self.held.pop(request.name, None)  # type: ignore[attr-defined]
        return reply

    async def _answer(self, request: Struct, payload: memoryview, flow: Flow) -> Reply:
        return await self.call(request, payload)

    async def start(self) -> None:
        self._server = Server(NetSettings(), HelloReply(PROTOCOL_VERSION, self.id, "c", 1, 1, 1), self._answer)
        port = int(self.address.rpartition(":")[2] or 0)
        self.address = f"127.0.0.1:{await self._server.start('127.0.0.1', port)}"

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0.0)

    def join(self, cluster_id: str = "c") -> JoinCluster:
        return JoinCluster(self.id, self.address, self.disk_id, cluster_id)


class Cluster:
    def __init__(self, registry: Registry, brokers: list[RemoteBroker], clock: SimulatedClock) -> None:
        self.registry = registry
        self.joining = Joining(registry._quorum, registry, "c")
        self.brokers = brokers
        self.clock = clock

    async def join(self, broker: RemoteBroker, cluster_id: str = "c") -> None:
        """Joins and is brought up to date."""
        await self.joining.join(broker.join(cluster_id))
        await until(lambda: broker.id not in self.joining._updates)

    @property
    def known(self) -> dict[int, Broker]:
        return self.registry._quorum.state.brokers


@contextlib.asynccontextmanager
async def running(path: Path, count: int) -> AsyncIterator[Cluster]:
    brokers = [RemoteBroker(number) for number in range(1, count + 1)]
    clock = SimulatedClock()
    bench = QuorumBench(FaultyDisk(0), sqlite_url(path / "metadata.db"))
    async with bench.opened() as (quorum, _, _):
        cluster = Cluster(Registry(quorum, clock, 5.0), brokers, clock)
        try:
            for broker in brokers:
                await broker.start()
                await cluster.join(broker, "")
            yield cluster
        finally:
            await cluster.joining.close()
            for broker in brokers:
                await broker.stop()


def play(path: Path, test: Test, count: int = 3) -> None:
    async def main() -> None:
        async with running(path, count) as cluster:
            await test(cluster)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_broker_is_kept_with_its_address_and_disk_and_told_of_the_others(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        first = cluster.brokers[0]
        reply = await cluster.joining.join(first.join())
        assert reply.cluster_id == "c"
        assert {node.id: node.address for node in reply.brokers} == {b.id: b.address for b in cluster.brokers}
        assert cluster.known[1] == Broker(1, first.address, 7)
        before = cluster.registry._quorum.last_transaction
        assert (await cluster.joining.join(first.join())).transaction == before, "a heartbeat changes nothing"

    play(tmp_path, test)


def test_a_topic_is_told_to_all_with_the_voters_of_its_groups(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        topic = await cluster.registry.create_topic("logs", 4, 2)
        voters = [list(partition.voters) for partition in topic.partitions]
        assert voters[0] == [1 << 32 | 7, 2 << 32 | 7]
        for broker in cluster.brokers:
            assert broker.voters["logs"] == voters
            assert broker.held["logs"] == {p.number: p.uid for p in topic.partitions if broker.id in p.replicas}

    play(tmp_path, test)


def test_more_replicas_than_brokers_use_all_brokers(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        topic = await cluster.registry.create_topic("logs", 1, 5)
        assert sorted(topic.partitions[0].replicas) == [1, 2, 3]

    play(tmp_path, test)


def test_a_topic_is_made_while_a_minority_is_away_which_gets_it_when_it_is_back(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        away = cluster.brokers[2]
        await away.stop()
        topic = await cluster.registry.create_topic("logs", 2, 3)
        assert "logs" not in away.held
        await away.start()
        await cluster.join(away)
        assert away.held["logs"] == {p.number: p.uid for p in topic.partitions}

    play(tmp_path, test)


def test_a_topic_waits_for_a_majority(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        one, two, three = cluster.brokers
        await two.stop()
        await three.stop()
        with pytest.raises(ConnectionLostError):
            await cluster.registry.create_topic("logs", 1, 3)
        with pytest.raises(ConnectionLostError):
            await cluster.registry.topic("logs")
        await two.start()
        assert (await cluster.registry.topic("logs")).name == "logs"
        assert one.held["logs"] and two.held["logs"]

    play(tmp_path, test)


def test_what_was_deleted_while_a_broker_was_away_is_deleted_when_it_is_back(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        away = cluster.brokers[2]
        for name in ("gone", "again", "kept"):
            await cluster.registry.create_topic(name, 3, 2)
        await away.stop()
        await cluster.registry.delete_topic("gone")
        await cluster.registry.delete_topic("again")
        again = await cluster.registry.create_topic("again", 3, 3)
        assert {"gone", "again", "kept"} <= away.held.keys()
        await away.start()
        await cluster.join(away)
        assert away.held.keys() == {"again", "kept"}
        assert away.held["again"] == {p.number: p.uid for p in again.partitions}
        assert "delete kept" not in away.changes

    play(tmp_path, test)


def test_a_broker_that_holds_nothing_of_a_topic_learns_that_its_name_has_a_new_meaning(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        first = await cluster.registry.create_topic("logs", 1, 1)
        outsider = next(broker for broker in cluster.brokers if broker.id not in first.partitions[0].replicas)
        assert outsider.held["logs"] == {}
        await outsider.stop()
        await cluster.registry.delete_topic("logs")
        second = await cluster.registry.create_topic("logs", 1, 1)
        await outsider.start()
        await cluster.join(outsider)
        assert outsider.voters["logs"] == [list(second.partitions[0].voters)]

    play(tmp_path, test)


def test_a_manager_that_leads_no_more_deletes_nothing_that_it_does_not_know(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        broker, quorum = cluster.brokers[0], cluster.registry._quorum
        broker.topics["new"], broker.held["new"] = ["a"], {0: "a"}  # another manager has made it
        real, leads = quorum.confirm, False

        async def confirm() -> int:
            if not leads:
                raise NotLeaderError("manager 1 does not lead")
            return await real()

        quorum.confirm = confirm  # type: ignore[method-assign]
        await broker.stop()
        await broker.start()
        await cluster.join(broker)
        assert broker.held["new"] == {0: "a"} and 1 in cluster.registry.brokers.outdated
        leads = True  # and knows of no such topic: it was deleted
        await cluster.join(broker)
        assert "new" not in broker.held

    play(tmp_path, test)


def test_a_broker_with_a_new_disk_is_told_to_host_with_the_voters_of_old(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        topic = await cluster.registry.create_topic("logs", 1, 3)
        old = cluster.brokers[1]
        await old.stop()
        new = RemoteBroker(2, disk_id=8)
        new.address = old.address
        cluster.brokers.append(new)
        await new.start()
        await cluster.join(new, "")
        assert cluster.known[2].disk_id == 8
        assert new.voters["logs"] == [list(topic.partitions[0].voters)]
        assert 2 << 32 | 8 not in topic.partitions[0].voters
        later = await cluster.registry.create_topic("later", 1, 3)
        assert 2 << 32 | 8 in later.partitions[0].voters

    play(tmp_path, test)


def test_a_broker_that_moved_is_reached_at_its_new_address(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        broker = cluster.brokers[0]
        await broker.stop()
        broker.address = ""
        await broker.start()
        await cluster.join(broker)
        assert cluster.known[1].endpoint == broker.address
        await cluster.registry.create_topic("logs", 1, 3)
        assert "logs" in broker.held

    play(tmp_path, test)


def test_a_port_that_another_broker_has_by_now_does_not_keep_its_old_owner_out(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        one, two = cluster.brokers
        await one.stop()
        await two.stop()
        one.address, two.address = "", one.address  # after a restart of all on any free ports
        await two.start()
        await one.start()
        cluster.joining.follow()
        with pytest.raises(ConnectionLostError):
            await cluster.registry.brokers.status(1)
        await cluster.join(one)
        await cluster.join(two)
        await cluster.registry.create_topic("logs", 1, 2)
        assert "logs" in one.held and "logs" in two.held

    play(tmp_path, test, count=2)


def test_a_second_process_under_the_same_id_is_refused_while_the_first_answers(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        twin = RemoteBroker(1, disk_id=9)
        cluster.brokers.append(twin)
        await twin.start()
        with pytest.raises(InvalidRequestError, match=r"broker 1 is at .* already and answers there"):
            await cluster.joining.join(twin.join())
        assert cluster.known[1].disk_id == 7

    play(tmp_path, test)


def test_a_broker_of_another_cluster_is_refused_and_keeps_what_it_has(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        stranger = RemoteBroker(9)
        stranger.topics = {"precious": ["u"]}
        stranger.held = {"precious": {0: "u"}}
        cluster.brokers.append(stranger)
        await stranger.start()
        with pytest.raises(InvalidRequestError, match="belongs to cluster other, this manager to cluster c"):
            await cluster.joining.join(stranger.join("other"))
        assert 9 not in cluster.known
        assert stranger.changes == []

    play(tmp_path, test)


def test_what_a_newcomer_brings_along_is_taken_in(tmp_path: Path) -> None:
    """A node that was a cluster of its own: never delete data on a guess."""

    async def test(cluster: Cluster) -> None:
        newcomer = RemoteBroker(4)
        newcomer.topics = {"old": ["u0", "u1"]}
        newcomer.held = {"old": {0: "u0", 1: "u1"}}
        cluster.brokers.append(newcomer)
        await newcomer.start()
        await cluster.join(newcomer, "")
        topic = cluster.registry._quorum.state.topic("old")
        assert [(p.uid, p.replicas) for p in topic.partitions] == [("u0", (4,)), ("u1", (4,))]
        await cluster.join(newcomer)
        assert newcomer.changes == []

    play(tmp_path, test)


def test_brokers_that_are_known_are_linked_again_after_a_start(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        await cluster.registry.create_topic("logs", 1, 3)
        registry = Registry(cluster.registry._quorum, cluster.clock, 5.0)
        joining = Joining(registry._quorum, registry, "c")
        joining.follow()
        assert (await registry.topic("logs")).name == "logs"
        assert registry.brokers.attached == [1, 2, 3]
        await joining.close()

    play(tmp_path, test)


def test_a_silent_broker_is_inactive_and_gets_no_new_topics_when_others_are_enough(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        silent = cluster.brokers[0]
        cluster.clock.now_s += 6
        for broker in cluster.brokers[1:]:
            await cluster.join(broker)
        assert [cluster.registry.broker_state(broker.id) for broker in cluster.brokers] == [
            "inactive",
            "active",
            "active",
            "active",
        ]
        topic = await cluster.registry.create_topic("logs", 6, 3)
        assert all(silent.id not in partition.replicas for partition in topic.partitions)
        await cluster.join(silent)
        assert cluster.registry.broker_state(silent.id) == "active"

    play(tmp_path, test, count=4)


def test_without_a_broker_no_topic_is_made(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        with pytest.raises(UnavailableError, match="no broker has joined yet"):
            await cluster.registry.create_topic("logs", 1, 3)
        assert not cluster.registry._quorum.state.topics

    play(tmp_path, test, count=0)


def test_a_broker_that_was_removed_is_refused_until_it_comes_with_an_empty_disk(tmp_path: Path) -> None:
    async def test(cluster: Cluster) -> None:
        quorum = cluster.registry._quorum
        gone = cluster.brokers[2]
        await quorum.propose(RemoveBroker(3))
        await cluster.joining.forget(3)
        assert sorted(cluster.known) == cluster.registry.brokers.attached == [1, 2]
        before = quorum.last_transaction
        with pytest.raises(InvalidRequestError, match="Broker 3 was removed from this cluster"):
            await cluster.join(gone)
        assert quorum.last_transaction == before, "refused without a trace in the log"
        gone.disk_id = 8
        await cluster.join(gone)
        assert sorted(cluster.registry.brokers.attached) == [1, 2, 3]
        topic = await cluster.registry.create_topic("logs", 1, 3)
        assert 3 in topic.partitions[0].replicas

    play(tmp_path, test)
