"""What a producer stores: values, keys, timestamps, headers, in which partition and in which order."""

from __future__ import annotations

import datetime
import random
import time
from collections import Counter
from collections.abc import Callable

import pyarrow as pa
import pytest

from quiver import Admin, Producer, RecordMetadata
from quiver.client.partitioner import Partitioner
from quiver.config import BATCH_BYTES_MAX, MESSAGE_BYTES_MAX, MIB
from quiver.errors import ClosedError, InvalidRequestError
from quiver.types import BatchMetadata
from tests.client.kit import LocalBroker, read_all, stored

MakeTopic = Callable[[int], str]


def test_acknowledgement_names_the_place(servers: str, topic: str) -> None:
    with Producer(servers) as producer:
        assert producer.send(topic, b"hello").result(10) == RecordMetadata(topic, 0, 0)
        assert producer.send(topic, b"world").result(10) == RecordMetadata(topic, 0, 1)
    assert stored(servers, topic) == [b"hello", b"world"]


def test_record_arrives_as_it_was_sent(servers: str, topic: str) -> None:
    headers = [("name", b"value"), ("empty", b""), ("name", b"again")]
    with Producer(servers) as producer:
        producer.send(topic, b"v", key=b"k", timestamp=1_700_000_000_123_456, headers=headers).result(10)
    (record,) = read_all(servers, topic)
    assert (record.topic, record.partition, record.offset) == (topic, 0, 0)
    assert (record.key, record.value, record.timestamp) == (b"k", b"v", 1_700_000_000_123_456)
    assert record.headers == (("name", b"value"), ("empty", b""), ("name", b"again"))
    assert record.datetime.replace(microsecond=0) == datetime.datetime(2023, 11, 14, 22, 13, 20, tzinfo=datetime.UTC)


def test_timestamp_is_the_time_of_sending_unless_given(servers: str, topic: str) -> None:
    before = time.time_ns() // 1000
    with Producer(servers) as producer:
        producer.send(topic, b"v").result(10)
        producer.send_many(topic, [b"w"]).result(10)
    after = time.time_ns() // 1000
    assert all(before <= record.timestamp <= after for record in read_all(servers, topic))


@pytest.mark.parametrize("timestamp", [0, -1, 1, 2**63 - 1, -(2**63)])
def test_any_64_bit_timestamp_is_kept(servers: str, topic: str, timestamp: int) -> None:
    with Producer(servers) as producer:
        producer.send(topic, b"v", timestamp=timestamp).result(10)
    assert [record.timestamp for record in read_all(servers, topic)] == [timestamp]


def test_empty_and_absent_are_told_apart(servers: str, topic: str) -> None:
    with Producer(servers) as producer:
        producer.send(topic, b"", key=b"")
        producer.send(topic, None, key=None)
        producer.send(topic, b"v", headers={})
    records = read_all(servers, topic)
    assert [(record.key, record.value, record.headers) for record in records] == [
        (b"", b"", ()),
        (None, None, ()),
        (None, b"v", ()),
    ]


def test_other_bytes_like_values_are_taken_and_copied(servers: str, topic: str) -> None:
    value = bytearray(b"abc")
    with Producer(servers) as producer:
        future = producer.send(topic, value, key=memoryview(b"key"))  # type: ignore[arg-type]
        value[:] = b"xyz"
        future.result(10)
    (record,) = read_all(servers, topic)
    assert (record.key, record.value) == (b"key", b"abc")


def test_headers_may_be_a_mapping_or_pairs(servers: str, topic: str) -> None:
    with Producer(servers) as producer:
        producer.send(topic, b"1", headers={"a": b"1", "ü": b"\xff"})
        producer.send(topic, b"2", headers=[("a", b"1")])
        producer.send(topic, b"3")
    assert [record.headers for record in read_all(servers, topic)] == [
        (("a", b"1"), ("ü", b"\xff")),
        (("a", b"1"),),
        (),
    ]


def test_same_key_goes_to_one_partition_and_none_goes_round(servers: str, make_topic: MakeTopic) -> None:
    topic = make_topic(4)
    with Producer(servers) as producer:
        keyed = [producer.send(topic, b"k", key=b"same") for _ in range(20)]
        bare = [producer.send(topic, b"b") for _ in range(20)]
        named = [producer.send(topic, b"n", key=b"same", partition=3) for _ in range(5)]
    assert {future.result().partition for future in keyed} == {Partitioner().choose(topic, 4, None, b"same")}
    assert set(Counter(future.result().partition for future in bare).values()) == {5}
    assert {future.result().partition for future in named} == {3}


def test_list_is_stored_in_order(servers: str, topic: str) -> None:
    values = [b"%d" % number for number in range(5000)]
    with Producer(servers, batch_bytes=10_000) as producer:
        runs = producer.send_many(topic, values).result(10)
    assert len(runs) > 5
    assert sum(run.count for run in runs) == 5000
    assert [run.offset for run in runs] == [sum(run.count for run in runs[:at]) for at in range(len(runs))]
    assert stored(servers, topic) == values


def test_empty_list_and_empty_table_store_nothing(servers: str, topic: str) -> None:
    with Producer(servers) as producer:
        assert producer.send_many(topic, []).result(10) == []
        assert producer.send_many(topic, pa.table({"value": pa.array([], pa.binary())})).result(10) == []
        assert producer.send_many(topic, [b"one"]).result(10) == [BatchMetadata(topic, 0, 0, 1)]


def test_list_with_keys_goes_where_single_records_would(servers: str, make_topic: MakeTopic) -> None:
    topic = make_topic(3)
    keys: list[bytes | None] = [b"k%d" % (number % 7) for number in range(100)]
    with Producer(servers) as producer:
        producer.send_many(topic, [b"%d" % number for number in range(100)], keys=keys).result(10)
        singles = {key: producer.send(topic, b"single", key=key).result(10).partition for key in set(keys)}
    records = read_all(servers, topic)
    assert all(singles[record.key] == record.partition for record in records)
    for key in set(keys):
        values = [int(record.value) for record in records if record.key == key and record.value != b"single"]  # type: ignore[arg-type]
        assert values == sorted(values)


def test_list_without_keys_fills_all_partitions(servers: str, make_topic: MakeTopic) -> None:
    topic = make_topic(4)
    with Producer(servers, batch_bytes=1000) as producer:
        producer.send_many(topic, [b"x" * 50] * 400).result(10)
    counts = Counter(record.partition for record in read_all(servers, topic))
    assert set(counts) == {0, 1, 2, 3}
    assert max(counts.values()) - min(counts.values()) <= 40


def test_named_partition_takes_the_whole_list(servers: str, make_topic: MakeTopic) -> None:
    topic = make_topic(4)
    with Producer(servers, batch_bytes=1000) as producer:
        runs = producer.send_many(topic, [b"%d" % number for number in range(500)], partition=2).result(10)
    assert {run.partition for run in runs} == {2}
    assert [record.value for record in read_all(servers, topic)] == [b"%d" % number for number in range(500)]


def test_arrow_table_is_stored_with_all_its_columns(servers: str, topic: str) -> None:
    table = pa.table(
        {
            "timestamp": pa.array([10, None, 30], pa.timestamp("us", "UTC")),
            "key": pa.array([b"a", None, b"c"]),
            "value": pa.array([b"1", b"2", None]),
            "headers": pa.array([[("h", b"x")], None, []], pa.map_(pa.string(), pa.binary())),
        }
    )
    with Producer(servers) as producer:
        producer.send_many(topic, table).result(10)
        producer.send_many(topic, table.to_batches()[0]).result(10)
    records = read_all(servers, topic)
    assert [record.value for record in records] == [b"1", b"2", None] * 2
    assert [record.key for record in records] == [b"a", None, b"c"] * 2
    assert [record.headers for record in records] == [(("h", b"x"),), (), ()] * 2
    assert [record.timestamp for record in records][::2] == [10, 30, records[4].timestamp]
    assert records[1].timestamp > 1_600_000_000_000_000


def test_table_of_other_types_that_convert_is_taken(servers: str, topic: str) -> None:
    table = pa.table(
        {"value": pa.array(["ä", "b"], pa.large_string()), "timestamp": pa.array([1, 2], pa.timestamp("s"))}
    )
    with Producer(servers) as producer:
        producer.send_many(topic, table).result(10)
    assert [(record.value, record.timestamp) for record in read_all(servers, topic)] == [
        ("ä".encode(), 1_000_000),
        (b"b", 2_000_000),
    ]


def test_large_table_is_cut_into_batches(servers: str, topic: str) -> None:
    table = pa.table({"value": pa.array([b"%07d" % number + b"x" * 100 for number in range(50_000)])})
    with Producer(servers, batch_bytes=100_000) as producer:
        runs = producer.send_many(topic, table).result(10)
    assert len(runs) >= 50
    assert [value[:7] for value in stored(servers, topic) if value] == [b"%07d" % number for number in range(50_000)]


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_batches_take_less_and_read_the_same(
    broker: LocalBroker, servers: str, topic: str, make_topic: MakeTopic, compression: str
) -> None:
    plain_topic = make_topic(1)
    values = [b"the same words again and again %d" % (number % 3) for number in range(3000)]
    for name, setting in ((topic, compression), (plain_topic, None)):
        with Producer(servers, compression=setting) as producer:
            producer.send_many(name, values).result(10)
            for value in values[:50]:
                producer.send(name, value, key=b"k", headers={"h": b"v"})
    assert stored(servers, topic) == values + values[:50]
    assert read_all(servers, topic)[-1].headers == (("h", b"v"),)
    with Admin(servers) as admin:
        sizes = {status.topic: status.size_bytes for status in admin.partition_status()}
    assert sizes[topic] < sizes[plain_topic] / 2


def test_order_is_kept_with_many_batches_in_flight(servers: str, make_topic: MakeTopic) -> None:
    topic = make_topic(3)
    with Producer(servers, batch_bytes=200, linger_ms=0) as producer:
        for number in range(6000):
            producer.send(topic, b"%d" % number)
    records = read_all(servers, topic)
    assert len(records) == 6000
    for partition in range(3):
        values = [int(record.value or b"") for record in records if record.partition == partition]
        assert values == list(range(partition, 6000, 3))


def test_send_and_send_many_keep_their_common_order(servers: str, topic: str) -> None:
    expected = []
    with Producer(servers, batch_bytes=500) as producer:
        for number in range(200):
            producer.send(topic, b"s%d" % number)
            producer.send_many(topic, [b"m%d" % number, b"n%d" % number])
            expected += [b"s%d" % number, b"m%d" % number, b"n%d" % number]
    assert stored(servers, topic) == expected


def test_messages_up_to_the_limit_are_stored(servers: str, topic: str) -> None:
    with Producer(servers) as producer:
        assert producer.send(topic, b"x" * MESSAGE_BYTES_MAX).result(10).offset == 0
        assert producer.send(topic, b"x" * (MESSAGE_BYTES_MAX - 10), key=b"k" * 10).result(10).offset == 1
        producer.send_many(topic, [b"x" * MESSAGE_BYTES_MAX] * 3).result(10)
    assert [len(value or b"") for value in stored(servers, topic)] == [MIB, MIB - 10, MIB, MIB, MIB]


def test_large_key_and_large_value_of_different_records_are_not_one_large_message(servers: str, topic: str) -> None:
    keys, values = [b"k" * (MESSAGE_BYTES_MAX - 1), b"k"], [b"v", b"v" * (MESSAGE_BYTES_MAX - 1)]
    with Producer(servers, batch_bytes=4 * MIB) as producer:
        producer.send_many(topic, values, keys=keys).result(30)
    assert [(record.key, record.value) for record in read_all(servers, topic)] == list(zip(keys, values, strict=True))


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_message_at_the_limit_that_does_not_compress_is_stored(
    servers: str, topic: str, compression: str | None
) -> None:
    value = random.Random(1).randbytes(MESSAGE_BYTES_MAX)
    with Producer(servers, compression=compression) as producer:
        producer.send(topic, value).result(10)
        producer.send_many(topic, [value, value]).result(10)
    assert stored(servers, topic) == [value, value, value]


def test_many_large_headers_make_many_batches(servers: str, topic: str) -> None:
    """Headers count: a batch of them that is over the limit would be refused by the broker."""
    with Producer(servers) as producer:
        futures = [producer.send(topic, b"%d" % row, headers={"h": b"x" * 500_000}) for row in range(60)]
        assert [future.result(20).offset for future in futures] == list(range(60))


def test_batches_of_the_largest_allowed_size_are_stored(servers: str, topic: str) -> None:
    with Producer(servers, batch_bytes=BATCH_BYTES_MAX) as producer:
        for _ in range(33):
            producer.send(topic, b"x" * (MESSAGE_BYTES_MAX - 32))
        producer.flush()
        producer.send_many(topic, [b"y" * (MESSAGE_BYTES_MAX - 32)] * 17).result(20)
    assert len(stored(servers, topic)) == 50


def test_closed_producer_refuses_and_close_twice_is_harmless(servers: str, topic: str) -> None:
    producer = Producer(servers)
    future = producer.send(topic, b"v")
    producer.close()
    assert future.done(), "close flushes"
    producer.close()
    for use in (
        lambda: producer.send(topic, b"w"),
        lambda: producer.send_many(topic, [b"w"]),
        producer.flush,
    ):
        with pytest.raises(ClosedError):
            use()
    assert stored(servers, topic) == [b"v"]


@pytest.mark.parametrize(
    "settings",
    [
        {"compression": "gzip"},
        {"batch_bytes": 0},
        {"batch_bytes": BATCH_BYTES_MAX + 1},
        {"buffer_bytes": 10},
        {"linger_ms": -1},
    ],
)
def test_impossible_settings_are_refused(servers: str, settings: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        Producer(servers, **settings)
