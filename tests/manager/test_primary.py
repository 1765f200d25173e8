"""One manager leads and the others read: what is asked of any of them is done once, and outlives each of them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from quiver.errors import NotLeaderError, OutcomeUnknownError, TopicExistsError, UnavailableError
from quiver.manager import primary as primary_module
from quiver.manager import quorum as quorum_module
from quiver.manager.classic_routes import CLASSIC_ROUTES
from quiver.manager.relay import is_for_primary
from quiver.manager.v1_routes import ROUTES
from quiver.metadata.image import encode_state
from quiver.metadata.store import sqlite_url
from quiver.wire.messages import CreateTopic, DeleteTopic, GetMetadata, MetadataReply
from quiver.wire.quorum_messages import ForPrimary
from tests.manager.kit import until
from tests.manager.nodes_kit import until_true
from tests.manager.quorum_kit import QUICK, Managers, managers, retried
from tests.metadata.kit import consume, create, dump, image, produce


async def call(cluster: Managers, number: int, method: str, target: str, **fields: Any) -> dict[str, Any]:
    status, body = await cluster.http(number, method, target, json.dumps(fields).encode() if fields else b"")
    found: dict[str, Any] = json.loads(body or b"{}")
    return {"http": status, **found}


# -- which calls are the primary's -------------------------------------------------------------------------------

DATA = {"/producer/produce", "/consumer/set_offset"}


def test_every_call_that_is_no_question_is_the_primarys_or_goes_to_the_brokers() -> None:
    """Whoever adds a call to a table decides this for it."""
    others = {
        route.path
        for route in (*CLASSIC_ROUTES, *ROUTES)
        if route.method != "GET" and not route.for_primary and not route.path.endswith(("/records", "/position"))
    }
    assert others == DATA
    assert not any(route.for_primary for route in (*CLASSIC_ROUTES, *ROUTES) if route.method == "GET")


@pytest.mark.parametrize(
    ("method", "target", "is_change"),
    [
        ("POST", b"/topics", True),
        ("POST", b"/topics?topic_name=a", True),
        ("POST", b"http://host:1/topics", True),
        ("POST", b"/producer%2Fregister", False),
        ("POST", b"/producer/r%65gister", True),
        ("DELETE", b"/brokers/3", True),
        ("DELETE", b"/v1/topics/a%2Fb", True),
        ("GET", b"/topics", False),
        ("POST", b"/producer/produce", False),
        ("POST", b"/v1/topics/a/records", False),
    ],
)
def test_changes_are_told_apart_by_method_and_path(method: str, target: bytes, is_change: bool) -> None:
    assert is_for_primary(method, target) is is_change


# -- any manager can be asked ------------------------------------------------------------------------------------


def test_what_is_written_at_one_manager_is_seen_at_once_at_all(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path, brokers=3) as cluster:
            await cluster.until_led()
            first, second = cluster.secondaries
            for at, name in ((first, "a"), (cluster.primary, "b"), (second, "c")):
                made = await call(cluster, at, "POST", "/topics", topic_name=name, partitions=2)
                assert (made["http"], made["partitions"]) == (200, [0, 1]), made
                for reader in cluster.nodes:
                    found = await call(cluster, reader, "GET", f"/topics/partitions?topic_name={name}")
                    assert found["partitions"] == [0, 1]
                    listed = await call(cluster, reader, "GET", "/topics")
                    assert name in listed["topics"]
            producer = (await call(cluster, first, "POST", "/producer/register", topic="a"))["producer_id"]
            consumer = (await call(cluster, second, "POST", "/consumer/register", topic="a"))["consumer_id"]
            for number, at in enumerate(cluster.nodes):
                fields = {"topic": "a", "producer_id": producer, "message": f"m{number}", "partition_id": 0}
                stored = await call(cluster, at, "POST", "/producer/produce", **fields)
                assert stored["offset"] == number, stored
            read = [
                (await call(cluster, at, "GET", f"/consumer/consume?topic=a&consumer_id={consumer}&partition_id=0"))
                for at in cluster.nodes
            ]
            assert [one["message"] for one in read] == ["m0", "m1", "m2"]

    asyncio.run(main())


def test_answers_of_the_primary_come_through_as_they_are(tmp_path: Path) -> None:
    """Refusals too, in the form of the API that was asked."""

    async def main() -> None:
        async with managers(tmp_path, brokers=1) as cluster:
            await cluster.until_led()
            at = cluster.secondaries[0]
            made = await call(cluster, at, "POST", "/v1/topics", name="logs", partitions=1, replication_factor=1)
            assert made["http"] == 201, made
            again = await call(cluster, at, "POST", "/v1/topics", name="logs", partitions=1, replication_factor=1)
            assert (again["http"], again["error"]["code"]) == (409, "topic_exists")
            classic = await call(cluster, at, "POST", "/topics", topic_name="logs")
            assert (classic["http"], classic["message"]) == (400, "Topic already exists")
            with pytest.raises(TopicExistsError):
                await cluster.ask(at, CreateTopic("logs"))
            assert (await cluster.http(at, "DELETE", "/v1/topics/logs"))[0] == 204
            gone = await call(cluster, at, "GET", "/v1/topics/logs")
            assert (gone["http"], gone["error"]["code"]) == (404, "unknown_topic")
            await cluster.ask(at, CreateTopic("logs", 2))
            await cluster.ask(at, DeleteTopic("logs"))

    asyncio.run(main())


def test_everyone_tells_who_is_who(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path) as cluster:
            primary = await cluster.until_led()
            ports = {number: int(node.http.rpartition(":")[2]) for number, node in cluster.nodes.items()}
            for at in cluster.nodes:
                told = await call(cluster, at, "GET", "/replicas")
                assert told["primary"] == {"ip": "127.0.0.1", "port": ports[primary]}
                found = {row["port"] for row in told["replicas"]}
                assert found == {port for number, port in ports.items() if number != primary}
                reply = await cluster.ask(at, GetMetadata())
                assert isinstance(reply, MetadataReply)
                assert reply.primary == primary
                assert {row.id: row.http for row in reply.managers} == {
                    number: node.http for number, node in cluster.nodes.items()
                }
                health = await call(cluster, at, "GET", "/health")
                assert health["role"] == ("primary" if at == primary else "secondary")
                assert health["term"] == cluster.quorum(primary).term
                assert health["cut_off_since"] is None

    asyncio.run(main())


def test_who_called_one_manager_is_known_to_all(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path, brokers=1) as cluster:
            await cluster.until_led()
            first, second = cluster.secondaries
            await call(cluster, first, "POST", "/topics", topic_name="a")
            producer = (await call(cluster, first, "POST", "/producer/register", topic="a"))["producer_id"]
            before = cluster.manager(second)._registry.producers_seen.get(producer, 0)
            await call(cluster, first, "POST", "/producer/produce", topic="a", producer_id=producer, message="m")
            mine = cluster.manager(first)._registry.producers_seen[producer]
            assert mine > before
            for other in (second, cluster.primary):
                registry = cluster.manager(other)._registry
                await until(lambda registry=registry: registry.producers_seen.get(producer) == mine)
            await until(lambda: all(len(cluster.manager(one)._standing.seen) == 3 for one in cluster.nodes))

    asyncio.run(main())


def test_what_is_handed_over_does_not_go_in_a_circle(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path) as cluster:
            await cluster.until_led()
            at = cluster.secondaries[0]
            with pytest.raises(NotLeaderError):
                await cluster.ask(at, ForPrimary(cluster.manager(at).cluster_id, 3, b"\x91\xa1a"))

    asyncio.run(main())


# -- the primary dies --------------------------------------------------------------------------------------------


def test_nothing_acknowledged_is_lost_and_no_id_is_given_twice_while_primaries_die(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path) as cluster:
            await cluster.quorum(await cluster.until_led()).propose(create("logs"))
            acknowledged: list[int] = []
            stop = asyncio.Event()

            async def register() -> None:
                while not stop.is_set():
                    at = cluster.primary
                    if not at:
                        await asyncio.sleep(0.005)
                        continue
                    try:
                        acknowledged.append((await cluster.quorum(at).propose(produce("logs"))).id)
                    except UnavailableError:
                        await asyncio.sleep(0.005)

            clients = [asyncio.create_task(register()) for _ in range(4)]
            for _ in range(3):
                before = len(acknowledged)
                dying = await cluster.until_led()
                await until(lambda before=before: len(acknowledged) > before + 20)
                await cluster.kill(dying)
                await cluster.until_led()
                await cluster.start(dying)
            stop.set()
            await asyncio.gather(*clients)
            await cluster.until_led()
            await cluster.until_equal()
            assert len(acknowledged) == len(set(acknowledged))
            for number in cluster.nodes:
                assert set(acknowledged) <= cluster.quorum(number).state.producers.keys()
            images = [image(cluster.quorum(number).state) for number in cluster.nodes]
            assert images[0] == images[1] == images[2]

    asyncio.run(main())


def test_a_proposal_whose_primary_loses_its_place_ends_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears nobody any more."""

    async def main() -> None:
        async with managers(tmp_path) as cluster:
            primary = await cluster.until_led()
            quorum = cluster.quorum(primary)
            monkeypatch.setattr(quorum.replica, "receive", lambda *_: False)
            with pytest.raises(OutcomeUnknownError, match="may or may not"):
                await quorum.propose(create("logs"))
            with pytest.raises(NotLeaderError):
                await quorum.propose(create("logs"))

    asyncio.run(main())


def test_brokers_and_topics_go_on_under_another_primary(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path, brokers=3) as cluster:
            dying = await cluster.until_led()
            await call(cluster, dying, "POST", "/topics", topic_name="a", partitions=3)
            await cluster.kill(dying)
            primary = await cluster.until_led()
            for name, at in (("b", primary), ("c", cluster.secondaries[0])):
                made = await call(cluster, at, "POST", "/topics", topic_name=name, partitions=3)
                assert made["http"] == 200, made
            for name in "abc":
                for at in cluster.nodes:
                    registered = await call(cluster, at, "POST", "/producer/register", topic=name)
                    fields = {"topic": name, "producer_id": registered["producer_id"], "message": "m"}
                    stored = await call(cluster, at, "POST", "/producer/produce", **fields)
                    assert stored["http"] == 200, stored

    asyncio.run(main())


def test_without_a_primary_a_change_waits_and_is_then_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primary_module, "_SEARCH_S", 0.3)

    async def main() -> None:
        async with managers(tmp_path) as cluster:
            await cluster.until_led()
            left = cluster.secondaries[0]
            await cluster.stop(*(number for number in cluster.nodes if number != left))
            await until(lambda: cluster.quorum(left).replica.raft.leader is None)  # one that stops hands over
            refused = await call(cluster, left, "POST", "/topics", topic_name="a")
            assert refused["http"] == 503
            assert "cannot be changed now" in refused["message"]

    asyncio.run(main())


def test_a_manager_that_is_cut_off_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path, metadata_stale_s=1.0) as cluster:
            primary = await cluster.until_led()
            await cluster.quorum(primary).propose(create("logs"))
            left = cluster.secondaries[0]
            others = [number for number in cluster.nodes if number != left]
            await cluster.stop(*others)
            await until(lambda: not cluster.manager(left)._standing.is_fresh)
            for target in ("/topics", "/topics/partitions?topic_name=logs", "/v1/topics", "/replicas"):
                refused = await call(cluster, left, "GET", target)
                assert refused["http"] == 503, refused
                message = refused.get("message") or refused["error"]["message"]
                assert f"manager {left} is cut off" in message
            with pytest.raises(UnavailableError, match="cut off"):
                await cluster.ask(left, GetMetadata())
            health = await call(cluster, left, "GET", "/health")
            assert health["http"] == 200
            assert health["cut_off_since"] is not None
            await cluster.start(*others)

            async def answers() -> bool:
                return (await call(cluster, left, "GET", "/topics")).get("topics") == ["logs"]

            await until_true(answers)

    asyncio.run(main())


# -- far behind --------------------------------------------------------------------------------------------------


def test_a_snapshot_that_is_longer_than_a_message_may_be_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(quorum_module.LOG_SETTINGS, segment_bytes_max=4096, checkpoint_bytes=8192)
    monkeypatch.setattr(quorum_module, "LOG_SETTINGS", small)
    monkeypatch.setattr(quorum_module, "_KEPT_MIN", 10)
    limit = 10_000
    raft = dataclasses.replace(QUICK["raft"], append_bytes_max=2000)
    net = dataclasses.replace(QUICK["net"], frame_bytes_max=limit)

    async def main() -> None:
        async with managers(tmp_path, raft=raft, net=net) as cluster:
            primary = await cluster.until_led()
            behind = cluster.secondaries[0]
            await cluster.stop(behind)
            quorum = cluster.quorum(primary)
            for first in range(0, 300, 20):
                await asyncio.gather(*(quorum.propose(create(f"topic-{first + n}", 3)) for n in range(20)))
            await until(lambda: quorum._log.first_index > 200)
            assert len(encode_state(quorum.state)) > limit
            await cluster.start(behind)
            await cluster.until_equal()
            assert image(cluster.quorum(behind).state) == image(quorum.state)
            assert cluster.quorum(behind)._log.first_index > 200

    asyncio.run(main())


def test_a_manager_far_behind_gets_a_snapshot_and_so_does_its_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(quorum_module.LOG_SETTINGS, segment_bytes_max=4096, checkpoint_bytes=8192)
    monkeypatch.setattr(quorum_module, "LOG_SETTINGS", small)
    monkeypatch.setattr(quorum_module, "_KEPT_MIN", 10)

    async def main() -> None:
        async with managers(tmp_path) as cluster:
            primary = await cluster.until_led()
            await cluster.quorum(primary).propose(create("logs", 3))
            behind = cluster.secondaries[0]
            at = cluster.quorum(behind).last_transaction
            await cluster.stop(behind)
            quorum = cluster.quorum(primary)
            while quorum._log.first_index <= at + 1:
                await quorum.propose(consume("logs"))
            await cluster.start(behind)
            await quorum.propose(consume("logs"))
            await cluster.until_equal()
            assert image(cluster.quorum(behind).state) == image(quorum.state)
            assert cluster.quorum(behind)._log.first_index > at
            rows = [dump(sqlite_url(tmp_path / "data" / f"manager-{one}" / "metadata.db")) for one in cluster.nodes]
            for found in rows:
                for table in ("consumer_metadata", "topic_metadata", "metadata_state"):
                    assert [row[:3] for row in found[table]] == [row[:3] for row in rows[0][table]]
            # And it goes on from there, alone on its disk.
            await cluster.stop()
            await cluster.start()
            again = await cluster.until_led()
            count = len(cluster.quorum(again).state.consumers)
            made = await retried(lambda: cluster.quorum(cluster.primary or again).propose(consume("logs")))
            assert made.id == count + 1

    asyncio.run(main())
