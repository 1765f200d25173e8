"""The supervisor with a stand-in for the node: what it starts, restarts, reports and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from quiver.cli.cluster_file import BrokerEntry, Cluster, SupervisorEntry, read_cluster, write_cluster
from quiver.cli.launch import Plan, make_plan
from quiver.cli.lock import FileLock
from quiver.cli.supervisor import Backoff, Ended, NodeSpec, Supervisor
from quiver.errors import InvalidRequestError

STAND_IN = str(Path(__file__).parent / "stand_in.py")
WAIT_S = 20.0


def embedded(how: str) -> list[NodeSpec]:
    return [NodeSpec("broker-1", 1, (sys.executable, STAND_IN, how), 0, 0)]


def cluster_of(*brokers: str) -> list[NodeSpec]:
    """A manager, and brokers that behave as is said."""
    manager = NodeSpec("manager-1", 1, (sys.executable, STAND_IN, "serve"), 0, 0, "manager")
    return [manager] + [
        NodeSpec(f"broker-{number}", number, (sys.executable, STAND_IN, how), 0, 0, "broker")
        for number, how in enumerate(brokers, 1)
    ]


class Harness:
    def __init__(
        self,
        data_dir: Path,
        how: str,
        *,
        restart: bool = True,
        stop_timeout_s: float = 10.0,
        specs: list[NodeSpec] | None = None,
        added: str | None = None,
    ) -> None:
        self.data_dir = data_dir
        self.said: list[str] = []
        self.announced: list[Cluster] = []
        self.ready = asyncio.Event()
        self.supervisor = Supervisor(
            data_dir,
            specs or embedded(how),
            restart=restart,
            say=self.said.append,
            on_ready=self._on_ready,
            make_broker=None if added is None else lambda number: cluster_of(*[added] * number)[-1],
            stop_timeout_s=stop_timeout_s,
        )

    def _on_ready(self, cluster: Cluster) -> None:
        self.announced.append(cluster)
        self.ready.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110  another process changes it
                await asyncio.sleep(0.01)

    def pid(self) -> int:
        cluster = read_cluster(self.data_dir)
        assert cluster is not None
        return cluster.brokers[0].pid


def run(
    harness: Callable[[], Harness], during: Callable[[Harness], Awaitable[None]] | None = None
) -> tuple[Ended, Harness]:
    async def scenario() -> tuple[Ended, Harness]:
        made = harness()
        running = asyncio.create_task(made.supervisor.run())
        if during is not None:
            await asyncio.wait_for(made.ready.wait(), WAIT_S)
            await during(made)
            os.kill(os.getpid(), signal.SIGTERM)
        return await asyncio.wait_for(running, WAIT_S), made

    return asyncio.run(scenario())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_backoff_doubles_to_its_limit_and_begins_again_after_a_long_run() -> None:
    backoff = Backoff()
    assert [backoff.delay_s(0.0) for _ in range(9)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0])
    assert backoff.delay_s(29.9) == 10.0
    assert backoff.delay_s(30.0) == pytest.approx(0.1)
    assert backoff.delay_s(0.0) == pytest.approx(0.2)


def test_cluster_file_is_there_when_ready_and_gone_after_the_stop(tmp_path: Path) -> None:
    pids: list[int] = []

    async def during(harness: Harness) -> None:
        cluster = read_cluster(tmp_path)
        assert cluster is not None
        assert harness.announced == [cluster]
        assert cluster.servers == (cluster.brokers[0].address,)
        assert cluster.http == (cluster.managers[0].http,)
        assert cluster.supervisor.pid == os.getpid()
        pids.append(harness.pid())

    ended, _ = run(lambda: Harness(tmp_path, "serve"), during)
    assert ended == Ended(0)
    assert not (tmp_path / "cluster.json").exists()
    assert not is_alive(pids[0])


def test_a_killed_node_comes_back_on_its_port_with_its_new_pid_in_the_file(tmp_path: Path) -> None:
    async def during(harness: Harness) -> None:
        before = harness.announced[0]
        os.kill(harness.pid(), signal.SIGKILL)
        await harness.until(lambda: harness.pid() != before.brokers[0].pid)
        after = read_cluster(tmp_path)
        assert after is not None
        assert after.servers == before.servers
        assert len(harness.announced) == 1

    ended, harness = run(lambda: Harness(tmp_path, "serve"), during)
    assert ended == Ended(0)
    assert "was killed by SIGKILL; starting it again in 0.1 s" in harness.said[0]


def test_without_restart_a_killed_node_ends_the_cluster(tmp_path: Path) -> None:
    async def scenario() -> None:
        harness = Harness(tmp_path, "serve", restart=False)
        running = asyncio.create_task(harness.supervisor.run())
        await asyncio.wait_for(harness.ready.wait(), WAIT_S)
        os.kill(harness.pid(), signal.SIGKILL)
        ended = await asyncio.wait_for(running, WAIT_S)
        assert ended.code == 1
        assert "was killed by SIGKILL; the cluster ends (--no-restart)" in ended.error
        assert not (tmp_path / "cluster.json").exists()

    asyncio.run(scenario())


def test_a_users_mistake_at_the_first_start_ends_the_cluster_with_its_message(tmp_path: Path) -> None:
    ended, harness = run(lambda: Harness(tmp_path, "user-mistake"))
    assert ended == Ended(2, "the port is in use")
    assert harness.said == []


def test_a_crash_at_the_first_start_shows_the_last_line_of_the_log(tmp_path: Path) -> None:
    ended, _ = run(lambda: Harness(tmp_path, "crash"))
    assert ended.code == 1
    assert ended.error.startswith("broker-1 could not start: RuntimeError: broken on purpose. Its log: ")


def test_a_node_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    pids: list[int] = []

    async def during(harness: Harness) -> None:
        pids.append(harness.pid())

    ended, harness = run(lambda: Harness(tmp_path, "deaf", stop_timeout_s=0.2), during)
    assert ended == Ended(0)
    assert "killing it" in harness.said[-1]
    assert not is_alive(pids[0])


def test_the_cluster_file_of_a_killed_supervisor_is_removed_before_the_new_cluster_serves(tmp_path: Path) -> None:
    write_cluster(tmp_path, Cluster(("127.0.0.1:1",), (BrokerEntry(1, 1, "127.0.0.1:1"),), SupervisorEntry(1)))
    run(lambda: Harness(tmp_path, "user-mistake"))
    assert not (tmp_path / "cluster.json").exists()


def test_brokers_start_when_the_manager_serves_and_are_told_where(tmp_path: Path) -> None:
    async def during(harness: Harness) -> None:
        cluster = harness.announced[0]
        manager = cluster.managers[0]
        assert (len(cluster.managers), len(cluster.brokers)) == (1, 2)
        assert cluster.servers == (*(broker.address for broker in cluster.brokers), manager.address)
        assert cluster.http == (manager.http,)
        for name in ("broker-1", "broker-2"):
            said = (tmp_path / "logs" / f"{name}.log").read_text()
            assert f"--manager {manager.address} " in said
        assert "--manager" not in (tmp_path / "logs" / "manager-1.log").read_text()

    ended, _ = run(lambda: Harness(tmp_path, "", specs=cluster_of("serve", "serve")), during)
    assert ended == Ended(0)


def test_every_node_of_a_cluster_comes_back_and_finds_the_manager_where_it_was(tmp_path: Path) -> None:
    async def during(harness: Harness) -> None:
        before = harness.announced[0]

        def current() -> Cluster:
            found = read_cluster(tmp_path)
            assert found is not None
            return found

        for pid in (before.managers[0].pid, before.brokers[1].pid):
            os.kill(pid, signal.SIGKILL)
        await harness.until(lambda: current().managers[0].pid != before.managers[0].pid)
        await harness.until(lambda: current().brokers[1].pid != before.brokers[1].pid)
        after = current()
        assert after.servers == before.servers
        assert after.brokers[0] == before.brokers[0]
        assert f"--manager {before.managers[0].address} " in (tmp_path / "logs" / "broker-2.log").read_text()

    ended, _ = run(lambda: Harness(tmp_path, "", specs=cluster_of("serve", "serve")), during)
    assert ended == Ended(0)


def test_a_broker_that_cannot_start_ends_the_cluster_with_its_message(tmp_path: Path) -> None:
    ended, _ = run(lambda: Harness(tmp_path, "", specs=cluster_of("serve", "user-mistake")))
    assert ended == Ended(2, "the port is in use")
    assert not (tmp_path / "cluster.json").exists()


def plan(tmp_path: Path, brokers: int | None, port: int = 9400) -> Plan:
    return make_plan(
        {"data_dir": str(tmp_path), "port": port, "http_port": 8002}, restart=True, config=None, brokers=brokers
    )


def test_one_broker_is_an_embedded_node_and_more_are_a_manager_and_brokers_on_ports_in_a_row(tmp_path: Path) -> None:
    assert [(spec.name, spec.role, spec.port) for spec in plan(tmp_path, 1).specs()] == [("broker-1", "embedded", 9400)]
    assert [(spec.name, spec.role, spec.port, spec.http_port) for spec in plan(tmp_path, 2).specs()] == [
        ("manager-1", "manager", 9400, 8002),
        ("broker-1", "broker", 9401, 0),
        ("broker-2", "broker", 9402, 0),
    ]
    assert {spec.port for spec in plan(tmp_path, 3, port=0).specs()} == {0}


def test_a_cluster_has_as_many_brokers_as_its_directory_and_never_fewer(tmp_path: Path) -> None:
    assert plan(tmp_path, None).brokers == 1
    for name in ("broker-1", "broker-3", "broker-x", "manager-1"):
        (tmp_path / name).mkdir()
    assert plan(tmp_path, None).brokers == 3
    assert plan(tmp_path, 4).brokers == 4
    with pytest.raises(InvalidRequestError, match="has the messages of 3 brokers; --brokers 2 would leave some out"):
        plan(tmp_path, 2)
    with pytest.raises(InvalidRequestError, match="no room for 3 brokers"):
        plan(tmp_path, 3, port=65_534)


async def add(harness: Harness, number: int) -> None:
    (harness.data_dir / f"broker-{number}").mkdir(exist_ok=True)
    os.kill(os.getpid(), signal.SIGUSR1)


def entries(data_dir: Path) -> int:
    cluster = read_cluster(data_dir)
    assert cluster is not None
    return len(cluster.brokers)


@pytest.mark.parametrize("restart", [True, False])
def test_added_broker_is_started_and_told_like_the_others(tmp_path: Path, restart: bool) -> None:
    async def during(harness: Harness) -> None:
        assert entries(tmp_path) == 1
        await add(harness, 2)
        await harness.until(lambda: entries(tmp_path) == 2)
        await add(harness, 2)  # the same again is nothing new
        await add(harness, 3)
        await harness.until(lambda: entries(tmp_path) == 3)

    ended, harness = run(
        lambda: Harness(tmp_path, "", specs=cluster_of("serve"), added="serve", restart=restart), during
    )
    assert ended == Ended(0)
    assert [line for line in harness.said if line.endswith("is added")] == ["broker-2 is added", "broker-3 is added"]
    assert (tmp_path / "logs" / "broker-2.log").read_text().count("--port") == 1


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize(("how", "reason"), [("user-mistake", "the port is in use"), ("crash", "broken on purpose")])
def test_added_broker_that_cannot_start_ends_nothing(tmp_path: Path, restart: bool, how: str, reason: str) -> None:
    async def during(harness: Harness) -> None:
        failed = tmp_path / "broker-2" / "start-failed"
        await add(harness, 2)
        await harness.until(lambda: failed.exists() and reason in failed.read_text())
        pid = harness.pid()
        if restart:
            os.kill(pid, signal.SIGKILL)
            await harness.until(lambda: harness.pid() != pid)
        assert entries(tmp_path) == 1 and is_alive(harness.pid())

    ended, _ = run(lambda: Harness(tmp_path, "", specs=cluster_of("serve"), added=how, restart=restart), during)
    assert ended == Ended(0)


def test_directory_that_somebody_runs_by_hand_is_left_alone(tmp_path: Path) -> None:
    async def during(harness: Harness) -> None:
        (tmp_path / "broker-2").mkdir()
        lock = FileLock(tmp_path / "broker-2" / "lock")
        assert lock.acquire()
        with lock:
            await add(harness, 3)
            await harness.until(lambda: entries(tmp_path) == 2)

    _, harness = run(lambda: Harness(tmp_path, "", specs=cluster_of("serve"), added="serve"), during)
    assert "broker-2 is added" not in harness.said


def test_embedded_node_takes_no_broker_and_does_not_die_of_the_question(tmp_path: Path) -> None:
    async def during(harness: Harness) -> None:
        await add(harness, 2)
        pid = harness.pid()
        os.kill(pid, signal.SIGKILL)
        await harness.until(lambda: harness.pid() != pid)
        cluster = read_cluster(tmp_path)
        assert cluster is not None and not cluster.supervisor.takes_brokers

    ended, _ = run(lambda: Harness(tmp_path, "serve"), during)
    assert ended == Ended(0)


def test_added_broker_gets_the_port_of_the_next_start_if_that_is_free(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        plan = make_plan({"data_dir": str(tmp_path), "port": port - 3}, restart=True, config=None, brokers=2)
        assert plan.added_broker(3).port == 0
    assert plan.added_broker(3).port == port
    free = make_plan({"data_dir": str(tmp_path), "port": 0}, restart=True, config=None, brokers=2)
    assert free.added_broker(3).port == 0
    above = make_plan({"data_dir": str(tmp_path), "port": 65_533}, restart=True, config=None, brokers=2)
    assert above.added_broker(3).port == 0
    (tmp_path / "broker-3").mkdir()
    again = make_plan({"data_dir": str(tmp_path), "port": port - 3}, restart=True, config=None)
    assert [spec.port for spec in again.specs() if spec.id == 3] == [port]
