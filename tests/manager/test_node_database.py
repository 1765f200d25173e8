"""A real node and its metadata database: PostgreSQL, a lost one, a foreign one, one that cannot be used."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from quiver.cli.embedded import EmbeddedNode
from quiver.config import NodeSettings
from quiver.metadata.store import sqlite_url
from tests.manager.kit import Api, HttpNode, state_of
from tests.metadata.kit import dump
from tests.system.kit import ENVIRON, until

pytestmark = pytest.mark.system

T = TypeVar("T")


def furnish(api: Api) -> tuple[int, int]:
    api.create("logs", 2)
    producer, consumer = api.producer("logs"), api.consumer("logs")
    for number in range(4):
        api.produce("logs", producer, f"m{number}")
    assert api.consume("logs", consumer) == "m0"
    return producer, consumer


def why_not(node: HttpNode, *arguments: str) -> tuple[int, str]:
    """The exit code and the one line of a node that does not start."""
    run = subprocess.run(
        [sys.executable, "-m", "quiver.cli.node", "--data-dir", "data", "--port", "0", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=node.directory,
        env=ENVIRON,
        timeout=60,
    )
    lines = run.stderr.decode().splitlines()
    assert "Traceback" not in run.stderr.decode()
    assert lines[-1].startswith("error: ")
    return run.returncode, lines[-1]


def test_a_node_keeps_its_metadata_in_postgresql(tmp_path: Path, postgres_url: str) -> None:
    with HttpNode(tmp_path, {"QUIVER_METADATA_URL": postgres_url}) as node:
        with Api(node.http) as api:
            producer, consumer = furnish(api)
            before = state_of(api)
            until(lambda: api.get("/health")["lag"] == 0)
        rows = dump(postgres_url)
        assert [(row[1], row[2]) for row in rows["partition_metadata"]] == [("logs", 0), ("logs", 1)]
        assert [row[0] for row in rows["producer_metadata"]] == [producer]
        assert not node.database.exists()
        node.kill()
        node.start()
        with Api(node.http) as api:
            after = state_of(api)
            # The new ports are transactions of their own, and so is the first entry of a new term.
            assert 2 <= after.pop("transaction") - before.pop("transaction") <= 3
            assert (before.pop("brokers"), after.pop("brokers")) == ([(1, before_address(rows))], [(1, node.address)])
            assert after == before
            assert api.producer("logs") == producer + 1
            assert sorted(api.consume_all("logs", consumer)) == ["m1", "m2", "m3"]


def before_address(rows: dict[str, list[tuple[object, ...]]]) -> object:
    return rows["broker_metadata"][0][1]


def test_a_lost_database_is_built_again(tmp_path: Path) -> None:
    with HttpNode(tmp_path) as node:
        with Api(node.http) as api:
            producer, consumer = furnish(api)
        node.kill()
        for path in node.database.parent.glob("metadata.db*"):
            path.unlink()
        node.start()
        with Api(node.http) as api:
            assert api.get("/topics/partitions", topic="logs") == {"partitions": [0, 1]}
            assert (api.producer("logs"), api.consumer("logs")) == (producer + 1, consumer + 1)
            api.produce("logs", producer, "m4")
            assert sorted(api.consume_all("logs", consumer)) == ["m1", "m2", "m3", "m4"]


def test_a_lost_log_is_noticed_and_nothing_is_made_of_it(tmp_path: Path) -> None:
    with HttpNode(tmp_path) as node:
        with Api(node.http) as api:
            furnish(api)
            until(lambda: api.get("/health")["lag"] == 0)
        node.terminate()
        rows = dump(sqlite_url(node.database))
        shutil.rmtree(node.database.parent / "log")
        code, line = why_not(node)
        assert code == 1
        assert "manager-1/log is gone, and no other manager has it: restore the directory" in line
        assert dump(sqlite_url(node.database)) == rows


@pytest.mark.parametrize(
    "url", ["nonsense", "sqlite:////no/such/directory/x.db", "postgresql:///x?host=/no/such/place"]
)
def test_a_database_that_cannot_be_reached_is_said_in_one_line(tmp_path: Path, url: str) -> None:
    node = HttpNode(tmp_path)
    code, line = why_not(node, "--metadata-url", url)
    assert code == 2
    assert "the metadata database cannot be used" in line


def test_a_file_that_is_no_database_is_said_in_one_line(tmp_path: Path) -> None:
    node = HttpNode(tmp_path)
    os.makedirs(node.database.parent)
    node.database.write_bytes(b"no database at all, but long enough to be looked at" * 100)
    code, line = why_not(node)
    assert code == 2
    assert "the metadata database cannot be used" in line


def test_a_damaged_page_is_said_in_one_line(tmp_path: Path) -> None:
    with HttpNode(tmp_path) as node:
        with Api(node.http) as api:
            furnish(api)
        node.terminate()
        raw = bytearray(node.database.read_bytes())
        raw[4096:] = bytes(len(raw) - 4096)  # the list of tables is in the first page
        node.database.write_bytes(raw)
        code, line = why_not(node)
        assert code == 2
        assert "the metadata database cannot be used" in line


def test_a_node_under_another_number_misses_its_partitions_and_says_so(tmp_path: Path) -> None:
    """The data of broker 1 is not broker 2's: what cannot be served now is a 503, and the node goes on."""

    def settings(node_id: int) -> NodeSettings:
        return NodeSettings(str(tmp_path / "data"), node_id, port=0, http_port=0, heartbeat_s=0.02)

    producer, consumer = on_embedded(settings(1), furnish)

    def as_two(api: Api) -> None:
        rows = {row["broker_id"]: row["status"] for row in api.get("/brokers")["brokers"]}
        assert rows == {1: "inactive", 2: "active"}
        for answer in (
            api.call("GET", "/consumer/consume", topic="logs", consumer_id=consumer),
            api.call("GET", "/size", topic="logs", consumer_id=consumer),
            api.call("POST", "/producer/produce", topic="logs", producer_id=producer, message="m"),
        ):
            assert answer.status == 503
            assert "no broker that holds partition" in answer.message
        database = sqlite_url(tmp_path / "data" / "manager-1" / "metadata.db")
        until(lambda: {row[0]: row[3] for row in dump(database)["broker_metadata"]} == rows)
        own = api.producer("own")
        api.produce("own", own, "m")

    on_embedded(settings(2), as_two)
    assert on_embedded(settings(1), lambda api: sorted(api.consume_all("logs", consumer))) == ["m1", "m2", "m3"]


def on_embedded(settings: NodeSettings, use: Callable[[Api], T]) -> T:
    """Runs a node in this process and a client of it in another thread."""

    async def main() -> T:
        node = EmbeddedNode(settings)
        await node.start()

        def work() -> T:
            with Api(node.http) as api:
                return use(api)

        try:
            return await asyncio.to_thread(work)
        finally:
            await node.stop()

    return asyncio.run(main())
