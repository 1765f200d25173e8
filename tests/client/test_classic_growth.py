"""A topic gets more partitions while classic clients use it: both notice it by themselves, and nothing is doubled."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest

from quiver import Admin
from quiver.classic import MyConsumer, MyConsumerError, MyProducer, MyProducerError, NoNewMessageError
from quiver.client import classic_base
from quiver.wire.partitioning import partition_of_key
from tests.client.http_proxy import HttpProxy, Loss
from tests.system.kit import Node, read_all, until

REFRESH_S = 0.3
PARTITIONS, PRODUCE, CONSUME = "/topics/partitions", "/producer/produce", "/consumer/consume"
MOVES = "key-1"  # a key that is elsewhere when there are two partitions

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
def topic(node: Node) -> str:
    """A new one of one partition."""
    name = f"growing-{next(_numbers)}"
    with Admin(node.address) as admin:
        admin.create_topic(name)
    return name


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classic_base, "PARTITIONS_REFRESH_S", REFRESH_S)


def grow(node: Node, topic: str, partitions: int = 2) -> None:
    with Admin(node.address) as admin:
        admin.add_partitions(topic, partitions)


def dequeued(consumer: MyConsumer, topic: str) -> str | None:
    try:
        return consumer.Dequeue(topic)
    except NoNewMessageError:
        return None


def test_consumer_finds_messages_of_a_new_partition(node: Node, topic: str) -> None:
    with MyProducer(node.http) as producer, MyConsumer(node.http) as consumer:
        consumer.RegisterConsumer(topic)
        producer.RegisterProducer(topic)
        assert dequeued(consumer, topic) is None
        grow(node, topic)
        producer.Enqueue(topic, "over there", partition=1)
        assert consumer.Size(topic) == 1
        began_s = time.monotonic()
        assert until(lambda: dequeued(consumer, topic)) == "over there"
        assert time.monotonic() - began_s < classic_base.PARTITIONS_REFRESH_S + 1
        assert consumer.Size(topic) == 0 and dequeued(consumer, topic) is None


def test_new_partition_is_read_while_the_old_one_is_never_empty(node: Node, topic: str, quick: None) -> None:
    with MyProducer(node.http) as producer, MyConsumer(node.http) as consumer:
        consumer.RegisterConsumer(topic)
        producer.RegisterProducer(topic)
        grow(node, topic)
        producer.Enqueue(topic, "new", partition=1)
        deadline_s = time.monotonic() + REFRESH_S + 5
        seen: list[str] = []
        while "new" not in seen and time.monotonic() < deadline_s:
            producer.Enqueue(topic, "old", partition=0)
            producer.Enqueue(topic, "old", partition=0)
            seen.append(consumer.Dequeue(topic))
        assert seen.count("new") == 1


def test_idle_polls_cost_one_look_in_a_while(proxy: HttpProxy, topic: str, quick: None) -> None:
    with MyConsumer(proxy.url) as consumer:
        consumer.RegisterConsumer(topic)
        looks, began_s = proxy.count(PARTITIONS), time.monotonic()
        while time.monotonic() - began_s < 3.5 * REFRESH_S:
            assert dequeued(consumer, topic) is None
        assert 1 <= proxy.count(PARTITIONS) - looks <= 4
        assert proxy.count(CONSUME) > 2 * (proxy.count(PARTITIONS) - looks)


def test_consumer_of_one_partition_looks_for_no_others(proxy: HttpProxy, node: Node, topic: str, quick: None) -> None:
    with MyProducer(node.http) as producer, MyConsumer(proxy.url) as consumer:
        consumer.RegisterConsumer(topic, 0)
        producer.RegisterProducer(topic)
        grow(node, topic)
        producer.Enqueue(topic, "x", partition=1)
        time.sleep(1.5 * REFRESH_S)
        assert dequeued(consumer, topic) is None
        assert proxy.count(PARTITIONS) == 0


def test_look_that_fails_loses_nothing(proxy: HttpProxy, node: Node, topic: str, quick: None) -> None:
    with MyProducer(node.http) as producer, MyConsumer(proxy.url, timeout=0.2) as consumer:
        consumer.RegisterConsumer(topic)
        producer.RegisterProducer(topic)
        producer.Enqueue(topic, "kept")
        time.sleep(1.1 * REFRESH_S)
        proxy.lose(Loss.REQUEST, PARTITIONS, times=100)
        with pytest.raises(MyConsumerError):
            consumer.Dequeue(topic)
        proxy.lose_no_more()
        assert consumer.Dequeue(topic) == "kept"


def test_producer_spreads_keys_over_new_partitions(node: Node, topic: str, quick: None) -> None:
    assert partition_of_key(MOVES.encode(), 2) == 1
    with MyProducer(node.http) as producer:
        producer.RegisterProducer(topic)
        assert producer.Enqueue(topic, "a", key=MOVES).partition == 0
        grow(node, topic)
        until(lambda: producer.Enqueue(topic, "b", key=MOVES).partition == 1, 5)
        assert {producer.Enqueue(topic, "c", partition=0).partition for _ in range(3)} == {0}


def test_messages_without_a_key_stay_where_they_are(node: Node, topic: str, quick: None) -> None:
    client = next(name for name in map("client-{}".format, itertools.count()) if partition_of_key(name.encode(), 2))
    with MyProducer(node.http, client) as producer:
        producer.RegisterProducer(topic)
        assert producer.Enqueue(topic, "first").partition == 0
        grow(node, topic)
        time.sleep(1.5 * REFRESH_S)
        producer.Enqueue(topic, "keyed", key=MOVES)  # it knows by now
        assert producer.Enqueue(topic, "second").partition == 0


@pytest.mark.parametrize("register_again", [False, True])
def test_retry_after_growth_meets_its_first_try(
    proxy: HttpProxy, node: Node, topic: str, quick: None, register_again: bool
) -> None:
    with MyProducer(proxy.url, timeout=0.3) as producer:
        producer.RegisterProducer(topic)
        proxy.lose(Loss.REPLY, PRODUCE, times=100)
        with pytest.raises(MyProducerError, match="may or may not be stored"):
            producer.Enqueue(topic, "once", key=MOVES)
        proxy.lose_no_more()
        grow(node, topic)
        time.sleep(1.5 * REFRESH_S)
        if register_again:
            producer.RegisterProducer(topic)
        assert producer.Enqueue(topic, "next", key=MOVES).partition == 1
        assert producer.Enqueue(topic, "once", key=MOVES).partition == 0
        assert producer.Enqueue(topic, "once", key=MOVES).partition == 1  # another message, of the same words
    values = sorted((record.partition, record.value) for record in read_all(node.address, topic))
    assert values == [(0, b"once"), (1, b"next"), (1, b"once")]


def test_topic_made_again_with_fewer_partitions_is_used_as_it_is(node: Node, topic: str, quick: None) -> None:
    with Admin(node.address) as admin, MyProducer(node.http) as producer:
        admin.add_partitions(topic, 8)
        producer.RegisterProducer(topic)
        producer.Enqueue(topic, "a", key=MOVES)
        admin.delete_topic(topic)
        admin.create_topic(topic)
        producer.RegisterProducer(topic)
        assert producer.Enqueue(topic, "b", key=MOVES).partition == 0
        assert producer.Enqueue(topic, "c").partition == 0
