"""R33 and R34 on three brokers and three managers, with every role killed in turn."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from quiver.classic import MyConsumer, MyProducer
from tests.system.managed_kit import MANAGERS, ManagedCluster
from tests.system.r33_kit import (
    CONSUMERS,
    PRODUCERS,
    Disturbance,
    HttpDoor,
    Run,
    SdkDoor,
    check,
    create_topics,
    run_all,
    write_log_files,
)
from tests.system.replicated_kit import BROKERS

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("cluster"),
]


class Roles:
    """Kills whoever has a role just now."""

    def __init__(self, cluster: ManagedCluster, topic: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self.killed: list[str] = []

    def manager(self, is_primary: bool) -> Disturbance:
        ended: dict[int, int] = {}

        def strike() -> None:
            primary = self._cluster.primary()
            chosen = primary if is_primary else next(manager for manager in MANAGERS if manager != primary)
            ended[chosen] = self._cluster.signal_manager(chosen, signal.SIGKILL)
            self.killed.append("primary" if is_primary else "secondary")

        return Disturbance(strike, lambda: self._cluster.until_managers_back(ended))

    def broker(self, leads: bool) -> Disturbance:
        ended: dict[int, int] = {}

        def strike() -> None:
            leader = self._cluster.leader(self._topic)
            chosen = leader if leads else next(broker for broker in range(1, BROKERS + 1) if broker != leader)
            ended.update(self._cluster.kill(chosen))
            self.killed.append("leader" if leads else "follower")

        return Disturbance(strike, lambda: self._cluster.until_back(ended))

    def all(self) -> list[Disturbance]:
        return [self.manager(False), self.broker(False), self.manager(True), self.broker(True)]


@pytest.mark.parametrize(
    ("over_http", "partitions"),
    [
        pytest.param(PRODUCERS + CONSUMERS, 1, id="http"),
        pytest.param(["P1", "P4", "C1", "C3"], 3, id="both-doors-3-partitions"),
    ],
)
def test_produced_is_consumed_in_one_order_though_every_role_is_killed(
    tmp_path: Path, over_http: list[str], partitions: int
) -> None:
    with ManagedCluster(tmp_path, brokers=BROKERS) as cluster:
        create_topics(cluster.servers, partitions)
        roles = Roles(cluster, "T-1")
        run = Run(write_log_files(tmp_path), roles.all())
        # One address of three: the clients find the others, and go on when this one is dead.
        http, sdk = HttpDoor(cluster.http_of(1)), SdkDoor(cluster.servers)
        run_all(run, {name: http if name in over_http else sdk for name in PRODUCERS + CONSUMERS})
        assert roles.killed == ["secondary", "follower", "primary", "leader"]
        assert cluster.trouble() == []
    check(run, partitions)


def line(when: str) -> str:
    return f"2026-11-15T20:03:52 INFO DS grüße, 日本 🏹 {when}\n"


def test_the_message_received_is_the_message_sent_though_every_role_is_killed(tmp_path: Path) -> None:
    with (
        ManagedCluster(tmp_path, brokers=BROKERS) as cluster,
        MyProducer(cluster.http_of(1), timeout=60) as producer,
        MyConsumer(cluster.http_of(1), timeout=60) as consumer,
    ):
        producer.RegisterProducer("DS")
        consumer.RegisterConsumer("DS")
        for disturbance in Roles(cluster, "DS").all():
            for when in ("before", "between"):
                producer.Enqueue("DS", line(when))
            assert consumer.Dequeue("DS") == line("before")
            disturbance.strike()
            assert consumer.Dequeue("DS") == line("between")
            producer.Enqueue("DS", line("after"))
            assert consumer.Dequeue("DS") == line("after")
            assert consumer.Size("DS") == 0
            disturbance.recover()
