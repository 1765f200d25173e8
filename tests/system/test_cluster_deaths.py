"""Brokers and the manager are killed, paused, restarted, and lose their disks, all under load; no message is lost."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quiver import Producer
from quiver.errors import NotLeaderError
from tests.system.direct_line import direct_line
from tests.system.kit import create_topic, until
from tests.system.quick_commands import quick
from tests.system.replicated_kit import BROKERS, MANAGER, ReplicatedCluster, paused
from tests.system.workload import PARTITIONS, Load, under_load

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.xdist_group("cluster")]

ALL = tuple(range(1, BROKERS + 1))
PAST_LEASE_S = 2.5  # an election takes at most 1.2 s


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicatedCluster]:
    """One for all these tests: each leaves it whole, and the next one finds what a cluster with a past is like."""
    with ReplicatedCluster(tmp_path_factory.mktemp("deaths")) as made:
        yield made
        assert made.trouble() == []


def test_rolling_restart_loses_nothing(cluster: ReplicatedCluster) -> None:
    with under_load(cluster.servers, "rolling") as load:
        for broker in (*ALL, MANAGER):
            ended = {broker: cluster.signal(broker, signal.SIGTERM)}
            cluster.until_back(ended)
            load.until_acknowledged(50)
            cluster.until_whole("rolling")


def test_killed_leader_loses_nothing(cluster: ReplicatedCluster) -> None:
    with under_load(cluster.servers, "leader") as load:
        before = until(lambda: (row := _status(cluster, "leader"))["leader"] and row)
        ended = cluster.kill(before["leader"])
        load.until_acknowledged(200)
        cluster.until_back(ended)
        cluster.until_whole("leader")
        until(lambda: (_status(cluster, "leader")["term"] or 0) > before["term"])


def test_killed_follower_loses_nothing(cluster: ReplicatedCluster) -> None:
    with under_load(cluster.servers, "follower") as load:
        leader = cluster.leader("follower")
        ended = cluster.kill(next(broker for broker in ALL if broker != leader))
        load.until_acknowledged(200)
        cluster.until_back(ended)
        cluster.until_whole("follower")


def test_all_brokers_killed_at_once_lose_nothing(cluster: ReplicatedCluster) -> None:
    with under_load(cluster.servers, "all") as load:
        ended = cluster.kill(*ALL)
        load.until_acknowledged(200)
        cluster.until_back(ended)
        cluster.until_whole("all")


def test_everything_killed_at_once_loses_nothing(cluster: ReplicatedCluster) -> None:
    with under_load(cluster.servers, "everything") as load:
        ended = cluster.kill(MANAGER, *ALL)
        load.until_acknowledged(200)
        cluster.until_back(ended)
        cluster.until_whole("everything")


def test_killed_leader_is_replaced_while_the_manager_is_frozen(cluster: ReplicatedCluster) -> None:
    """Only brokers can say who leads now, of a topic that is younger than their last talk with the manager."""
    with under_load(cluster.servers, "frozen") as load:
        with paused(cluster, MANAGER):
            ended = cluster.kill(cluster.leader("frozen"))
            load.until_acknowledged(200)
        cluster.until_back(ended)
        cluster.until_whole("frozen")


def test_killed_manager_is_not_missed_by_messages(cluster: ReplicatedCluster) -> None:
    with under_load(cluster.servers, "manager") as load:
        ended = cluster.kill(MANAGER)
        load.until_acknowledged(200)
        cluster.until_back(ended)


def test_paused_leader_that_wakes_up_neither_acknowledges_nor_serves_old_ends(cluster: ReplicatedCluster) -> None:
    """It wakes up past its lease and believes for a moment that it still leads."""
    with under_load(cluster.servers, "paused") as load:
        asyncio.run(_wake_up_too_late(cluster, load))
        cluster.until_whole("paused")


async def _wake_up_too_late(cluster: ReplicatedCluster, load: Load) -> None:
    old = cluster.leader(load.topic)
    async with direct_line(cluster.address(old)) as line:
        with paused(cluster, old):
            await asyncio.to_thread(cluster.leader, load.topic, 0, old)
            await asyncio.to_thread(time.sleep, PAST_LEASE_S)
            await asyncio.to_thread(load.until_acknowledged, 200)
            acknowledged = load.acknowledged_ends()[0]
            # They wait in its socket, and are the first that it sees when it goes on.
            answers, connection = asyncio.ensure_future(line.insist(load)), line._connection
            while len(connection._waiting) < 2 or connection.transport.get_write_buffer_size():
                await asyncio.sleep(0.01)  # until both are there
                assert not answers.done()
        (await answers).check(acknowledged)


def test_broker_with_an_empty_disk_comes_back_as_another_replica(cluster: ReplicatedCluster, tmp_path: Path) -> None:
    with under_load(cluster.servers, "empty") as load:
        broker = cluster.leader("empty")
        home = cluster.data_dir / f"broker-{broker}"
        before = _replica_ids(home, "empty")
        ended = cluster.kill(broker)
        home.rename(tmp_path / "lost")  # as a whole: the supervisor starts the next life a moment later
        load.until_acknowledged(200)
        cluster.until_back(ended)
        cluster.until_whole("empty")  # of three voters and nobody else
        after = _replica_ids(home, "empty")
    assert len(before) == len(after) == PARTITIONS
    assert not set(before.values()) & set(after.values()), "it was counted under its old name"


def _replica_ids(home: Path, topic: str) -> dict[str, int]:
    """By the uid of their partition."""
    found: dict[str, int] = json.loads((home / "catalog.json").read_bytes())["topics"][topic]["replicas"]
    return found


# -- what can be seen from outside -----------------------------------------------------------------------------------


def test_status_shows_leaders_terms_and_how_far_a_replica_is_behind(cluster: ReplicatedCluster) -> None:
    with under_load(cluster.servers, "status") as load:
        row = until(lambda: (row := _status(cluster, "status"))["leader"] == cluster.leader("status") and row)
        assert row["term"] >= 1
        assert {replica["broker"]: replica["voter"] for replica in row["replicas"]} == dict.fromkeys(ALL, True)
        behind = next(broker for broker in ALL if broker != row["leader"])

        def shows_it() -> bool:
            """All from one answer: another broker may lead a moment later."""
            row = _status(cluster, "status")
            told = {replica["broker"]: replica for replica in row["replicas"]}
            return (
                row["leader"] not in (None, behind)
                and told[behind]["state"] == "unreachable"
                and told[behind]["lag"] > 0
                and told[row["leader"]]["lag"] == 0
            )

        with paused(cluster, behind):
            load.until_acknowledged(200)
            until(shows_it)
            until(lambda: re.search(rf"{behind} \(unreachable, \d+ behind\)", _quiver(cluster, "status")))
        cluster.until_whole("status")


def _status(cluster: ReplicatedCluster, topic: str) -> dict[str, Any]:
    """The row of partition 0 in `quiver status --json`."""
    report = json.loads(_quiver(cluster, "status", "--json"))
    rows: list[dict[str, Any]] = next(found["partitions"] for found in report["topics"] if found["name"] == topic)
    return rows[0]


def _quiver(cluster: ReplicatedCluster, *words: str) -> str:
    run = quick(*words, "--data-dir", str(cluster.data_dir), columns=300)
    assert run.returncode == 0, run.stderr.decode()
    return run.stdout.decode()


def test_followers_serve_the_same_bytes_up_to_what_they_know_to_be_committed(cluster: ReplicatedCluster) -> None:
    create_topic(cluster.servers, "followers")
    with Producer(cluster.servers) as producer:
        producer.send_many("followers", [b"%d" % number for number in range(100)]).result(30)

    async def ask(broker: int) -> bytes:
        async with direct_line(cluster.address(broker)) as line:
            reply, frames = await line.fetch("followers", 0, 0)
            while reply.high_watermark < 100:  # a follower hears of it with the next message
                reply, frames = await line.fetch("followers", 0, 0)
            if broker != leader:
                with pytest.raises(NotLeaderError):  # it cannot know whether there is more
                    await line.fetch("followers", 0, 101)
            return bytes(frames)

    leader = cluster.leader("followers")
    served = [asyncio.run(ask(broker)) for broker in ALL]
    assert served[0]
    assert served == [served[0]] * BROKERS
