"""Three managers as processes: each may die or freeze at any point, and what was answered holds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from quiver import Admin
from quiver.metadata.store import sqlite_url
from tests.system.kit import ENVIRON, free_port, until
from tests.system.managed_kit import MANAGERS, PATIENT, ManagedCluster, rows_of
from tests.system.replicated_kit import BACK_S_MAX


class Registering(threading.Thread):
    """Registers producers at one manager after the other; keeps the ids that were answered."""

    def __init__(self, cluster: ManagedCluster, topic: str, managers: tuple[int, ...] = MANAGERS) -> None:
        super().__init__()
        self._cluster, self._topic, self._managers = cluster, topic, managers
        self._over = threading.Event()
        self.ids: list[int] = []

    def run(self) -> None:
        turn = 0
        while not self._over.is_set():
            turn += 1
            at = self._managers[turn % len(self._managers)]
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
            until(lambda before=before: sum(len(client.ids) for client in clients) > before + 20, BACK_S_MAX)
            ended = {dying: cluster.signal_manager(dying, signal.SIGKILL)}
            until(lambda: cluster.file.http[0] == cluster.http_of(cluster.primary()), BACK_S_MAX)
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
    with ManagedCluster(tmp_path, PATIENT) as cluster:
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
        cluster.until_managers_back({primary: pid})
        cluster.primary()
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
        until(lambda: cluster.call(frozen, "GET", "/topics", timeout_s=3)[0] == 503, BACK_S_MAX)
        assert "cut off" in cluster.call(frozen, "GET", "/topics")[1]["message"]
        status, health = cluster.call(frozen, "GET", "/health")
        assert status == 200
        assert health["cut_off_since"]
        status, body = cluster.call(frozen, "POST", "/producer/register", topic="old")
        assert status == 503
        for manager in (primary, other):
            cluster.signal_manager(manager, signal.SIGCONT)
        until(lambda: cluster.call(frozen, "POST", "/producer/register", topic="old")[0] == 200, BACK_S_MAX)


def test_a_manager_is_replaced_by_one_of_another_number_under_load(tmp_path: Path) -> None:
    with ManagedCluster(tmp_path, {"QUIVER_METADATA_STALE_S": "1"}) as cluster:
        assert cluster.call(cluster.primary(), "POST", "/topics", topic_name="t")[0] == 200
        client = Registering(cluster, "t", (1, 2))
        client.start()
        address = f"127.0.0.1:{free_port()}"
        said = cluster.command("manager", "add", "4", address)
        peers = said.split("--peers ")[1].strip()
        assert peers.endswith(f"4={address}") and peers.count("=") == 4
        command = ["manager", "--id", "4", "--peers", peers, "--data-dir", str(tmp_path / "other"), "--http-port", "0"]
        with (tmp_path / "newcomer.log").open("wb") as log:
            run = [sys.executable, "-m", "quiver.cli.main", *command]
            newcomer = subprocess.Popen(run, env=ENVIRON, stdout=log, stderr=log)
        try:
            states = until_states(cluster, {1, 2, 3, 4})
            assert sorted(states.values()) == ["primary", "secondary", "secondary", "secondary"]
            assert cluster.command("manager", "remove", "3") == "Removed manager 3.\n"
            until(lambda: [entry.id for entry in cluster.file.managers] == [1, 2], BACK_S_MAX)
            assert until_states(cluster, {1, 2, 4}).keys() == {1, 2, 4}
            # Two of three are enough, and one of the two is the new one.
            before, ended = len(client.ids), cluster.signal_manager(1, signal.SIGKILL)
            cluster.until_managers_back({1: ended})
            until(lambda: len(client.ids) > before + 20, BACK_S_MAX)
        finally:
            client.stop()
            newcomer.terminate()
            assert newcomer.wait(BACK_S_MAX) == 0
        assert len(client.ids) == len(set(client.ids))
        until(lambda: known_producers(cluster, 2) >= set(client.ids))
        kept = rows_of(sqlite_url(tmp_path / "other" / "manager-4" / "metadata.db"))["producer_metadata"]
        assert {row[0] for row in kept} >= set(client.ids[:before]), "the new one has it all, in a database of its own"


def until_states(cluster: ManagedCluster, managers: set[int]) -> dict[int, str]:
    """What `quiver manager list` says, once these are there and all of them vote."""
    with Admin(cluster.servers) as admin:

        def all_vote() -> bool:
            states = {one.id: one.state for one in admin.quorum()}
            return states.keys() == managers and set(states.values()) == {"primary", "secondary"}

        until(all_vote, BACK_S_MAX)
    return {row["id"]: row["state"] for row in json.loads(cluster.command("manager", "list", "--json"))}


def _heartbeats(report: dict[str, Any]) -> dict[str, list[str]] | None:
    """The last one of everyone that `quiver status` knows of; None when there is somebody without."""
    kinds = ("managers", "brokers", "producers", "consumers")
    found = {kind: [row["last_heartbeat"] for row in report[kind]] for kind in kinds}
    return found if all(all(times) for times in found.values()) else None


def test_status_and_the_log_show_what_happened(tmp_path: Path) -> None:
    with ManagedCluster(tmp_path, PATIENT) as cluster:
        assert cluster.call(cluster.primary(), "POST", "/topics", topic_name="t", partitions=2)[0] == 200
        for role in ("producer", "consumer"):
            assert cluster.call(cluster.primary(), "POST", f"/{role}/register", topic="t")[0] == 200

        def told() -> Any:
            """What status says, when it says of each what the managers do; the supervisor looks only now and then."""
            report = json.loads(cluster.command("status", "--json"))
            roles = {row["id"]: row["role"] for row in report["managers"]}
            primary = cluster.primary()
            wanted = {manager: "primary" if manager == primary else "secondary" for manager in MANAGERS}
            return report if roles == wanted and cluster.file.http[0] == cluster.http_of(primary) else None

        report = until(told)
        assert len({row["term"] for row in report["managers"]}) == 1
        assert all(row["state"] == "online" for row in report["managers"])
        heard = until(lambda: _heartbeats(json.loads(cluster.command("status", "--json"))))
        assert {kind: len(times) for kind, times in heard.items()} == {
            "managers": 3,
            "brokers": 1,
            "producers": 1,
            "consumers": 1,
        }
        shown = cluster.command("status")
        assert "primary" in shown and shown.count(" ago") == 6
        for manager in MANAGERS:
            found = until(
                lambda manager=manager: (
                    (log := json.loads(cluster.command("wal", "show", "--manager", str(manager), "--json")))
                    and all(row["applied"] for row in log["transactions"])
                    and log["transactions"]
                ),
                BACK_S_MAX,
            )
            kinds = [row["kind"] for row in found]
            assert kinds.count("create_topic") == 1
            assert kinds.count("register_manager") == 3
            assert [row["transaction"] for row in found] == list(range(1, len(found) + 1))
            made = next(row["payload"] for row in found if row["kind"] == "create_topic")
            assert (made["name"], len(made["uids"])) == ("t", 2)
        assert "create_topic" in cluster.command("wal", "show", "--last", "3")
