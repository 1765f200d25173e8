"""Wrong input at the SDK: a typed error at once, nothing stored, and the client works on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c

from quiver import Admin, Consumer, Producer
from quiver.config import BATCH_BYTES_MAX, MESSAGE_BYTES_MAX, MIB
from quiver.errors import (
    CorruptLogError,
    InvalidRequestError,
    InvalidTopicError,
    MessageTooLargeError,
    NoCommittedPositionError,
    RequestError,
    TopicExistsError,
    UnknownPartitionError,
    UnknownTopicError,
)
from quiver.net.connection import open_connection
from quiver.wire.batch_check import SCHEMA_ID_V1
from quiver.wire.messages import Produce, ProduceReply
from quiver.wire.records import batch_from_lists, encode_batch
from tests.client.kit import fill, poll_numbers, stored

BAD_TOPICS = [
    "",
    "../x",
    "/etc/passwd",
    ".",
    "..",
    "a" * 250,
    "a b",
    "a\nb",
    "a\x00b",
    "ünlaut",
    None,
    1,
    b"topic",
    [],
    (),
]


def named(value: object) -> str:
    return repr(value)[:30]


@pytest.fixture(scope="module")
def producer(servers: str) -> Iterator[Producer]:
    """One for all tests of this module: it must be as good after each as before."""
    with Producer(servers) as made:
        yield made


@pytest.fixture(scope="module")
def admin(servers: str) -> Iterator[Admin]:
    with Admin(servers) as made:
        yield made


def refused(use: Callable[[], Any], error: type[RequestError]) -> RequestError:
    with pytest.raises(error) as caught:
        use()
    assert caught.value.message
    assert not caught.value.retriable
    return caught.value


# Topics


@pytest.mark.parametrize("name", BAD_TOPICS, ids=named)
def test_bad_topic_names_are_refused_everywhere(servers: str, producer: Producer, admin: Admin, name: Any) -> None:
    before = admin.list_topics()
    for use in (
        lambda: producer.send(name, b"v"),
        lambda: producer.send_many(name, [b"v"]),
        lambda: Consumer(servers, [name]),
        lambda: admin.create_topic(name),
        lambda: admin.delete_topic(name),
        lambda: admin.describe_topic(name),
        lambda: admin.offsets(name),
        lambda: admin.offset_at(name, 0, 0),
    ):
        refused(use, InvalidTopicError)
    if name is not None:
        refused(lambda: admin.partition_status(name), InvalidTopicError)
    assert admin.list_topics() == before


@pytest.mark.parametrize("partition", ["0", 0.0, True, None, b"0", [], -1, 1, 2**70], ids=named)
def test_bad_partition_of_an_offset_question_is_refused(admin: Admin, topic: str, partition: Any) -> None:
    refused(lambda: admin.offset_at(topic, partition, 0), RequestError)


def test_unknown_topic_is_told_as_such(servers: str, producer: Producer, admin: Admin) -> None:
    for use in (
        lambda: producer.send("nowhere", b"v"),
        lambda: producer.send_many("nowhere", [b"v"]),
        lambda: admin.describe_topic("nowhere"),
        lambda: admin.delete_topic("nowhere"),
        lambda: admin.offsets("nowhere"),
        lambda: admin.partition_status("nowhere"),
    ):
        error = refused(use, UnknownTopicError)
        assert "nowhere" in error.message
    assert "nowhere" not in admin.list_topics()


def test_longest_and_oddest_good_names_work(servers: str, producer: Producer, admin: Admin) -> None:
    for name in ("a" * 249, "...", "-", "_", "A.b-C_9"):
        admin.create_topic(name)
        producer.send(name, b"v").result(10)
        assert stored(servers, name) == [b"v"]
        refused(lambda name=name: admin.create_topic(name), TopicExistsError)


@pytest.mark.parametrize("partitions", [0, -1, 10_001, 2**70, "3", 1.5, True, None])
def test_bad_partition_counts_are_refused(admin: Admin, partitions: Any) -> None:
    refused(lambda: admin.create_topic("counted", partitions), InvalidRequestError)
    assert "counted" not in admin.list_topics()


# Records

BAD_RECORDS: list[tuple[dict[str, Any], type[RequestError]]] = [
    ({"value": "text"}, InvalidRequestError),
    ({"value": 1}, InvalidRequestError),
    ({"value": [b"v"]}, InvalidRequestError),
    ({"key": "text"}, InvalidRequestError),
    ({"key": 1}, InvalidRequestError),
    ({"partition": "0"}, InvalidRequestError),
    ({"partition": 0.0}, InvalidRequestError),
    ({"partition": True}, InvalidRequestError),
    ({"partition": -1}, UnknownPartitionError),
    ({"partition": 1}, UnknownPartitionError),
    ({"timestamp": "now"}, InvalidRequestError),
    ({"timestamp": 1.5}, InvalidRequestError),
    ({"timestamp": True}, InvalidRequestError),
    ({"timestamp": 2**63}, InvalidRequestError),
    ({"timestamp": -(2**63) - 1}, InvalidRequestError),
    ({"headers": 1}, InvalidRequestError),
    ({"headers": "text"}, InvalidRequestError),
    ({"headers": ["ab"]}, InvalidRequestError),
    ({"headers": [("a", b"1", b"2")]}, InvalidRequestError),
    ({"headers": {"a": "text"}}, InvalidRequestError),
    ({"headers": {"a": None}}, InvalidRequestError),
    ({"headers": {b"a": b"1"}}, InvalidRequestError),
    ({"headers": {"\ud800": b"1"}}, InvalidRequestError),
    ({"headers": 0}, InvalidRequestError),
    ({"value": b"x" * (MESSAGE_BYTES_MAX + 1)}, MessageTooLargeError),
    ({"key": b"x" * (MESSAGE_BYTES_MAX + 1)}, MessageTooLargeError),
    ({"value": b"x" * MESSAGE_BYTES_MAX, "key": b"k"}, MessageTooLargeError),
    ({"headers": {"h": b"x" * (MESSAGE_BYTES_MAX + 1)}}, MessageTooLargeError),
    ({"headers": {"h" * (MESSAGE_BYTES_MAX + 1): b""}}, MessageTooLargeError),
]


@pytest.mark.parametrize(("fields", "error"), BAD_RECORDS, ids=named)
def test_bad_record_is_refused_and_the_next_is_stored(
    servers: str, producer: Producer, topic: str, fields: dict[str, Any], error: type[RequestError]
) -> None:
    refused(lambda: producer.send(topic, **({"value": b"v"} | fields)), error)
    producer.flush(timeout=5)
    producer.send(topic, b"good").result(10)
    assert stored(servers, topic) == [b"good"]


def test_too_large_says_how_large_and_what_is_allowed(producer: Producer, topic: str) -> None:
    error = refused(lambda: producer.send(topic, b"x" * (2 * MIB)), MessageTooLargeError)
    assert error.facts == {"size": 2 * MIB, "limit": MESSAGE_BYTES_MAX}


HEADERS = pa.map_(pa.string(), pa.binary())
BAD_LISTS: list[tuple[Any, type[RequestError]]] = [
    ("text", InvalidRequestError),
    (b"bytes", InvalidRequestError),
    (5, InvalidRequestError),
    (None, InvalidRequestError),
    ([b"a", "text"], InvalidRequestError),
    ([b"a", 1], InvalidRequestError),
    ([b"a", [b"b"]], InvalidRequestError),
    ([b"a", b"x" * (MESSAGE_BYTES_MAX + 1)], MessageTooLargeError),
    (pa.table({"other": [b"a"]}), InvalidRequestError),
    (pa.table({"value": [b"a"], "other": [b"a"]}), InvalidRequestError),
    (pa.table({"value": [[1, 2]]}), InvalidRequestError),
    (pa.table({"value": [b"a"], "timestamp": ["yesterday"]}), InvalidRequestError),
    (pa.table({"value": [b"a"], "headers": [1]}), InvalidRequestError),
    (pa.table({"value": [b"x" * (MESSAGE_BYTES_MAX + 1)]}), MessageTooLargeError),
    (
        pa.table({"value": [b"a"], "headers": pa.array([[("h", b"x" * (BATCH_BYTES_MAX + 2 * MIB))]], HEADERS)}),
        MessageTooLargeError,
    ),
    (
        pa.table({"value": [b"a"] * 3, "headers": pa.array([None, [("h", b"x" * (2 * MIB))], None], HEADERS)}),
        MessageTooLargeError,
    ),
]


@pytest.mark.parametrize(("records", "error"), BAD_LISTS, ids=named)
def test_bad_list_is_refused_as_a_whole(
    servers: str, producer: Producer, topic: str, records: Any, error: type[RequestError]
) -> None:
    refused(lambda: producer.send_many(topic, records), error)
    producer.send_many(topic, [b"good"]).result(10)
    assert stored(servers, topic) == [b"good"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"keys": [b"k"]},
        {"keys": ["a", "b"]},
        {"keys": [1, 2]},
        {"keys": 5},
        {"partition": "0"},
        {"partition": 9},
    ],
    ids=named,
)
def test_bad_arguments_of_a_list_are_refused(
    servers: str, producer: Producer, topic: str, arguments: dict[str, Any]
) -> None:
    refused(lambda: producer.send_many(topic, [b"a", b"b"], **arguments), RequestError)
    refused(lambda: producer.send_many(topic, pa.table({"value": [b"a"]}), keys=[b"k"]), InvalidRequestError)
    producer.send_many(topic, [b"good"]).result(10)
    assert stored(servers, topic) == [b"good"]


# Consumers


@pytest.mark.parametrize(
    "settings",
    [
        {"topics": "logs"},
        {"topics": b"logs"},
        {"topics": []},
        {"topics": 5},
        {"topics": None},
        {"topics": ["logs", ""]},
        {"start": "middle"},
        {"start": -1},
        {"start": 1.5},
        {"start": True},
        {"start": None},
        {"group": ""},
        {"group": "g" * 256},
        {"group": 7},
        {"group": b"g"},
        {"partitions": {"other": [0]}},
        {"partitions": [0]},
    ],
    ids=named,
)
def test_impossible_consumer_settings_are_refused(servers: str, settings: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"topics": ["logs"]} | settings
    refused(lambda: Consumer(servers, arguments.pop("topics"), **arguments), RequestError)


@pytest.mark.parametrize("partitions", [[1], [-1], ["0"], [None], [True]], ids=named)
def test_partition_that_the_topic_does_not_have_is_refused(servers: str, topic: str, partitions: list[Any]) -> None:
    with Consumer(servers, [topic], partitions={topic: partitions}) as consumer:
        refused(lambda: consumer.poll(timeout=0), RequestError)


def test_wrong_arguments_leave_a_consumer_as_it_was(servers: str, topic: str) -> None:
    fill(servers, topic, 20)
    with Consumer(servers, [topic], group="g") as consumer:
        poll_numbers(consumer, 5)
        wrong: Any
        for wrong in ("1", 1.0, None, b"1", True, [1]):
            refused(lambda wrong=wrong: consumer.seek(topic, 0, wrong), InvalidRequestError)
            refused(lambda wrong=wrong: consumer.seek(topic, wrong, 0), RequestError)
            refused(lambda wrong=wrong: consumer.seek_to_time(topic, wrong, 0), RequestError)
            refused(lambda wrong=wrong: consumer.committed(topic, wrong), RequestError)
            refused(lambda wrong=wrong: consumer.seek(wrong, 0, 0), RequestError)
        for wrong in (0, -1, "5", 2.5, None, True):
            refused(lambda wrong=wrong: consumer.poll(wrong), InvalidRequestError)
        refused(lambda: consumer.seek(topic, 1, 0), UnknownPartitionError)
        refused(lambda: consumer.seek("other", 0, 0), UnknownPartitionError)
        refused(lambda: consumer.committed(topic, 1), UnknownPartitionError)
        refused(lambda: consumer.committed("nowhere", 0), UnknownTopicError)
        assert poll_numbers(consumer, 15) == list(range(5, 20))


def test_longest_and_oddest_group_names_work(servers: str, topic: str) -> None:
    fill(servers, topic, 3)
    for group in ("g" * 255, "ü" * 255, "../g", " ", "a\x00b", "🐍"):
        with Consumer(servers, [topic], group=group, start="committed") as consumer:
            refused(consumer.poll, NoCommittedPositionError)
        with Consumer(servers, [topic], group=group) as consumer:
            poll_numbers(consumer, 2)
            consumer.commit()
            assert consumer.committed(topic, 0) == 2


# A batch that no reader can open


def store_unreadable(servers: str, topic: str) -> None:
    """What another client could do: metadata that is right, and value offsets that point nowhere."""
    batch = bytearray(encode_batch(batch_from_lists([1], None, [b"abcdefgh"] * 4, None)))
    at = batch.index(b"abcdefgh" * 4)
    batch[at - 24 : at] = b"\xff" * 24
    payload = bytes(batch)

    async def main() -> None:
        connection = await open_connection(servers, "test", timeout_s=5)
        request = Produce(topic, 0, 4, 1, 1, crc32c(payload), SCHEMA_ID_V1)
        await connection.call(request, ProduceReply, (payload,), timeout_s=5)
        connection.close()

    asyncio.run(main())


def test_batch_that_cannot_be_read_stops_its_reader_until_it_seeks_past(servers: str, topic: str) -> None:
    fill(servers, topic, 10)
    store_unreadable(servers, topic)
    fill(servers, topic, 10, first=10)
    for _ in range(2):
        with Consumer(servers, [topic]) as consumer:
            assert poll_numbers(consumer, 10) == list(range(10))
            for ask in (consumer.poll, consumer.poll_arrow, lambda: next(iter(consumer)), consumer.poll):
                with pytest.raises(CorruptLogError):
                    ask()
                assert consumer.position(topic, 0) == 10, "never past what was not handed out"
            consumer.seek(topic, 0, 14)
            assert poll_numbers(consumer, 10) == list(range(10, 20))
    with Consumer(servers, [topic]) as consumer:
        table = consumer.poll_arrow(timeout=10)
        assert table["offset"].to_pylist() == list(range(table.num_rows))
        assert table.num_rows <= 10
