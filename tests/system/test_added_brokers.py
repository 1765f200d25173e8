"""`quiver broker add`: one more broker under the supervisor of a running cluster."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quiver import Admin, Producer
from quiver.cli.cluster_file import write_cluster
from tests.system.growing_kit import QUIVER, Growing
from tests.system.kit import ENVIRON, free_port, until
from tests.system.quick_commands import quick

pytestmark = pytest.mark.system


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Growing]:
    made = Growing(tmp_path)
    try:
        yield made
    finally:
        made.end()


def test_added_broker_is_one_like_the_others(cluster: Growing) -> None:
    port = free_port()
    cluster.run("up", "--detach", "--brokers", "2", "--port", str(port), "--http-port", str(free_port()))
    said = cluster.run("broker", "add")
    assert f"Broker 3 serves 127.0.0.1:{port + 3}." in said and "quiver broker rebalance" in said
    assert cluster.brokers == [1, 2, 3] and cluster.listed()[3]["state"] == "online"
    assert [one["id"] for one in json.loads(cluster.run("status", "--json"))["brokers"]] == [1, 2, 3]

    with Admin(cluster.servers) as admin, Producer(cluster.servers) as producer:
        topic = admin.create_topic("three")
        assert sorted(topic.partitions[0].replicas) == [1, 2, 3]
        producer.send("three", b"kept").result(60)
        pid = cluster.pid(3)
        os.kill(pid, signal.SIGKILL)
        until(lambda: cluster.pid(3) != pid)
        assert cluster.log("supervisor").count("broker-3") >= 2
        until(lambda: cluster.listed()[3]["replicas"] == 1)
        producer.send("three", b"kept too").result(60)

    cluster.run("down")
    cluster.run("up", "--detach", "--port", str(port), "--http-port", str(free_port()))
    assert cluster.brokers == [1, 2, 3]
    until(lambda: cluster.listed()[3]["replicas"] == 1)
    assert cluster.run("consume", "three", "--from", "earliest", "--max", "2").split("\n")[:2] == ["kept", "kept too"]


def test_two_at_once_get_two_numbers_and_a_removed_one_stays_away(cluster: Growing) -> None:
    cluster.run("up", "--detach", "--brokers", "2", "--port", "0")
    command = [*QUIVER, "broker", "add"]
    both = [subprocess.Popen(command, cwd=cluster.directory, env=ENVIRON, stdout=subprocess.PIPE) for _ in range(2)]
    said = sorted(one.communicate(timeout=90)[0].decode() for one in both)
    assert [words.split(" serves")[0] for words in said] == ["Broker 3", "Broker 4"]
    assert cluster.brokers == [1, 2, 3, 4] and set(cluster.listed()) == {1, 2, 3, 4}

    cluster.run("broker", "remove", "3")
    until(lambda: cluster.brokers == [1, 2, 4])
    assert "Broker 5 serves" in cluster.run("broker", "add")
    assert cluster.brokers == [1, 2, 4, 5] and set(cluster.listed()) == {1, 2, 4, 5}
    assert cluster.log("supervisor").count("broker-3 is added") == 1
    assert cluster.log("supervisor").count("broker-3 was removed from the cluster") == 1


def test_broker_is_added_on_a_free_port_under_three_managers(cluster: Growing) -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 4))
        taken.listen()
        cluster.run("up", "--detach", "--managers", "3", "--port", str(port), "--http-port", str(free_port()))
        assert cluster.brokers == [1]
        said = cluster.run("broker", "add", "--data-dir", str(cluster.data_dir), "--servers", cluster.servers)
        assert "Broker 2 serves 127.0.0.1:" in said and f":{port + 4}." not in said
        assert set(cluster.listed()) == {1, 2}


def test_broker_that_cannot_start_is_told_and_ends_nothing(cluster: Growing) -> None:
    cluster.run("up", "--detach", "--brokers", "2", "--port", "0")
    pids = {entry.pid for entry in cluster.file.brokers}
    log = cluster.data_dir / "logs" / "broker-3.log"
    log.mkdir()  # its output has no place to go
    said = cluster.run("broker", "add", code=1)
    assert said.startswith("error: broker 3 could not be started: ") and said.count("\n") == 1
    assert not (cluster.data_dir / "broker-3").exists()
    assert {entry.pid for entry in cluster.file.brokers} == pids
    log.rmdir()
    assert "Broker 3 serves" in cluster.run("broker", "add")


def test_clusters_that_take_no_broker_say_so(cluster: Growing, tmp_path: Path) -> None:
    assert "no cluster runs on" in cluster.run("broker", "add", code=1)
    cluster.run("up", "--detach", "--port", "0")
    assert "its own and only broker" in cluster.run("broker", "add", code=2)
    other = tmp_path / "elsewhere"
    other.mkdir()
    run = quick("broker", "add", "--servers", cluster.servers, cwd=other)
    assert run.returncode == 2 and b"is not supervised on this machine" in run.stderr
    assert b"quiver broker --manager " in run.stderr and b" --id 2" in run.stderr
    assert sorted(path.name for path in cluster.data_dir.glob("broker-*")) == ["broker-1"]


def test_supervisor_of_an_older_version_is_left_in_peace(cluster: Growing) -> None:
    cluster.run("up", "--detach", "--brokers", "2", "--port", "0")
    raw = json.loads((cluster.data_dir / "cluster.json").read_text())
    del raw["supervisor"]["takes_brokers"]  # as that one wrote it
    (cluster.data_dir / "cluster.json").write_text(json.dumps(raw))
    assert "of an older version" in cluster.run("broker", "add", code=2)
    assert not (cluster.data_dir / "broker-3").exists()
    write_cluster(cluster.data_dir, cluster.file)
    assert set(cluster.listed()) == {1, 2}


def test_interrupted_command_ends_at_once_and_the_broker_comes(cluster: Growing) -> None:
    cluster.run("up", "--detach", "--brokers", "2", "--port", "0")
    command = subprocess.Popen([*QUIVER, "broker", "add"], cwd=cluster.directory, env=ENVIRON, stderr=subprocess.PIPE)
    until(lambda: "broker-3 is added" in cluster.log("supervisor"))
    began_s = time.monotonic()
    command.send_signal(signal.SIGINT)
    _, said = command.communicate(timeout=30)
    assert command.returncode == 130 and b"Traceback" not in said and said.strip().endswith(b"interrupted")
    assert time.monotonic() - began_s < 10
    until(lambda: cluster.brokers == [1, 2, 3])


def test_help_has_examples() -> None:
    said = quick("broker", "add", "--help", cwd=Path("/tmp")).stdout.decode()
    assert "$ quiver broker add" in said
