"""nginx before three real managers: reads are spread, and managers die, freeze and come back under load."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from quiver.classic import MyConsumer, MyProducer
from tests.system.kit import ENVIRON, WAIT_S, until
from tests.system.managed_kit import MANAGERS, ManagedCluster
from tests.system.nginx_kit import Nginx
from tests.system.r33_kit import (
    CONSUMERS,
    PRODUCERS,
    Disturbance,
    HttpDoor,
    Run,
    check,
    create_topics,
    run_all,
    write_log_files,
)

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("cluster"),
]

GONE_S_MAX = 5.0  # a manager that is gone gets nothing after so long
LINES = 150


def place(cluster: ManagedCluster, manager: int) -> str:
    return urlsplit(cluster.http_of(manager)).netloc


def who_got(line: str) -> str:
    """The manager, or managers, of a line of the access log."""
    return line.split('" ')[1].split(" ")[1]


@contextlib.contextmanager
def watching(cluster: ManagedCluster, nginx: Nginx) -> Iterator[None]:
    """`quiver nginx-config --watch`, from when it has written the file."""
    command = [sys.executable, "-m", "quiver.cli.main", "nginx-config", "--data-dir", str(cluster.data_dir), "--watch"]
    watcher = subprocess.Popen([*command, *nginx.flags], env=ENVIRON, stderr=subprocess.PIPE)
    try:
        until(lambda: nginx.config.exists() or watcher.poll() is not None)
        assert watcher.poll() is None, watcher.communicate()[1]
        yield
    finally:
        watcher.send_signal(signal.SIGINT)
        _, said = watcher.communicate(timeout=WAIT_S)
    assert b"Traceback" not in said, said.decode()


def primary_in(nginx: Nginx) -> str:
    return nginx.config.read_text().split("upstream quiver_writes {")[1].split("server ")[1].split(" ")[0]


def test_reads_are_spread_evenly_over_the_secondaries(tmp_path: Path) -> None:
    with ManagedCluster(tmp_path) as cluster:
        nginx, primary = Nginx(tmp_path), 0
        while primary != cluster.primary():  # the one that the configuration is for; a busy machine may move it
            primary = cluster.primary()
            cluster.command("nginx-config", *nginx.flags)
        with nginx, MyProducer(nginx.url) as producer, MyConsumer(nginx.url) as consumer:
            producer.RegisterProducer("t")
            consumer.RegisterConsumer("t")
            for number in range(100):
                producer.Enqueue("t", f"m{number}")
            until(lambda: len(nginx.lines()) >= 100)
            since = len(nginx.lines())
            assert [consumer.Dequeue("t") for _ in range(100)] == [f"m{number}" for number in range(100)]
            until(lambda: len(nginx.lines(since)) == 100)
            reads = Counter(who_got(line) for line in nginx.lines(since))
            writes = {who_got(line) for line in nginx.lines() if '"POST' in line}
        secondaries = [place(cluster, manager) for manager in MANAGERS if manager != primary]
        assert reads == dict.fromkeys(secondaries, 50)
        assert writes == {place(cluster, primary)}


def test_managers_are_killed_and_come_back_under_load_and_no_client_notices(tmp_path: Path) -> None:
    """R33 through nginx. No producer or consumer raises; after a primary's death the new one gets the changes."""
    with ManagedCluster(tmp_path, brokers=3) as cluster:
        create_topics(cluster.servers)
        nginx = Nginx(tmp_path)
        ended: dict[int, int] = {}

        def kill_secondary() -> None:
            chosen = next(manager for manager in MANAGERS if manager != cluster.primary())
            ended[chosen] = cluster.signal_manager(chosen, signal.SIGKILL)

        def kill_primary() -> None:
            ended.clear()
            primary = cluster.primary()
            ended[primary] = cluster.signal_manager(primary, signal.SIGKILL)

        def until_moved() -> None:
            moved = cluster.primary(not_this=next(iter(ended)))
            until(lambda: primary_in(nginx) == place(cluster, moved))
            cluster.until_managers_back(ended)

        kills = [
            Disturbance(kill_secondary, lambda: cluster.until_managers_back(ended)),
            Disturbance(kill_primary, until_moved),
        ]
        run = Run(write_log_files(tmp_path, LINES), kills)
        with watching(cluster, nginx), nginx:
            door = HttpDoor(nginx.url)
            run_all(run, dict.fromkeys(PRODUCERS + CONSUMERS, door))
            # Who was dead has reads again, by itself.
            since = len(nginx.lines())
            back = place(cluster, next(iter(ended)))

            def leads(there: str) -> bool:
                """On a busy machine it may have become the primary again, which gets no reads."""
                return primary_in(nginx) == there == place(cluster, cluster.primary())

            with MyConsumer(nginx.url) as consumer:
                until(lambda: consumer.ListTopics() and (back in " ".join(nginx.lines(since)) or leads(back)))
    check(run)


def test_a_manager_that_is_frozen_gets_nothing_and_comes_back(tmp_path: Path) -> None:
    """It takes connections, so that nginx alone would not notice."""
    with ManagedCluster(tmp_path) as cluster:
        nginx = Nginx(tmp_path)
        frozen = next(manager for manager in MANAGERS if manager != cluster.primary())
        there = place(cluster, frozen)
        with watching(cluster, nginx), nginx, MyConsumer(nginx.url, timeout=60) as consumer:
            consumer.ListTopics()
            cluster.signal_manager(frozen, signal.SIGSTOP)
            began_s = time.monotonic()
            until(lambda: f"{there} down" in nginx.config.read_text(), 10)
            assert time.monotonic() - began_s < GONE_S_MAX
            until(lambda: consumer.ListTopics() is not None and time.monotonic() - began_s > GONE_S_MAX)
            since = len(nginx.lines())
            for _ in range(20):
                consumer.ListTopics()
            until(lambda: len(nginx.lines(since)) >= 20)
            assert there not in " ".join(nginx.lines(since))
            cluster.signal_manager(frozen, signal.SIGCONT)
            since = len(nginx.lines())
            until(lambda: consumer.ListTopics() is not None and there in " ".join(nginx.lines(since)))
