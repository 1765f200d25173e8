"""What a sink's task does on a real node, without Spark around it: the same rows again are stored once."""

from __future__ import annotations

import datetime
import itertools
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from quiver.errors import InvalidRequestError, MessageTooLargeError, UnknownPartitionError, UnknownTopicError
from quiver.spark.options import WriteOptions
from quiver.spark.writing import TaskName, write_rows
from quiver.wire.messages import Produce
from quiver.wire.partitioning import partition_of_key
from tests.system.kit import Node, create_topic, read_all, until, values_of
from tests.system.proxy import Proxy, Step

pytestmark = pytest.mark.system

# About 13 MB: four pieces.
LARGE = [b"%06d" % number + b"x" * 994 for number in range(13_000)]

_names = map("task-{}".format, itertools.count(1))


def new_task() -> TaskName:
    return TaskName(next(_names), 3, 5)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("node")) as made:
        yield made


@pytest.fixture
def topic(node: Node) -> str:
    return create_topic(node.address, next(_names))


def options_of(servers: str, topic: str) -> WriteOptions:
    return WriteOptions(servers, topic)


def handed_over(values: list[bytes], rows: int, keys: list[bytes | None] | None = None) -> Iterator[pa.RecordBatch]:
    """As Spark gives them to a task: `rows` at a time."""
    for start in range(0, len(values), rows):
        columns = {"value": pa.array(values[start : start + rows], pa.binary())}
        if keys is not None:
            columns["key"] = pa.array(keys[start : start + rows], pa.binary())
        yield pa.RecordBatch.from_pydict(columns)


def test_rows_are_stored_in_order_and_once_however_they_are_handed_over(node: Node, topic: str) -> None:
    options, name = options_of(node.address, topic), new_task()
    for rows in (10_000, 7_001, 100_000):
        assert write_rows(options, name, handed_over(LARGE, rows)) == len(LARGE)
    assert values_of(read_all(node.address, topic)) == LARGE


def test_another_task_stores_the_same_rows_again(node: Node, topic: str) -> None:
    """Shows that the test above can fail."""
    options = options_of(node.address, topic)
    for _ in range(2):
        write_rows(options, new_task(), handed_over([b"a", b"b"], 10))
    assert values_of(read_all(node.address, topic)) == [b"a", b"b", b"a", b"b"]


def test_task_that_failed_half_way_is_completed_by_its_next_attempt(node: Node, topic: str) -> None:
    options, name = options_of(node.address, topic), new_task()

    def broken() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(handed_over(LARGE, 1000)):
            if number == 10:
                # Two pieces are under way by now; wait until one is stored, so that this is half a task.
                until(lambda: read_all(node.address, topic))
                raise OSError("the executor is lost")
            yield batch

    with pytest.raises(OSError, match="the executor is lost"):
        write_rows(options, name, broken())
    assert 0 < len(read_all(node.address, topic)) < len(LARGE)
    write_rows(options, name, handed_over(LARGE, 10_000))
    assert values_of(read_all(node.address, topic)) == LARGE


def test_few_rows_may_come_in_another_order_the_next_time(node: Node) -> None:
    topic = create_topic(node.address, next(_names), 3)
    options, name = options_of(node.address, topic), new_task()
    values = [b"%d" % number for number in range(1000)]
    keys = [None if number % 5 == 0 else b"k%d" % (number % 37) for number in range(1000)]
    write_rows(options, name, handed_over(values, 300, keys))
    write_rows(options, name, handed_over(values[::-1], 400, keys[::-1]))
    assert Counter(values_of(read_all(node.address, topic))) == Counter(values)


def test_keys_choose_partitions_and_rows_without_take_turns_by_task(node: Node) -> None:
    topic = create_topic(node.address, next(_names), 3)
    options = options_of(node.address, topic)
    keys: list[bytes | None] = [None, b"", b"a", b"b", b"c", None]
    write_rows(options, TaskName("q", 0, 0), handed_over([b"%d" % number for number in range(6)], 10, keys))
    for record in read_all(node.address, topic):
        if record.key is not None:
            assert record.partition == partition_of_key(record.key, 3)
    without = [record for record in read_all(node.address, topic) if record.key is None]
    assert [record.value for record in without] == [b"0", b"5"]  # together, in their order
    for number in range(30):
        write_rows(options, TaskName("q", 0, number + 1), handed_over([b"x"], 10))
    spread = Counter(record.partition for record in read_all(node.address, topic) if record.value == b"x")
    assert len(spread) == 3  # small tasks do not all write to the first partition


def test_row_may_name_its_partition(node: Node) -> None:
    topic = create_topic(node.address, next(_names), 4)
    batch = pa.RecordBatch.from_pydict(
        {
            "value": pa.array([b"%d" % number for number in range(6)]),
            "key": pa.array([b"k", b"k", None, b"k", None, b"k"]),
            "partition": pa.array([3, 0, 3, None, 2, 3], pa.int32()),
        }
    )
    assert write_rows(options_of(node.address, topic), new_task(), iter([batch])) == 6
    found = {(record.partition, record.value) for record in read_all(node.address, topic)}
    assert found == {(3, b"0"), (0, b"1"), (3, b"2"), (partition_of_key(b"k", 4), b"3"), (2, b"4"), (3, b"5")}
    for wrong in (4, -1):
        named = pa.RecordBatch.from_pydict({"value": [b"x", b"y"], "partition": pa.array([wrong, None], pa.int64())})
        with pytest.raises(UnknownPartitionError, match=f"the column partition says {wrong}; the topic has .* 0 to 3"):
            write_rows(options_of(node.address, topic), new_task(), iter([named]))


def test_structs_are_written_as_json(node: Node, topic: str) -> None:
    when = datetime.datetime(2026, 11, 15, 20, tzinfo=datetime.timezone(datetime.timedelta(hours=5, minutes=45)))
    kathmandu = pa.timestamp("us", "Asia/Kathmandu")
    inner = pa.struct({"at": kathmandu, "raw": pa.binary()})
    kind = pa.struct({"n": pa.int64(), "list": pa.list_(inner), "map": pa.map_(pa.string(), pa.float64())})
    rows = [
        {"n": 1, "list": [{"at": when, "raw": b"\xff"}], "map": [("a", 1.5)]},
        None,
        {"n": None, "list": [], "map": []},
    ]
    batch = pa.RecordBatch.from_pydict({"value": pa.array(rows, kind)})
    write_rows(WriteOptions(node.address, topic, json_values=True), new_task(), iter([batch]))
    assert values_of(read_all(node.address, topic)) == [
        b'{"n":1,"list":[{"at":"2026-11-15T14:15:00Z","raw":"/w=="}],"map":{"a":1.5}}',
        None,
        b'{"n":null,"list":[],"map":{}}',
    ]


def test_next_micro_batch_is_stored_and_one_before_it_is_refused(node: Node, topic: str) -> None:
    options, name = options_of(node.address, topic), new_task()
    for batch in (5, 6, 6, 9):
        write_rows(options, name._replace(batch=batch), handed_over([b"%d" % batch], 1))
    with pytest.raises(InvalidRequestError, match="has rows of a later batch of this query than 8"):
        write_rows(options, name._replace(batch=8), handed_over([b"8"], 1))
    assert values_of(read_all(node.address, topic)) == [b"5", b"6", b"9"]


def test_two_attempts_at_once_store_each_row_once(node: Node, topic: str) -> None:
    options, name = options_of(node.address, topic), new_task()
    with ThreadPoolExecutor(3) as pool:
        attempts = [pool.submit(write_rows, options, name, handed_over(LARGE, rows)) for rows in (999, 1000, 2500)]
        assert [attempt.result(60) for attempt in attempts] == [len(LARGE)] * 3
    assert values_of(read_all(node.address, topic)) == LARGE


def test_when_rows_differ_what_was_stored_stays_and_only_later_batches_are_added(node: Node, topic: str) -> None:
    """As docs/spark.md tells: here the first run stored the first of four batches, and the second has other rows."""
    options, name = options_of(node.address, topic), new_task()

    def first_run() -> Iterator[pa.RecordBatch]:
        yield from handed_over(LARGE[:5000], 5000)  # one batch is full; the rest of these rows waits for more
        until(lambda: read_all(node.address, topic))
        raise OSError("the executor is lost")

    with pytest.raises(OSError, match="the executor is lost"):
        write_rows(options, name, first_run())
    kept = values_of(read_all(node.address, topic))
    assert kept == LARGE[: len(kept)]
    others = [b"other" + value for value in LARGE]
    write_rows(options, name, handed_over(others, 1000))
    found = values_of(read_all(node.address, topic))
    assert found[: len(kept)] == kept
    assert found[len(kept) :] == others[-len(found[len(kept) :]) :]
    assert len(others) - len(kept) <= len(found) - len(kept) < len(others)


def test_task_without_rows_needs_no_server(tmp_path: Path) -> None:
    assert write_rows(options_of("127.0.0.1:1", "any"), new_task(), iter(())) == 0


def test_lost_acknowledgements_store_nothing_twice(node: Node, topic: str) -> None:
    with Proxy(node.address) as proxy:
        for step in (Step.BEFORE_REPLY, Step.IN_REQUEST, Step.IN_REPLY):
            proxy.cut(step, Produce, skip=1)
        write_rows(options_of(proxy.address, topic), new_task(), handed_over(LARGE, 5_000))
        assert proxy.cuts_left == 0
    assert values_of(read_all(node.address, topic)) == LARGE


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([[("a", b"x")], [("b", None)]], pa.map_(pa.string(), pa.binary())), "may not be null"),
        (pa.array([[("a", b"x" * 2**20)], None], pa.map_(pa.string(), pa.binary())), "over the limit"),
    ],
)
def test_headers_that_cannot_be_stored_are_refused(node: Node, topic: str, column: pa.Array, message: str) -> None:
    batch = pa.RecordBatch.from_pydict({"value": pa.array([b"1", b"2"]), "headers": column})
    with pytest.raises((InvalidRequestError, MessageTooLargeError), match=message):
        write_rows(options_of(node.address, topic), new_task(), iter([batch]))
    assert read_all(node.address, topic) == []


def test_large_row_goes_alone_and_a_larger_one_is_refused(node: Node, topic: str) -> None:
    options = options_of(node.address, topic)
    values = [b"a" * 2**20, b"b", b"c" * 2**20, b"d" * 2**20, b"e" * 2**20, b"f"]
    write_rows(options, new_task(), handed_over(values, 10))
    assert values_of(read_all(node.address, topic)) == values
    with pytest.raises(MessageTooLargeError, match="over the limit of 1048576"):
        write_rows(options, new_task(), handed_over([b"a" * (2**20 + 1)], 10))


def test_topic_must_be_there(node: Node) -> None:
    with pytest.raises(UnknownTopicError):
        write_rows(options_of(node.address, "nowhere"), new_task(), handed_over([b"a"], 1))
