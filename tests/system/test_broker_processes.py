"""A cluster of a manager and three brokers, each a process: it begins, loses processes, and ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quiver import Admin, Consumer, Producer
from quiver.classic import MyConsumer, MyProducer, NoNewMessageError
from quiver.cli.cluster_file import SUPERVISOR_LOCK, Cluster, read_cluster
from quiver.cli.lock import holder_pid, is_held
from quiver.errors import UnavailableError
from tests.system.kit import ENVIRON, until
from tests.system.quick_commands import quick

pytestmark = pytest.mark.system

QUIVER = (sys.executable, "-m", "quiver.cli.main")


class ThreeBrokers:
    """Commands run in its directory find it by themselves."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data_dir = directory / "quiver-data"

    def run(self, *arguments: str, stdin: bytes = b"", code: int = 0) -> subprocess.CompletedProcess[bytes]:
        if arguments[0] == "up":
            run = subprocess.run(
                [*QUIVER, *arguments], capture_output=True, cwd=self.directory, env=ENVIRON, timeout=90
            )
        else:
            run = quick(*arguments, cwd=self.directory, stdin=stdin)
        assert run.returncode == code, run.stderr.decode()
        assert b"Traceback" not in run.stderr
        return run

    def up(self, *arguments: str) -> None:
        self.run("up", "--detach", "--port", "0", *arguments)

    @property
    def file(self) -> Cluster:
        found = read_cluster(self.data_dir)
        assert found is not None
        return found

    @property
    def servers(self) -> str:
        return ",".join(self.file.servers)

    def pid(self, broker: int) -> int:
        return next(entry.pid for entry in self.file.brokers if entry.id == broker)

    def kill(self, broker: int) -> None:
        os.kill(self.pid(broker), signal.SIGKILL)

    def until_replaced(self, pids: set[int]) -> None:
        until(lambda: pids.isdisjoint([entry.pid for entry in (*self.file.brokers, *self.file.managers)]), 60)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("status", "--json").stdout)
        return found

    def end(self) -> None:
        lock = self.data_dir / SUPERVISOR_LOCK
        pid = holder_pid(lock) if lock.exists() else None
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            until(lambda: not is_held(lock), 60)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreeBrokers]:
    made = ThreeBrokers(tmp_path_factory.mktemp("three"))
    try:
        made.up("--brokers", "3")
        yield made
    finally:
        made.end()


def leader_of(servers: str, topic: str) -> int:
    with Admin(servers) as admin:
        admin.offsets(topic)  # the leader answers this, so there is one
        return admin.describe_topic(topic).partitions[0].leader


def read_all(servers: str, topic: str, count: int) -> list[bytes | None]:
    with Consumer(servers, [topic], start="earliest", idle_timeout=30) as consumer:
        found: list[bytes | None] = []
        for record in consumer:
            found.append(record.value)
            if len(found) == count:
                break
        return found + [record.value for record in consumer.poll(timeout=0.5)]


def test_a_cluster_begins_serves_and_ends_and_begins_again_with_what_it_had(tmp_path: Path) -> None:
    cluster = ThreeBrokers(tmp_path)
    try:
        cluster.up("--brokers", "3")
        file = cluster.file
        assert [entry.id for entry in file.brokers] == [1, 2, 3]
        assert file.servers == (*(entry.address for entry in file.brokers), file.managers[0].address)
        logs = {path.name for path in (cluster.data_dir / "logs").iterdir()}
        assert {"manager-1.log", "broker-1.log", "broker-2.log", "broker-3.log"} <= logs
        cluster.run("topic", "create", "logs", "--partitions", "3")
        cluster.run("produce", "logs", stdin=b"".join(b"%d\n" % number for number in range(300)))
        assert sorted(map(int, cluster.run("consume", "logs").stdout.split())) == list(range(300))

        def has_leaders() -> Any:
            """On a busy machine there may be an election just now."""
            report = cluster.status()
            roles = [[one["role"] for one in row["replicas"]] for row in report["topics"][0]["partitions"]]
            return report if all(found.count("leader") == 1 for found in roles) else None

        report = until(has_leaders)
        assert [row["state"] for row in report["brokers"]] == ["online"] * 3
        rows = report["topics"][0]["partitions"]
        assert sum(row["messages"] for row in rows) == 300
        for row in rows:
            assert row["leader"] in (1, 2, 3) and row["term"] >= 1
            assert [(one["broker"], one["voter"]) for one in row["replicas"]] == [(1, True), (2, True), (3, True)]

        def listed() -> Any:
            found = json.loads(cluster.run("broker", "list", "--json").stdout)
            return found if sum(row["leads"] for row in found) == 3 else None

        shown = [(row["id"], row["state"], row["replicas"]) for row in until(listed)]
        assert shown == [(n, "online", 3) for n in (1, 2, 3)]

        pids = [entry.pid for entry in (*file.brokers, *file.managers)]
        cluster.run("down")
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        cluster.run("up", "--detach", "--port", "0", "--brokers", "1", code=2)
        cluster.up()
        assert len(cluster.file.brokers) == 3
        assert sorted(map(int, cluster.run("consume", "logs").stdout.split())) == list(range(300))
    finally:
        cluster.end()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_producers_and_consumers_go_on_when_the_leader_goes(running: ThreeBrokers, how: signal.Signals) -> None:
    topic = f"goes-{how.name}"
    with Admin(running.servers) as admin:
        admin.create_topic(topic)
    leader = leader_of(running.servers, topic)
    pid = running.pid(leader)
    # A time-out is longer than what is waited for: it is an election and a retry that help.
    patient = {"request_timeout": 600.0, "delivery_timeout": 600.0}
    with (
        Producer(running.servers, **patient) as producer,
        Consumer(running.servers, [topic], start="earliest") as consumer,
    ):
        sent = [producer.send(topic, b"%d" % number) for number in range(100)]
        producer.flush()
        os.kill(pid, how)
        sent += [producer.send(topic, b"%d" % number) for number in range(100, 200)]
        assert [future.result(90).offset for future in sent] == list(range(200))
        got: list[int] = []
        until(lambda: got.extend(int(r.value or b"") for r in consumer.poll(timeout=0.2)) or len(got) >= 200)
        assert got == list(range(200))
    if how == signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    else:
        running.until_replaced({pid})
    assert read_all(running.servers, topic, 200) == [b"%d" % number for number in range(200)]


def plain_post(url: str, path: str, **fields: Any) -> dict[str, Any]:
    """A client that knows nothing of retries: what it gets is all it gets."""
    request = urllib.request.Request(url + path, json.dumps(fields).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=60) as reply:
        found: dict[str, Any] = json.load(reply)
        return found


def test_http_goes_on_through_changes_of_leaders(running: ThreeBrokers) -> None:
    """Classic clients and plain ones, each message stored once, none refused."""
    url = running.file.http[0]
    classic, plain = "classic", "plain"
    with MyProducer(url) as producer, MyConsumer(url) as consumer:
        producer.CreateTopic(classic)
        producer.RegisterProducer(classic)
        consumer.RegisterConsumer(classic)
        plain_id = plain_post(url, "/producer/register", topic=plain)["producer_id"]
        stop = threading.Event()
        enqueued: list[str] = []
        posted: list[str] = []
        failures: list[Exception] = []

        def enqueue() -> None:
            while not stop.is_set():
                producer.Enqueue(classic, f"{len(enqueued)}")
                enqueued.append(f"{len(enqueued)}")

        def post(name: str) -> None:
            for number in itertools.count():
                if stop.is_set():
                    return
                plain_post(url, "/producer/produce", topic=plain, producer_id=plain_id, message=f"{name}{number}")
                posted.append(f"{name}{number}")

        def guarded(work: Callable[..., None], *arguments: Any) -> None:
            try:
                work(*arguments)
            except Exception as error:
                failures.append(error)

        jobs = [(enqueue,), (post, "a"), (post, "b"), (post, "c")]
        threads = [threading.Thread(target=guarded, args=job) for job in jobs]
        for thread in threads:
            thread.start()

        def until_both_go_on() -> None:
            before = len(enqueued), len(posted)
            until(lambda: failures or (len(enqueued) > before[0] + 20 and len(posted) > before[1] + 20), 90)

        for topic in (classic, plain, plain):
            until_both_go_on()
            broker = leader_of(running.servers, topic)
            pid = running.pid(broker)
            os.kill(pid, signal.SIGKILL)
            running.until_replaced({pid})
        until_both_go_on()
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []
        dequeued = []
        with contextlib.suppress(NoNewMessageError):
            while True:
                dequeued.append(str(consumer.Dequeue(classic)))
    assert dequeued == enqueued
    stored = [value.decode() for value in read_all(running.servers, plain, len(posted)) if value is not None]
    assert sorted(stored) == sorted(posted)


def test_messages_flow_while_the_manager_is_away_and_topics_wait_for_it(running: ThreeBrokers) -> None:
    with Admin(running.servers) as admin:
        admin.create_topic("steady")
    manager = running.file.managers[0]
    brokers = ",".join(entry.address for entry in running.file.brokers)
    os.kill(manager.pid, signal.SIGSTOP)
    try:
        # A new client: it has to be told by brokers where things are.
        with Producer(brokers) as producer, Consumer(brokers, ["steady"], start="earliest") as consumer:
            assert producer.send("steady", b"one").result(60).offset == 0
            assert [record.value for record in consumer.poll(timeout=60)] == [b"one"]
        with Admin(brokers, request_timeout=3.0) as admin, pytest.raises(UnavailableError):
            admin.create_topic("waits")
    finally:
        os.kill(manager.pid, signal.SIGCONT)
    os.kill(manager.pid, signal.SIGKILL)
    with Producer(brokers) as producer:
        assert producer.send("steady", b"two").result(60).offset == 1
    running.until_replaced({manager.pid})
    with Admin(brokers) as admin:
        admin.create_topic("after")
        assert {"steady", "after"} <= set(admin.list_topics())


def test_a_broker_that_lost_its_disk_is_filled_again_by_the_others(running: ThreeBrokers) -> None:
    topic = "refilled"
    with Admin(running.servers) as admin, Producer(running.servers) as producer:
        admin.create_topic(topic)
        producer.send_many(topic, [b"%d" % number for number in range(1000)])
        producer.flush()
        pid = running.pid(2)
        os.kill(pid, signal.SIGSTOP)
        shutil.rmtree(running.data_dir / "broker-2")
        os.kill(pid, signal.SIGKILL)
        producer.send_many(topic, [b"%d" % number for number in range(1000, 2000)])
        producer.flush()
        running.until_replaced({pid})

        def is_full() -> bool:
            held = [one for one in admin.replica_status(topic).get(2, []) if one.next_offset == 2000]
            leader = [one for one in admin.partition_status(topic) if one.role == "leader"]
            return bool(held and leader and [r for r in leader[0].replicas if r.broker == 2 and r.voter and not r.lag])

        until(is_full, 60)
    assert read_all(running.servers, topic, 2000) == [b"%d" % number for number in range(2000)]


def test_a_broker_can_be_run_by_hand_and_join(running: ThreeBrokers, tmp_path: Path) -> None:
    manager = running.file.managers[0].address
    command = ["broker", "--manager", manager, "--id", "4", "--port", "0", "--data-dir", str(tmp_path / "four")]
    process = subprocess.Popen([*QUIVER, *command], stderr=subprocess.PIPE, env=ENVIRON, cwd=tmp_path)
    try:
        with Admin(running.servers) as admin:
            until(lambda: 4 in {node.id for node in admin.nodes()})
            admin.create_topic("wide", 8)
            until(lambda: len(admin.replica_status("wide").get(4, [])) == 6)  # 8 partitions, 3 replicas, 4 brokers
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 0
        assert b"broker_stopped" in said
    finally:
        process.kill()
        process.communicate()
