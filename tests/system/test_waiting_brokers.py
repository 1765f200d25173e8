"""`quiver broker add HOST:PORT` and POST /brokers: brokers that wait, and endpoints that are none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from quiver import Admin, Producer
from quiver.cli.ready import EXIT_REMOVED
from quiver.config import NetSettings
from quiver.errors import DeliveryError, UnavailableError
from quiver.net.server import Flow, Reply, Server
from quiver.wire.admin_messages import TakeIn, TakenIn
from quiver.wire.messages import PROTOCOL_VERSION, HelloReply
from tests.system.growing_kit import Growing, waiting_broker
from tests.system.kit import Node, free_port, until
from tests.system.quick_commands import quick

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Growing]:
    """Three managers, so that two of three calls are handed over."""
    made = Growing(tmp_path_factory.mktemp("cluster"))
    try:
        made.run("up", "--detach", "--brokers", "2", "--managers", "3", "--port", "0")
        yield made
    finally:
        made.end()


def post(http: str, body: Any) -> tuple[int, dict[str, Any]]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{http}/brokers", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        assert error.code != 503 or error.headers["Retry-After"]
        return error.code, json.load(error)


def refused(cluster: Growing, endpoint: Any, status: int = 400) -> str:
    found, body = post(cluster.file.http[0], {"endpoint": endpoint})
    assert (found, body["status"]) == (status, "failure"), body
    return str(body["message"])


@contextlib.contextmanager
def played(answer: TakenIn, node_id: int) -> Iterator[str]:
    """Something that answers as a broker does and never joins; yields its address."""
    loop = asyncio.new_event_loop()

    async def serve(request: Struct, payload: memoryview, flow: Flow) -> Reply:
        assert isinstance(request, TakeIn)
        return answer, ()

    server = Server(NetSettings(), HelloReply(PROTOCOL_VERSION, node_id, "", 1, 1, 1), serve)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        port = asyncio.run_coroutine_threadsafe(server.start("127.0.0.1", 0), loop).result(30)
        yield f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0.0), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_waiting_broker_is_added_by_command_and_stays_added(cluster: Growing, tmp_path: Path) -> None:
    port = str(free_port())
    with waiting_broker(tmp_path / "w", 11, "--port", port) as broker:
        address = broker.until_waiting()
        assert address == f"127.0.0.1:{port}" and "Ctrl-C ends it" in broker.log
        assert f"Broker 11 serves {address}." in cluster.run("broker", "add", address)
        row = cluster.listed()[11]
        assert (row["address"], row["state"]) == (address, "online")
        assert "Broker 11 serves" in cluster.run("broker", "add", address), "again changes nothing"
        with Admin(cluster.servers) as admin, Producer(cluster.servers) as producer:
            assert sorted(admin.create_topic("eleven").partitions[0].replicas) == [1, 2, 11]
            producer.send("eleven", b"x").result(60)
        assert broker.end() == 0
    with waiting_broker(tmp_path / "w", 11, "--port", port) as broker:  # its directory knows the managers
        until(lambda: "node_ready id=11" in broker.log)
        assert "waits to be added" not in broker.log
        until(lambda: cluster.listed()[11]["state"] == "online")
        cluster.run("broker", "remove", "11")
        assert broker.process.wait(60) == EXIT_REMOVED


def test_every_manager_takes_the_call(cluster: Growing, tmp_path: Path) -> None:
    for number, http in enumerate(cluster.file.http, 21):
        with waiting_broker(tmp_path, number, "--port", "0") as broker:
            endpoint = broker.until_waiting().replace("127.0.0.1", "localhost")
            said = {"status": "success", "message": f"Broker {number} is part of the cluster", "broker_id": number}
            assert post(http, {"endpoint": endpoint}) == (200, said)
            assert post(http, {"endpoint": endpoint}) == (200, said)
            cluster.run("broker", "remove", str(number))
            assert broker.process.wait(60) == EXIT_REMOVED


def test_waiting_broker_serves_nothing_and_ends_cleanly(tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        with waiting_broker(tmp_path, 5, "--port", "0") as broker:
            address = broker.until_waiting()
            with Admin(address, request_timeout=1) as admin:
                with pytest.raises(UnavailableError, match=f"quiver broker add {address}"):
                    admin.create_topic("t")
                with pytest.raises(UnavailableError):
                    admin.nodes()
            with (
                Producer(address, request_timeout=1, delivery_timeout=1) as producer,
                pytest.raises((DeliveryError, UnavailableError)),
            ):
                producer.send("t", b"x").result(30)
            assert broker.end(number) == 0
    assert not (tmp_path / "quiver-data" / "broker-5" / "partitions").exists(), "nothing was stored"


def test_endpoints_that_are_no_waiting_brokers_are_refused(cluster: Growing, tmp_path: Path) -> None:
    said = refused(cluster, "127.0.0.1:9")
    assert said.startswith("No broker answers at 127.0.0.1:9 ") and "'quiver broker --id N --port 9'" in said
    http = cluster.file.http[0].removeprefix("http://")
    assert "is not a broker" in refused(cluster, http)
    assert "is manager " in refused(cluster, cluster.file.managers[0].address)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert "No broker answers" in refused(cluster, f"127.0.0.1:{port}")
    with Node(tmp_path / "alone") as node:
        assert "a cluster of its own" in refused(cluster, node.address)
        status, body = post(node.http, {"endpoint": cluster.file.brokers[0].address})
        assert status == 400 and "An embedded node is its own and only broker" in body["message"]
    with played(TakenIn(31, "127.0.0.1:1", "another"), 31) as address:
        said = refused(cluster, address)
        assert "belongs to another cluster (another)" in said and "empty data directory" in said
    with played(TakenIn(1, "127.0.0.1:1"), 1) as address:
        said = refused(cluster, address)
        assert f"Broker 1 of this cluster is at {cluster.file.brokers[0].address}" in said and "another --id" in said
    with Admin(cluster.servers) as admin:
        assert {1, 2} <= {node.id for node in admin.nodes()} and 31 not in {node.id for node in admin.nodes()}
    run = quick("broker", "add", "127.0.0.1:9", cwd=cluster.directory)
    assert run.returncode == 2 and run.stderr.startswith(b"error: No broker answers") and run.stderr.count(b"\n") == 1


def test_broker_of_another_cluster_is_refused(cluster: Growing, tmp_path: Path) -> None:
    other = Growing(tmp_path)
    try:
        other.run("up", "--detach", "--brokers", "2", "--port", "0")
        for entry in other.file.brokers:
            assert "belongs to another cluster" in refused(cluster, entry.address)
        assert set(other.listed()) == {1, 2}
    finally:
        other.end()


def test_broker_that_does_not_join_in_time_is_a_503(cluster: Growing) -> None:
    with played(TakenIn(32, "127.0.0.1:1"), 32) as address:
        assert "was told to join and has not done so within" in refused(cluster, address, 503)


@pytest.mark.parametrize(
    "endpoint",
    [
        *(None, 5, 1.5, True, [], ["127.0.0.1:1"], {}),
        *("", ":", "x", ":1", "x:", "x:0", "x:65536", "x:-1", "x:1e3", "x:٣", " :1", "a b:1", "x:1\n"),
        *("http://x:1", "::1:9404", "[]:1", "a" * 400 + ":1", "ü:1", "a..b:1"),
    ],
)
def test_wrong_endpoints_are_refused(cluster: Growing, endpoint: Any) -> None:
    said = refused(cluster, endpoint)
    assert "endpoint" in said or endpoint == "a..b:1"


def test_wrong_commands_say_what_is_wrong(cluster: Growing) -> None:
    assert "is not an address like" in cluster.run("broker", "add", "no address", code=2)
    assert "one broker is added at a time" in cluster.run("broker", "add", "a:1,b:2", code=2)
    assert "a broker needs --id N" in cluster.run("broker", code=2)
    assert "$ quiver broker add 10.0.0.6:9404" in cluster.run("broker", "add", "--help")
