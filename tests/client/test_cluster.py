"""Addresses, connections and patience: what producers, consumers and admins share."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from quiver import Admin, Consumer, Producer
from quiver.client import cluster as cluster_module
from quiver.client.cluster import BACKOFF_S_MAX, Cluster, backoff_s, parse_servers
from quiver.errors import (
    ClosedError,
    ConnectionLostError,
    InvalidRequestError,
    QuiverError,
    RequestTimeoutError,
    TopicExistsError,
    UnavailableError,
)
from quiver.net.connection import Connection, open_connection
from tests.client.kit import LocalBroker, free_port
from tests.system.proxy import Proxy

# Addresses


@pytest.mark.parametrize(
    ("servers", "addresses"),
    [
        ("127.0.0.1:9400", ["127.0.0.1:9400"]),
        ("localhost", ["localhost:9400"]),
        (" a:1 , b:2,c ", ["a:1", "b:2", "c:9400"]),
        ("[::1]:9401", ["[::1]:9401"]),
    ],
)
def test_servers_are_addresses_with_a_default_port(servers: str, addresses: list[str]) -> None:
    assert parse_servers(servers) == addresses


BAD_SERVERS = [
    "",
    "   ",
    ",",
    "a:1,",
    ":9400",
    "host:",
    "host:port",
    "host:0",
    "host:65536",
    "host:-1",
    "host:9400.0",
    "host:²",
    "host:٣",
    "host:" + "9" * 5000,
    "a b:9400",
    "a\x00b:9400",
    "a/b:9400",
    "http://host:9400",
    "x" * 300 + ":9400",
    "a..b:9400",
    "\ud800:9400",
    None,
    9400,
    b"127.0.0.1:9400",
    ["127.0.0.1:9400"],
]


@pytest.mark.parametrize("servers", BAD_SERVERS, ids=lambda servers: repr(servers)[:30])
def test_bad_servers_are_refused_when_the_client_is_made(servers: object) -> None:
    for make in (
        lambda: Producer(servers),  # type: ignore[arg-type]
        lambda: Consumer(servers, ["t"]),  # type: ignore[arg-type]
        lambda: Admin(servers),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequestError):
            make()


def test_second_server_is_asked_when_the_first_does_not_answer(servers: str, topic: str) -> None:
    with Producer(f"127.0.0.1:{free_port()},{servers}") as producer:
        assert producer.send(topic, b"v").result(10).offset == 0


def test_server_that_nobody_runs_is_reported_after_the_request_timeout() -> None:
    address = f"127.0.0.1:{free_port()}"
    with Admin(address, request_timeout=0.3) as admin, pytest.raises(ConnectionLostError, match=address):
        admin.list_topics()


def test_host_that_does_not_exist_is_reported() -> None:
    with Admin("no-such-host.invalid:9400", request_timeout=0.3) as admin, pytest.raises(UnavailableError):
        admin.list_topics()


@pytest.fixture
def stranger() -> Iterator[tuple[str, list[bytes]]]:
    """A server that speaks something else: (its address, what it says to everyone)."""
    says: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            with client:
                client.settimeout(1)
                client.recv(100)
                for part in says:
                    client.sendall(part)

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}", says
    done.set()
    thread.join()
    listener.close()


@pytest.mark.parametrize("words", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 5, b"\x00" * 100, b"\xff" * 100, b""])
def test_server_of_another_kind_is_reported_as_such(stranger: tuple[str, list[bytes]], words: bytes) -> None:
    address, says = stranger
    says.append(words)
    with Admin(address, request_timeout=0.5) as admin, pytest.raises(QuiverError):
        admin.list_topics()


# Connections


def test_callers_that_come_at_any_moment_share_one_connection(servers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Connection] = []

    async def counted(address: str, client: str, **options: Any) -> Connection:
        opened.append(await open_connection(address, client, **options))
        return opened[-1]

    monkeypatch.setattr(cluster_module, "open_connection", counted)

    async def main(turns: int) -> None:
        """The second caller comes so many turns of the loop after the connection was opened for the first."""
        opened.clear()
        cluster = Cluster(servers, "test", 10.0)
        first = asyncio.create_task(cluster.connection(servers))
        while not opened and not first.done():  # noqa: ASYNC110 - turns of the loop are what is tested
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        second = await cluster.connection(servers)
        assert await first is second
        assert opened == [second]
        await cluster.close()
        assert not second.is_open

    for turns in range(6):
        asyncio.run(main(turns))


def test_topic_that_another_forgets_at_once_still_exists(servers: str, topic: str) -> None:
    """Those who ask together get one answer; the first of them may find its leader gone before the others look."""

    async def main() -> None:
        cluster = Cluster(servers, "test", 10.0)

        async def ask() -> str:
            found = await cluster.topic(topic)
            cluster.forget_topic(topic)
            return found.name

        assert await asyncio.gather(ask(), ask(), ask()) == [topic] * 3
        await cluster.close()

    asyncio.run(main())


def test_close_while_a_connection_opens_leaves_none_open(servers: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main(steps: int) -> None:
        cluster = Cluster(servers, "test", 10.0)
        task = asyncio.create_task(cluster.connection(servers))
        for _ in range(steps):
            await asyncio.sleep(0.0002)
        await cluster.close()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(outcome, Connection):
            assert not outcome.is_open
        else:
            assert isinstance(outcome, ClosedError), repr(outcome)
        with pytest.raises(ClosedError):
            await cluster.connection(servers)

    with caplog.at_level(logging.WARNING, "asyncio"):
        for steps in range(12):
            asyncio.run(main(steps))
    assert caplog.records == []


def test_silent_connection_is_given_up_and_the_next_request_gets_a_new_one(broker: LocalBroker) -> None:
    """Else an admin would wait for ever on a connection whose other end has vanished without a word."""
    with Proxy(broker.address) as proxy, Admin(proxy.address, request_timeout=1.2) as admin:
        admin.list_topics()
        proxy.silence()
        try:
            admin.list_topics()
        except RequestTimeoutError:
            admin.list_topics()
        assert proxy.connections == 2
        proxy.silence()
        with pytest.raises(RequestTimeoutError):
            admin.create_topic("silent-1")
        admin.create_topic("silent-2")
        proxy.silence()
        with pytest.raises(RequestTimeoutError):
            admin.delete_topic("silent-2")
        admin.delete_topic("silent-2")


# Patience


def test_pauses_grow_to_a_maximum_and_differ() -> None:
    pauses = [backoff_s(attempt) for attempt in range(30)]
    assert all(0 < pause <= BACKOFF_S_MAX for pause in pauses)
    assert max(pauses[:2]) < min(pauses[5:])
    assert len({backoff_s(5) for _ in range(20)}) > 10


def test_admin_waits_for_a_server_that_comes_back(broker: LocalBroker) -> None:
    broker.stop()
    timer = threading.Timer(0.3, broker.start)
    timer.start()
    with Admin(broker.address) as admin:
        admin.create_topic("after-restart")
        with pytest.raises(TopicExistsError):
            admin.create_topic("after-restart")
    timer.join()
