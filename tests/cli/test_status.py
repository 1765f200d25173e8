"""The report of `quiver status`, from what the supervisor and the nodes know."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from quiver.cli.cluster_file import BrokerEntry, Cluster, Running, SupervisorEntry
from quiver.cli.heartbeats import CLIENTS_SHOWN, ago, client_cells, left_out
from quiver.cli.render import human_bytes
from quiver.cli.status import Answer, local_report, remote_report, replica_text, topic_rows
from quiver.types import ManagerInfo, NodeInfo, PartitionStatus, ReplicaStatus

CLUSTER = Cluster(("127.0.0.1:7001",), (BrokerEntry(1, 11, "127.0.0.1:7001"),), SupervisorEntry(10))
ONE = PartitionStatus("b", 0, "online", 5, 9, 2048, 1)
SEEN = "2026-11-17T20:00:00.000000+00:00"
HEALTH: dict[str, Any] = {
    "managers": [{"manager_id": 1, "last_heartbeat": SEEN}],
    "brokers": [{"broker_id": 1, "last_heartbeat": SEEN}, {"broker_id": 2, "last_heartbeat": None}],
    "producers": [{"producer_id": 4, "topic": "b", "last_heartbeat": None}],
    "consumers": [
        {"consumer_id": number, "topic": "b", "last_heartbeat": f"2026-11-17T19:00:{number:02}.000000+00:00"}
        for number in range(CLIENTS_SHOWN + 3)
    ],
}


def test_topics_and_partitions_are_in_order() -> None:
    rows = topic_rows(
        {
            1: [
                PartitionStatus("b", 1, "failed", 0, 3, 10, 2, "disk error"),
                ONE,
                PartitionStatus("a", 0, "online", 0, 0, 0, 1),
            ]
        }
    )
    assert [(topic["name"], [row["partition"] for row in topic["partitions"]]) for topic in rows] == [
        ("a", [0]),
        ("b", [0, 1]),
    ]
    assert rows[1]["partitions"][0]["messages"] == 4
    assert rows[1]["partitions"][1]["detail"] == "disk error"


def test_a_local_report_joins_pids_and_answers() -> None:
    report = local_report(
        Path("/d"), Running(10, CLUSTER), Answer([NodeInfo(1, "127.0.0.1:7001")], {1: [ONE]}, [], {}, HEALTH)
    )
    assert report["brokers"] == [
        {"id": 1, "pid": 11, "address": "127.0.0.1:7001", "state": "online", "last_heartbeat": SEEN}
    ]
    assert report["supervisor"] == {"pid": 10}
    assert "error" not in report


def test_a_node_that_does_not_answer_is_unreachable() -> None:
    report = local_report(Path("/d"), Running(10, CLUSTER), None, "no answer")
    assert report["brokers"][0]["state"] == "unreachable"
    assert report["error"] == "no answer"
    assert local_report(Path("/d"), Running(10, None), None, "starting")["brokers"] == []


def test_a_remote_report_has_no_pids() -> None:
    managers = [ManagerInfo(2, "h:5", "http://h:6"), ManagerInfo(1, "h:3", "http://h:4")]
    health = {1: {"role": "primary", "term": 4, "lag": 0, "cut_off_since": None}}
    report = remote_report(Answer([NodeInfo(2, "h:2"), NodeInfo(1, "h:1")], {1: [ONE]}, managers, health, HEALTH))
    one, two = report["managers"]
    assert (one["id"], one["state"], one["role"], one["term"], one["lag"]) == (1, "online", "primary", 4, 0)
    assert (two["id"], two["state"], two["role"]) == (2, "unreachable", None)
    assert report["brokers"] == [
        {"id": 1, "address": "h:1", "state": "online", "last_heartbeat": SEEN},
        {"id": 2, "address": "h:2", "state": "unreachable", "last_heartbeat": None},
    ]
    assert [row["last_heartbeat"] for row in report["managers"]] == [SEEN, None]


def test_clients_that_called_last_come_first_and_the_others_are_counted() -> None:
    answer = Answer([], {}, [], {}, HEALTH)
    report = remote_report(answer)
    assert report["producers"] == [{"id": 4, "topic": "b", "last_heartbeat": None}]
    assert [row["id"] for row in report["consumers"]] == list(range(CLIENTS_SHOWN + 2, 2, -1))
    assert (report["producer_count"], report["consumer_count"], left_out(report)) == (1, CLIENTS_SHOWN + 3, 3)
    everyone = remote_report(answer, clients=True)
    assert (len(everyone["consumers"]), left_out(everyone)) == (CLIENTS_SHOWN + 3, 0)
    cells = client_cells(everyone, datetime.datetime.fromisoformat(SEEN))
    assert cells[0] == ("producer", "4", "b", "never")
    assert cells[-1] == ("consumer", "0", "b", "1 h ago")


def test_heartbeats_are_told_by_their_age() -> None:
    now = datetime.datetime.fromisoformat(SEEN)
    ages = [
        ago((now - datetime.timedelta(seconds=passed)).isoformat(), now) for passed in (-3, 0.44, 59, 60, 7300, 2e5)
    ]
    assert ages == ["0.0 s ago", "0.4 s ago", "59.0 s ago", "1 min ago", "2 h ago", "2 d ago"]


def replica(role: str, term: int, next_offset: int = 9, lags: tuple[ReplicaStatus, ...] = ()) -> PartitionStatus:
    return PartitionStatus("b", 0, "online", 5, next_offset, 2048, 1, "", "u", 0, role, term, lags)


def test_a_partition_is_told_by_its_leader_with_the_lag_of_eachreplica_text() -> None:
    lags = (ReplicaStatus(1, True, 4), ReplicaStatus(2, True, 0), ReplicaStatus(3, False, 70))
    (topic,) = topic_rows({1: [replica("follower", 7, 6)], 2: [replica("leader", 7, 9, lags)], 4: []})
    (row,) = topic["partitions"]
    assert (row["leader"], row["term"], row["next_offset"]) == (2, 7, 9)
    assert [(one["broker"], one["role"], one["voter"], one["lag"]) for one in row["replicas"]] == [
        (1, "follower", True, 4),
        (2, "leader", True, 0),
        (3, "away", False, 70),
    ]
    assert [replica_text(one) for one in row["replicas"]] == [
        "1 (4 behind)",
        "2",
        "3 (unreachable, learner, 70 behind)",
    ]


def test_of_two_that_think_they_lead_the_newer_term_counts() -> None:
    (topic,) = topic_rows({1: [replica("leader", 3, 100)], 2: [replica("leader", 4, 50)]})
    assert topic["partitions"][0]["leader"] == 2


def test_a_partition_without_a_leader_says_so() -> None:
    (topic,) = topic_rows({1: [replica("follower", 3, 8)], 2: [replica("candidate", 4, 7)]})
    assert (topic["partitions"][0]["leader"], topic["partitions"][0]["term"]) == (0, 4)


def test_sizes_are_readable() -> None:
    assert [human_bytes(size) for size in (0, 1023, 1024, 5 * 1024**2, 3 * 1024**4)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]
