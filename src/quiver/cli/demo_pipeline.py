"""The second part of `make demo`: the pipeline of `quiver pipeline init` on log lines, with a broker killed under it.

Five services, three by the SDK and two by plain HTTP, send log lines to a topic of four partitions. The pipeline parses
them into a table, counts them by minute, level and service into another and into a topic, and sends what does not parse
to a topic of its own. The broker that leads is killed while it reads. At the end all counts are those of what was sent.

Rule: half of the lines wait for the kill, so that it is in the middle for whoever sends and for whoever reads.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow.dataset
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from quiver import Admin, Consumer, Producer
from quiver.classic import MyProducer
from quiver.cli.cluster_file import Cluster
from quiver.errors import QuiverError

if TYPE_CHECKING:
    from quiver.spark.pipeline.flows import Flow

LEVELS: Final = ("DEBUG", "INFO", "WARN", "ERROR")
SDK_SERVICES: Final = ("service-1", "service-2", "service-3")
HTTP_SERVICES: Final = ("service-4", "service-5")
HTTP_SHARE: Final = 200  # a service by HTTP sends one line where one by the SDK sends so many
CHUNK: Final = 1_000
MALFORMED_EVERY: Final = 97
TIMEOUT_S: Final = 120.0
# The last line of a service: an hour later, so that the minutes before it are over.
LAST: Final = "2026-11-15T21:00:00"

Key = tuple[str, str, str]  # minute, level, service


def log_line(service: str, number: int, count: int) -> tuple[bytes, Key | None]:
    """A line as a service writes it, and what it counts as; every now and then one that no parser takes.

    The `count` lines of a service tell of ten minutes, with trouble in the sixth and seventh.
    """
    if number % MALFORMED_EVERY == MALFORMED_EVERY - 1:
        return b"Traceback (most recent call last): %d of %s" % (number, service.encode()), None
    minute, second = divmod(number * 600 // count, 60)
    troubled = minute in (5, 6)
    level = LEVELS[number * 7919 % 11 % 4 if troubled else (0, 1, 1, 1, 1, 1, 0, 2, 1, 1, 3)[number * 7919 % 11]]
    line = f"2026-11-15T20:{minute:02d}:{second:02d} {level} {service} request {number} took {number % 400} ms"
    return line.encode(), (f"2026-11-15T20:{minute:02d}:00", level, service)


@dataclasses.dataclass(slots=True)
class Sent:
    """What was acknowledged, counted as Spark should count it; without the last lines."""

    counts: Counter[Key] = dataclasses.field(default_factory=Counter)
    malformed: int = 0
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What the pipeline made of it."""

    counts: dict[Key, int]  # of the table
    results: dict[Key, int]  # of the topic
    parsed: int
    dead_letters: int


class PipelineDemo:
    def __init__(self, data_dir: Path, cluster: Cluster, lines: int, progress: Progress) -> None:
        from quiver.spark.pipeline.project import Topics

        self.topics = Topics()
        self.sent = Sent()
        self.killed = ""  # what was killed, for people
        self._folder = data_dir / "pipeline"
        self._log = data_dir / "spark.log"
        self._cluster = cluster
        self._servers = ",".join(broker.address for broker in cluster.brokers)
        self._progress = progress
        per_sdk = lines // len(SDK_SERVICES)
        self._counts = dict.fromkeys(SDK_SERVICES, per_sdk) | dict.fromkeys(
            HTTP_SERVICES, max(2, per_sdk // HTTP_SHARE)
        )
        self._sending = progress.add_task("sending log lines", total=sum(self._counts.values()), visible=False)
        self._reading = progress.add_task("starting Spark", total=None, visible=False)
        self._is_read = threading.Event()  # a flow runs
        self._is_killed = threading.Event()
        self._over = threading.Event()  # somebody failed: nobody need go on

    def run(self) -> Found:
        from quiver.spark.pipeline.project import find_spec, write_project
        from quiver.spark.pipeline.runner import open_pipeline

        with Admin(self._servers) as admin:
            admin.create_topic(self.topics.lines, 4)
            for name in (self.topics.dead_letters, self.topics.counts):
                admin.create_topic(name)
        write_project(self._folder, self._servers, self.topics)
        # One short run of one process: what is known of the tables need not outlive it, a second compiler is no use.
        conf = {
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.sql.catalogImplementation": "in-memory",
            "spark.sql.shuffle.partitions": "2",
        }
        self._progress.update(self._reading, visible=True)
        with open_pipeline(find_spec(self._folder), self._log, conf, self._changed) as pipeline:
            with ThreadPoolExecutor(len(self._counts) + 1) as threads:
                work = [threads.submit(self._send, name) for name in self._counts]
                work.append(threads.submit(self._kill))
                try:
                    pipeline.run()
                except BaseException:
                    self._over.set()
                    raise
                self._wait(work)
            self._send_last()
            pipeline.run()
            parsed = pipeline.table("parsed").count()
        return self._found(parsed)

    # -- who sends -------------------------------------------------------------------------------------------------

    def _send(self, name: str) -> None:
        count = self._counts[name]
        self._progress.update(self._sending, visible=True)
        if name in SDK_SERVICES:
            with Producer(self._servers) as producer:
                self._hand_over(name, count, lambda chunk: producer.send_many(self.topics.lines, chunk).result())
            return
        with MyProducer(self._cluster.http, client=name) as client:
            client.RegisterProducer(self.topics.lines)

            def deliver(chunk: list[bytes]) -> None:
                for line in chunk:
                    client.Enqueue(self.topics.lines, line.decode())

            self._hand_over(name, count, deliver)

    def _hand_over(self, name: str, count: int, deliver: Callable[[list[bytes]], object]) -> None:
        """In chunks; each is counted once it is acknowledged. The second half waits for the kill."""
        for first in range(0, count, CHUNK):
            made = [log_line(name, number, count) for number in range(first, min(count, first + CHUNK))]
            if first + CHUNK > count / 2:
                self._until(self._is_killed)
            deliver([line for line, _ in made])
            with self.sent.lock:
                self.sent.counts.update(key for _, key in made if key is not None)
                self.sent.malformed += sum(key is None for _, key in made)
            self._progress.advance(self._sending, len(made))

    def _send_last(self) -> None:
        with Producer(self._servers) as producer:
            lines = [f"{LAST} DEBUG {name} good night".encode() for name in self._counts]
            producer.send_many(self.topics.lines, lines).result()

    # -- who dies --------------------------------------------------------------------------------------------------

    def _kill(self) -> None:
        """The broker that leads the first partition, once the pipeline reads."""
        self._until(self._is_read)
        with Admin(self._servers) as admin:
            told = admin.replica_status(self.topics.lines)
        leader = next(broker for broker, rows in told.items() if any(row.role == "leader" for row in rows))
        os.kill(next(broker.pid for broker in self._cluster.brokers if broker.id == leader), signal.SIGKILL)
        self._is_killed.set()
        self.killed = f"broker {leader}"
        self._progress.console.print(f"killed {self.killed}, which led, with SIGKILL while the pipeline read")

    def _until(self, event: threading.Event) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not event.wait(0.05):
            if self._over.is_set() or time.monotonic() > deadline_s:
                raise QuiverError("the demo stands still")

    @staticmethod
    def _wait(work: list[Future[None]]) -> None:
        for future in work:
            future.result(TIMEOUT_S)

    # -- who reads -------------------------------------------------------------------------------------------------

    def _changed(self, flow: Flow) -> None:
        if flow.state == "RUNNING":
            self._is_read.set()
        lag = "" if flow.lag is None else f", {flow.lag:,} behind"
        told = f"{flow.name}: {flow.state.lower()}, {flow.rows:,} rows, {flow.rows_per_s:,.0f}/s{lag}"
        if flow.state in ("RUNNING", "COMPLETED", "FAILED"):
            self._progress.update(self._reading, description=told[:60])

    def _found(self, parsed: int) -> Found:
        counts: dict[Key, int] = {}
        table = self._folder / "storage" / "tables" / "counts"
        for row in pyarrow.dataset.dataset(table, format="parquet").to_table().to_pylist():
            counts[row["minute"].strftime("%Y-%m-%dT%H:%M:%S"), row["level"], row["producer"]] = row["lines"]
        results: Counter[Key] = Counter()
        with Consumer(self._servers, [self.topics.counts], idle_timeout=1.0) as consumer:
            for record in consumer:
                told = msgspec.json.decode(record.value or b"{}")
                results[told["minute"], told["level"], told["producer"]] += told["lines"]  # one twice would show
        with Admin(self._servers) as admin:
            dead = sum(end - start for start, end in admin.offsets(self.topics.dead_letters).values())
        last = [key for key in counts if key[0] == LAST]
        return Found({key: n for key, n in counts.items() if key not in last}, dict(results), parsed - len(last), dead)


def show(sent: Sent, found: Found) -> bool:
    """The result for people; True when it is what was sent."""
    table = Table(title="Log lines, as the pipeline counted them")
    table.add_column("service")
    for level in LEVELS:
        table.add_column(level, justify="right")
    for service in (*SDK_SERVICES, *HTTP_SERVICES):
        cells = [sum(n for (_, lv, by), n in found.counts.items() if (lv, by) == (level, service)) for level in LEVELS]
        table.add_row(service, *(f"{cell:,}" for cell in cells))
    console = Console()
    console.print(table)
    total = sent.counts.total()
    checks = (
        ("lines in the table 'parsed'", found.parsed, total, found.parsed == total),
        ("counted in the table 'counts'", sum(found.counts.values()), total, found.counts == sent.counts),
        ("counted in the topic 'counts'", sum(found.results.values()), total, found.results == sent.counts),
        ("dead letters", found.dead_letters, sent.malformed, found.dead_letters == sent.malformed),
    )
    verdict = Table(title="Sent and found")
    for name in ("", "found", "sent", ""):
        verdict.add_column(name, justify="right" if name else "left")
    for what, here, there, right in checks:
        verdict.add_row(what, f"{here:,}", f"{there:,}", "[green]equal[/]" if right else "[red]DIFFERENT[/]")
    console.print(verdict)
    return all(right for *_, right in checks)


def caption(counts: dict[Key, int], killed: str) -> str:
    """What is to be seen, in a sentence or two."""
    by_minute: Counter[str] = Counter()
    for (minute, level, _), lines in counts.items():
        by_minute[minute[11:16]] += lines if level == "ERROR" else 0
    worst = sorted(minute for minute, _ in by_minute.most_common(2))
    errors, lines = by_minute.total(), sum(counts.values())
    return (
        f"{lines:,} lines of {len({service for *_, service in counts})} services, {errors:,} of them errors, "
        f"{sum(by_minute[minute] for minute in worst) / max(1, errors):.0%} of these at {' and '.join(worst)}.\n"
        f"{killed} was killed while they were sent and read; every line is counted once."
    )


def draw(counts: dict[Key, int], killed: str, path: Path) -> None:
    """Lines by minute, stacked by level."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    minutes = sorted({minute for minute, _, _ in counts})
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    bottom = [0] * len(minutes)
    for level, color in zip(LEVELS, ("#9aa5b1", "#3e7cb1", "#e6a23c", "#c0392b"), strict=True):
        heights = [sum(n for (m, lv, _), n in counts.items() if (m, lv) == (minute, level)) for minute in minutes]
        axes.bar([minute[11:16] for minute in minutes], heights, bottom=bottom, label=level, color=color)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    axes.set(title="Log lines by minute and level", xlabel="minute", ylabel="lines")
    axes.legend(frameon=False, ncols=len(LEVELS), loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.supxlabel(caption(counts, killed.capitalize()), fontsize=9, x=0.02, ha="left")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
