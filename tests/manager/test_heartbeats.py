"""Who was seen when, how much there is and how far who read: shown at once, in the database soon, known after a
restart."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from quiver.metadata.store import sqlite_url
from tests.manager.kit import Api, HttpNode, fresh
from tests.metadata.kit import dump
from tests.system.kit import until

pytestmark = pytest.mark.system

OFTEN = {"QUIVER_HEARTBEAT_S": "0.02"}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpNode]:
    with HttpNode(tmp_path_factory.mktemp("node"), OFTEN) as made:
        yield made


def seen(api: Api, kind: str, number: int) -> datetime.datetime:
    """When somebody was last seen, as /health says."""
    rows = api.get("/health")[f"{kind}s"]
    (row,) = [row for row in rows if row[f"{kind}_id"] == number]
    return datetime.datetime.fromisoformat(row["last_heartbeat"])


def row_of(database: str, table: str, number: int) -> tuple[Any, ...]:
    """Of what was registered: the database has it a moment after the answer."""
    (row,) = until(lambda: [row for row in dump(database)[table] if row[0] == number])
    found: tuple[Any, ...] = row
    return found


def stored_time(us: int | None) -> datetime.datetime | None:
    return None if us is None else datetime.datetime.fromtimestamp(us / 1e6, datetime.UTC)


def test_every_call_of_a_producer_is_a_heartbeat(api: Api) -> None:
    topic = fresh()
    producer, other = api.producer(topic), api.producer(topic)
    last, silent = seen(api, "producer", producer), seen(api, "producer", other)
    for number in range(3):
        api.produce(topic, producer, "m", prod_client=f"{topic} {number}", sequence=0)
        now = seen(api, "producer", producer)
        assert now > last
        last = now
    # Also one that came to nothing: it is alive, and mistaken.
    api.refusal("POST", "/producer/produce", topic=topic, producer_id=producer)
    assert seen(api, "producer", producer) > last
    assert seen(api, "producer", other) == silent


def test_every_call_of_a_consumer_is_a_heartbeat(api: Api) -> None:
    topic = fresh()
    producer, consumer = api.producer(topic), api.consumer(topic)
    other = api.consumer(topic)
    api.produce(topic, producer, "m")
    last, silent = seen(api, "consumer", consumer), seen(api, "consumer", other)
    for call in (
        lambda: api.consume(topic, consumer),
        lambda: api.consume(topic, consumer),  # nothing new: still a call
        lambda: api.size(topic, consumer),
        lambda: api.post("/consumer/set_offset", consumer_id=consumer, offset=-1),
    ):
        call()
        now = seen(api, "consumer", consumer)
        assert now > last
        last = now
    assert seen(api, "consumer", other) == silent


def test_the_broker_and_the_manager_are_seen_again_and_again(api: Api) -> None:
    first = seen(api, "broker", 1)
    manager = until(lambda: api.get("/health")["managers"] and api.get("/health")["managers"][0]["last_heartbeat"])
    until(lambda: seen(api, "broker", 1) > first)
    assert api.get("/brokers")["brokers"][0]["last_heartbeat"] is not None
    until(lambda: api.get("/health")["managers"][0]["last_heartbeat"] > manager)


def test_what_was_seen_reaches_the_database(api: Api, node: HttpNode) -> None:
    topic, database = fresh(), sqlite_url(node.database)
    producer, consumer = api.producer(topic), api.consumer(topic)
    api.produce(topic, producer, "m")
    api.consume(topic, consumer)
    wrote, read = seen(api, "producer", producer), seen(api, "consumer", consumer)
    until(lambda: stored_time(row_of(database, "producer_metadata", producer)[3]) == wrote)
    until(lambda: stored_time(row_of(database, "consumer_metadata", consumer)[4]) == read)
    first = row_of(database, "broker_metadata", 1)
    assert first[3] == "active"
    until(lambda: row_of(database, "broker_metadata", 1)[2] > (first[2] or 0))


def test_sizes_and_positions_reach_the_database(api: Api, node: HttpNode) -> None:
    topic, database = api.create(fresh(), 2), sqlite_url(node.database)
    producer, everything, second = api.producer(topic), api.consumer(topic), api.consumer(topic, partition_id=1)
    for number in range(7):
        api.produce(topic, producer, f"m{number}")
    for _ in range(5):
        api.consume(topic, everything)
    api.consume(topic, second)

    def found() -> Any:
        rows = dump(database)
        sizes = [row[6] for row in rows["partition_metadata"] if row[1] == topic]
        return (
            sizes,
            row_of(database, "consumer_metadata", everything)[3],
            row_of(database, "consumer_metadata", second)[3],
        )

    until(lambda: found() == ([4, 3], 5, 1))
    api.post("/consumer/set_offset", consumer_id=everything, offset=-1)
    until(lambda: found() == ([4, 3], 0, 1))


def test_the_database_says_up_to_where_it_is(api: Api, node: HttpNode) -> None:
    topic = fresh()
    api.create(topic)
    api.refusal("POST", "/topics", topic_name=topic)
    transaction = api.get("/health")["transaction"]
    until(lambda: api.get("/health")["lag"] == 0)
    assert dump(sqlite_url(node.database))["metadata_state"][0] == ("applied_transaction", transaction)


@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_what_was_seen_is_known_after_a_restart(tmp_path: Path, end: str) -> None:
    settings = OFTEN if end == "kill" else {"QUIVER_HEARTBEAT_S": "1000"}  # a clean end writes it down by itself
    with HttpNode(tmp_path, settings) as node:
        with Api(node.http) as api:
            topic = fresh()
            producer, consumer = api.producer(topic), api.consumer(topic)
            for _ in range(3):
                api.produce(topic, producer, "m")
                api.consume(topic, consumer)
            before = seen(api, "producer", producer), seen(api, "consumer", consumer)
        if end == "kill":
            database = sqlite_url(node.database)
            until(
                lambda: (
                    (
                        stored_time(row_of(database, "producer_metadata", producer)[3]),
                        stored_time(row_of(database, "consumer_metadata", consumer)[4]),
                    )
                    == before
                )
            )
            assert row_of(database, "broker_metadata", 1)[2] is not None
            node.kill()
        else:
            assert node.terminate() == 0
            assert row_of(sqlite_url(node.database), "consumer_metadata", consumer)[3] == 3
        node.start()
        with Api(node.http) as api:
            assert (seen(api, "producer", producer), seen(api, "consumer", consumer)) == before
            (broker,) = api.get("/brokers")["brokers"]
            assert broker["endpoint"] == node.address, "it has moved to another port"


def test_a_partition_that_is_damaged_does_not_silence_the_others(tmp_path: Path) -> None:
    """Heartbeats go on, and each call on it is told that it may be tried again."""
    with HttpNode(tmp_path, OFTEN) as node:
        with Api(node.http) as api:
            bad, good = fresh(), fresh()
            producer, consumer = api.producer(bad), api.consumer(bad)
            for number in range(20):
                api.produce(bad, producer, f"m{number}")
            api.producer(good)
        node.terminate()
        uid = next(row[3] for row in dump(sqlite_url(node.database))["partition_metadata"] if row[1] == bad)
        segments = sorted((node.directory / "data" / "broker-1" / "partitions" / uid).glob("*.seg"))
        raw = bytearray(segments[0].read_bytes())
        middle = len(raw.rstrip(b"\0")) // 2  # behind its content there is room
        raw[middle : middle + 200] = bytes(200)
        segments[0].write_bytes(raw)
        node.start()
        with Api(node.http) as api:
            read = api.call("GET", "/consumer/consume", topic=bad, consumer_id=consumer)
            for number in range(20):
                if read.status != 200:
                    break
                assert read.message == f"m{number}"
                read = api.call("GET", "/consumer/consume", topic=bad, consumer_id=consumer)
            for _ in range(2):  # it is not skipped, however often one asks
                assert read.status == 503
                assert "corrupt" in read.message
                read = api.call("GET", "/consumer/consume", topic=bad, consumer_id=consumer)
            writer = api.producer(good)
            api.produce(good, writer, "m")
            wrote = seen(api, "producer", writer)
            database = sqlite_url(node.database)
            until(lambda: stored_time(row_of(database, "producer_metadata", writer)[3]) == wrote)


def test_a_database_that_is_locked_for_a_while_holds_nobody_up(api: Api, node: HttpNode) -> None:
    topic = fresh()
    producer = api.producer(topic)
    engine = sa.create_engine(sqlite_url(node.database), poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN EXCLUSIVE")
        consumer = api.consumer(topic)
        api.produce(topic, producer, "m")
        assert api.consume(topic, consumer) == "m"
        assert api.get("/health")["lag"] > 0
        connection.exec_driver_sql("ROLLBACK")
    until(lambda: api.get("/health")["lag"] == 0)
    assert row_of(sqlite_url(node.database), "consumer_metadata", consumer)[1] == topic
