"""What managers tell of partitions stays right when a leader goes: who leads, how much a client has stored, groups."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from quiver.aio import Admin, Consumer
from quiver.metadata.store import sqlite_url
from tests.manager.kit import until
from tests.manager.quorum_kit import Managers, managers
from tests.metadata.kit import dump

STEADY = {"broker_silence_s": 60.0}  # who stops is still listed


async def call(cluster: Managers, at: int, method: str, target: str, **fields: Any) -> dict[str, Any]:
    status, body = await cluster.http(at, method, target, json.dumps(fields).encode() if fields else b"")
    assert status == 200, (status, body)
    found: dict[str, Any] = json.loads(body)
    return found


def leaders(path: Path, manager: int) -> list[int]:
    """By partition, as the database of a manager has it."""
    rows = dump(sqlite_url(path / "data" / f"manager-{manager}" / "metadata.db"))["partition_metadata"]
    return [row[4] for row in sorted(rows, key=lambda row: int(row[2]))]


async def real_leaders(admin: Admin) -> list[int]:
    told = await admin.replica_status("logs")
    found = {one.partition: broker for broker, some in told.items() for one in some if one.role == "leader"}
    return [found.get(number, 0) for number in range(3)]


def test_what_is_told_of_partitions_is_told_by_their_leaders(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path, brokers=3, **STEADY) as cluster:
            await cluster.until_led()
            at = cluster.primary
            await call(cluster, at, "POST", "/topics", topic_name="logs", partitions=3)
            producer = (await call(cluster, at, "POST", "/producer/register", topic="logs"))["producer_id"]
            sent = {"topic": "logs", "producer_id": producer, "prod_client": "me"}
            for number in range(30):
                fields = sent | {"message": f"m{number}", "partition_id": number % 3, "sequence": number // 3}
                await call(cluster, at, "POST", "/producer/produce", **fields)
            servers = ",".join(f"127.0.0.1:{port}" for port in cluster.ports.values())
            async with Consumer(servers, ["logs"], group="g", partitions={"logs": [0, 1, 2]}) as reader:
                got: list[Any] = []
                while len(got) < 30:
                    got += await reader.poll(100, timeout=5)
                await reader.commit()
            async with Admin(servers) as admin:
                before: list[int] = []
                while not before or any(leaders(tmp_path, one) != before for one in cluster.nodes):
                    before = await real_leaders(admin)
                gone = before[0]
                await cluster.brokers.pop(gone).stop()  # hands over, then is away
                for one in cluster.nodes:
                    assert (await call(cluster, one, "GET", "/producer/client_size?prod_client=me"))["count"] == 30
                    listed = await call(cluster, one, "GET", "/v1/groups/g")
                    assert [part["offset"] for part in listed["partitions"]] == [10, 10, 10]
                # The SDK asks brokers by itself, and one of them does not answer.
                assert [group.name for group in await admin.groups.all()] == ["g"]
                assert [one.offset for one in (await admin.groups.describe("g"))[1]] == [10, 10, 10]
                await until(lambda: all(gone not in leaders(tmp_path, one) for one in cluster.nodes))

    asyncio.run(main())


def test_what_cannot_be_counted_is_not_left_out_of_a_count(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path, count=1, brokers=1, **STEADY) as cluster:
            await cluster.until_led()
            await call(cluster, 1, "POST", "/topics", topic_name="logs", partitions=2)
            producer = (await call(cluster, 1, "POST", "/producer/register", topic="logs"))["producer_id"]
            sent = {"topic": "logs", "producer_id": producer, "prod_client": "me", "message": "m"}
            for number in range(10):
                await call(cluster, 1, "POST", "/producer/produce", **sent, partition_id=number % 2)
            asked = "/producer/client_size?prod_client=me"
            assert (await call(cluster, 1, "GET", asked))["count"] == 10
            await cluster.brokers.pop(1).stop()
            one, _ = (tmp_path / "data").glob("broker-1/partitions/*/*.seg")
            with one.open("r+b") as file:
                file.seek(100)
                file.write(b"damage")
            await cluster.start_brokers(1)
            status, body = await cluster.http(1, "GET", asked)
            assert (status, b"of topic logs is out of order" in body) == (503, True), body

    asyncio.run(main())


def test_a_broker_that_is_away_keeps_its_last_heartbeat_over_a_restart_of_the_managers(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path, brokers=1, **STEADY) as cluster:
            await cluster.until_led()
            await cluster.brokers.pop(1).stop()
            seen = (await call(cluster, 1, "GET", "/brokers"))["brokers"][0]["last_heartbeat"]
            assert seen is not None
            await cluster.stop()  # a clean end writes down what was seen
            await cluster.start()
            (row,) = (await call(cluster, 1, "GET", "/brokers"))["brokers"]
            assert (row["last_heartbeat"], row["status"]) == (seen, "inactive")
            told = (await call(cluster, 1, "GET", "/health"))["managers"]
            assert all(manager["last_heartbeat"] for manager in told)

    asyncio.run(main())


def test_a_partition_that_was_added_can_be_used_at_once_at_every_manager(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path, brokers=1) as cluster:
            await cluster.until_led()
            at = cluster.primary
            await call(cluster, at, "POST", "/topics", topic_name="logs")
            producer = (await call(cluster, at, "POST", "/producer/register", topic="logs"))["producer_id"]
            consumer = (await call(cluster, at, "POST", "/consumer/register", topic="logs"))["consumer_id"]
            for number in range(1, 9):
                secondary = cluster.secondaries[number % 2]
                await call(cluster, at, "PATCH", "/v1/topics/logs", partitions=number + 1)
                sent = {"topic": "logs", "producer_id": producer, "message": f"m{number}", "partition_id": number}
                assert (await call(cluster, secondary, "POST", "/producer/produce", **sent))["offset"] == 0
                asked = f"/consumer/consume?topic=logs&consumer_id={consumer}&partition_id={number}"
                other = cluster.secondaries[number % 2 - 1]
                assert (await call(cluster, other, "GET", asked))["message"] == f"m{number}"
                found = await call(cluster, other, "GET", f"/v1/topics/logs/partitions/{number}/records?offset=0")
                assert len(found["records"]) == 1

    asyncio.run(main())
