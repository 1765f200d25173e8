"""Batch reads and writes of topics by a real Spark on a real node."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, IntegerType, LongType, MapType, StringType, TimestampType

import quiver.spark
from quiver import Producer, Record
from quiver.wire.messages import Fetch
from quiver.wire.partitioning import partition_of_key
from tests.spark.kit import Lake, numbered, values_in
from tests.system.kit import Node, read_all
from tests.system.proxy import Proxy, Step

DAY_US = 24 * 3600 * 1_000_000
MIB = 2**20


def fails(message: str, action: Any) -> None:
    with pytest.raises(PySparkException) as error:
        action()
    assert message in str(error.value)


# Reading


def test_format_is_found_without_registering_and_by_hand(lake: Lake) -> None:
    topic = lake.new_topic()
    lake.fill(topic, [b"a"])
    assert values_in(lake.read(topic)) == [b"a"]  # found by its module's name
    other: SparkSession = lake.spark.newSession()
    quiver.spark.register(other)
    frame = other.read.format("quiver").options(servers=lake.servers, topic=topic).load()
    assert values_in(frame) == [b"a"]


def test_every_column_comes_as_it_was_stored(lake: Lake) -> None:
    topic = lake.new_topic(2)
    stamps = [0, -1, 1, 1_700_000_000_123_456, -DAY_US * 365 * 200, 253_402_300_799_999_999]
    with Producer(lake.servers) as producer:
        producer.send(topic, b"plain", partition=0, timestamp=stamps[0])
        producer.send(topic, None, key=b"\x00\xff", partition=0, timestamp=stamps[1])
        producer.send(topic, b"", key=b"", partition=0, timestamp=stamps[2])
        producer.send(topic, b"h", partition=0, timestamp=stamps[3], headers={"a": b"1", "": b"", "ü": b"\xff"})
        producer.send(topic, b"x" * MIB, partition=1, timestamp=stamps[4])
        producer.send(topic, bytes(range(256)) * 4096, partition=1, timestamp=stamps[5])
        producer.flush()
    frame = lake.read(topic)
    assert [(field.name, type(field.dataType)) for field in frame.schema.fields] == [
        ("topic", StringType),
        ("partition", IntegerType),
        ("offset", LongType),
        ("timestamp", TimestampType),
        ("key", BinaryType),
        ("value", BinaryType),
        ("headers", MapType),
    ]
    assert frame.schema["headers"].dataType.simpleString() == "map<string,binary>"
    columns = ["topic", "partition", "offset", F.unix_micros("timestamp").alias("timestamp"), "key", "value", "headers"]
    rows = sorted(frame.select(*columns).collect(), key=lambda row: (row.partition, row.offset))
    assert [(row.topic, row.partition, row.offset, row.timestamp) for row in rows] == [
        (topic, 0, 0, stamps[0]),
        (topic, 0, 1, stamps[1]),
        (topic, 0, 2, stamps[2]),
        (topic, 0, 3, stamps[3]),
        (topic, 1, 0, stamps[4]),
        (topic, 1, 1, stamps[5]),
    ]
    assert [row.key for row in rows] == [None, b"\x00\xff", b"", None, None, None]
    assert [row.value for row in rows] == [b"plain", None, b"", b"h", b"x" * MIB, bytes(range(256)) * 4096]
    assert [row.headers for row in rows] == [None, None, None, {"a": b"1", "": b"", "ü": b"\xff"}, None, None]


def test_several_topics_are_one_frame_and_an_empty_one_adds_nothing(lake: Lake) -> None:
    first, second, empty = lake.new_topic(2), lake.new_topic(), lake.new_topic(3)
    lake.fill(first, numbered(250, "f"))
    lake.fill(second, numbered(150, "s"))
    rows = lake.read(f"{first}, {second},{empty}").groupBy("topic").count().collect()
    assert {row.topic: row["count"] for row in rows} == {first: 250, second: 150}
    assert lake.read(empty).collect() == []


def test_offsets_choose_what_is_read(lake: Lake) -> None:
    topic = lake.new_topic(2)
    for partition in range(2):
        lake.fill(topic, numbered(300, f"p{partition}"), partition)
    p0, p1 = numbered(300, "p0"), numbered(300, "p1")
    start, end = json.dumps({topic: {"0": 150, "1": -1}}), json.dumps({topic: {"0": 160}})
    assert values_in(lake.read(topic, startingOffsets=start, endingOffsets=end)) == p0[150:160]
    assert values_in(lake.read(topic, startingOffsets=start)) == p0[150:]
    assert values_in(lake.read(topic, startingOffsets="earliest", endingOffsets="latest")) == p0 + p1
    assert lake.read(topic, startingOffsets="latest").count() == 0


def test_rows_per_task_cuts_ranges_into_tasks(lake: Lake) -> None:
    topic = lake.new_topic(2)
    lake.fill(topic, numbered(500, "p0"), 0)
    lake.fill(topic, numbered(50, "p1"), 1)
    frame = lake.read(topic, rowsPerTask=130)
    assert frame.rdd.getNumPartitions() == 5
    rows = frame.select(F.spark_partition_id().alias("task"), "partition", "offset").collect()
    sizes = Counter((row.partition, row.task) for row in rows)
    assert sorted(sizes.values()) == [50, 110, 130, 130, 130]
    assert sorted((row.partition, row.offset) for row in rows) == (
        [(0, offset) for offset in range(500)] + [(1, offset) for offset in range(50)]
    )


def test_filters_are_pushed_down_where_spark_allows_it(lake: Lake) -> None:
    topic = lake.new_topic(3)
    for partition in range(3):
        lake.fill(topic, numbered(100, f"p{partition}"), partition)
    pushing: SparkSession = lake.spark.newSession()
    pushing.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    where = "partition in (1, 2) and offset >= 20 and offset < 22 and timestamp > '2020-01-01' and value like 'p1%'"
    for spark, tasks in ((pushing, 2), (lake.spark, 3)):
        frame = Lake(spark, lake.servers).read(topic).where(where)
        assert values_in(frame) == numbered(100, "p1")[20:22]
        assert frame.rdd.getNumPartitions() == tasks
    chosen = {"partitions": "1-2", "fromOffset": 20, "untilOffset": 22, "fromTime": "2020-01-01T00:00:00Z"}
    frame = lake.read(topic, columns="value,partition", **chosen)
    assert frame.columns == ["value", "partition"]
    assert (
        sorted(bytes(row.value) for row in frame.collect()) == numbered(100, "p1")[20:22] + numbered(100, "p2")[20:22]
    )
    assert frame.rdd.getNumPartitions() == 2


def test_wrong_options_for_reading_are_told(lake: Lake) -> None:
    """All of them are in test_source.py; here is how some look to Spark's user."""
    fails("no option rowspertask_ for a source; did you mean rowsPerTask?", lambda: lake.read("a", rowsPerTask_=3))
    fails("option rowsPerTask is a whole number of 1 or more, not '0'", lambda: lake.read("a", rowsPerTask=0).collect())
    fails("topic not-there does not exist", lambda: lake.read("not-there").collect())


def test_node_killed_during_a_batch_read_delays_it_only(lake: Lake, tmp_path: Path) -> None:
    values = [value + b"." * 4000 for value in numbered(4000)]  # 16 MB: several fetches for each task
    killed = threading.Event()
    with Node(tmp_path) as node, Proxy(node.address) as proxy:
        direct, through = Lake(lake.spark, node.address), Lake(lake.spark, proxy.address)
        topic = direct.new_topic(2)
        for partition in range(2):
            direct.fill(topic, values[partition::2], partition)

        def kill() -> None:
            node.kill()
            killed.set()

        def restart() -> None:
            assert killed.wait(60)
            node.start()

        proxy.cut(Step.BEFORE_REPLY, Fetch, skip=1, before=kill)
        restarter = threading.Thread(target=restart)
        restarter.start()
        assert values_in(through.read(topic)) == values[0::2] + values[1::2]
        restarter.join()
        assert proxy.cuts_left == 0


# Writing


def content(records: list[Record]) -> list[tuple[Any, ...]]:
    return [(record.timestamp, record.key, record.value, record.headers) for record in records]


def test_rows_are_stored_as_they_are_and_come_back_the_same(lake: Lake) -> None:
    first, second = lake.new_topic(), lake.new_topic()
    frame = lake.frame(
        [
            (b"k", b"v", 1_700_000_000_123_456, {"a": b"1", "b": b"\xff"}),
            (None, None, -1, None),
            (b"", b"", 0, {}),
            (b"\xff", b"x" * (MIB - 99), 253_402_300_799_999_999, {"": b""}),
        ],
        "key binary, value binary, micros bigint, headers map<string, binary>",
    ).coalesce(1)
    lake.write(frame.select("key", "value", F.timestamp_micros("micros").alias("timestamp"), "headers"), first)
    assert content(read_all(lake.servers, first)) == [
        (1_700_000_000_123_456, b"k", b"v", (("a", b"1"), ("b", b"\xff"))),
        (-1, None, None, ()),
        (0, b"", b"", ()),
        (253_402_300_799_999_999, b"\xff", b"x" * (MIB - 99), (("", b""),)),
    ]
    lake.write(lake.read(first).select("headers", "timestamp", "value", "key"), second)
    assert content(read_all(lake.servers, second)) == content(read_all(lake.servers, first))


def test_strings_are_stored_as_utf8_and_keys_choose_partitions(lake: Lake) -> None:
    topic = lake.new_topic(3)
    rows = [(f"key-{number % 7}", f"grüße {number}", {"n": str(number)}) for number in range(60)]
    lake.write(lake.frame(rows, "key string, value string, headers map<string, string>"), topic)
    records = read_all(lake.servers, topic)
    assert sorted((record.key, record.value, record.headers) for record in records) == sorted(
        (key.encode(), value.encode(), (("n", headers["n"].encode()),)) for key, value, headers in rows
    )
    for record in records:
        assert record.key is not None
        assert record.partition == partition_of_key(record.key, 3)


def test_rows_choose_among_sixty_four_partitions_and_most_stay_empty(lake: Lake) -> None:
    topic = lake.new_topic(64)
    rows = [(7 * number % 64, None if number % 3 else f"k{number}", number, f"t{number}") for number in range(5)]
    frame = lake.frame([*rows, (None, None, 99, None)], "partition int, key string, n int, t string")
    frame = frame.select("partition", "key", F.struct("n", "t").alias("value")).coalesce(1)
    for _ in range(2):  # under a name it is stored once
        lake.write(frame, topic, valueFormat="json", sink="once", sinkBatch=3)
    found = {record.value: record.partition for record in read_all(lake.servers, topic)}
    assert len(found) == 6 == lake.read(topic, columns="offset").count()
    assert found.pop(b'{"n":99,"t":null}') in range(64)
    assert found == {b'{"n":%d,"t":"t%d"}' % (n, n): partition for partition, _, n, _ in rows}


def test_many_rows_of_several_tasks_are_each_stored_once_in_their_tasks_order(lake: Lake) -> None:
    topic = lake.new_topic()
    rows = lake.spark.range(0, 24_000, numPartitions=3)  # 24 MB: tasks of several pieces
    lake.write(rows.select(F.rpad(F.format_string("%06d", "id"), 1000, ".").alias("value")), topic)
    numbers = [int((record.value or b"")[:6]) for record in read_all(lake.servers, topic)]
    for task in range(3):
        mine = range(task * 8000, (task + 1) * 8000)
        assert [number for number in numbers if number in mine] == list(mine)
    assert len(numbers) == 24_000


def test_wrong_frames_and_modes_are_refused(lake: Lake) -> None:
    """All of them are in test_source.py; here is how some look to Spark's user."""
    topic = lake.new_topic()
    one = lake.frame([("a", 1)], "value string, number int")
    fails("only added to: use .mode('append')", lambda: lake.write(one.select("value"), topic, "overwrite"))
    fails("this frame has ['number', 'value']", lambda: lake.write(one, topic))
    large = one.select(F.repeat("value", MIB + 1).alias("value"))
    fails("is over the limit of 1048576", lambda: lake.write(large, topic))
    assert lake.stored(topic) == []


def test_what_the_sdk_sends_as_arrow_spark_reads_and_the_other_way(lake: Lake) -> None:
    topic = lake.new_topic()
    with Producer(lake.servers, compression="zstd") as producer:
        producer.send_many(topic, pa.table({"value": numbered(1000), "key": numbered(1000, "k")})).result(30)
    rows = lake.read(topic).orderBy("offset").collect()
    assert [(bytes(row.key), bytes(row.value)) for row in rows] == list(
        zip(numbered(1000, "k"), numbered(1000), strict=True)
    )
