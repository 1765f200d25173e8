"""`make demo`: a million log lines through an embedded node that is killed in the middle, and nothing is missing.

Rule: everything runs for real (the supervised node, the SDK, kill -9) in a temporary directory, and nothing is left.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from quiver import Admin, Consumer, Producer
from quiver.cli.cluster import down
from quiver.cli.cluster_file import Cluster, read_cluster
from quiver.cli.launch import make_plan, start_detached
from quiver.errors import QuiverError

TOPIC: Final = "demo-logs"
PARTITIONS: Final = 4
PRODUCERS: Final = 5
CHUNK: Final = 2_000
_LEVELS: Final = ("DEBUG", "INFO", "INFO", "INFO", "WARN", "ERROR")
_RESTART_TIMEOUT_S: Final = 30.0

console = Console(stderr=True)


@dataclasses.dataclass(slots=True)
class Verdict:
    """What reading everything back showed."""

    consumed: int = 0
    duplicates: int = 0
    gaps: int = 0
    reordered: int = 0
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return self.duplicates == self.gaps == self.reordered == 0


def log_lines(producer: int, first: int, count: int) -> list[bytes]:
    """Lines as a service writes them: time, level, producer, number, text."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S")
    return [
        b"%s %s service-%d %d request handled in %d ms"
        % (now.encode(), _LEVELS[number % len(_LEVELS)].encode(), producer, number, number * 7919 % 400)
        for number in range(first, first + count)
    ]


def produce(servers: str, producer: int, count: int, progress: Progress, task: int) -> None:
    with Producer(servers) as sender:
        for first in range(0, count, CHUNK):
            size = min(CHUNK, count - first)
            # Waiting for each chunk keeps one producer's lines in one order over all partitions.
            sender.send_many(TOPIC, log_lines(producer, first, size)).result()
            progress.advance(task, size)  # type: ignore[arg-type]


def consume(servers: str, expected: int, progress: Progress) -> Verdict:
    """Reads everything and checks each line: once, none missing, in order within its partition."""
    seen = [bytearray(expected) for _ in range(PRODUCERS)]
    last: dict[tuple[int, int], int] = {}
    verdict = Verdict()
    task = progress.add_task("reading", total=expected)
    began = time.perf_counter()
    with Consumer(servers, [TOPIC]) as consumer:
        while verdict.consumed < expected:
            table = consumer.poll_arrow(timeout=5.0)
            if not table.num_rows:
                break  # the end, though not all was there: the gaps below say how many
            values = table.column("value").to_pylist()
            for value, partition in zip(values, table.column("partition").to_pylist(), strict=True):
                _, _, service, number, _ = value.split(b" ", 4)
                producer, line = int(service[8:]), int(number)
                verdict.duplicates += seen[producer][line]
                seen[producer][line] = 1
                verdict.reordered += last.get((producer, partition), -1) >= line
                last[producer, partition] = line
            verdict.consumed += len(values)
            progress.advance(task, len(values))
    verdict.gaps = expected - sum(sum(lines) for lines in seen)
    verdict.seconds = time.perf_counter() - began
    return verdict


def kill_node(data_dir: Path, cluster: Cluster) -> tuple[int, int, float]:
    """SIGKILL, then waits until the supervisor has a new node; (old pid, new pid, seconds)."""
    old = cluster.brokers[0].pid
    os.kill(old, signal.SIGKILL)
    began = time.perf_counter()
    while time.perf_counter() - began < _RESTART_TIMEOUT_S:
        now = read_cluster(data_dir)
        if now is not None and now.brokers[0].pid != old:
            return old, now.brokers[0].pid, time.perf_counter() - began
        time.sleep(0.02)
    raise QuiverError(f"the supervisor did not bring the node back within {_RESTART_TIMEOUT_S:g} s")


def shares(count: int) -> Iterator[int]:
    for producer in range(PRODUCERS):
        yield count // PRODUCERS + (producer < count % PRODUCERS)


def run(data_dir: Path, count: int) -> bool:
    plan = make_plan({"data_dir": str(data_dir), "port": 0}, restart=True, config=None)
    began = time.perf_counter()
    start_detached(plan, console.print)
    try:
        cluster = read_cluster(data_dir)
        assert cluster is not None
        servers = ",".join(cluster.servers)
        console.print(f"embedded node at {servers}, ready in {time.perf_counter() - began:.2f} s")
        with Admin(servers) as admin:
            admin.create_topic(TOPIC, PARTITIONS)
        columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(f"sending, {PRODUCERS} producers", total=count)
            began = time.perf_counter()
            threads = [
                threading.Thread(target=produce, args=(servers, producer, share, progress, task), daemon=True)
                for producer, share in enumerate(shares(count))
            ]
            for thread in threads:
                thread.start()
            while progress.tasks[0].completed < count / 2 and any(thread.is_alive() for thread in threads):
                time.sleep(0.01)
            old, new, outage_s = kill_node(data_dir, cluster)
            progress.console.print(f"killed node {old} with SIGKILL; node {new} took over after {outage_s:.2f} s")
            for thread in threads:
                thread.join()
            produced, produce_s = int(progress.tasks[0].completed), time.perf_counter() - began
            verdict = consume(servers, produced, progress)
        _show(produced, produce_s, verdict)
        return verdict.clean and produced == verdict.consumed == count
    finally:
        down(str(data_dir))


def _show(produced: int, produce_s: float, verdict: Verdict) -> None:
    table = Table(title="What became of the log lines")
    for name in ("", "lines", "lines/s"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("produced (kill -9 included)", f"{produced:,}", f"{produced / produce_s:,.0f}")
    table.add_row("consumed", f"{verdict.consumed:,}", f"{verdict.consumed / verdict.seconds:,.0f}")
    table.add_row("duplicates", str(verdict.duplicates))
    table.add_row("gaps", str(verdict.gaps))
    table.add_row("out of order", str(verdict.reordered))
    Console().print(table)


def main(lines: int = typer.Option(1_000_000, min=PRODUCERS, help="Log lines to send.")) -> None:
    """Sends log lines through an embedded node, kills it with -9 in the middle, reads all back and checks."""
    with tempfile.TemporaryDirectory(prefix="quiver-demo-") as directory:
        if not run(Path(directory), lines):
            console.print("[red]the lines read are not the lines sent[/red]")
            sys.exit(1)
    console.print("produced = consumed, nothing twice, nothing missing")


if __name__ == "__main__":
    typer.run(main)
