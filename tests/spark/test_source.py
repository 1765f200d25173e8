"""What the data source checks before anything runs: options, frames and modes, without Spark's machinery."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from pyspark_quiver import DefaultSource
from quiver import Producer
from quiver.errors import InvalidRequestError, InvalidTopicError, RequestError
from quiver.spark.offsets import OffsetRange
from quiver.spark.source import QuiverDataSource
from tests.system.kit import Node, create_topic

pytestmark = pytest.mark.system

TEXT, BINARY = StringType(), BinaryType()


def schema(**columns: DataType) -> StructType:
    made = StructType()
    for name, kind in columns.items():
        made.add(name, kind)
    return made


VALUE = schema(value=TEXT)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("node")) as made:
        create_topic(made.address, "logs", 2)
        create_topic(made.address, "other")
        with Producer(made.address) as producer:
            producer.send_many("logs", [b"x"] * 100, partition=0).result(30)
            producer.send_many("logs", [b"x"] * 30, partition=1).result(30)
        yield made


def source(node: Node | None = None, **options: Any) -> QuiverDataSource:
    given = {name: str(value) for name, value in options.items()}
    if node is not None:
        given["servers"] = node.address
    return QuiverDataSource(CaseInsensitiveDict(given))


def planned(node: Node, **options: Any) -> list[OffsetRange]:
    return [partition.value for partition in source(node, **options).reader(VALUE).partitions()]


def test_module_that_spark_finds_has_the_source() -> None:
    assert DefaultSource is QuiverDataSource
    assert DefaultSource.name() == "quiver"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topic": "logs"}, r"needs .option\('servers', ...\)"),
        ({"servers": "127.0.0.1:1"}, r"needs .option\('topic', ...\)"),
        ({"servers": "127.0.0.1:1", "topic": ""}, r"needs .option\('topic', ...\)"),
        ({"servers": "127.0.0.1:1", "topic": "no/name"}, "topic name 'no/name' is not allowed"),
        ({"servers": "127.0.0.1:1", "topic": "logs,"}, "topic name '' is not allowed"),
        *(
            ({"servers": "127.0.0.1:1", "topic": "logs", name: value}, f"option {name} is a whole number of 1 or more")
            for name in ("rowsPerTask", "maxRowsPerTrigger")
            for value in ("0", "-1", "1.5", "x", "", "²", "٣")
        ),
    ],
)
def test_wrong_option_is_told_by_name(options: dict[str, str], message: str) -> None:
    for make in (source(**options).reader, source(**options).streamReader):
        with pytest.raises((InvalidRequestError, InvalidTopicError), match=message):
            make(VALUE)


def test_stream_takes_no_end() -> None:
    with pytest.raises(InvalidRequestError, match="a stream has no end: endingOffsets is for batch reads"):
        source(servers="a", topic="logs", endingoffsets="latest").streamReader(VALUE)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [(0, 0, 100), (1, 0, 30)]),
        ({"rowsPerTask": 40}, [(0, 0, 40), (0, 40, 80), (0, 80, 100), (1, 0, 30)]),
        ({"startingOffsets": "latest"}, []),
        ({"startingOffsets": json.dumps({"logs": {"0": 90, "1": -1}})}, [(0, 90, 100)]),
        ({"endingOffsets": json.dumps({"logs": {"0": -2, "1": 7}})}, [(1, 0, 7)]),
        ({"STARTINGOFFSETS": "earliest", "EndingOffsets": "earliest"}, []),
    ],
)
def test_batch_read_is_planned_by_offsets(
    node: Node, options: dict[str, Any], expected: list[tuple[int, int, int]]
) -> None:
    assert planned(node, topic="logs", **options) == [OffsetRange("logs", *piece) for piece in expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topic": "not-there"}, "topic not-there does not exist"),
        ({"topic": "logs", "startingOffsets": "newest"}, "startingOffsets is 'earliest', 'latest' or JSON"),
        ({"topic": "logs", "endingOffsets": '{"other": {}}'}, "endingOffsets: topic other is not one of those"),
        ({"topic": "logs", "endingOffsets": '{"logs": {"0": 101}}'}, "offset 101 of logs-0 is out of range: 0 to 100"),
        ({"topic": "logs", "startingOffsets": '{"logs": {"0": 5}}', "endingOffsets": '{"logs": {"0": 4}}'}, "the end"),
        ({"topic": "logs", "startingOffsets": "latest", "endingOffsets": "earliest"}, "the end is before the start"),
    ],
)
def test_read_that_cannot_be_planned_is_refused(node: Node, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        planned(node, **options)


def test_stream_begins_at_the_end_unless_told_otherwise(node: Node) -> None:
    assert source(node, topic="logs").streamReader(VALUE).initialOffset() == {"logs": {"0": 100, "1": 30}}
    told = source(node, topic="logs", startingOffsets='{"logs": {"1": 3}}').streamReader(VALUE)
    assert told.initialOffset() == {"logs": {"0": 0, "1": 3}}


def test_stream_takes_what_it_may_in_each_step(node: Node) -> None:
    reader = source(node, topic="logs,other", maxRowsPerTrigger=50).streamReader(VALUE)
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(50)
    start = {"logs": {"0": 0, "1": 10}, "other": {"0": 0}}
    assert reader.latestOffset(start, limit) == {"logs": {"0": 30, "1": 30}, "other": {"0": 0}}
    assert source(node, topic="logs").streamReader(VALUE).getDefaultReadLimit() == ReadAllAvailable()
    everything = reader.latestOffset(start, ReadAllAvailable())
    assert everything == {"logs": {"0": 100, "1": 30}, "other": {"0": 0}} == reader.reportLatestOffset()


def test_available_now_does_not_look_beyond_its_start(node: Node) -> None:
    create_topic(node.address, "growing")
    reader = source(node, topic="growing").streamReader(VALUE)
    reader.prepareForTriggerAvailableNow()
    with Producer(node.address) as producer:
        producer.send("growing", b"late").result(30)
    assert reader.latestOffset({"growing": {"0": 0}}, ReadAllAvailable()) == {"growing": {"0": 0}}
    assert reader.reportLatestOffset() == {"growing": {"0": 1}}


def test_stream_over_a_topic_that_was_made_again_is_refused(node: Node) -> None:
    reader = source(node, topic="other").streamReader(VALUE)
    with pytest.raises(InvalidRequestError, match="Was the topic deleted and made again"):
        reader.partitions({"other": {"0": 7}}, reader.latestOffset({"other": {"0": 7}}, ReadAllAvailable()))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": TEXT}, r"this frame has \['text'\]"),
        ({"value": TEXT, "number": IntegerType()}, r"this frame has \['number', 'value'\]"),
        ({"Value": TEXT}, r"this frame has \['Value'\]"),
        ({"key": TEXT}, r"this frame has \['key'\]"),
        ({"value": IntegerType()}, "the column value of a sink is string or binary, not int"),
        ({"value": TEXT, "key": LongType()}, "the column key of a sink is string or binary, not bigint"),
        ({"value": TEXT, "timestamp": TEXT}, "the column timestamp of a sink is timestamp, not string"),
        ({"value": TEXT, "timestamp": TimestampNTZType()}, "timestamp of a sink is timestamp, not timestamp_ntz"),
        ({"value": TEXT, "headers": ArrayType(TEXT)}, "headers of a sink is map<string, binary>, not array<string>"),
        ({"value": TEXT, "headers": MapType(TEXT, LongType())}, "headers of a sink is map<string, binary>, not map"),
        ({"value": TEXT, "headers": MapType(BINARY, BINARY)}, "headers of a sink is map<string, binary>, not map"),
    ],
)
def test_frame_that_is_no_message_is_refused(columns: dict[str, DataType], message: str) -> None:
    sink = source(servers="127.0.0.1:1", topic="logs")
    for make in (sink.writer, sink.streamWriter):
        with pytest.raises(InvalidRequestError, match=message):
            make(schema(**columns), False)


@pytest.mark.parametrize(
    "columns",
    [
        {"value": TEXT},
        {"value": BINARY, "key": TEXT},
        {"headers": MapType(TEXT, BINARY), "timestamp": TimestampType(), "value": TEXT, "key": BINARY},
        {"value": BINARY, "headers": MapType(TEXT, TEXT)},
    ],
)
def test_frame_of_messages_is_taken(columns: dict[str, DataType]) -> None:
    sink = source(servers="127.0.0.1:1", topic="logs")
    assert sink.writer(schema(**columns), False)
    assert sink.streamWriter(schema(**columns), False)


def test_topic_is_only_added_to_and_is_one() -> None:
    with pytest.raises(InvalidRequestError, match=r"only added to: use .mode\('append'\)"):
        source(servers="127.0.0.1:1", topic="logs").writer(VALUE, True)
    with pytest.raises(InvalidRequestError, match="a sink writes to one topic"):
        source(servers="127.0.0.1:1", topic="logs,other").writer(VALUE, False)
