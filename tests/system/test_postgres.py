"""Managers as processes on a real PostgreSQL: a server that dies under load costs nothing but time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.manager.test_managers_postgres import control
from tests.metadata.kit import postgres_instance
from tests.system.kit import read_all, until, values_of
from tests.system.managed_kit import MANAGERS, PATIENT, ManagedCluster
from tests.system.replicated_kit import BACK_S_MAX

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with postgres_instance() as made:
        yield made


class Load:
    """Clients of all managers: each registers producers and sends a message by each, and keeps what was answered."""

    def __init__(self, cluster: ManagedCluster) -> None:
        self._cluster = cluster
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(manager,)) for manager in MANAGERS]
        self.producers: list[int] = []
        self.messages: list[str] = []

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, manager: int) -> None:
        while not self._over.wait(0.01):
            status, body = self._cluster.call(manager, "POST", "/producer/register", topic="t")
            if status != 200:
                continue
            producer = body["producer_id"]
            self.producers.append(producer)
            message = {"topic": "t", "producer_id": producer, "message": f"m{producer}"}
            message |= {"prod_client": f"c{producer}", "sequence": 0}  # however often it is sent
            while not self._over.is_set():
                if self._cluster.call(manager, "POST", "/producer/produce", **message)[0] == 200:
                    self.messages.append(message["message"])
                    break

    def until_more(self) -> None:
        producers, messages = len(self.producers), len(self.messages)
        until(lambda: len(self.producers) > producers + 10 and len(self.messages) > messages + 10, BACK_S_MAX)


def test_a_database_server_that_dies_under_load_is_brought_up_to_date(tmp_path: Path, server: Any) -> None:
    url = {"QUIVER_METADATA_URL": server.get_uri()}
    with ManagedCluster(tmp_path, PATIENT | url) as cluster:
        assert cluster.call(cluster.primary(), "POST", "/topics", topic_name="t")[0] == 200
        with Load(cluster) as load:
            load.until_more()
            control(server, "-m", "immediate", "stop")
            load.until_more()
            secondary = next(manager for manager in MANAGERS if manager != cluster.primary())
            behind = cluster.call(cluster.primary(), "GET", "/health")[1]["lag"]
            # Without its database it cannot begin; its supervisor tries again.
            killed = cluster.signal_manager(secondary, signal.SIGKILL)
            load.until_more()
            control(server, "restart")  # with the options that it had
            cluster.until_managers_back({secondary: killed})
            load.until_more()
        assert behind > 0
        rows = cluster.until_equal()
        assert rows[0] == rows[1] == rows[2]
        for manager in MANAGERS:
            asked = ("wal", "show", "--manager", str(manager), "--metadata-url", server.get_uri(), "--last", "20")
            assert cluster.command(*asked).count("yes") == 20
        assert len(load.producers) == len(set(load.producers))
        assert set(load.producers) <= {row[0] for row in rows[0]["producer_metadata"]}
        stored = [(value or b"").decode() for value in values_of(read_all(cluster.servers, "t"))]
        assert len(stored) == len(set(stored)) and set(load.messages) <= set(stored)
