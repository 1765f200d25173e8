"""The report of `quiver status`, from what the supervisor and the nodes know."""

from __future__ import annotations

from pathlib import Path

from quiver.cli.cluster_file import BrokerEntry, Cluster, Running, SupervisorEntry
from quiver.cli.render import human_bytes
from quiver.cli.status import local_report, remote_report, topic_rows
from quiver.types import NodeInfo, PartitionStatus

CLUSTER = Cluster(("127.0.0.1:7001",), (BrokerEntry(1, 11, "127.0.0.1:7001"),), SupervisorEntry(10))
ONE = PartitionStatus("b", 0, "online", 5, 9, 2048, 1)


def test_topics_and_partitions_are_in_order() -> None:
    rows = topic_rows(
        [
            PartitionStatus("b", 1, "failed", 0, 3, 10, 2, "disk error"),
            ONE,
            PartitionStatus("a", 0, "online", 0, 0, 0, 1),
        ]
    )
    assert [(topic["name"], [row["partition"] for row in topic["partitions"]]) for topic in rows] == [
        ("a", [0]),
        ("b", [0, 1]),
    ]
    assert rows[1]["partitions"][0]["messages"] == 4
    assert rows[1]["partitions"][1]["detail"] == "disk error"


def test_a_local_report_joins_pids_and_answers() -> None:
    report = local_report(Path("/d"), Running(10, CLUSTER), ([NodeInfo(1, "127.0.0.1:7001")], [ONE]))
    assert report["brokers"] == [{"id": 1, "pid": 11, "address": "127.0.0.1:7001", "state": "online"}]
    assert report["supervisor"] == {"pid": 10}
    assert "error" not in report


def test_a_node_that_does_not_answer_is_unreachable() -> None:
    report = local_report(Path("/d"), Running(10, CLUSTER), None, "no answer")
    assert report["brokers"][0]["state"] == "unreachable"
    assert report["error"] == "no answer"
    assert local_report(Path("/d"), Running(10, None), None, "starting")["brokers"] == []


def test_a_remote_report_has_no_pids() -> None:
    assert remote_report([NodeInfo(1, "h:1")], [ONE])["brokers"] == [{"id": 1, "address": "h:1", "state": "online"}]


def test_sizes_are_readable() -> None:
    assert [human_bytes(size) for size in (0, 1023, 1024, 5 * 1024**2, 3 * 1024**4)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "3.0 TiB",
    ]
