"""What a sink's task does on a real node, without Spark around it: the same rows again are stored once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from quiver.errors import InvalidRequestError, MessageTooLargeError, UnknownTopicError
from quiver.spark.source import Options, write_rows
from quiver.wire.messages import Produce
from quiver.wire.partitioning import partition_of_key
from tests.system.kit import Node, create_topic, read_all, until, values_of
from tests.system.proxy import Proxy, Step

pytestmark = pytest.mark.system

# About 13 MB: four pieces.
LARGE = [b"%06d" % number + b"x" * 994 for number in range(13_000)]

_names = map("task-{}".format, itertools.count(1))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("node")) as made:
        yield made


@pytest.fixture
def topic(node: Node) -> str:
    return create_topic(node.address, next(_names))


def options_of(servers: str, topic: str) -> Options:
    return Options({"servers": servers, "topic": topic})


def handed_over(values: list[bytes], rows: int, keys: list[bytes | None] | None = None) -> Iterator[pa.RecordBatch]:
    """As Spark gives them to a task: `rows` at a time."""
    for start in range(0, len(values), rows):
        columns = {"value": pa.array(values[start : start + rows], pa.binary())}
        if keys is not None:
            columns["key"] = pa.array(keys[start : start + rows], pa.binary())
        yield pa.RecordBatch.from_pydict(columns)


def test_rows_are_stored_in_order_and_once_however_they_are_handed_over(node: Node, topic: str) -> None:
    options, name = options_of(node.address, topic), next(_names)
    for rows in (10_000, 7_001, 100_000):
        assert write_rows(options, name, handed_over(LARGE, rows)).rows == len(LARGE)
    assert values_of(read_all(node.address, topic)) == LARGE


def test_another_task_stores_the_same_rows_again(node: Node, topic: str) -> None:
    """Shows that the test above can fail."""
    options = options_of(node.address, topic)
    for _ in range(2):
        write_rows(options, next(_names), handed_over([b"a", b"b"], 10))
    assert values_of(read_all(node.address, topic)) == [b"a", b"b", b"a", b"b"]


def test_task_that_failed_half_way_is_completed_by_its_next_attempt(node: Node, topic: str) -> None:
    options, name = options_of(node.address, topic), next(_names)

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
    options, name = options_of(node.address, topic), next(_names)
    values = [b"%d" % number for number in range(1000)]
    keys = [None if number % 5 == 0 else b"k%d" % (number % 37) for number in range(1000)]
    write_rows(options, name, handed_over(values, 300, keys))
    write_rows(options, name, handed_over(values[::-1], 400, keys[::-1]))
    assert Counter(values_of(read_all(node.address, topic))) == Counter(values)


def test_keys_choose_partitions_and_rows_without_take_turns_by_task(node: Node) -> None:
    topic = create_topic(node.address, next(_names), 3)
    options = options_of(node.address, topic)
    keys: list[bytes | None] = [None, b"", b"a", b"b", b"c", None]
    write_rows(options, "q/0/0", handed_over([b"%d" % number for number in range(6)], 10, keys))
    for record in read_all(node.address, topic):
        if record.key is not None:
            assert record.partition == partition_of_key(record.key, 3)
    without = [record for record in read_all(node.address, topic) if record.key is None]
    assert [record.value for record in without] == [b"0", b"5"]  # together, in their order
    for number in range(30):
        write_rows(options, f"q/1/{number}", handed_over([b"x"], 10))
    spread = Counter(record.partition for record in read_all(node.address, topic) if record.value == b"x")
    assert len(spread) == 3  # small tasks do not all write to the first partition


def test_task_without_rows_needs_no_server(tmp_path: Path) -> None:
    assert write_rows(options_of("127.0.0.1:1", "any"), "name", iter(())).rows == 0


def test_lost_acknowledgements_store_nothing_twice(node: Node, topic: str) -> None:
    with Proxy(node.address) as proxy:
        for step in (Step.BEFORE_REPLY, Step.IN_REQUEST, Step.IN_REPLY):
            proxy.cut(step, Produce, skip=1)
        write_rows(options_of(proxy.address, topic), next(_names), handed_over(LARGE, 5_000))
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
        write_rows(options_of(node.address, topic), next(_names), iter([batch]))
    assert read_all(node.address, topic) == []


def test_large_row_goes_alone_and_a_larger_one_is_refused(node: Node, topic: str) -> None:
    options = options_of(node.address, topic)
    values = [b"a" * 2**20, b"b", b"c" * 2**20, b"d" * 2**20, b"e" * 2**20, b"f"]
    write_rows(options, next(_names), handed_over(values, 10))
    assert values_of(read_all(node.address, topic)) == values
    with pytest.raises(MessageTooLargeError, match="over the limit of 1048576"):
        write_rows(options, next(_names), handed_over([b"a" * (2**20 + 1)], 10))


def test_topic_must_be_there(node: Node) -> None:
    with pytest.raises(UnknownTopicError):
        write_rows(options_of(node.address, "nowhere"), next(_names), handed_over([b"a"], 1))
