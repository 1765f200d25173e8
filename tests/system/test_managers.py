"""Three managers as processes: each may die or freeze at any point, and what was answered holds."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.system.kit import until
from tests.system.managed_kit import MANAGERS, ManagedCluster


class Registering(threading.Thread):
    """Registers producers at one manager after the other; keeps the ids that were answered."""

    def __init__(self, cluster: ManagedCluster, topic: str) -> None:
        super().__init__()
        self._cluster, self._topic = cluster, topic
        self._over = threading.Event()
        self.ids: list[int] = []

    def run(self) -> None:
        turn = 0
        while not self._over.is_set():
            turn += 1
            at = MANAGERS[turn % len(MANAGERS)]
            status, body = self._cluster.call(at, "POST", "/producer/register", topic=self._topic)
            if status == 200:
                self.ids.append(body["producer_id"])
            else:
                assert status in (0, 503), body

    def stop(self) -> None:
        self._over.set()
        self.join()


def known_producers(cluster: ManagedCluster, manager: int) -> set[int]:
    status, body = cluster.call(manager, "GET", "/health")
    assert status == 200
    return {row["producer_id"] for row in body["producers"]}


def test_primaries_die_and_nothing_answered_is_lost_or_given_twice(tmp_path: Path) -> None:
    with ManagedCluster(tmp_path) as cluster:
        assert cluster.call(cluster.primary(), "POST", "/topics", topic_name="t")[0] == 200
        clients = [Registering(cluster, "t") for _ in range(2)]
        for client in clients:
            client.start()
        for _ in range(3):
            before = sum(len(client.ids) for client in clients)
            dying = cluster.primary()
            until(lambda before=before: sum(len(client.ids) for client in clients) > before + 20, 30)
            ended = {dying: cluster.signal_manager(dying, signal.SIGKILL)}
            after = cluster.primary(not_this=dying)
            until(lambda after=after: cluster.file.http[0] == cluster.http_of(after), 10)
            cluster.until_managers_back(ended)
        for client in clients:
            client.stop()
        ids = [number for client in clients for number in client.ids]
        assert len(ids) == len(set(ids))
        rows = cluster.until_equal()
        assert rows[0] == rows[1] == rows[2]
        for manager in MANAGERS:
            until(lambda manager=manager: known_producers(cluster, manager) >= set(ids))
        assert cluster.trouble() == []


@pytest.mark.parametrize("place", ["committed", "database", "after"])
def test_a_primary_that_dies_at_any_point_did_it_once_or_never(tmp_path: Path, place: str) -> None:
    """Between the log and the answer; between the log and the database; after the answer."""
    with ManagedCluster(tmp_path) as cluster:
        primary = cluster.primary()
        assert cluster.call(primary, "POST", "/topics", topic_name="t")[0] == 200
        until(lambda: cluster.call(primary, "GET", "/health")[1]["lag"] == 0)
        pid = cluster.manager_pid(primary)
        secondary = next(manager for manager in MANAGERS if manager != primary)
        if place != "after":
            (cluster.failpoints / f"{place}-{primary}").touch()
        status, body = cluster.call(secondary, "POST", "/producer/register", topic="t")
        if place == "after":
            cluster.signal_manager(primary, signal.SIGKILL)
        assert status in {"committed": (503,), "database": (200, 503), "after": (200,)}[place], body
        if status == 503:
            assert "may or may not have been done" in body["message"]
        cluster.primary(not_this=primary)
        cluster.until_managers_back({primary: pid})
        assert not list(cluster.failpoints.iterdir())
        # The command was on a majority of disks: it stands, once, and its id is not given again.
        status, body = cluster.call(secondary, "POST", "/producer/register", topic="t")
        assert (status, body["producer_id"]) == (200, 2)
        rows = cluster.until_equal()
        assert [row[0] for row in rows[0]["producer_metadata"]] == [1, 2]
        assert rows[0] == rows[1] == rows[2]


def test_a_manager_that_was_frozen_or_left_alone_never_answers_from_the_past(tmp_path: Path) -> None:
    with ManagedCluster(tmp_path, {"QUIVER_METADATA_STALE_S": "1"}) as cluster:
        primary = cluster.primary()
        frozen, other = (manager for manager in MANAGERS if manager != primary)
        assert cluster.call(frozen, "POST", "/topics", topic_name="old")[0] == 200
        cluster.signal_manager(frozen, signal.SIGSTOP)
        assert cluster.call(other, "POST", "/topics", topic_name="new")[0] == 200
        time.sleep(1.5)  # longer than what may be stale
        cluster.signal_manager(frozen, signal.SIGCONT)
        status, body = cluster.call(frozen, "GET", "/topics")
        assert (status == 200 and set(body["topics"]) == {"old", "new"}) or (status == 503 and "cut off" in str(body))
        until(lambda: cluster.call(frozen, "GET", "/topics")[0] == 200)
        # Alone: the others are there, but say nothing.
        for manager in (primary, other):
            cluster.signal_manager(manager, signal.SIGSTOP)
        until(lambda: cluster.call(frozen, "GET", "/topics", timeout_s=3)[0] == 503, 10)
        assert "cut off" in cluster.call(frozen, "GET", "/topics")[1]["message"]
        status, health = cluster.call(frozen, "GET", "/health")
        assert status == 200
        assert health["cut_off_since"]
        status, body = cluster.call(frozen, "POST", "/producer/register", topic="old")
        assert status == 503
        for manager in (primary, other):
            cluster.signal_manager(manager, signal.SIGCONT)
        until(lambda: cluster.call(frozen, "POST", "/producer/register", topic="old")[0] == 200, 20)


def test_status_and_the_log_show_what_happened(tmp_path: Path) -> None:
    with ManagedCluster(tmp_path) as cluster:
        primary = cluster.primary()
        assert cluster.call(primary, "POST", "/topics", topic_name="t", partitions=2)[0] == 200
        assert cluster.file.http[0] == cluster.http_of(primary)
        report = json.loads(cluster.command("status", "--json"))
        roles = {row["id"]: row["role"] for row in report["managers"]}
        assert roles == {manager: "primary" if manager == primary else "secondary" for manager in MANAGERS}
        assert len({row["term"] for row in report["managers"]}) == 1
        assert all(row["state"] == "online" for row in report["managers"])
        assert "primary" in cluster.command("status")
        for manager in MANAGERS:
            found = until(
                lambda manager=manager: (
                    (log := json.loads(cluster.command("wal", "show", "--manager", str(manager), "--json")))
                    and all(row["applied"] for row in log["transactions"])
                    and log["transactions"]
                ),
                20,
            )
            kinds = [row["kind"] for row in found]
            assert kinds.count("create_topic") == 1
            assert kinds.count("register_manager") == 3
            assert [row["transaction"] for row in found] == list(range(1, len(found) + 1))
            made = next(row["payload"] for row in found if row["kind"] == "create_topic")
            assert (made["name"], len(made["uids"])) == ("t", 2)
        assert "create_topic" in cluster.command("wal", "show", "--last", "3")
