"""Brokers are added and removed, and the manager dies in the middle, all under load; no message is lost."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from quiver import Admin
from quiver.cli.ready import EXIT_REMOVED
from quiver.errors import UnavailableError
from tests.system.kit import ENVIRON, SMALL_FILES, free_port, until
from tests.system.quick_commands import quick
from tests.system.replicated_kit import BACK_S_MAX, MANAGER, ReplicatedCluster, paused
from tests.system.workload import PARTITIONS, Load, under_load

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.xdist_group("cluster")]

QUIVER = (sys.executable, "-m", "quiver.cli.main")
# A broker that is frozen for a while counts as one that can take something.
LENIENT = SMALL_FILES | {"QUIVER_BROKER_SILENCE_S": "60"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ReplicatedCluster]:
    with ReplicatedCluster(tmp_path) as made:
        yield made
        assert made.trouble() == []


def start_broker(cluster: ReplicatedCluster, broker: int, log: Path) -> subprocess.Popen[bytes]:
    """Nobody restarts this one."""
    command = [*QUIVER, "broker", "--manager", cluster.file.managers[0].address, "--id", str(broker)]
    command += ["--data-dir", str(cluster.data_dir), "--port", str(free_port())]
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=ENVIRON | SMALL_FILES)


@contextlib.contextmanager
def extra_broker(cluster: ReplicatedCluster, broker: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A broker beside those that are supervised; returns when the cluster knows it."""
    process = start_broker(cluster, broker, log)
    try:
        until(lambda: broker in brokers_of(cluster), BACK_S_MAX)
        yield process
        assert "Traceback" not in log.read_text()
    finally:
        process.terminate()
        process.wait(30)


def brokers_of(cluster: ReplicatedCluster) -> list[int]:
    with Admin(cluster.servers) as admin:
        return sorted(node.id for node in admin.nodes())


def voters(cluster: ReplicatedCluster, topic: str) -> dict[int, set[int]]:
    """By partition, as its leader says; of two that both say so the one of the later term."""
    with contextlib.suppress(UnavailableError):
        told = [one for statuses in cluster.statuses(topic).values() for one in statuses if one.role == "leader"]
        told.sort(key=lambda one: one.term)
        return {one.partition: {replica.broker for replica in one.replicas if replica.voter} for one in told}
    return {}


def holders(cluster: ReplicatedCluster, topic: str) -> Counter[int]:
    """How many replicas of a topic each broker has. Under load somebody may be out of reach: ask until it is so."""
    return _count(voters(cluster, topic))


def _count(held: dict[int, set[int]]) -> Counter[int]:
    return Counter(broker for found in held.values() for broker in found)


def until_still(cluster: ReplicatedCluster) -> None:
    def is_still() -> bool:
        with contextlib.suppress(UnavailableError), Admin(cluster.servers, request_timeout=2) as admin:
            return admin.moves() == ([], [])
        return False

    until(is_still, BACK_S_MAX)


def quiver(cluster: ReplicatedCluster, *words: str) -> str:
    run = quick(*words, "--servers", cluster.servers)
    assert run.returncode == 0, run.stderr.decode()
    return run.stdout.decode()


def test_brokers_are_added_and_removed_under_load(cluster: ReplicatedCluster, tmp_path: Path) -> None:
    with under_load(cluster.servers, "moving") as load, extra_broker(cluster, 4, tmp_path / "4.log") as added:
        assert "moved" in quiver(cluster, "broker", "rebalance")
        until(lambda: holders(cluster, "moving")[4] >= 2, BACK_S_MAX)
        load.until_acknowledged(200)
        numbers = range(PARTITIONS)
        gone = next(
            led for number in numbers if (led := cluster.leader("moving", number)) != 4
        )  # one that leads and is supervised
        assert f"Removed broker {gone}." in quiver(cluster, "broker", "remove", str(gone))
        load.until_acknowledged(200)
        stayed = [broker for broker in (1, 2, 3, 4) if broker != gone]
        assert brokers_of(cluster) == stayed
        until(lambda: holders(cluster, "moving") == dict.fromkeys(stayed, PARTITIONS), BACK_S_MAX)
        until(lambda: gone not in [entry.id for entry in cluster.file.brokers], BACK_S_MAX)
        assert f"broker-{gone} was removed from the cluster and is not started again" in cluster.log("supervisor")
        assert not list((cluster.data_dir / f"broker-{gone}" / "partitions").iterdir())
        assert added.poll() is None


def test_moves_finish_when_the_manager_is_killed_in_the_middle(tmp_path: Path) -> None:
    _move_and_kill_in_the_middle(tmp_path, managers=1)


def test_moves_finish_under_the_next_primary(tmp_path: Path) -> None:
    _move_and_kill_in_the_middle(tmp_path, managers=3)


def _move_and_kill_in_the_middle(tmp_path: Path, managers: int) -> None:
    with ReplicatedCluster(tmp_path, LENIENT, managers) as cluster:
        with under_load(cluster.servers, "killed") as load, extra_broker(cluster, 4, tmp_path / "4.log") as added:

            def shares() -> dict[int, set[int]] | None:
                found = voters(cluster, "killed")
                return found if sorted(_count(found).values()) == [2, 2, 2, 3] else None

            _kill_the_primary(cluster, load, frozen(added), "rebalance")
            held: dict[int, set[int]] = until(shares, BACK_S_MAX)
            taker = max(broker for found in held.values() if 3 in found for broker in {1, 2, 4} - found)
            freeze = frozen(added) if taker == 4 else paused(cluster, taker)
            _kill_the_primary(cluster, load, freeze, "remove", "3")
            until(lambda: brokers_of(cluster) == [1, 2, 4], BACK_S_MAX)
            until(lambda: holders(cluster, "killed") == dict.fromkeys((1, 2, 4), PARTITIONS), BACK_S_MAX)
        assert cluster.trouble() == []


@contextlib.contextmanager
def frozen(process: subprocess.Popen[bytes]) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def _kill_the_primary(
    cluster: ReplicatedCluster, load: Load, freeze: contextlib.AbstractContextManager[None], *command: str
) -> None:
    """`freeze` is for a broker that is to take something: the moves cannot end before the primary does. It dies as soon
    as it shows them, and so does who asked for them: it would ask the next one again."""
    words = [*QUIVER, "broker", *command, "--no-wait", "--servers", cluster.servers]
    with Admin(cluster.servers) as admin, freeze, subprocess.Popen(words, env=ENVIRON) as asking:
        try:
            until(lambda: admin.moves()[0], BACK_S_MAX)
        finally:
            asking.kill()
        ended = cluster.kill(MANAGER)
    load.until_acknowledged(100)
    cluster.until_back(ended)
    until_still(cluster)


def test_removed_broker_is_refused_with_its_directory_and_welcome_without(
    cluster: ReplicatedCluster, tmp_path: Path
) -> None:
    log = tmp_path / "4.log"
    with under_load(cluster.servers, "again"):
        with extra_broker(cluster, 4, log) as process:
            quiver(cluster, "broker", "rebalance")
            process.kill()
            process.wait(30)
            quiver(cluster, "broker", "remove", "4")
        again = start_broker(cluster, 4, log)
        assert again.wait(30) == EXIT_REMOVED
        assert "error: Broker 4 was removed from this cluster; it may join again with an empty" in log.read_text()
        (cluster.data_dir / "broker-4").rename(tmp_path / "old")
        with extra_broker(cluster, 4, log):
            quiver(cluster, "broker", "rebalance")
            until(lambda: holders(cluster, "again")[4] >= 2, BACK_S_MAX)
            quiver(cluster, "broker", "remove", "4")


def test_partitions_are_added_from_the_shell(cluster: ReplicatedCluster) -> None:
    assert quiver(cluster, "topic", "create", "logs") == "Created topic logs with 1 partition.\n"
    assert quiver(cluster, "topic", "alter", "logs", "--partitions", "5") == "Topic logs has 5 partitions.\n"
    assert len(quiver(cluster, "topic", "describe", "logs").splitlines()) >= 5 + 2
    assert "Every broker has its share." in quiver(cluster, "broker", "rebalance")
