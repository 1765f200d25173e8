"""`quiver group list|describe|reset|delete` against a real node."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from quiver import Consumer, Producer, Record
from quiver.cli.main import app
from tests.client.kit import LocalBroker, new_topic

PARTITIONS = 2


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LocalBroker(tmp_path_factory.mktemp("node")) as node:
        yield node.address


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def topic(servers: str) -> str:
    """Ten records in each of two partitions, the first half an hour ago."""
    name, now_us = new_topic(servers, PARTITIONS), time.time_ns() // 1000
    with Producer(servers) as producer:
        for number in range(10):
            stamp = now_us - (1_800_000_000 if number < 5 else 0)
            for partition in range(PARTITIONS):
                producer.send(name, b"%d" % number, partition=partition, timestamp=stamp).result()
    return name


@pytest.fixture
def group(servers: str, topic: str) -> str:
    """It has read everything, and is at rest."""
    with Consumer(servers, [topic], group=topic) as consumer:
        read: list[Record] = []
        while len(read) < 10 * PARTITIONS:
            read += consumer.poll(timeout=10)
        consumer.commit()
    return topic


def quiver(servers: str, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["group", *arguments, "--servers", servers])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def positions(servers: str, group: str) -> list[int | None]:
    found = json.loads(quiver(servers, "describe", group, "--json"))
    return [one["position"] for one in found["partitions"]]


def test_groups_are_listed(servers: str, group: str) -> None:
    rows: list[dict[str, Any]] = json.loads(quiver(servers, "list", "--json"))
    assert {"name": group, "members": 0, "assignment": "sticky"} in rows
    assert group in quiver(servers, "list")


def test_a_group_is_described_with_its_lag_and_its_members(servers: str, topic: str, group: str) -> None:
    with Consumer(servers, [topic], group=group, client_id="reader") as reader:
        reader.poll(timeout=0)
        found = json.loads(quiver(servers, "describe", group, "--json"))
        assert (found["name"], found["lag"], len(found["members"])) == (group, 0, 1)
        assert [one["position"] for one in found["partitions"]] == [10, 10]
        assert all(one["member"].startswith("reader-") for one in found["partitions"])
        shown = quiver(servers, "describe", group)
        assert f"Group {group}: 1 members, 0 messages left" in shown and "reader-" in shown


@pytest.mark.parametrize(
    ("place", "expected"),
    [("earliest", [0, 0]), ("latest", [10, 10]), ("4", [4, 4]), ("20m", [5, 5]), ("1d", [0, 0]), ("0s", [10, 10])],
)
def test_a_group_is_set_to_a_place(servers: str, group: str, place: str, expected: list[int]) -> None:
    planned = json.loads(quiver(servers, "reset", group, "--to", place, "--dry-run", "--json"))
    assert planned["dry_run"] is True
    assert [(one["before"], one["after"]) for one in planned["partitions"]] == [(10, after) for after in expected]
    assert positions(servers, group) == [10, 10], "a dry run changes nothing"
    quiver(servers, "reset", group, "--to", place)
    assert positions(servers, group) == expected


def test_a_group_is_set_to_a_moment(servers: str, group: str) -> None:
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 1200))
    quiver(servers, "reset", group, "--to", moment)
    assert positions(servers, group) == [5, 5]


def test_one_partition_alone_is_set(servers: str, topic: str, group: str) -> None:
    shown = quiver(servers, "reset", group, "--to", "7", "--topic", topic, "--partition", "1")
    assert f"Group {group} is set" in shown
    assert positions(servers, group) == [10, 7]


def test_a_group_with_members_is_neither_set_nor_deleted(servers: str, topic: str, group: str) -> None:
    with Consumer(servers, [topic], group=group) as reader:
        reader.poll(timeout=0)
        for command in (["reset", group, "--to", "earliest"], ["delete", group, "--yes"]):
            said = quiver(servers, *command, code=2)
            assert said == f"error: group {group} has 1 active members; stop them first\n"
        assert positions(servers, group) == [10, 10]


def test_a_group_is_deleted_and_begins_again(servers: str, topic: str, group: str) -> None:
    assert quiver(servers, "delete", group, "--yes") == f"Deleted group {group}.\n"
    assert quiver(servers, "describe", group, code=2) == f"error: group {group} does not exist\n"
    with Consumer(servers, [topic], group=group) as consumer:
        assert consumer.poll(1, timeout=10)[0].offset == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["describe", "nobody"], "group nobody does not exist"),
        (["reset", "nobody", "--to", "latest"], "group nobody does not exist"),
        (["delete", "nobody", "--yes"], "group nobody does not exist"),
        (["describe", "#7"], "does not begin with #"),
    ],
)
def test_an_unknown_group_is_said_to_be(servers: str, arguments: list[str], said: str) -> None:
    assert said in quiver(servers, *arguments, code=2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "noon"], "is not a place to start"),
        (["--to", "11"], "valid offsets are 0 to 10"),
        (["--to", "latest", "--partition", "1"], "a partition needs its topic"),
        (["--to", "latest", "--topic", "nowhere"], "topic nowhere does not exist"),
    ],
)
def test_a_place_that_is_none_is_refused(servers: str, group: str, arguments: list[str], said: str) -> None:
    assert said in quiver(servers, "reset", group, *arguments, code=2)
    assert positions(servers, group) == [10, 10]
