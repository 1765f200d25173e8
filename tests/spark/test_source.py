"""What the data source decides before anything runs: options, plans, frames and modes, without Spark's machinery."""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.serializers import CPickleSerializer
from pyspark.sql.datasource import (
    CaseInsensitiveDict,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable
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
from quiver import Consumer, Producer
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
ROWS = schema(value=BINARY)


def at(number: int) -> str:
    """When the record of that offset was sent."""
    return f"2026-11-15T20:00:{number // 60:02d}.{number % 60:06d}Z"


def rows_of(count: int) -> pa.Table:
    stamps = pa.array([datetime.datetime.fromisoformat(at(number)) for number in range(count)])
    return pa.table({"value": pa.array([b"x"] * count), "timestamp": stamps})


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """logs-0 has a hundred records, logs-1 thirty; group g has read 42 of the former."""
    with Node(tmp_path_factory.mktemp("node")) as made:
        create_topic(made.address, "logs", 2)
        create_topic(made.address, "other")
        with Producer(made.address) as producer:
            producer.send_many("logs", rows_of(100), partition=0).result(30)
            producer.send_many("logs", rows_of(30), partition=1).result(30)
        with Consumer(made.address, ["logs"], group="g", partitions={"logs": [0]}) as consumer:
            consumer.poll(42)
            consumer.commit()
        yield made


def source(node: Node | None = None, **options: Any) -> QuiverDataSource:
    given = {name: str(value) for name, value in options.items()}
    if node is not None:
        given["servers"] = node.address
    return QuiverDataSource(CaseInsensitiveDict(given))


def planned(node: Node, *filters: Filter, **options: Any) -> list[OffsetRange]:
    reader = source(node, **options).reader(ROWS)
    if filters:
        assert list(reader.pushFilters(list(filters))) == []
    return [dataclasses.replace(partition.value, uid="") for partition in reader.partitions()]


def test_module_that_spark_finds_has_the_source() -> None:
    assert DefaultSource is QuiverDataSource
    assert DefaultSource.name() == "quiver"


def test_source_is_loaded_without_pandas() -> None:
    """Spark loads it in a new process for each query and each stream: pandas alone would take a second each time."""
    check = "import sys, quiver.spark.source; sys.exit('pandas' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": None}, r"needs .option\('servers', ...\)"),
        ({"servers": "one two"}, "'one two' is not an address"),
        ({"topic": None}, r"needs .option\('topic', ...\)"),
        ({"topic": ""}, r"needs .option\('topic', ...\)"),
        ({"topic": "no/name"}, "topic name 'no/name' is not allowed"),
        ({"topic": "logs,"}, "topic name '' is not allowed"),
        ({"startingOffset": "latest"}, "no option startingoffset for a source; did you mean startingOffsets?"),
        ({"password": "secret"}, "no option password for a source; known are columns, "),
        ({"failOnDataLoss": "no"}, "option failOnDataLoss is true or false, not 'no'"),
        ({"columns": "value,when"}, "option columns is some of topic, partition, offset"),
        ({"columns": "value,value"}, "each once, not 'value,value'"),
        ({"columns": ""}, "option columns is some of"),
        ({"partitions": "1,x"}, "option partitions is numbers and ranges like 0,4-7, not '1,x'"),
        ({"partitions": "5-2"}, "option partitions is numbers and ranges"),
        ({"fromOffset": "-1"}, "option fromOffset is a whole number of 0 or more, not '-1'"),
        ({"untilTime": "yesterday"}, "option untilTime is a time like 2026-11-15T20:00:00Z, not 'yesterday'"),
        ({"fromTime": "2026-11-15T20:00:00"}, "option fromTime: .* does not say its time zone"),
        ({"group": "#7"}, "option group is a name of 1 to 255 characters that does not begin with #"),
        ({"startingOffsets": "group"}, r"startingOffsets=group needs .option\('group', ...\)"),
        *(
            ({name: value}, f"option {name} is a whole number of 1 or more")
            for name in ("rowsPerTask", "maxRowsPerTrigger", "maxBytesPerTrigger")
            for value in ("0", "-1", "1.5", "x", "", "²", "٣")
        ),
    ],
)
def test_wrong_option_is_told_by_name_when_the_source_is_named(options: dict[str, str | None], message: str) -> None:
    given = {"servers": "127.0.0.1:1", "topic": "logs"} | options
    made = source(**{name: value for name, value in given.items() if value is not None})
    for make in (made.schema, lambda: made.reader(ROWS), lambda: made.streamReader(ROWS)):
        with pytest.raises((InvalidRequestError, InvalidTopicError), match=message):
            make()


def test_batch_and_stream_have_options_of_their_own() -> None:
    with pytest.raises(InvalidRequestError, match="a stream has no end: endingOffsets is for batch reads"):
        source(servers="a", topic="logs", endingoffsets="latest").streamReader(ROWS)
    with pytest.raises(InvalidRequestError, match="option maxRowsPerTrigger is for streams"):
        source(servers="a", topic="logs", maxrowspertrigger=3).reader(ROWS)
    with pytest.raises(InvalidRequestError, match="option group is for startingOffsets=group"):
        source(servers="a", topic="logs", group="g").reader(ROWS)


def test_columns_are_those_that_are_asked_for() -> None:
    asked = source(servers="a", topic="logs", columns="offset, headers")
    assert asked.schema() == "offset bigint, headers map<string, binary>"
    with pytest.raises(InvalidRequestError, match="a topic has no column text, but topic, partition"):
        asked.reader(schema(text=TEXT))
    with pytest.raises(InvalidRequestError, match="the column value of a topic is binary, not string"):
        asked.streamReader(VALUE)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [(0, 0, 100), (1, 0, 30)]),
        ({"rowsPerTask": 40}, [(0, 0, 40), (0, 40, 80), (0, 80, 100), (1, 0, 30)]),
        ({"startingOffsets": "latest"}, []),
        ({"startingOffsets": json.dumps({"logs": {"0": 90, "1": -1}})}, [(0, 90, 100)]),
        ({"endingOffsets": json.dumps({"logs": {"0": -2, "1": 7}})}, [(1, 0, 7)]),
        ({"STARTINGOFFSETS": "earliest", "EndingOffsets": "earliest"}, []),
        ({"startingOffsets": at(20)}, [(0, 20, 100), (1, 20, 30)]),
        ({"endingOffsets": at(25)}, [(0, 0, 25), (1, 0, 25)]),
        ({"startingOffsets": json.dumps({"logs": {"0": at(99), "1": "latest"}})}, [(0, 99, 100)]),
        ({"startingOffsets": "group", "group": "g"}, [(0, 42, 100), (1, 0, 30)]),
        ({"partitions": "1,3-5"}, [(1, 0, 30)]),
        ({"partitions": "0-9", "fromOffset": 25, "untilOffset": 27}, [(0, 25, 27), (1, 25, 27)]),
        ({"fromOffset": 50, "untilOffset": 20}, []),
        ({"fromTime": at(28)}, [(0, 28, 100), (1, 28, 30)]),
    ],
)
def test_batch_read_is_planned_by_options(
    node: Node, options: dict[str, Any], expected: list[tuple[int, int, int]]
) -> None:
    assert planned(node, topic="logs", **options) == [OffsetRange("logs", *piece) for piece in expected]


def test_topics_are_named_or_matched(node: Node) -> None:
    assert {one.topic for one in planned(node, topic="l[op]gs,lo*,ot?er")} == {"logs"}  # the others are empty
    assert {one.topic for one in planned(node, topic="*")} == {"logs"}
    with pytest.raises(InvalidRequestError, match=r"no topic matches x\*"):
        planned(node, topic="x*")


def when(number: int) -> datetime.datetime:
    return datetime.datetime.fromisoformat(at(number))


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([EqualTo(("partition",), 1)], [(1, 0, 30)]),
        ([IsNotNull(("offset",)), In(("partition",), (1, 2))], [(1, 0, 30)]),
        ([EqualTo(("topic",), "other")], []),
        ([GreaterThan(("offset",), 28)], [(0, 29, 100), (1, 29, 30)]),
        ([GreaterThanOrEqual(("offset",), 28), LessThan(("offset",), 29)], [(0, 28, 29), (1, 28, 29)]),
        ([LessThanOrEqual(("offset",), 1)], [(0, 0, 2), (1, 0, 2)]),
        ([EqualTo(("offset",), 99)], [(0, 99, 100)]),
        ([GreaterThan(("timestamp",), when(28))], [(0, 29, 100), (1, 29, 30)]),
    ],
)
def test_filters_of_spark_narrow_what_is_read(
    node: Node, filters: list[Filter], expected: list[tuple[int, int, int]]
) -> None:
    assert planned(node, *filters, topic="logs") == [OffsetRange("logs", *piece) for piece in expected]


def test_filters_that_only_spark_understands_are_left_to_it() -> None:
    left = [
        EqualTo(("value",), b"x"),
        EqualTo(("headers", "a"), b"x"),
        EqualTo(("partition",), None),
        EqualTo(("offset",), 1.5),
        EqualTo(("partition",), True),
        GreaterThan(("partition",), 3),
        In(("offset",), (1, 2)),
        GreaterThan(("timestamp",), datetime.datetime(2026, 11, 15)),
        IsNull(("offset",)),
        Not(EqualTo(("partition",), 1)),
        StringStartsWith(("topic",), "lo"),
    ]
    reader = source(servers="a", topic="logs").reader(ROWS)
    assert reader.pushFilters.__func__ is DataSourceReader.pushFilters  # else Spark refuses it where this is not set
    assert list(reader.pushFilters([*left, EqualTo(("partition",), 1)])) == left


def test_rows_come_as_they_are_wanted(node: Node) -> None:
    given = {"topic": "logs", "partitions": "1", "fromTime": at(3), "untilTime": at(6), "columns": "offset,topic,value"}
    reader = source(node, **given).reader(schema(offset=LongType(), topic=TEXT, value=BINARY))
    batches = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    assert pa.Table.from_batches(batches).to_pylist() == [
        {"offset": n, "topic": "logs", "value": b"x"} for n in (3, 4, 5)
    ]
    assert list(reader.read(InputPartition(None))) == []  # what Spark makes of an empty plan


def test_nothing_but_plain_values_travels_to_executors(node: Node) -> None:
    """What Spark pickles: the source, its readers also after they have planned, and their partitions."""
    made = source(node, topic="logs", fromTime=at(3))
    reader, stream, sink = made.reader(ROWS), made.streamReader(ROWS), source(node, topic="logs")
    writers = sink.writer(VALUE, False), sink.streamWriter(VALUE, False)
    start = stream.initialOffset()
    payload = CPickleSerializer().dumps(
        [made, reader, stream, stream.latestOffset(start, ReadAllAvailable()), reader.partitions(), *writers]
    )
    stream.stop()
    built = Built(io.BytesIO(payload))
    built.load()
    plain = ("builtins", "copyreg", "collections", "pyspark.sql.datasource", "pyspark.sql.types")
    assert [name for name in built.modules if not name.startswith(("quiver.spark.", *plain))] == []
    assert "quiver.spark.cluster_view" not in built.modules


class Built(pickle.Unpickler):
    """Notes the modules of everything that a pickle builds by name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.modules.add(module)
        return super().find_class(module, name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topic": "not-there"}, "topic not-there does not exist"),
        ({"topic": "logs", "startingOffsets": "newest"}, "startingOffsets is 'earliest', 'latest', 'group', a time or"),
        ({"topic": "logs", "endingOffsets": '{"other": {}}'}, "endingOffsets: topic other is not one of those"),
        ({"topic": "logs", "endingOffsets": '{"logs": {"0": 101}}'}, "offset 101 of logs-0 is out of range: 0 to 100"),
        ({"topic": "logs", "startingOffsets": '{"logs": {"0": 5}}', "endingOffsets": '{"logs": {"0": 4}}'}, "the end"),
        ({"topic": "logs", "startingOffsets": "latest", "endingOffsets": "earliest"}, "the end is before the start"),
    ],
)
def test_read_that_cannot_be_planned_is_refused(node: Node, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        planned(node, **options)


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
        ({"value": TEXT, "partition": TEXT}, "the column partition of a sink is int, not string"),
        ({"value": schema(a=TEXT)}, r"a struct is written with .option\('valueFormat', 'json'\)"),
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
        {"value": TEXT, "partition": LongType()},
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


def test_structs_are_for_json_and_json_is_for_structs() -> None:
    sink = source(servers="127.0.0.1:1", topic="logs", valueFormat="json")
    assert sink.writer(schema(value=schema(a=TEXT), key=TEXT), False)
    assert sink.streamWriter(schema(value=ArrayType(TEXT)), False)
    with pytest.raises(
        InvalidRequestError, match="valueFormat=json is for a value that is a struct, a map or an array"
    ):
        sink.writer(VALUE, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"valueFormat": "avro"}, "option valueFormat is 'raw' or 'json', not 'avro'"),
        ({"sink": ""}, "option sink is a name, and sinkBatch beside it a number"),
        ({"sinkBatch": "3"}, "option sink is a name, and sinkBatch beside it a number"),
        ({"sink": "a", "sinkBatch": "x"}, "option sinkBatch is a whole number of 0 or more, not 'x'"),
        ({"startingOffsets": "latest"}, "no option startingoffsets for a sink; known are servers, sink,"),
        ({"topik": "a"}, "no option topik for a sink; did you mean topic?"),
    ],
)
def test_wrong_option_of_a_sink_is_told_by_name(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        source(**({"servers": "127.0.0.1:1", "topic": "logs"} | options)).writer(VALUE, False)


def test_stream_names_its_sink_by_itself() -> None:
    with pytest.raises(InvalidRequestError, match="a stream has the name of its query"):
        source(servers="127.0.0.1:1", topic="logs", sink="a").streamWriter(VALUE, False)
