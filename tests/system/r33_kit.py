"""Five producers push the lines of their log files while three consumers consume, on three topics, and things happen.

At the end messages produced are messages consumed, in the same order for every consumer of a topic. The doors are the
classic clients over HTTP and the SDK.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from quiver import Admin, Consumer, Producer, Record, RecordMetadata
from quiver.classic import MyConsumer, MyProducer, NoNewMessageError
from quiver.testing.history import History

# producers and consumers by topic
TOPICS = {
    "T-1": (["P1", "P2", "P3"], ["C1", "C2", "C3"]),
    "T-2": (["P1", "P4", "P5"], ["C1"]),
    "T-3": (["P1", "P2"], ["C1", "C2", "C3"]),
}
PRODUCERS = ["P1", "P2", "P3", "P4", "P5"]
CONSUMERS = ["C1", "C2", "C3"]
LINES = 180
WAIT_S = 120.0
SEED = 33


class Disturbance(NamedTuple):
    """`strike` happens while messages flow; then they go on flowing while `recover` waits for what comes back."""

    strike: Callable[[], object]
    recover: Callable[[], object] = lambda: None


def topics_of(name: str) -> list[str]:
    return [topic for topic, (producers, consumers) in TOPICS.items() if name in producers + consumers]


def write_log_files(directory: Path, line_count: int = LINES) -> dict[str, Path]:
    """A log file for each producer; every line is different."""
    dice = random.Random(SEED)
    files = {}
    for producer in PRODUCERS:
        lines = [
            f"2026-11-15T20:{number // 60:02d}:{number % 60:02d} {dice.choice(['DEBUG', 'INFO', 'WARN', 'ERROR'])} "
            f"{producer} request {number} took {dice.randrange(10_000)} ms {'x' * dice.randrange(200)}"
            for number in range(line_count)
        ]
        files[producer] = directory / f"{producer}.log"
        files[producer].write_text("\n".join(lines) + "\n")
    return files


# -- the two doors ---------------------------------------------------------------------------------------------------

Send = Callable[[str, str], RecordMetadata]
Poll = Callable[[], list[Record]]


class HttpDoor:
    def __init__(self, urls: str | Sequence[str]) -> None:
        self._urls = urls

    def producer(self, name: str) -> tuple[MyProducer, Send]:
        client = MyProducer(self._urls, client=name, timeout=WAIT_S)
        for topic in topics_of(name):
            client.RegisterProducer(topic)
        return client, client.Enqueue

    def consumer(self, name: str) -> tuple[MyConsumer, Poll]:
        client = MyConsumer(self._urls, timeout=WAIT_S)
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
    def __init__(self, servers: str) -> None:
        self._servers = servers

    def producer(self, name: str) -> tuple[Producer, Send]:
        client = Producer(self._servers)
        return client, lambda topic, line: client.send(topic, line.encode()).result(WAIT_S)

    def consumer(self, name: str) -> tuple[Consumer, Poll]:
        # All partitions by name: what a member of a group reads again after it was away is not what is judged here.
        with Admin(self._servers) as admin:
            counts = {topic: len(admin.describe_topic(topic).partitions) for topic in topics_of(name)}
        everything = {topic: list(range(count)) for topic, count in counts.items()}
        client = Consumer(self._servers, topics_of(name), group=name, partitions=everything, start="earliest")

        def poll() -> list[Record]:
            found = client.poll(20, timeout=0.02)
            if found:
                client.commit()
            return found

        return client, poll


Doors = dict[str, HttpDoor | SdkDoor]


# -- the run ---------------------------------------------------------------------------------------------------------


class Run:
    """What producers, consumers and disturbances share. One History for each topic: a line goes to several."""

    def __init__(self, files: dict[str, Path], disturbances: Sequence[Disturbance]) -> None:
        self.files = files
        self.lines = len(files[PRODUCERS[0]].read_text().splitlines())
        self._disturbances = disturbances
        self.histories = {topic: History() for topic in TOPICS}
        self.seen: dict[tuple[str, str], list[Record]] = {}  # by topic and consumer
        self._struck = [threading.Event() for _ in disturbances]
        self.failed = threading.Event()
        self.first_error: BaseException | None = None
        self._lock = threading.Lock()
        self.produced_count = 0
        self.consumed_count = 0
        self.to_produce_count = self.lines * sum(len(producers) for producers, _ in TOPICS.values())
        self.to_consume_count = self.lines * sum(len(names[0]) * len(names[1]) for names in TOPICS.values())

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
        """Nobody is done too early: the k-th part of a file waits until the k-th disturbance has struck."""
        part = number * (len(self._struck) + 1) // self.lines
        for struck in self._struck[:part]:
            deadline_s = time.monotonic() + WAIT_S
            while not struck.wait(0.1):
                assert not self.failed.is_set() and time.monotonic() < deadline_s, "nothing happened"

    def consume(self, name: str, poll: Poll) -> None:
        readers = {topic: self.histories[topic].reader(name) for topic in topics_of(name)}
        seen = {topic: self.seen.setdefault((topic, name), []) for topic in topics_of(name)}
        expected = {topic: self.lines * len(TOPICS[topic][0]) for topic in topics_of(name)}
        deadline_s = time.monotonic() + WAIT_S * (1 + len(self._struck) / 2)
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

    def disturb(self) -> None:
        for number, (disturbance, struck) in enumerate(zip(self._disturbances, self._struck, strict=True), start=1):
            wanted = self.to_produce_count * (number - 0.3) / (len(self._struck) + 1)
            deadline_s = time.monotonic() + WAIT_S
            while self.produced_count < wanted or not self.consumed_count:
                assert not self.failed.is_set() and time.monotonic() < deadline_s, "too little was produced"
                time.sleep(0.002)
            disturbance.strike()
            assert 0 < self.produced_count < self.to_produce_count
            assert 0 < self.consumed_count < self.to_consume_count
            struck.set()
            disturbance.recover()

    def watch(self, future: Future[None]) -> None:
        if (error := future.exception()) is not None:
            self.first_error = self.first_error or error
            self.failed.set()


def create_topics(servers: str, partitions: int = 1) -> None:
    with Admin(servers) as admin:
        for topic in TOPICS:
            admin.create_topic(topic, partitions)


def run_all(run: Run, doors: Doors) -> None:
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
        work.append(run.disturb)
        with ThreadPoolExecutor(len(work)) as threads:
            futures = [threads.submit(part) for part in work]
            for future in futures:
                future.add_done_callback(run.watch)
        if run.first_error is not None:
            raise run.first_error
    finally:
        for client in clients:
            client.close()


def check(run: Run, partitions: int = 1) -> None:
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
