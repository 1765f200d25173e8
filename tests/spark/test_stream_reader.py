"""What a stream's reader tells Spark, on a real node and without Spark's machinery."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import BinaryType, StructType

from quiver import Admin, Producer
from quiver.errors import InvalidRequestError, UnknownTopicError
from quiver.spark.source import QuiverDataSource
from quiver.spark.stream import QuiverStreamReader
from tests.system.kit import Node, until

pytestmark = pytest.mark.system

ROWS = StructType().add("value", BinaryType())

_names = map("topic-{}".format, itertools.count(1))


class Desk:
    """A node, and readers that are stopped at the end."""

    def __init__(self, node: Node) -> None:
        self.servers = node.address
        self.readers: list[QuiverStreamReader] = []

    def topic(self, *counts: int, name: str | None = None) -> str:
        """A topic with so many records in each partition."""
        name = name or next(_names)
        with Admin(self.servers) as admin, Producer(self.servers) as producer:
            admin.create_topic(name, len(counts))
            for number, count in enumerate(counts):
                if count:
                    producer.send_many(name, [b"x"] * count, partition=number).result(30)
        return name

    def send(self, topic: str, partition: int, count: int) -> None:
        with Producer(self.servers) as producer:
            producer.send_many(topic, [b"x"] * count, partition=partition).result(30)

    def reader(self, topic: str, **options: Any) -> QuiverStreamReader:
        given = {"servers": self.servers, "topic": topic} | {name: str(value) for name, value in options.items()}
        self.readers.append(QuiverDataSource(CaseInsensitiveDict(given)).streamReader(ROWS))
        return self.readers[-1]

    def lag(self, group: str) -> dict[tuple[str, int], int]:
        with Admin(self.servers) as admin:
            return {(one.topic, one.partition): one.lag for one in admin.describe_group(group)[1]}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    settings = {
        "QUIVER_LOG_RETENTION_MS": "none",
        "QUIVER_LOG_SEGMENT_BYTES_MAX": "4096",
        "QUIVER_RETENTION_CHECK_S": "0.1",
    }
    with Node(tmp_path_factory.mktemp("node"), settings) as made:
        yield made


@pytest.fixture
def desk(node: Node) -> Iterator[Desk]:
    made = Desk(node)
    yield made
    for reader in made.readers:
        reader.stop()


def offsets_of(mark: dict[str, Any]) -> dict[str, dict[str, int]]:
    return {topic: {n: at for n, at in found.items() if n != "uid"} for topic, found in mark.items()}


def test_stream_begins_at_the_end_unless_told_otherwise(desk: Desk) -> None:
    topic = desk.topic(100, 30)
    assert offsets_of(desk.reader(topic).initialOffset()) == {topic: {"0": 100, "1": 30}}
    told = desk.reader(topic, startingOffsets=f'{{"{topic}": {{"1": 3}}}}').initialOffset()
    assert offsets_of(told) == {topic: {"0": 0, "1": 3}}


def test_stream_takes_what_it_may_in_each_step(desk: Desk) -> None:
    topic, other = desk.topic(100, 30), desk.topic(0)
    reader = desk.reader(f"{topic},{other}", maxRowsPerTrigger=50, startingOffsets=f'{{"{topic}": {{"1": 10}}}}')
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(50)
    start = reader.initialOffset()
    assert offsets_of(reader.latestOffset(start, limit)) == {topic: {"0": 30, "1": 30}, other: {"0": 0}}
    assert desk.reader(topic).getDefaultReadLimit() == ReadAllAvailable()
    everything = reader.latestOffset(start, ReadAllAvailable())
    assert offsets_of(everything) == {topic: {"0": 100, "1": 30}, other: {"0": 0}}
    assert everything == reader.reportLatestOffset()
    assert reader.latestOffset(everything, limit) == everything  # Spark compares what it gets with what it had


def test_stream_takes_as_many_bytes_as_it_may(desk: Desk) -> None:
    topic = desk.topic(0, 0, 0)
    with Producer(desk.servers) as producer:
        for number in range(60):
            producer.send_many(topic, [b"x" * 1000] * 10, partition=number % 2).result(30)  # 300 kB in each of two
    reader = desk.reader(topic, maxBytesPerTrigger=100_000, startingOffsets="earliest", maxRowsPerTrigger=80)
    assert reader.getDefaultReadLimit() == ReadMaxRows(80)
    limit = desk.reader(topic, maxBytesPerTrigger=100_000).getDefaultReadLimit()
    assert limit == ReadMaxBytes(100_000)
    first = reader.latestOffset(reader.initialOffset(), ReadMaxRows(80))
    assert offsets_of(first) == {topic: {"0": 40, "1": 40, "2": 0}}  # the rows are fewer
    reader = desk.reader(topic, maxBytesPerTrigger=100_000, startingOffsets="earliest")
    at, steps = reader.initialOffset(), 0
    while (following := reader.latestOffset(at, limit)) != at:
        rows = [following[topic][n] - at[topic][n] for n in ("0", "1", "2")]
        assert rows[2] == 0 and 0 < sum(rows) <= 100
        at, steps = following, steps + 1
    assert offsets_of(at) == {topic: {"0": 300, "1": 300, "2": 0}}
    assert 6 <= steps <= 12


def test_available_now_does_not_look_beyond_its_start(desk: Desk) -> None:
    topic = desk.topic(3)
    reader = desk.reader(topic, startingOffsets="earliest")
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    desk.send(topic, 0, 1)
    with Admin(desk.servers) as admin:
        admin.add_partitions(topic, 2)
    desk.send(topic, 1, 1)
    end = reader.latestOffset(start, ReadAllAvailable())
    assert offsets_of(end) == {topic: {"0": 3}}
    assert offsets_of(reader.reportLatestOffset()) == {topic: {"0": 4, "1": 1}}
    assert reader.latestOffset(end, ReadAllAvailable()) == end


def test_partitions_and_topics_that_are_made_meanwhile_are_read_from_their_beginning(desk: Desk) -> None:
    topic = desk.topic(5, name="grows-1")
    reader = desk.reader("grows-*")
    start = reader.initialOffset()
    with Admin(desk.servers) as admin:
        admin.add_partitions(topic, 3)
    desk.send(topic, 2, 7)
    other = desk.topic(2, name="grows-2")
    end = reader.latestOffset(start, ReadAllAvailable())
    assert offsets_of(end) == {topic: {"0": 5, "1": 0, "2": 7}, other: {"0": 2}}
    found = [
        (one.value.topic, one.value.partition, one.value.start, one.value.end) for one in reader.partitions(start, end)
    ]
    assert found == [(topic, 2, 0, 7), (other, 0, 0, 2)]


def test_topic_that_was_made_again_is_told_from_the_one_before(desk: Desk) -> None:
    """Also when the new one has more records than were read of the old one."""
    topic = desk.topic(5)
    start = desk.reader(topic).initialOffset()
    with Admin(desk.servers) as admin:
        admin.delete_topic(topic)
    with pytest.raises(UnknownTopicError, match=f"topic {topic} does not exist"):
        desk.reader(topic).latestOffset(start, ReadAllAvailable())
    desk.topic(9, name=topic)
    with pytest.raises(InvalidRequestError, match=f"topic {topic} was deleted and made again since it was last read"):
        desk.reader(topic).latestOffset(start, ReadAllAvailable())
    lenient = desk.reader(topic, failOnDataLoss="false")
    end = lenient.latestOffset(start, ReadAllAvailable())
    (partition,) = lenient.partitions(start, end)
    assert (partition.value.start, partition.value.end) == (0, 9)
    assert sum(batch.num_rows for batch in lenient.read(partition)) == 9


def test_topic_of_a_pattern_that_is_deleted_is_told(desk: Desk) -> None:
    kept, gone = desk.topic(1, name="some-1"), desk.topic(1, name="some-2")
    start = desk.reader("some-*").initialOffset()
    with Admin(desk.servers) as admin:
        admin.delete_topic(gone)
    with pytest.raises(InvalidRequestError, match=f"topic {gone} was deleted while it was read"):
        desk.reader("some-*").latestOffset(start, ReadAllAvailable())
    lenient = desk.reader("some-*", failOnDataLoss="false")
    assert offsets_of(lenient.latestOffset(start, ReadAllAvailable())) == {kept: {"0": 1}}


def test_group_is_where_spark_is_done(desk: Desk) -> None:
    topic = desk.topic(10, 4)
    reader = desk.reader(topic, group="dash", startingOffsets="earliest", maxRowsPerTrigger=6)
    start = reader.initialOffset()
    middle = reader.latestOffset(start, ReadMaxRows(6))
    assert desk.lag("dash") == {(topic, 0): 10, (topic, 1): 4}  # the first batch is planned, not done
    end = reader.latestOffset(middle, ReadMaxRows(6))
    assert desk.lag("dash") == {(topic, 0): 7, (topic, 1): 1}
    assert reader.latestOffset(end, ReadAllAvailable()) != end
    again = desk.reader(topic, group="dash", startingOffsets="group").initialOffset()
    assert offsets_of(again) == offsets_of(end)


def test_what_retention_removed_is_told_or_left_out(desk: Desk) -> None:
    topic = desk.topic(0)
    start = desk.reader(topic, startingOffsets="earliest").initialOffset()
    with Admin(desk.servers) as admin, Producer(desk.servers) as producer:
        admin.alter_topic(topic, {"retention.bytes": 8192})
        for _ in range(40):
            producer.send(topic, b"x" * 1000).result(30)
        until(lambda: admin.offsets(topic)[0][0] > 20)
        admin.alter_topic(topic, unset=["retention.bytes"])
        earliest, latest = admin.offsets(topic)[0]
    with pytest.raises(InvalidRequestError, match="were removed by retention before they were read"):
        desk.reader(topic).latestOffset(start, ReadAllAvailable())
    strict, lenient = desk.reader(topic), desk.reader(topic, failOnDataLoss="false")
    end = lenient.latestOffset(start, ReadAllAvailable())
    (partition,) = lenient.partitions(start, end)
    assert sum(batch.num_rows for batch in lenient.read(partition)) == latest - earliest
    with pytest.raises(InvalidRequestError, match=f"{earliest} records of {topic}-0 from offset 0 on were removed"):
        list(strict.read(partition))  # a plan that was made before
