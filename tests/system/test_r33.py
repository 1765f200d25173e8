"""Five producers, three consumers, three topics, and a node that is killed in the middle; one producer, one consumer.

Producers push the lines of their log files while consumers consume, through the classic clients over HTTP and through
the SDK. At the end messages produced are messages consumed, in the same order for every consumer of a topic.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from quiver import Admin, Consumer, Producer, Record, RecordMetadata
from quiver.classic import MyConsumer, MyProducer, NoNewMessageError
from quiver.testing.history import History
from tests.system.cluster_kit import SupervisedCluster
from tests.system.kit import Node

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]

# producers and consumers by topic
TOPICS = {
    "T-1": (["P1", "P2", "P3"], ["C1", "C2", "C3"]),
    "T-2": (["P1", "P4", "P5"], ["C1"]),
    "T-3": (["P1", "P2"], ["C1", "C2", "C3"]),
}
PRODUCERS = ["P1", "P2", "P3", "P4", "P5"]
CONSUMERS = ["C1", "C2", "C3"]
LINES = 300
KILLS = 2
WAIT_S = 120.0
SEED = 33


def topics_of(name: str) -> list[str]:
    return [topic for topic, (producers, consumers) in TOPICS.items() if name in producers + consumers]


def write_log_files(directory: Path) -> dict[str, Path]:
    """A log file for each producer; every line is different."""
    dice = random.Random(SEED)
    files = {}
    for producer in PRODUCERS:
        lines = [
            f"2026-11-15T20:{number // 60:02d}:{number % 60:02d} {dice.choice(['DEBUG', 'INFO', 'WARN', 'ERROR'])} "
            f"{producer} request {number} took {dice.randrange(10_000)} ms {'x' * dice.randrange(200)}"
            for number in range(LINES)
        ]
        files[producer] = directory / f"{producer}.log"
        files[producer].write_text("\n".join(lines) + "\n")
    return files


# -- the two doors ---------------------------------------------------------------------------------------------------

Send = Callable[[str, str], RecordMetadata]
Poll = Callable[[], list[Record]]


class HttpDoor:
    def __init__(self, cluster: SupervisedCluster) -> None:
        self._url = cluster.http

    def producer(self, name: str) -> tuple[MyProducer, Send]:
        client = MyProducer(self._url, client=name)
        for topic in topics_of(name):
            client.RegisterProducer(topic)
        return client, client.Enqueue

    def consumer(self, name: str) -> tuple[MyConsumer, Poll]:
        client = MyConsumer(self._url)
        for topic in topics_of(name):
            client.RegisterConsumer(topic)

        def poll() -> list[Record]:
            found = []
            for topic in topics_of(name):
                try:
                    message = client.Dequeue(topic)
                except NoNewMessageError:
                    continue
                found.append(Record(topic, message.partition_id, message.offset, 0, None, message.encode()))
            return found

        return client, poll


class SdkDoor:
    def __init__(self, cluster: SupervisedCluster) -> None:
        self._servers = cluster.servers

    def producer(self, name: str) -> tuple[Producer, Send]:
        client = Producer(self._servers)
        return client, lambda topic, line: client.send(topic, line.encode()).result(WAIT_S)

    def consumer(self, name: str) -> tuple[Consumer, Poll]:
        client = Consumer(self._servers, topics_of(name), group=name, start="earliest")

        def poll() -> list[Record]:
            found = client.poll(20, timeout=0.02)
            if found:
                client.commit()
            return found

        return client, poll


# -- the run ---------------------------------------------------------------------------------------------------------


class Run:
    """The state that producers, consumers and the killer share. One History for each topic: a line goes to several."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.files = files
        self.histories = {topic: History() for topic in TOPICS}
        self.seen: dict[tuple[str, str], list[Record]] = {}  # by topic and consumer
        self.killed = [threading.Event() for _ in range(KILLS)]
        self.failed = threading.Event()
        self._lock = threading.Lock()
        self.produced_count = 0
        self.consumed_count = 0
        self.to_produce_count = LINES * sum(len(producers) for producers, _ in TOPICS.values())
        self.to_consume_count = LINES * sum(len(names[0]) * len(names[1]) for names in TOPICS.values())

    def produce(self, name: str, send: Send) -> None:
        logs = {topic: self.histories[topic].producer(name) for topic in topics_of(name)}
        for number, line in enumerate(self.files[name].read_text().splitlines()):
            self._gate(number)
            for topic, log in logs.items():
                log.sent(line.encode())
                log.acknowledged(line.encode(), send(topic, line))
                with self._lock:
                    self.produced_count += 1

    def _gate(self, number: int) -> None:
        """Nobody is done before the kill: the k-th part of a file waits until the k-th kill was sent."""
        part = number * (KILLS + 1) // LINES
        for killed in self.killed[:part]:
            deadline_s = time.monotonic() + WAIT_S
            while not killed.wait(0.1):
                assert not self.failed.is_set() and time.monotonic() < deadline_s, "there was no kill"

    def consume(self, name: str, poll: Poll) -> None:
        readers = {topic: self.histories[topic].reader(name) for topic in topics_of(name)}
        seen = {topic: self.seen.setdefault((topic, name), []) for topic in topics_of(name)}
        expected = {topic: LINES * len(TOPICS[topic][0]) for topic in topics_of(name)}
        deadline_s = time.monotonic() + WAIT_S
        while True:
            is_complete = all(len(seen[topic]) >= expected[topic] for topic in seen)
            found = poll()
            if is_complete and not found:
                return  # and nothing came behind the last one
            assert not self.failed.is_set(), "another actor failed"
            assert time.monotonic() < deadline_s, f"{name} has {[len(found) for found in seen.values()]} messages"
            for record in found:
                readers[record.topic].saw(record)
                seen[record.topic].append(record)
            with self._lock:
                self.consumed_count += len(found)
            if not found:
                time.sleep(0.005)

    def kill(self, cluster: SupervisedCluster) -> None:
        for number, killed in enumerate(self.killed, start=1):
            wanted = self.to_produce_count * (number - 0.3) / (KILLS + 1)
            deadline_s = time.monotonic() + WAIT_S
            while self.produced_count < wanted:
                assert not self.failed.is_set() and time.monotonic() < deadline_s, "too little was produced"
                time.sleep(0.002)
            cluster.kill_node()
            assert 0 < self.produced_count < self.to_produce_count
            assert 0 < self.consumed_count < self.to_consume_count
            killed.set()
            cluster.until_back()

    def watch(self, future: Future[None]) -> None:
        if future.exception() is not None:
            self.failed.set()


def run_all(run: Run, cluster: SupervisedCluster, doors: dict[str, HttpDoor | SdkDoor]) -> None:
    clients = []
    try:
        work: list[Callable[[], None]] = []
        for name in PRODUCERS:
            producer, send = doors[name].producer(name)
            clients.append(producer)
            work.append(lambda name=name, send=send: run.produce(name, send))
        for name in CONSUMERS:
            consumer, poll = doors[name].consumer(name)
            clients.append(consumer)
            work.append(lambda name=name, poll=poll: run.consume(name, poll))
        work.append(lambda: run.kill(cluster))
        with ThreadPoolExecutor(len(work)) as threads:
            futures = [threads.submit(part) for part in work]
            for future in futures:
                future.add_done_callback(run.watch)
        for future in futures:
            future.result()
    finally:
        for client in clients:
            client.close()


@pytest.mark.parametrize(
    ("over_http", "partitions"),
    [
        pytest.param(["P1", "P3", "P5", "C1", "C3"], 1, id="both-doors"),
        pytest.param(PRODUCERS + CONSUMERS, 1, id="http"),
        pytest.param(["P2", "P4", "C1", "C2"], 3, id="both-doors-3-partitions"),
    ],
)
def test_produced_is_consumed_in_one_order_though_the_node_is_killed(
    tmp_path: Path, over_http: list[str], partitions: int
) -> None:
    run = Run(write_log_files(tmp_path))
    with SupervisedCluster(tmp_path) as cluster:
        with Admin(cluster.servers) as admin:
            for topic in TOPICS:
                admin.create_topic(topic, partitions)
        http, sdk = HttpDoor(cluster), SdkDoor(cluster)
        run_all(run, cluster, {name: http if name in over_http else sdk for name in PRODUCERS + CONSUMERS})
        assert len(set(cluster.pids)) == KILLS + 1
    for topic, (producers, consumers) in TOPICS.items():
        assert [str(violation) for violation in run.histories[topic].judge()] == []
        produced = sorted(line.encode() for name in producers for line in run.files[name].read_text().splitlines())
        orders = []
        for consumer in consumers:
            seen = run.seen[topic, consumer]
            assert sorted(record.value or b"" for record in seen) == produced
            # The order as the consumer saw it, by partition: with one partition it is the order of the topic.
            orders.append(
                [[record.value for record in seen if record.partition == number] for number in range(partitions)]
            )
        assert all(order == orders[0] for order in orders)


# -- one producer, one consumer --------------------------------------------------------------------------------------

MESSAGE = "2026-11-15T20:03:52 INFO DS grüße, 日本 🏹\twith a tab and a newline\n"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("node")) as made:
        yield made


@pytest.fixture
def ds(node: Node) -> Iterator[str]:
    """The topic DS, new for each test."""
    with Admin(node.address) as admin:
        admin.create_topic("DS")
        yield "DS"
        admin.delete_topic("DS")


@pytest.mark.parametrize("receiver", ["http", "sdk"])
@pytest.mark.parametrize("sender", ["http", "sdk"])
def test_message_received_is_the_message_sent(node: Node, ds: str, sender: str, receiver: str) -> None:
    if sender == "http":
        with MyProducer(node.http) as classic_producer:
            classic_producer.RegisterProducer(ds)
            classic_producer.Enqueue(ds, MESSAGE)
    else:
        with Producer(node.address) as producer:
            producer.send(ds, MESSAGE.encode()).result(30)
    if receiver == "http":
        with MyConsumer(node.http) as classic_consumer:
            classic_consumer.RegisterConsumer(ds)
            assert classic_consumer.Dequeue(ds) == MESSAGE
            assert classic_consumer.Size(ds) == 0
    else:
        with Consumer(node.address, [ds], start="earliest") as consumer:
            (record,) = consumer.poll(timeout=30)
            assert record.value == MESSAGE.encode()
