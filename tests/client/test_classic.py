"""The classic clients on a real node, straight and through a proxy that loses requests and replies."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quiver import Admin, Consumer, Producer
from quiver.classic import Message, MyConsumer, MyConsumerError, MyProducer, MyProducerError, NoNewMessageError
from quiver.client.http import HttpLink
from quiver.errors import ForkedError, InvalidRequestError, QuiverError
from quiver.types import RecordMetadata
from quiver.wire.partitioning import partition_of_key
from tests.client.http_proxy import HttpProxy, Loss
from tests.system.kit import Node, free_port, read_all, until

PRODUCE, CONSUME = "/producer/produce", "/consumer/consume"

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("node")) as made:
        yield made


@pytest.fixture
def proxy(node: Node) -> Iterator[HttpProxy]:
    with HttpProxy(node.http_port) as made:
        yield made


@pytest.fixture
def topic() -> str:
    """A name that no other test uses. There is no topic of it yet."""
    return f"classic-{next(_numbers)}"


@pytest.fixture
def producer(node: Node) -> Iterator[MyProducer]:
    with MyProducer(node.http) as made:
        yield made


@pytest.fixture
def consumer(node: Node) -> Iterator[MyConsumer]:
    with MyConsumer(node.http) as made:
        yield made


def stored(node: Node, topic: str) -> list[str]:
    return [(record.value or b"").decode() for record in read_all(node.address, topic)]


def drain(consumer: MyConsumer, topic: str, partition: int | None = None) -> list[Message]:
    found = []
    while True:
        try:
            found.append(consumer.Dequeue(topic, partition))
        except NoNewMessageError:
            return found


def texts(count: int) -> list[str]:
    return [f"message {number}" for number in range(count)]


# What the calls do


def test_a_message_goes_in_and_comes_out(producer: MyProducer, consumer: MyConsumer, topic: str) -> None:
    producer.RegisterProducer(topic)
    assert producer.Enqueue(topic, "hello") == RecordMetadata(topic, 0, 0)
    consumer.RegisterConsumer(topic)
    assert consumer.Size(topic) == 1
    message = consumer.Dequeue(topic)
    assert message == "hello"
    assert (message.topic, message.partition_id, message.offset) == (topic, 0, 0)
    assert consumer.Size(topic) == 0
    assert topic in producer.ListTopics()
    assert consumer.ListTopics() == producer.ListTopics()


def test_created_topic_has_its_partitions(producer: MyProducer, topic: str) -> None:
    assert producer.CreateTopic(topic, 3) == [0, 1, 2]
    with pytest.raises(MyProducerError, match=r"^Topic already exists$") as error:
        producer.CreateTopic(topic)
    assert error.value.facts == {"status": 400}


def test_errors_carry_what_the_server_said(producer: MyProducer, consumer: MyConsumer, topic: str) -> None:
    with pytest.raises(MyConsumerError, match=topic):
        consumer.RegisterConsumer(topic)
    assert topic not in consumer.ListTopics()
    with pytest.raises(MyProducerError, match="not allowed"):
        producer.RegisterProducer("no topic/name")
    producer.RegisterProducer(topic)
    with pytest.raises(MyProducerError, match="larger than the limit of 1048576 bytes"):
        producer.Enqueue(topic, "x" * (2**20 + 1))
    with pytest.raises(MyProducerError, match="Partition 7 does not exist"):
        producer.Enqueue(topic, "x", partition=7)
    consumer.RegisterConsumer(topic)
    with pytest.raises(MyConsumerError, match="Partition 7 does not exist"):
        consumer.Dequeue(topic, 7)
    with pytest.raises(MyConsumerError, match=f"^No new message is published to {topic}$"):
        consumer.Dequeue(topic)
    assert issubclass(MyProducerError, QuiverError) and issubclass(MyConsumerError, QuiverError)


def test_refused_message_uses_up_no_number(node: Node, producer: MyProducer, topic: str) -> None:
    producer.RegisterProducer(topic)
    producer.Enqueue(topic, "0")
    for _ in range(2):
        with pytest.raises(MyProducerError):
            producer.Enqueue(topic, "x" * (2**20 + 1))
    producer.Enqueue(topic, "1")
    assert stored(node, topic) == ["0", "1"]


def test_calls_before_registration_say_what_to_do(producer: MyProducer, consumer: MyConsumer, topic: str) -> None:
    with pytest.raises(MyProducerError, match="call RegisterProducer"):
        producer.Enqueue(topic, "x")
    for call in (consumer.Dequeue, consumer.Size):
        with pytest.raises(MyConsumerError, match="call RegisterConsumer"):
            call(topic)


def test_wrong_arguments_are_refused_without_a_request(proxy: HttpProxy, topic: str) -> None:
    with MyProducer(proxy.url) as producer, MyConsumer(proxy.url) as consumer:
        producer.RegisterProducer(topic)
        consumer.RegisterConsumer(topic)
        before = len(proxy.paths)
        wrong: list[Callable[[], Any]] = [
            lambda: producer.Enqueue(topic, b"bytes"),  # type: ignore[arg-type]
            lambda: producer.Enqueue(topic, "x", key=1),  # type: ignore[arg-type]
            lambda: producer.Enqueue(topic, "lone \ud800"),
            lambda: producer.Enqueue(topic, "x", key="\udfff"),
            lambda: producer.Enqueue(topic, "x", partition="0"),  # type: ignore[arg-type]
            lambda: consumer.Dequeue(topic, True),
            lambda: MyProducer(proxy.url, client=""),
            lambda: MyProducer(proxy.url, client=7),  # type: ignore[arg-type]
        ]
        for call in wrong:
            with pytest.raises((MyProducerError, MyConsumerError)):
                call()
        assert len(proxy.paths) == before
    for url in ("127.0.0.1:8002", "ftp://host", "http://", "http://host:x", "", None):
        with pytest.raises(InvalidRequestError, match="not an address like"):
            MyProducer(url)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", " ", "line\nline\r\n", "\x00\x1f", "grüße 日本 🏹", '{"a": "\\"}', "a+b&c=d%20#?", "é" * 2**19]
)
def test_text_comes_back_as_it_went(
    node: Node, producer: MyProducer, consumer: MyConsumer, topic: str, text: str
) -> None:
    producer.RegisterProducer(topic)
    producer.Enqueue(topic, text)
    consumer.RegisterConsumer(topic)
    assert consumer.Dequeue(topic) == text
    assert stored(node, topic) == [text]


def test_each_consumer_has_its_own_position(node: Node, producer: MyProducer, topic: str) -> None:
    producer.RegisterProducer(topic)
    for text in texts(5):
        producer.Enqueue(topic, text)
    with MyConsumer(node.http) as first, MyConsumer(node.http) as second:
        assert first.RegisterConsumer(topic) != second.RegisterConsumer(topic)
        assert drain(first, topic) == texts(5)
        assert second.Size(topic) == 5
        assert drain(second, topic) == texts(5)
        first.RegisterConsumer(topic)  # a new consumer, from the start
        assert drain(first, topic) == texts(5)


# Partitions


def test_partition_is_the_named_one_or_by_key_or_by_client(node: Node, producer: MyProducer, topic: str) -> None:
    producer.CreateTopic(topic, 5)
    producer.RegisterProducer(topic)
    assert [producer.Enqueue(topic, "n", partition=number).partition for number in range(5)] == list(range(5))
    for key in ("a", "b", "ключ", ""):
        assert producer.Enqueue(topic, "k", key=key).partition == partition_of_key(key.encode(), 5)
    mine = partition_of_key(producer.client.encode(), 5)
    assert {producer.Enqueue(topic, "c").partition for _ in range(5)} == {mine}
    keys = {record.key for record in read_all(node.address, topic) if record.value == b"k"}
    assert keys == {b"a", b"b", "ключ".encode(), b""}


def test_keys_go_where_the_sdk_sends_them(node: Node, producer: MyProducer, topic: str) -> None:
    producer.CreateTopic(topic, 4)
    producer.RegisterProducer(topic)
    with Producer(node.address) as sdk:
        for number in range(20):
            key = f"key-{number}"
            assert producer.Enqueue(topic, "x", key=key).partition == (
                sdk.send(topic, b"x", key=key.encode()).result(30).partition
            )


def test_registered_to_a_partition_both_stay_there(producer: MyProducer, consumer: MyConsumer, topic: str) -> None:
    producer.CreateTopic(topic, 3)
    producer.RegisterProducer(topic, 1)
    consumer.RegisterConsumer(topic, 1)
    assert producer.Enqueue(topic, "a", key="any").partition == 1
    assert producer.Enqueue(topic, "b", partition=1).partition == 1
    with pytest.raises(MyProducerError, match="registered to partition 1 only"):
        producer.Enqueue(topic, "c", partition=2)
    with pytest.raises(MyConsumerError, match="registered to partition 1 only"):
        consumer.Dequeue(topic, 2)
    assert drain(consumer, topic) == ["a", "b"]


def test_dequeue_takes_partitions_in_turn_and_skips_empty_ones(
    producer: MyProducer, consumer: MyConsumer, topic: str
) -> None:
    producer.CreateTopic(topic, 4)
    producer.RegisterProducer(topic)
    consumer.RegisterConsumer(topic)
    for partition, count in ((0, 3), (2, 2), (3, 1)):
        for number in range(count):
            producer.Enqueue(topic, f"{partition}-{number}", partition)
    assert consumer.Size(topic) == 6
    assert drain(consumer, topic) == ["0-0", "2-0", "3-0", "0-1", "2-1", "0-2"]
    producer.Enqueue(topic, "late", 1)
    assert drain(consumer, topic) == ["late"]


def test_named_and_unnamed_dequeue_share_one_position(producer: MyProducer, consumer: MyConsumer, topic: str) -> None:
    producer.CreateTopic(topic, 2)
    producer.RegisterProducer(topic)
    consumer.RegisterConsumer(topic)
    for number in range(4):
        producer.Enqueue(topic, str(number), 1)
    assert consumer.Dequeue(topic, 1) == "0"
    assert consumer.Dequeue(topic) == "1"
    assert consumer.Dequeue(topic, 1) == "2"
    assert drain(consumer, topic) == ["3"]


# Replies that get lost


@pytest.mark.parametrize("loss", Loss)
def test_retries_store_each_message_once_and_in_order(node: Node, proxy: HttpProxy, topic: str, loss: Loss) -> None:
    for skip in (0, 3, 1, 7):
        proxy.lose(loss, PRODUCE, skip)
    proxy.lose(loss, PRODUCE, skip=2, times=3)
    with MyProducer(proxy.url) as producer:
        producer.RegisterProducer(topic)
        told = [producer.Enqueue(topic, text).offset for text in texts(25)]
    assert proxy.left == 0
    assert told == list(range(25))
    assert stored(node, topic) == texts(25)


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("loss", Loss)
def test_retries_hand_out_each_message_once_and_in_order(
    node: Node, proxy: HttpProxy, producer: MyProducer, topic: str, loss: Loss, partitions: int
) -> None:
    producer.CreateTopic(topic, partitions)
    producer.RegisterProducer(topic)
    for number, text in enumerate(texts(24)):
        producer.Enqueue(topic, text, number % partitions)
    for skip in (0, 3, 1, 7):
        proxy.lose(loss, CONSUME, skip)
    proxy.lose(loss, CONSUME, skip=2, times=3)
    with MyConsumer(proxy.url) as consumer:
        consumer.RegisterConsumer(topic)
        assert drain(consumer, topic) == texts(24)
        assert proxy.left == 0
        assert consumer.Size(topic) == 0


def test_without_numbers_and_offsets_the_same_losses_double_and_skip(
    node: Node, proxy: HttpProxy, producer: MyProducer, consumer: MyConsumer, topic: str
) -> None:
    """Shows that the tests above can fail: these losses do make the clients send again what was carried out."""
    producer_id, consumer_id = producer.RegisterProducer(topic), consumer.RegisterConsumer(topic)
    proxy.lose(Loss.REPLY, PRODUCE)
    proxy.lose(Loss.REPLY, CONSUME)
    link = HttpLink(proxy.url, 30.0)
    for text in ("a", "b"):
        assert link.post(PRODUCE, {"topic": topic, "producer_id": producer_id, "message": text}).is_success
    assert stored(node, topic) == ["a", "a", "b"]
    first = link.get(CONSUME, {"topic": topic, "consumer_id": consumer_id})
    assert first.body["offset"] == 1
    assert first.repeated
    link.close()


@pytest.mark.parametrize("loss", [Loss.REPLY, Loss.HALF_REPLY, Loss.UNAVAILABLE])
def test_topic_and_registrations_survive_lost_replies(proxy: HttpProxy, topic: str, loss: Loss) -> None:
    for path in ("/topics", "/topics/partitions", "/producer/register", "/consumer/register", "/size"):
        proxy.lose(loss, path)
    with MyProducer(proxy.url) as producer, MyConsumer(proxy.url) as consumer:
        assert producer.CreateTopic(topic, 2) == [0, 1]
        producer.RegisterProducer(topic)
        producer.Enqueue(topic, "x")
        consumer.RegisterConsumer(topic)
        assert consumer.Size(topic) == 1
        assert proxy.left == 0
        with pytest.raises(MyProducerError, match=r"^Topic already exists$"):
            producer.CreateTopic(topic, 2)


def test_idle_connection_that_the_server_closed_is_replaced(proxy: HttpProxy, topic: str) -> None:
    with MyProducer(proxy.url) as producer:
        producer.RegisterProducer(topic)
        producer.Enqueue(topic, "0")
        assert proxy.connections == 1
        proxy.hang_up()
        assert producer.Enqueue(topic, "1").offset == 1
        assert proxy.connections == 2
        proxy.hang_up()
        with pytest.raises(MyProducerError, match=r"^Topic already exists$"):  # not taken for a lost reply
            producer.CreateTopic(topic)
        assert proxy.count("/topics") == 1


def test_message_of_unknown_fate_is_stored_once_when_it_is_sent_again(node: Node, proxy: HttpProxy, topic: str) -> None:
    with MyProducer(proxy.url, timeout=1.0) as producer:
        producer.RegisterProducer(topic)
        producer.Enqueue(topic, "a")
        proxy.lose(Loss.REPLY, PRODUCE, times=50)
        with pytest.raises(MyProducerError, match="may or may not be stored") as error:
            producer.Enqueue(topic, "b")
        assert error.value.facts == {"status": 0}
        proxy.lose_no_more()
        assert producer.Enqueue(topic, "b").offset == 1
        assert producer.Enqueue(topic, "b").offset == 2  # one more of the same is one more
    assert stored(node, topic) == ["a", "b", "b"]


@pytest.mark.parametrize("loss", [Loss.REPLY, Loss.REQUEST])
def test_message_of_unknown_fate_is_settled_before_another_is_stored(
    node: Node, proxy: HttpProxy, topic: str, loss: Loss
) -> None:
    with MyProducer(proxy.url, timeout=1.0) as producer:
        producer.RegisterProducer(topic)
        proxy.lose(loss, PRODUCE, times=50)
        for text in ("b", "c"):
            with pytest.raises(MyProducerError, match="may or may not be stored"):
                producer.Enqueue(topic, text)
        proxy.lose_no_more()
        assert producer.Enqueue(topic, "d").offset == 1
    assert stored(node, topic) == ["b", "d"]


def test_consumer_that_gave_up_skips_nothing(node: Node, proxy: HttpProxy, producer: MyProducer, topic: str) -> None:
    producer.CreateTopic(topic, 2)
    producer.RegisterProducer(topic)
    for number, text in enumerate(texts(6)):
        producer.Enqueue(topic, text, number % 2)
    with MyConsumer(proxy.url, timeout=1.0) as consumer:
        consumer.RegisterConsumer(topic)
        assert consumer.Dequeue(topic) == "message 0"
        proxy.lose(Loss.REPLY, CONSUME, times=50)
        for _ in range(3):
            with pytest.raises(MyConsumerError, match="does not answer"):
                consumer.Dequeue(topic)
        proxy.lose_no_more()
        found = drain(consumer, topic)
    assert sorted(found) == texts(6)[1:]
    assert [text for text in found if text.partition_id == 0] == ["message 2", "message 4"]


def test_lost_reply_at_the_start_of_a_trimmed_log_comes_again(tmp_path: Path, topic: str) -> None:
    short = {
        "QUIVER_LOG_SEGMENT_BYTES_MAX": "4000",
        "QUIVER_LOG_RETENTION_BYTES": "8000",
        "QUIVER_RETENTION_CHECK_S": "0.05",
    }
    with Node(tmp_path, short) as node, Admin(node.address) as admin, MyProducer(node.http) as producer:
        producer.RegisterProducer(topic)
        for text in texts(60):
            producer.Enqueue(topic, text)
        until(lambda: admin.offsets(topic)[0][0])
    # Without retention: the log must not be trimmed further while it is read.
    with Node(tmp_path) as node, HttpProxy(node.http_port) as proxy, MyConsumer(proxy.url) as consumer:
        with Admin(node.address) as admin:
            start = admin.offsets(topic)[0][0]
        consumer.RegisterConsumer(topic)
        proxy.lose(Loss.REPLY, CONSUME)
        assert drain(consumer, topic) == texts(60)[start:]


# A node that is away


def test_node_that_is_away_is_waited_for(tmp_path: Path, topic: str) -> None:
    with Node(tmp_path) as node, MyProducer(node.http) as producer, MyConsumer(node.http) as consumer:
        producer.RegisterProducer(topic)
        consumer.RegisterConsumer(topic)
        producer.Enqueue(topic, "a")
        node.kill()
        restarter = threading.Timer(0.3, node.start)
        restarter.start()
        assert producer.Enqueue(topic, "b").offset == 1
        restarter.join()
        assert drain(consumer, topic) == ["a", "b"]


def test_node_that_stays_away_is_told_after_the_time_out(topic: str) -> None:
    with MyProducer(f"http://127.0.0.1:{free_port()}", timeout=0.2) as producer:
        with pytest.raises(MyProducerError, match=r"does not answer.*refused") as error:
            producer.RegisterProducer(topic)
        assert error.value.facts == {"status": 0}


def test_message_that_was_never_sent_keeps_no_other_waiting(node: Node, proxy: HttpProxy, topic: str) -> None:
    """Nobody was there to take it: the next message may take its number at once."""
    with MyProducer(node.http, timeout=1.0) as producer:
        producer.RegisterProducer(topic)
        (server,) = producer._link._servers.values()
        port = server.port
        producer.close()
        server.port = free_port()
        with pytest.raises(MyProducerError, match="does not answer") as error:
            producer.Enqueue(topic, "nobody heard this")
        assert "may or may not" not in error.value.message
        server.port = port
        producer.Enqueue(topic, "first")
    assert stored(node, topic) == ["first"]


def test_server_that_is_not_ours_is_told_apart(node: Node) -> None:
    with MyProducer(f"{node.http}/elsewhere") as producer, pytest.raises(MyProducerError, match="no such path"):
        producer.ListTopics()


# Names of producers


def client_size(node: Node, client: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", node.http_port, timeout=30)
    try:
        connection.request("GET", f"/producer/client_size?prod_client={client}")
        count: int = json.loads(connection.getresponse().read())["count"]
        return count
    finally:
        connection.close()


def test_producer_of_a_known_name_goes_on_with_its_numbers(node: Node, topic: str) -> None:
    for round_number in range(3):
        with MyProducer(node.http, client=f"P-{topic}") as producer:
            producer.RegisterProducer(topic)
            for number in range(12):
                producer.Enqueue(topic, f"{round_number}-{number}")
    assert stored(node, topic) == [f"{round_number}-{number}" for round_number in range(3) for number in range(12)]
    assert client_size(node, f"P-{topic}") == 36


def test_producer_that_the_server_forgot_begins_anew(node: Node, producer: MyProducer, topic: str) -> None:
    producer.RegisterProducer(topic)
    for text in texts(3):
        producer.Enqueue(topic, text)
    with Admin(node.address) as admin:
        admin.delete_topic(topic)
    with pytest.raises(MyProducerError, match=topic):
        producer.Enqueue(topic, "nowhere to go")
    producer.RegisterProducer(topic)
    for text in texts(3):
        producer.Enqueue(topic, text)
    assert stored(node, topic) == texts(3)


# Threads and processes


def test_threads_share_a_producer_and_keep_their_order(node: Node, proxy: HttpProxy, topic: str) -> None:
    for _ in range(10):
        proxy.lose(Loss.REPLY, PRODUCE, skip=5)
    with MyProducer(proxy.url) as producer, ThreadPoolExecutor(6) as threads:
        producer.CreateTopic(topic, 3)
        producer.RegisterProducer(topic)

        def send(thread: int) -> None:
            for number in range(20):
                producer.Enqueue(topic, f"{thread}-{number}", partition=thread % 3)

        list(threads.map(send, range(6)))
        assert proxy.connections <= 6 + 10
    found = stored(node, topic)
    assert len(found) == 120
    for thread in range(6):
        mine = [text for text in found if text.startswith(f"{thread}-")]
        assert mine == [f"{thread}-{number}" for number in range(20)]


def test_threads_share_a_consumer_and_each_message_goes_to_one(
    node: Node, proxy: HttpProxy, producer: MyProducer, topic: str
) -> None:
    producer.CreateTopic(topic, 2)
    producer.RegisterProducer(topic)
    for number, text in enumerate(texts(60)):
        producer.Enqueue(topic, text, number % 2)
    for _ in range(6):
        proxy.lose(Loss.REPLY, CONSUME, skip=5)
    with MyConsumer(proxy.url) as consumer, ThreadPoolExecutor(4) as threads:
        consumer.RegisterConsumer(topic)
        found = [text for part in threads.map(lambda _: drain(consumer, topic), range(4)) for text in part]
    assert Counter(found) == Counter(texts(60))


def test_client_of_another_process_is_refused(
    node: Node, producer: MyProducer, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer.RegisterProducer(topic)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(ForkedError):
            producer.Enqueue(topic, "x")
    producer.Enqueue(topic, "x")


def test_closed_client_works_again(producer: MyProducer, consumer: MyConsumer, topic: str) -> None:
    producer.RegisterProducer(topic)
    producer.close()
    producer.Enqueue(topic, "x")
    consumer.RegisterConsumer(topic)
    consumer.close()
    consumer.close()
    assert consumer.Dequeue(topic) == "x"


# Both doors


def test_classic_and_sdk_meet_in_one_topic(node: Node, producer: MyProducer, consumer: MyConsumer, topic: str) -> None:
    producer.RegisterProducer(topic)
    consumer.RegisterConsumer(topic)
    with Producer(node.address) as sdk, Consumer(node.address, [topic], idle_timeout=10.0) as reader:
        producer.Enqueue(topic, "one")
        sdk.send(topic, b"two").result(30)
        producer.Enqueue(topic, "three")
        records = iter(reader)
        assert [next(records).value for _ in range(3)] == [b"one", b"two", b"three"]
    assert drain(consumer, topic) == ["one", "two", "three"]
