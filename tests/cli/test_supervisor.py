"""The supervisor with a stand-in for the node: what it starts, restarts, reports and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from quiver.cli.cluster_file import BrokerEntry, Cluster, SupervisorEntry, read_cluster, write_cluster
from quiver.cli.supervisor import Backoff, Ended, NodeSpec, Supervisor

STAND_IN = str(Path(__file__).parent / "stand_in.py")
WAIT_S = 20.0


class Harness:
    def __init__(self, data_dir: Path, how: str, *, restart: bool = True, stop_timeout_s: float = 10.0) -> None:
        self.data_dir = data_dir
        self.said: list[str] = []
        self.announced: list[Cluster] = []
        self.ready = asyncio.Event()
        self.supervisor = Supervisor(
            data_dir,
            [NodeSpec("broker-1", 1, (sys.executable, STAND_IN, how), 0, 0)],
            restart=restart,
            say=self.said.append,
            on_ready=self._on_ready,
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
