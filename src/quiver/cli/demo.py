"""`make demo`: a cluster that loses two nodes, then the whole way of a log line; at the end nothing is missing.

First `demo_r33` on three brokers and three managers. Then five producers, three by the SDK and two by plain HTTP, send
log lines to an embedded node. Spark parses and counts them as they come; lines that do not parse go to a topic of their
own; all is archived to Parquet. The node is killed and comes back. At the end the counts are those of what was sent.

Rule: everything is real and in a temporary directory; nothing is left running. Only the chart stays.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import pyarrow.dataset
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from quiver import Admin, Consumer, Producer
from quiver.classic import MyProducer
from quiver.cli.cluster import down
from quiver.cli.cluster_file import Cluster, read_cluster
from quiver.cli.demo_r33 import R33
from quiver.cli.launch import make_plan, start_detached
from quiver.errors import QuiverError

TOPIC: Final = "logs"
DEAD_LETTERS: Final = "dead-letters"
COUNTS: Final = "counts"
LEVELS: Final = ("DEBUG", "INFO", "WARN", "ERROR")
SDK_PRODUCERS: Final = ("service-1", "service-2", "service-3")
HTTP_PRODUCERS: Final = ("service-4", "service-5")
HTTP_SHARE: Final = 200  # an HTTP producer sends one line where an SDK producer sends so many
CHUNK: Final = 1_000
MALFORMED_EVERY: Final = 97
_RESTART_TIMEOUT_S: Final = 30.0
_DRAIN_TIMEOUT_S: Final = 120.0

console = Console(stderr=True)
_COLUMNS: Final = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())

Key = tuple[str, str, str]  # window, level, producer


@dataclasses.dataclass(slots=True)
class Sent:
    """What was acknowledged, counted as Spark should count it."""

    counts: Counter[Key] = dataclasses.field(default_factory=Counter)
    malformed: int = 0
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def lines(self) -> int:
        return self.counts.total() + self.malformed


def log_line(producer: str, number: int, count: int) -> tuple[bytes, Key | None]:
    """A line as a service writes it, and what it counts as; every now and then one that no parser takes.

    The `count` lines of a service tell of ten minutes, with trouble in the sixth and seventh.
    """
    if number % MALFORMED_EVERY == MALFORMED_EVERY - 1:
        return b"Traceback (most recent call last): %d of %s" % (number, producer.encode()), None
    minute, second = divmod(number * 600 // count, 60)
    troubled = minute in (5, 6)
    level = LEVELS[number * 7919 % 11 % 4 if troubled else (0, 1, 1, 1, 1, 1, 0, 2, 1, 1, 3)[number * 7919 % 11]]
    line = f"2026-11-15T20:{minute:02d}:{second:02d} {level} {producer} request {number} took {number % 400} ms"
    return line.encode(), (f"2026-11-15T20:{minute:02d}:00", level, producer)


def send(producer: str, count: int, sent: Sent, deliver: Callable[[list[bytes]], None]) -> None:
    """Hands lines over in chunks; counts each chunk once it is acknowledged."""
    for first in range(0, count, CHUNK):
        made = [log_line(producer, number, count) for number in range(first, min(count, first + CHUNK))]
        deliver([line for line, _ in made])
        with sent.lock:
            sent.counts.update(key for _, key in made if key is not None)
            sent.malformed += sum(key is None for _, key in made)


def send_by_sdk(servers: str, producer: str, count: int, sent: Sent, advance: Callable[[int], None]) -> None:
    with Producer(servers) as client:

        def deliver(lines: list[bytes]) -> None:
            client.send_many(TOPIC, lines).result()
            advance(len(lines))

        send(producer, count, sent, deliver)


def send_by_http(url: str, producer: str, count: int, sent: Sent, advance: Callable[[int], None]) -> None:
    client = MyProducer(url, client=producer)
    client.RegisterProducer(TOPIC)

    def deliver(lines: list[bytes]) -> None:
        for line in lines:
            client.Enqueue(TOPIC, line.decode())
            advance(1)

    send(producer, count, sent, deliver)


def kill_node(data_dir: Path, cluster: Cluster) -> str:
    """SIGKILL, then waits until the supervisor has a new node."""
    old = cluster.brokers[0].pid
    os.kill(old, signal.SIGKILL)
    began = time.perf_counter()
    while time.perf_counter() - began < _RESTART_TIMEOUT_S:
        now = read_cluster(data_dir)
        if now is not None and now.brokers[0].pid != old:
            new, outage_s = now.brokers[0].pid, time.perf_counter() - began
            return f"killed node {old} with SIGKILL; node {new} took over after {outage_s:.2f} s"
        time.sleep(0.02)
    raise QuiverError(f"the supervisor did not bring the node back within {_RESTART_TIMEOUT_S:g} s")


class Demo:
    def __init__(self, data_dir: Path, cluster: Cluster, lines: int, progress: Progress) -> None:
        self._data_dir = data_dir
        self._cluster = cluster
        self._servers = ",".join(cluster.servers)
        self._progress = progress
        self._sent = Sent()
        self._per_sdk = lines // len(SDK_PRODUCERS)
        self._per_http = max(1, self._per_sdk // HTTP_SHARE)
        self._failures: list[BaseException] = []

    def run(self) -> tuple[Sent, dict[Key, int], int, int]:
        """What was sent, what Spark counted, dead letters, rows in the archive."""
        from quiver.spark.session import open_session

        with Admin(self._servers) as admin:
            admin.create_topic(TOPIC, 4)
            for name in (DEAD_LETTERS, COUNTS):
                admin.create_topic(name)
        starting = self._progress.add_task("starting Spark", total=None)
        conf = {"spark.sql.shuffle.partitions": "2"}
        with open_session("quiver-demo", self._data_dir / "spark.log", conf=conf) as spark:
            self._progress.update(starting, total=1, completed=1)
            queries = self._start_queries(spark)
            self._send_all()
            self._drain(queries)
        return self._sent, self._read_counts(), self._count_topic(DEAD_LETTERS), self._count_archive()

    def _start_queries(self, spark: Any) -> list[Any]:
        from quiver.spark.log_analytics import LogAnalytics, start

        archive, checkpoints = str(self._data_dir / "archive"), str(self._data_dir / "checkpoints")
        return start(spark, LogAnalytics(self._servers, TOPIC, DEAD_LETTERS, COUNTS, archive, checkpoints))

    def _send_all(self) -> None:
        sdk_total = self._per_sdk * len(SDK_PRODUCERS)
        by_sdk = self._progress.add_task("sending by SDK", total=sdk_total)
        by_http = self._progress.add_task("sending by HTTP", total=self._per_http * len(HTTP_PRODUCERS))
        jobs: list[tuple[Any, str, str, int, TaskID]] = [
            *((send_by_sdk, self._servers, name, self._per_sdk, by_sdk) for name in SDK_PRODUCERS),
            *((send_by_http, self._cluster.http[0], name, self._per_http, by_http) for name in HTTP_PRODUCERS),
        ]
        threads = [threading.Thread(target=self._guard, args=job, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        while self._progress.tasks[by_sdk].completed < sdk_total / 2 and any(t.is_alive() for t in threads):
            time.sleep(0.01)
        self._progress.console.print(kill_node(self._data_dir, self._cluster))
        for thread in threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _guard(self, job: Any, where: str, name: str, count: int, task: TaskID) -> None:
        try:
            job(where, name, count, self._sent, lambda n: self._progress.advance(task, n))
        except Exception as error:  # raised again by the thread that waits
            self._failures.append(error)

    def _drain(self, queries: list[Any]) -> None:
        """Waits until every query has seen every line, then stops them."""
        target = self._sent.lines
        tasks = {query.name: self._progress.add_task(f"Spark: {query.name}", total=target) for query in queries}
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        left = list(queries)
        while left and time.monotonic() < deadline:
            for query in list(left):
                if query.exception() is not None:
                    raise QuiverError(f"query {query.name} failed: {query.exception()}")
                seen = sum(progress["numInputRows"] for progress in query.recentProgress)
                self._progress.update(tasks[query.name], completed=seen)
                if seen >= target:
                    query.stop()
                    left.remove(query)
            time.sleep(0.1)
        if left:
            raise QuiverError(f"Spark did not get through within {_DRAIN_TIMEOUT_S:g} s")

    def _read_counts(self) -> dict[Key, int]:
        counts: dict[Key, int] = {}
        with Consumer(self._servers, [COUNTS], idle_timeout=1.0) as consumer:
            for record in consumer:
                found = msgspec.json.decode(record.value or b"{}")
                counts[found["window"], found["level"], found["producer"]] = found["count"]
        return counts

    def _count_topic(self, topic: str) -> int:
        with Admin(self._servers) as admin:
            return sum(latest - earliest for earliest, latest in admin.offsets(topic).values())

    def _count_archive(self) -> int:
        return int(pyarrow.dataset.dataset(str(self._data_dir / "archive")).count_rows())


def show(sent: Sent, counts: dict[Key, int], dead: int, archived: int) -> bool:
    """The result for people; True when it is what was sent."""
    table = Table(title="Lines counted by Spark")
    table.add_column("producer")
    for level in LEVELS:
        table.add_column(level, justify="right")
    for producer in (*SDK_PRODUCERS, *HTTP_PRODUCERS):
        cells = [sum(n for (_, lv, by), n in counts.items() if (lv, by) == (level, producer)) for level in LEVELS]
        table.add_row(producer, *(f"{cell:,}" for cell in cells))
    console_out = Console()
    console_out.print(table)
    checks = (
        ("counted by window, level and producer", sum(counts.values()), sent.counts.total(), counts == sent.counts),
        ("dead letters", dead, sent.malformed, dead == sent.malformed),
        ("rows in the archive", archived, sent.counts.total(), archived == sent.counts.total()),
    )
    verdict = Table(title="Sent and found")
    for name in ("", "found", "sent", ""):
        verdict.add_column(name, justify="right" if name else "left")
    for what, found, expected, right in checks:
        verdict.add_row(what, f"{found:,}", f"{expected:,}", "[green]equal[/]" if right else "[red]DIFFERENT[/]")
    console_out.print(verdict)
    return all(right for *_, right in checks)


def draw(counts: dict[Key, int], path: Path) -> None:
    """Lines by minute, stacked by level."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    windows = sorted({window for window, _, _ in counts})
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    bottom = [0] * len(windows)
    for level, color in zip(LEVELS, ("#9aa5b1", "#3e7cb1", "#e6a23c", "#c0392b"), strict=True):
        heights = [sum(n for (w, lv, _), n in counts.items() if (w, lv) == (window, level)) for window in windows]
        axes.bar([window[11:16] for window in windows], heights, bottom=bottom, label=level, color=color)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    axes.set(title="Log lines by minute and level", xlabel="minute", ylabel="lines")
    axes.legend(frameon=False, ncols=len(LEVELS), loc="upper center", bbox_to_anchor=(0.5, -0.15))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def run_cluster(lines: int) -> bool:
    """Three brokers and three managers, and what `demo_r33` does to them."""
    with tempfile.TemporaryDirectory(prefix="quiver-demo-") as directory:
        flags = {"data_dir": directory, "port": 0}
        start_detached(make_plan(flags, restart=True, config=None, brokers=3, managers=3), console.print)
        try:
            cluster = read_cluster(Path(directory))
            assert cluster is not None
            console.print(f"three brokers at {', '.join(broker.address for broker in cluster.brokers)}")
            console.print(f"three managers at {', '.join(cluster.http)}")
            with Progress(*_COLUMNS, console=console) as progress:
                r33 = R33(Path(directory), cluster, lines, progress)
                r33.run()
            return r33.show()
        finally:
            down(directory)


def run_spark(lines: int, chart: Path) -> bool:
    """An embedded node, and the log analytics on Spark."""
    with tempfile.TemporaryDirectory(prefix="quiver-demo-") as directory:
        data_dir = Path(directory)
        start_detached(make_plan({"data_dir": directory, "port": 0}, restart=True, config=None), console.print)
        try:
            cluster = read_cluster(data_dir)
            assert cluster is not None
            console.print(f"embedded node at {cluster.servers[0]} and {cluster.http[0]}")
            with Progress(*_COLUMNS, console=console) as progress:
                found = Demo(data_dir, cluster, lines, progress).run()
            draw(found[1], chart)
            return show(*found)
        finally:
            down(directory)


def main(
    lines: Annotated[int, typer.Option(min=3_000, help="Log lines to send to Spark by the SDK.")] = 200_000,
    cluster_lines: Annotated[int, typer.Option(min=400, help="Lines of an SDK producer in the cluster.")] = 10_000,
    chart: Annotated[Path, typer.Option(help="Where to draw the chart.")] = Path("quiver-demo.png"),
) -> None:
    """Kill a broker and the primary manager of a cluster under load, then a node before Spark; check what arrived."""
    began = time.perf_counter()
    right = run_cluster(cluster_lines)
    console.print(f"{time.perf_counter() - began:.0f} s so far")
    right = run_spark(lines, chart) and right
    console.print(f"chart in {chart}; {time.perf_counter() - began:.0f} s in all")
    if not right:
        console.print("[red]what was found is not what was sent[/]")
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
