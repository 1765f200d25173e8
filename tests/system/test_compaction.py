"""A compacted topic on three real brokers, one of which is killed: every door shows the last value of each key."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from quiver import Admin, Consumer, Producer
from quiver.classic import MyConsumer, MyProducer, MyProducerError
from quiver.client.range_reader import RangeReader
from quiver.errors import InvalidRequestError
from quiver.testing.cluster import QuiverCluster
from tests.system.kit import until

pytestmark = [pytest.mark.system, pytest.mark.slow]

SETTINGS = {"cleanup": "compact", "segment.bytes": 4096, "tombstone.ms": 0}
KEYS = [b"key %d" % number for number in range(12)]

Table = dict[bytes, bytes]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuiverCluster]:
    with QuiverCluster(tmp_path_factory.mktemp("cluster"), 3, retention_check_s=0.1) as made:
        yield made


def say(producer: Producer, topic: str, chance: random.Random, rounds: int, table: Table) -> None:
    """Sets and deletes keys at random; the last key of all is set, so that the end of the log stays."""
    for number in range(rounds):
        key = chance.choice(KEYS[:-1])
        value = None if chance.random() < 0.3 else b"%d" % chance.getrandbits(40)
        producer.send(topic, value, key=key).result(30)
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value
        if number % 10 == 9:
            producer.send(topic, b"end %d" % number, key=KEYS[-1]).result(30)
            table[KEYS[-1]] = b"end %d" % number


def apply(table: Table, key: bytes | None, value: bytes | None) -> None:
    assert key is not None
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value


def table_of_replica(cluster: QuiverCluster, topic: str, turn: int, end: int) -> tuple[Table, int]:
    """As that replica has it, and in how many records."""
    table: Table = {}
    count = 0
    with RangeReader(cluster.servers, topic, 0, 0, end, turn=turn) as reader:
        for _, batch in reader:
            count += batch.num_rows
            for key, value in zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True):
                apply(table, key, value)
    return table, count


def fetch(cluster: QuiverCluster, topic: str, offset: int) -> Any:
    url = f"{cluster.http}/v1/topics/{topic}/partitions/0/records?offset={offset}&max_records=7"
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.load(reply)


def test_every_reader_has_the_last_value_of_each_key(cluster: QuiverCluster) -> None:
    topic = cluster.new_topic(settings=SETTINGS)
    table: Table = {}
    chance = random.Random(7)
    with Producer(cluster.servers) as producer:
        say(producer, topic, chance, 60, table)
        cluster.kill_broker(2)
        say(producer, topic, chance, 100, table)
        cluster.restart()
        say(producer, topic, chance, 60, table)
        with Admin(cluster.servers) as admin:
            (edges,) = admin.offsets(topic).values()

        def small() -> bool:
            # New records have the older ones of their keys removed, and what says 'deleted' too, once all are back.
            say(producer, topic, chance, 10, table)
            end = edges[1]
            return all(table_of_replica(cluster, topic, turn, end)[1] <= len(KEYS) for turn in range(3))

        until(small)
    with Admin(cluster.servers) as admin:
        ((start, end),) = admin.offsets(topic).values()
    assert start == 0
    for turn in range(3):
        assert table_of_replica(cluster, topic, turn, end)[0] == table
    found: Table = {}
    with Consumer(cluster.servers, [topic], group="g") as consumer:
        while consumer.position(topic, 0) != end:
            for record in consumer.poll(max_records=5, timeout=0.2):
                apply(found, record.key, record.value)
        consumer.commit()
        assert found == table and consumer.committed(topic, 0) == end
        consumer.seek(topic, 0, 3)
        found = {}
        while consumer.position(topic, 0) != end:
            for row in consumer.poll_arrow(timeout=0.2).to_pylist():
                assert row["offset"] >= 3
                apply(found, row["key"], row["value"])
        assert found == table
    found, offset = {}, 0
    while offset < end:
        page = fetch(cluster, topic, offset)
        for record in page["records"]:
            assert offset <= record["offset"] < page["next_offset"]
            apply(found, record["key"].encode(), None if record["value"] is None else record["value"].encode())
        offset = page["next_offset"]
    assert found == table


def test_classic_consumers_pass_the_gaps_and_have_nothing_left_at_the_end(cluster: QuiverCluster) -> None:
    topic = cluster.new_topic(settings=SETTINGS)
    url = cluster.http
    with MyProducer(url) as producer, MyConsumer(url) as consumer:
        producer.RegisterProducer(topic)
        consumer.RegisterConsumer(topic)
        with pytest.raises(MyProducerError, match="needs a key: the topic is compacted by key"):
            producer.Enqueue(topic, "no key")

        def compacted() -> bool:
            for number in range(30):
                producer.Enqueue(topic, f"value {number}", key=f"key {number % 3}")
            return fetch(cluster, topic, 0)["records"][0]["offset"] > 0

        until(compacted)
        seen = []
        while consumer.Size(topic):
            seen.append(consumer.Dequeue(topic))
        assert seen[-3:] == ["value 27", "value 28", "value 29"]


def test_records_without_a_key_are_refused_at_every_door(cluster: QuiverCluster) -> None:
    topic = cluster.new_topic(settings=SETTINGS)
    message = "needs a key: the topic is compacted by key"
    with Producer(cluster.servers) as producer:
        for send in (
            lambda: producer.send(topic, b"value"),
            lambda: producer.send_many(topic, [b"a", b"b"]),
            lambda: producer.send_many(topic, [b"a", b"b"], keys=[b"k", None]),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                send().result(30)
        producer.send(topic, b"value", key=b"").result(30)
    for media, body in (
        ("application/json", b'{"records": [{"key": "k", "value": "a"}, {"value": "b"}]}'),
        ("application/x-ndjson", b'{"value": "b"}\n'),
    ):
        request = urllib.request.Request(f"{cluster.http}/v1/topics/{topic}/records", body, {"Content-Type": media})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=10)
        assert caught.value.code == 400 and message in caught.value.read().decode()
    with Admin(cluster.servers) as admin:
        assert admin.offsets(topic) == {0: (0, 1)}, "nothing of a refused request is stored"
