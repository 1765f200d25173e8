"""The first part of `make demo`: a cluster of three brokers and three managers, two of them killed under load.

Five producers, three by the SDK and two by plain HTTP, push lines to three topics while three consumers consume. A
broker that leads and the primary manager are killed in the middle. At the end each consumer has seen every line of its
topics once, and all consumers of a topic in the same order.

Rule: no producer is done before both kills: the second half of its lines waits for the first, the last quarter for the
second.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from quiver import Admin, Consumer, Producer
from quiver.classic import MyProducer
from quiver.cli.cluster_file import Cluster, read_cluster
from quiver.errors import QuiverError, UnavailableError

# producers and consumers by topic
TOPICS: Final = {
    "T-1": (("P1", "P2", "P3"), ("C1", "C2", "C3")),
    "T-2": (("P1", "P4", "P5"), ("C1",)),
    "T-3": (("P1", "P2"), ("C1", "C2", "C3")),
}
SDK_PRODUCERS: Final = ("P1", "P2", "P3")
HTTP_PRODUCERS: Final = ("P4", "P5")
CONSUMERS: Final = ("C1", "C2", "C3")
HTTP_SHARE: Final = 40  # an HTTP producer sends one line where an SDK producer sends so many
CHUNK: Final = 100
TIMEOUT_S: Final = 60.0


def topics_of(name: str) -> list[str]:
    return [topic for topic, (producers, consumers) in TOPICS.items() if name in producers + consumers]


def lines_of(producer: str, lines: int) -> list[bytes]:
    count = lines if producer in SDK_PRODUCERS else max(4, lines // HTTP_SHARE)
    return [f"{producer} line {number}".encode() for number in range(count)]


def verdict(produced: list[bytes], seen: dict[str, list[bytes]]) -> tuple[int, int, bool]:
    """Lost and doubled, in all consumers together; whether all saw the same order."""
    wanted = Counter(produced)
    lost = sum((wanted - Counter(lines)).total() for lines in seen.values())
    doubled = sum((Counter(lines) - wanted).total() for lines in seen.values())
    orders = list(seen.values())
    return lost, doubled, all(order == orders[0] for order in orders)


class R33:
    """`lines` are those of one SDK producer, for each of its topics."""

    def __init__(self, data_dir: Path, cluster: Cluster, lines: int, progress: Progress) -> None:
        self._data_dir = data_dir
        self._cluster = cluster
        self._servers = ",".join(broker.address for broker in cluster.brokers)
        self._lines = lines
        self._progress = progress
        self._kills = (threading.Event(), threading.Event())
        self._over = threading.Event()  # somebody failed: nobody need go on
        self.produced = {
            topic: [line for name in producers for line in lines_of(name, lines)]
            for topic, (producers, _) in TOPICS.items()
        }
        self.seen: dict[str, dict[str, list[bytes]]] = {
            topic: {name: [] for name in consumers} for topic, (_, consumers) in TOPICS.items()
        }

    def run(self) -> None:
        with Admin(self._servers) as admin:
            for topic in TOPICS:
                admin.create_topic(topic)
        to_consume = sum(len(self.produced[topic]) * len(names[1]) for topic, names in TOPICS.items())
        sent = self._progress.add_task("R33: producing", total=sum(map(len, self.produced.values())))
        read = self._progress.add_task("R33: consuming", total=to_consume)
        work: list[tuple[Callable[..., None], str, int]] = [
            *((self._produce_by_sdk, name, sent) for name in SDK_PRODUCERS),
            *((self._produce_by_http, name, sent) for name in HTTP_PRODUCERS),
            *((self._consume, name, read) for name in CONSUMERS),
            (self._kill, "", sent),
        ]
        with ThreadPoolExecutor(len(work)) as threads:
            futures = [threads.submit(job, name, task) for job, name, task in work]
            failed = [future for future in wait(futures, return_when=FIRST_EXCEPTION).done if future.exception()]
            if failed:
                self._over.set()
        for future in failed:
            future.result()

    def show(self) -> bool:
        """The result for people; True when what was consumed is what was produced."""
        table = Table(title="Three brokers, three managers, two of them killed: produced and consumed")
        for column in ("topic", "produced", "consumed by", "lost", "doubled", "order"):
            table.add_column(column)
        right = True
        for topic, seen in self.seen.items():
            lost, doubled, same = verdict(self.produced[topic], seen)
            right = right and lost == doubled == 0 and same
            by = ", ".join(f"{name}: {len(lines):,}" for name, lines in seen.items())
            order = "[green]the same[/]" if same else "[red]DIFFERENT[/]"
            table.add_row(topic, f"{len(self.produced[topic]):,}", by, str(lost), str(doubled), order)
        Console().print(table)
        return right

    # -- who works -----------------------------------------------------------------------------------------------

    def _gate(self, done: int, total: int) -> None:
        for killed, share in zip(self._kills, (2, 4), strict=True):
            if done >= total - total // share and not self._until(killed.is_set):
                raise QuiverError("there was no kill")

    def _until(self, condition: Callable[[], object]) -> bool:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            if self._over.is_set() or time.monotonic() > deadline_s:
                return False
            time.sleep(0.01)
        return True

    def _produce_by_sdk(self, name: str, task: int) -> None:
        lines = lines_of(name, self._lines)
        with Producer(self._servers) as producer:
            for first in range(0, len(lines), CHUNK):
                self._gate(first, len(lines))
                chunk = lines[first : first + CHUNK]
                for future in [producer.send_many(topic, chunk) for topic in topics_of(name)]:
                    future.result()
                    self._advance(task, len(chunk))

    def _produce_by_http(self, name: str, task: int) -> None:
        lines = lines_of(name, self._lines)
        with MyProducer(self._cluster.http) as producer:
            for topic in topics_of(name):
                producer.RegisterProducer(topic)
            for number, line in enumerate(lines):
                self._gate(number, len(lines))
                for topic in topics_of(name):
                    producer.Enqueue(topic, line.decode())
                    self._advance(task, 1)

    def _consume(self, name: str, task: int) -> None:
        topics = topics_of(name)
        left = sum(len(self.produced[topic]) for topic in topics)
        deadline_s = time.monotonic() + 2 * TIMEOUT_S
        with Consumer(self._servers, topics, start="earliest") as consumer:
            # One poll more than needed: what was doubled would come behind.
            while (found := consumer.poll(5_000, timeout=0.3)) or left > 0:
                if self._over.is_set() or time.monotonic() > deadline_s:
                    raise QuiverError(f"{name} waits for {left:,} lines in vain")
                for record in found:
                    self.seen[record.topic][name].append(record.value or b"")
                left -= len(found)
                self._advance(task, len(found))

    def _advance(self, task: int, count: int) -> None:
        self._progress.advance(self._progress.tasks[task].id, count)

    # -- who dies ------------------------------------------------------------------------------------------------

    def _kill(self, _: str, task: int) -> None:
        total = sum(map(len, self.produced.values()))
        for killed, share, kill in zip(self._kills, (0.3, 0.6), (self._kill_broker, self._kill_primary), strict=True):
            wanted = total * share
            if not self._until(lambda wanted=wanted: self._progress.tasks[task].completed >= wanted):  # type: ignore[misc]
                raise QuiverError("too little was produced")
            said = kill()
            killed.set()
            self._progress.console.print(said())

    def _kill_broker(self) -> Callable[[], str]:
        with Admin(self._servers) as admin:
            told = admin.replica_status("T-1")
        leader = next(broker for broker, rows in told.items() if any(row.role == "leader" for row in rows))
        old = next(broker.pid for broker in self._cluster.brokers if broker.id == leader)
        os.kill(old, signal.SIGKILL)
        began_s = time.monotonic()

        def said() -> str:
            self._until_file(lambda now: next(row.pid for row in now.brokers if row.id == leader) != old)
            return (
                f"killed broker {leader}, which led, with SIGKILL; it is back after {time.monotonic() - began_s:.1f} s"
            )

        return said

    def _kill_primary(self) -> Callable[[], str]:
        now = read_cluster(self._data_dir) or self._cluster
        old = next(manager for manager in now.managers if manager.http == now.http[0])
        os.kill(old.pid, signal.SIGKILL)
        began_s = time.monotonic()

        def said() -> str:
            self._until_file(lambda now: now.http[0] != old.http)
            outage_s = time.monotonic() - began_s
            return f"killed manager {old.id}, the primary, with SIGKILL; another leads after {outage_s:.1f} s"

        return said

    def _until_file(self, condition: Callable[[Cluster], bool]) -> None:
        if not self._until(lambda: (now := read_cluster(self._data_dir)) is not None and condition(now)):
            raise UnavailableError("the supervisor did not bring it back")
