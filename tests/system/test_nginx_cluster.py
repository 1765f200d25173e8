"""nginx before three real managers: reads are spread, and managers die, freeze and come back under load."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from quiver.classic import MyConsumer, MyProducer
from quiver.cli.nginx import ANSWER_S, LOOK_EVERY_S, SILENCES_MAX
from tests.system.kit import ENVIRON, WAIT_S, until
from tests.system.managed_kit import MANAGERS, PATIENT, ManagedCluster
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
# `quiver`, that also writes a line for each look at the managers: those that are to get nothing.
TELLING = """
import sys
from quiver.cli import main, nginx
decide, told = nginx.decide, open(sys.argv.pop(1), "a", buffering=1)
def decide_and_tell(answers, silences):
    found = decide(answers, silences)
    print(*sorted(found.away if found else ()), file=told)
    return found
nginx.decide = decide_and_tell
main.main()
"""


def place(cluster: ManagedCluster, manager: int) -> str:
    return urlsplit(cluster.http_of(manager)).netloc


def who_got(line: str) -> str:
    """The manager, or managers, of a line of the access log."""
    return line.split('" ')[1].split(" ")[1]


@contextlib.contextmanager
def watching(cluster: ManagedCluster, nginx: Nginx) -> Iterator[None]:
    """`quiver nginx-config --watch`, from when it has written the file."""
    command = [sys.executable, "-c", TELLING, str(looks_file(nginx)), "nginx-config", "--watch"]
    flags = ["--data-dir", str(cluster.data_dir), *nginx.flags]
    watcher = subprocess.Popen([*command, *flags], env=ENVIRON, stderr=subprocess.PIPE)
    try:
        until(lambda: nginx.config.exists() or watcher.poll() is not None)
        assert watcher.poll() is None, watcher.communicate()[1]
        yield
    finally:
        watcher.send_signal(signal.SIGINT)
        _, said = watcher.communicate(timeout=WAIT_S)
    assert b"Traceback" not in said, said.decode()


def looks_file(nginx: Nginx) -> Path:
    return nginx.run_dir / "looks"


def looks(nginx: Nginx) -> list[str]:
    return looks_file(nginx).read_text().splitlines()


def workers(nginx: Nginx) -> set[int]:
    """Their pids. A reload makes new ones; the old ones end when they have answered what they had."""
    pid = int((nginx.run_dir / "nginx.pid").read_text())
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def primary_in(nginx: Nginx) -> str:
    return nginx.config.read_text().split("upstream quiver_writes {")[1].split("server ")[1].split(" ")[0]


def test_reads_are_spread_evenly_over_the_secondaries(tmp_path: Path) -> None:
    with ManagedCluster(tmp_path, PATIENT) as cluster:
        nginx, primary = Nginx(tmp_path), 0
        while primary != cluster.primary():  # the one that the configuration is for; a busy machine may move it
            primary = cluster.primary()
            cluster.command("nginx-config", *nginx.flags)
        with nginx, MyProducer(nginx.url) as producer, MyConsumer(nginx.url) as consumer:
            producer.RegisterProducer("t")
            consumer.RegisterConsumer("t")
            for number in range(100):
                producer.Enqueue("t", f"m{number}")
            assert [consumer.Dequeue("t") for _ in range(100)] == [f"m{number}" for number in range(100)]
            until(lambda: sum("/consumer/consume" in line for line in nginx.lines()) == 100)
            # All that is read goes round, also when a client asks again who leads.
            reads = Counter(who_got(line) for line in nginx.lines() if '"GET' in line)
            writes = {who_got(line) for line in nginx.lines() if '"POST' in line}
        secondaries = {place(cluster, manager) for manager in MANAGERS if manager != primary}
        assert reads.keys() == secondaries
        assert max(reads.values()) - min(reads.values()) <= 1
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
            until(lambda: primary_in(nginx) == place(cluster, cluster.primary()))
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
    """It takes connections, so that nginx alone would not notice. Counted in looks: a busy machine stretches time."""
    assert SILENCES_MAX * (LOOK_EVERY_S + ANSWER_S) < GONE_S_MAX
    with ManagedCluster(tmp_path, PATIENT) as cluster:
        nginx = Nginx(tmp_path)
        frozen = next(manager for manager in MANAGERS if manager != cluster.primary())
        there = place(cluster, frozen)
        with watching(cluster, nginx), nginx, MyConsumer(nginx.url, timeout=60) as consumer:
            consumer.ListTopics()
            until(lambda: there not in looks(nginx)[-1])
            before = workers(nginx)
            cluster.signal_manager(frozen, signal.SIGSTOP)
            seen = len(looks(nginx))
            until(lambda: f"{there} down" in nginx.config.read_text())
            gone = next(number for number, away in enumerate(looks(nginx)[seen:]) if there in away)
            assert gone <= SILENCES_MAX, "one look may have been under way"
            until(lambda: not before & workers(nginx))
            since = len(nginx.lines())
            for _ in range(20):
                consumer.ListTopics()
            until(lambda: len(nginx.lines(since)) >= 20)
            assert there not in " ".join(nginx.lines(since))
            cluster.signal_manager(frozen, signal.SIGCONT)
            since = len(nginx.lines())
            until(lambda: consumer.ListTopics() is not None and there in " ".join(nginx.lines(since)))
