"""A connection that breaks at any step of an exchange: each message is stored once and in order all the same."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quiver import Admin, Consumer, Producer
from quiver.errors import TopicExistsError
from quiver.testing.history import DUPLICATE, History, Violation
from quiver.types import RecordMetadata
from quiver.wire.messages import CommitPosition, CreateTopic, Fetch, Produce
from tests.system.kit import Node, create_topic, read_all
from tests.system.proxy import Proxy, Step

pytestmark = pytest.mark.system

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("node")) as made:
        yield made


@pytest.fixture
def proxy(node: Node) -> Iterator[Proxy]:
    with Proxy(node.address) as made:
        yield made


@pytest.fixture
def topic(node: Node) -> str:
    return create_topic(node.address, f"cut-{next(_numbers)}")


def send_all(history: History, producer: Producer, topic: str, count: int, value_bytes: int = 20) -> None:
    """Each message a batch of its own, so that several are in flight when the connection breaks."""
    log = history.producer("p")
    values = [(b"message %d " % number).ljust(value_bytes, b".") for number in range(count)]
    futures = []
    for value in values:
        log.sent(value)
        futures.append(producer.send_many(topic, [value]))
    for value, future in zip(values, futures, strict=True):
        (where,) = future.result(30)
        log.acknowledged(value, RecordMetadata(where.topic, where.partition, where.offset))


def judged(history: History, servers: str, topic: str) -> list[Violation]:
    reader = history.reader("c")
    for record in read_all(servers, topic):
        reader.saw(record)
    return history.judge()


@pytest.mark.parametrize("step", Step)
def test_retries_store_each_message_once_and_in_order(node: Node, proxy: Proxy, topic: str, step: Step) -> None:
    history = History()
    for skip in (0, 3, 1, 7, 0, 2):
        proxy.cut(step, Produce, skip)
    with Producer(proxy.address) as producer:
        send_all(history, producer, topic, 60)
    assert proxy.cuts_left == 0
    assert proxy.connections == 7
    assert judged(history, node.address, topic) == []
    assert history.acknowledged_count == 60


@pytest.mark.parametrize("step", [Step.BEFORE_REPLY, Step.IN_REPLY])
def test_without_deduplication_the_same_cuts_store_duplicates(node: Node, proxy: Proxy, topic: str, step: Step) -> None:
    """Shows that the test above can fail: these cuts do make the client send again what is stored."""
    history = History()
    for skip in (0, 3, 1):
        proxy.cut(step, Produce, skip)
    with Producer(proxy.address, idempotent=False) as producer:
        send_all(history, producer, topic, 30)
    assert proxy.cuts_left == 0
    assert DUPLICATE in {violation.kind for violation in judged(history, node.address, topic)}


@pytest.mark.parametrize("step", Step)
def test_single_sends_survive_a_cut_of_every_second_request(node: Node, proxy: Proxy, topic: str, step: Step) -> None:
    for _ in range(5):
        proxy.cut(step, Produce, skip=1)
    with Producer(proxy.address) as producer:
        told = [producer.send(topic, b"%d" % number).result(30).offset for number in range(12)]
    assert proxy.cuts_left == 0
    assert told == list(range(12))
    assert [record.value for record in read_all(node.address, topic)] == [b"%d" % number for number in range(12)]


def send_through_kills(directory: Path, step: Step, kills: int, count: int, value_bytes: int) -> History:
    """Sends while the node is killed so often at that step, and started again; judged by the caller."""
    history = History()
    killed = threading.Event()
    with Node(directory) as node, Proxy(node.address) as proxy:
        topic = create_topic(node.address, "logs")

        def kill() -> None:
            node.kill()
            killed.set()

        def restart() -> None:
            for _ in range(kills):
                assert killed.wait(30)
                killed.clear()
                node.start()

        for _ in range(kills):
            proxy.cut(step, Produce, skip=4, before=kill)
        restarter = threading.Thread(target=restart)
        restarter.start()
        with Producer(proxy.address) as producer:
            send_all(history, producer, topic, count, value_bytes)
        restarter.join(30)
        assert proxy.cuts_left == 0
        assert history.acknowledged_count == count
        reader = history.reader("c")
        for record in read_all(node.address, topic):
            reader.saw(record)
    return history


@pytest.mark.parametrize("step", [Step.AFTER_REQUEST, Step.BEFORE_REPLY, Step.IN_REPLY])
def test_node_killed_between_send_and_acknowledgement_stores_once(tmp_path: Path, step: Step) -> None:
    assert send_through_kills(tmp_path, step, kills=3, count=40, value_bytes=20).judge() == []


def test_what_was_acknowledged_in_the_last_moment_of_a_node_is_kept(tmp_path: Path) -> None:
    """Killed by the very acknowledgement while the disk works on what came behind; large records keep it busy."""
    assert send_through_kills(tmp_path, Step.AFTER_REPLY, kills=4, count=50, value_bytes=200_000).judge() == []


def test_node_restarted_between_send_and_acknowledgement_stores_once(tmp_path: Path) -> None:
    """The node answered and went down in peace; the one that comes back must know the batch from its files."""
    history = History()
    with Node(tmp_path) as node, Proxy(node.address) as proxy:
        topic = create_topic(node.address, "logs")

        def restart() -> None:
            assert node.terminate() == 0
            node.start()

        proxy.cut(Step.BEFORE_REPLY, Produce, skip=4, before=restart)
        proxy.cut(Step.BEFORE_REPLY, Produce, skip=8, before=restart)
        with Producer(proxy.address) as producer:
            send_all(history, producer, topic, 40)
        assert proxy.cuts_left == 0
        assert judged(history, node.address, topic) == []


@pytest.mark.parametrize("step", Step)
def test_commit_of_a_position_holds_whatever_is_cut(node: Node, proxy: Proxy, topic: str, step: Step) -> None:
    with Producer(node.address) as producer:
        producer.send_many(topic, [b"%d" % number for number in range(10)]).result(30)
    with Consumer(proxy.address, [topic], group="g", start="earliest") as consumer:
        for expected in range(1, 6):
            proxy.cut(step, CommitPosition)
            (record,) = consumer.poll(1, timeout=10)
            assert record.offset == expected - 1
            consumer.commit()
            assert proxy.cuts_left == 0
            assert consumer.committed(topic, 0) == expected
    with Consumer(node.address, [topic], group="g", start="committed") as consumer:
        assert consumer.poll(1, timeout=10)[0].offset == 5


@pytest.mark.parametrize("step", Step)
def test_reading_goes_on_after_a_cut_without_loss_or_repetition(
    node: Node, proxy: Proxy, topic: str, step: Step
) -> None:
    with Producer(node.address) as producer:
        for number in range(20):
            producer.send_many(topic, [b"%d" % number] * 5).result(30)
    for skip in (0, 1, 2):
        proxy.cut(step, Fetch, skip)
    seen = []
    # A fetch of few bytes: many exchanges, so that cuts fall between, before and behind records.
    with Consumer(proxy.address, [topic], start="earliest", fetch_bytes=1) as consumer:
        while len(seen) < 100 or proxy.cuts_left:
            seen += [record.offset for record in consumer.poll(7, timeout=0.2)]
    assert seen == list(range(100))


@pytest.mark.parametrize("step", Step)
def test_topic_is_created_once_whatever_is_cut(node: Node, proxy: Proxy, step: Step) -> None:
    name = f"made-{step.name}"
    proxy.cut(step, CreateTopic)
    with Admin(proxy.address) as admin:
        assert len(admin.create_topic(name, 3).partitions) == 3
        assert proxy.cuts_left == 0
        with pytest.raises(TopicExistsError):
            admin.create_topic(name, 3)


def test_slow_replies_change_nothing_but_the_time(node: Node, proxy: Proxy, topic: str) -> None:
    history = History()
    proxy.delay_s = 0.01
    with Producer(proxy.address) as producer:
        send_all(history, producer, topic, 20)
    assert judged(history, node.address, topic) == []
