"""The report: targets judged from the rows, two tables, one JSON file.

Rule: every ratio is computed from rows of the same run. What was not measured is said, never guessed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import Row
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

QUIVER, FLOOR, REDIS, REFERENCE, NOTHING = "Quiver", "floor", "Redis", "reference", "nothing"
ROWS, SDK = "rows", "send_many"
NO_COMMITS, BEFORE = "no commits", "before"

# Rows that targets refer to.
BATCHES_128_KIB = "128 KiB batches"
ONE_IN_FLIGHT = "one in flight, 100 B"
ONE_IN_FLIGHT_AIO = "one in flight, 100 B, asyncio"
SEND_MANY_100_B = "send_many, 100 B"
XADD_100_B = "XADD, 100 B"
XADD_BY_HAND = "XADD, 100 B, by hand"
POLL = "poll, 100 B"
POLL_ARROW = "poll_arrow, 100 B"
XREAD_100_B = "XREAD, 100 B"
XREAD_BY_HAND = "XREAD, 100 B, by hand"
CLASSIC_PRODUCE = "classic produce, 100 B"
CLASSIC_CONSUME = "classic consume, 100 B"
SPARK_SCAN = "Spark scan, 100 B"
SPARK_WRITE = "Spark write, 100 B"
SPARK_TRIGGER = "Spark trigger, 100 partitions"
IDLE_NODE = "idle node, 100 partitions"
GROWTH_POLL = "growth while poll reads"
GROWTH_POLL_ARROW = "growth while poll_arrow reads"
BATCHES_128_KIB_3 = "128 KiB batches, 3 replicas"
START = "quiver up, 3 brokers and 3 managers"
SMALL_BATCHES = "100 B batches, 3 replicas"
ONE_IN_FLIGHT_3 = "one in flight, 3 replicas"
ONE_IN_FLIGHT_3_AIO = "one in flight, 3 replicas, asyncio"
FAILOVER = "leader killed, to the next ack"
IDLE_CPU = "1,000 idle partitions, processor"
IDLE_RSS = "1,000 idle partitions, memory"
IDLE_WAKE = "1,000 idle partitions, first record"
CLASSIC_PRODUCE_3 = "classic produce, 100 B, 3 replicas"
CLASSIC_CONSUME_3 = "classic consume, 100 B, 3 replicas"
LIST_CLASSIC = "10,000 topics, GET /topics"
LIST_V1 = "10,000 topics, GET /v1/topics"
LIST_SDK = "10,000 topics, Admin.list_topics"
RESTART_TOPICS = "10,000 topics, restart"
LIST_CONSUMERS = "100,000 consumers, GET /health"
RESTART_CONSUMERS = "100,000 consumers, restart"
GROUP_POLL = "poll in a group, commit every second"
GROUP_POLL_ARROW = "poll_arrow in a group, commit every second"
GROUP_RESUME = "member killed, its partitions are read on"
GROUP_KEPT = "member killed, the other partitions"
SIMULATOR = "quiver sim, one process"

NOT_A_TERMINAL_WIDTH = 170

# figure -> (column, how it is written); a row has one of the rates, and its name says of what
COLUMNS = {
    "records_per_s": ("rate /s", "{:,.0f}"),
    "batches_per_s": ("rate /s", "{:,.0f}"),
    "requests_per_s": ("rate /s", "{:,.0f}"),
    "rows_per_s": ("rate /s", "{:,.0f}"),
    "events_per_s": ("rate /s", "{:,.0f}"),
    "mb_per_s": ("MB/s", "{:,.1f}"),
    "p50_ms": ("p50 ms", "{:.3f}"),
    "p99_ms": ("p99 ms", "{:.3f}"),
    "rss_mb": ("memory MB", "{:.1f}"),
    "percent": ("CPU %", "{:.1f}"),
    "seconds": ("s", "{:.2f}"),
}


_UNITS = {
    "rss_mb": "MB",
    "seconds": "s",
    "percent": "%",
    "p50_ms": "ms",
    "p99_ms": "ms",
    "batches_per_s": "/s",
    "events_per_s": "/s",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A bound for one of Quiver's figures, or for its ratio to the figure of `against`, a (system, row) pair."""

    name: str
    row: str
    figure: str
    limit: float
    at_least: bool
    against: tuple[str, str] | None = None

    @property
    def unit(self) -> str:
        return "x" if self.against else _UNITS[self.figure]


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    target: Target
    measured: float | None  # None: a row it needs was not measured
    met: bool | None


TARGETS = (
    Target("128 KiB batches, of the floor's bytes/s", BATCHES_128_KIB, "mb_per_s", 0.5, True, (FLOOR, BATCHES_128_KIB)),
    Target("one in flight (threads), p50, of floor", ONE_IN_FLIGHT, "p50_ms", 2, False, (FLOOR, ONE_IN_FLIGHT)),
    Target("one in flight (asyncio), p50, of floor", ONE_IN_FLIGHT_AIO, "p50_ms", 2, False, (FLOOR, ONE_IN_FLIGHT)),
    Target("send_many 100 B, of Redis XADD", SEND_MANY_100_B, "records_per_s", 8, True, (REDIS, XADD_100_B)),
    Target("poll_arrow, of Redis XREAD", POLL_ARROW, "records_per_s", 10, True, (REDIS, XREAD_100_B)),
    Target("poll, of Redis XREAD", POLL, "records_per_s", 1.5, True, (REDIS, XREAD_100_B)),
    Target(
        "classic produce, of the reference's", CLASSIC_PRODUCE, "requests_per_s", 20, True, (REFERENCE, CLASSIC_PRODUCE)
    ),
    Target(
        "classic consume, of the reference's", CLASSIC_CONSUME, "requests_per_s", 20, True, (REFERENCE, CLASSIC_CONSUME)
    ),
    Target("Spark scan, of a source out of nothing", SPARK_SCAN, "rows_per_s", 0.7, True, (NOTHING, SPARK_SCAN)),
    Target("Spark scan, of the same source with rows", SPARK_SCAN, "rows_per_s", 5, True, (ROWS, SPARK_SCAN)),
    Target("Spark write, of send_many, 3 replicas", SPARK_WRITE, "rows_per_s", 0.4, True, (SDK, SPARK_WRITE)),
    Target("Spark trigger beside its execution, p50", SPARK_TRIGGER, "p50_ms", 150, False),
    Target("idle node with 100 partitions", IDLE_NODE, "rss_mb", 120, False),
    Target("node's growth while poll_arrow reads", GROWTH_POLL_ARROW, "rss_mb", 64, False),
    Target("node's growth while poll reads", GROWTH_POLL, "rss_mb", 64, False),
    Target(
        "3 replicas: 128 KiB batches, of floor", BATCHES_128_KIB_3, "mb_per_s", 0.5, True, (FLOOR, BATCHES_128_KIB_3)
    ),
    Target("3 replicas: one in flight (threads), p50", ONE_IN_FLIGHT_3, "p50_ms", 2, False, (FLOOR, ONE_IN_FLIGHT_3)),
    Target("3 replicas: one in flight (aio), p50", ONE_IN_FLIGHT_3_AIO, "p50_ms", 2, False, (FLOOR, ONE_IN_FLIGHT_3)),
    Target("3 replicas: small batches", SMALL_BATCHES, "batches_per_s", 8000, True),
    Target("3 brokers, 3 managers: up and ready", START, "seconds", 5, False),
    Target("failover, p99", FAILOVER, "p99_ms", 2000, False),
    Target("1,000 idle partitions: busiest broker", IDLE_CPU, "percent", 5, False),
    Target("1,000 idle partitions: largest broker", IDLE_RSS, "rss_mb", 200, False),
    Target("1,000 idle partitions: first record, later by", IDLE_WAKE, "p99_ms", 50, False),
    Target(
        "3 replicas: classic produce, of the reference's",
        CLASSIC_PRODUCE_3,
        "requests_per_s",
        20,
        True,
        (REFERENCE, CLASSIC_PRODUCE_3),
    ),
    Target(
        "3 replicas: classic consume, of the reference's",
        CLASSIC_CONSUME_3,
        "requests_per_s",
        20,
        True,
        (REFERENCE, CLASSIC_CONSUME_3),
    ),
    Target("3 replicas: classic produce, p99", CLASSIC_PRODUCE_3, "p99_ms", 50, False),
    Target("3 replicas: classic consume, p99", CLASSIC_CONSUME_3, "p99_ms", 50, False),
    Target("10,000 topics: GET /topics", LIST_CLASSIC, "p99_ms", 200, False),
    Target("10,000 topics: GET /v1/topics", LIST_V1, "p99_ms", 200, False),
    Target("10,000 topics: list of the SDK", LIST_SDK, "p99_ms", 200, False),
    Target("10,000 topics: restart", RESTART_TOPICS, "seconds", 10, False),
    Target("100,000 consumers: GET /health", LIST_CONSUMERS, "p99_ms", 200, False),
    Target("100,000 consumers: restart", RESTART_CONSUMERS, "seconds", 10, False),
    Target("group: poll with commits, of none", GROUP_POLL, "records_per_s", 0.9, True, (NO_COMMITS, GROUP_POLL)),
    Target(
        "group: poll_arrow with commits, of none",
        GROUP_POLL_ARROW,
        "records_per_s",
        0.9,
        True,
        (NO_COMMITS, GROUP_POLL_ARROW),
    ),
    Target("group: partitions of a dead member, session + 1 s", GROUP_RESUME, "seconds", 3, False),
    Target("group: the others, longest gap between records", GROUP_KEPT, "seconds", 0.3, False),
    Target("simulator: events on one core", SIMULATOR, "events_per_s", 10_000, True),
)


def judge(targets: Sequence[Target], rows: Sequence[Row]) -> list[Verdict]:
    figures = {(row.system, row.name): row.figures for row in rows}
    verdicts = []
    for target in targets:
        measured = figures.get((QUIVER, target.row), {}).get(target.figure)
        if measured is not None and target.against is not None:
            base = figures.get(target.against, {}).get(target.figure)
            measured = measured / base if base else None
        met = None
        if measured is not None:
            met = measured >= target.limit if target.at_least else measured <= target.limit
        verdicts.append(Verdict(target, measured, met))
    return verdicts


def ratios(rows: Sequence[Row], names: Sequence[str], against: tuple[str, str], figure: str) -> str:
    """Quiver's rows as multiples of the row `against`, in words."""
    figures = {(row.system, row.name): row.figures for row in rows}
    base = figures[against][figure]
    return ", ".join(f"{name.split(',')[0]} is {figures[QUIVER, name][figure] / base:.2f} x" for name in names)


def draw(title: str, rows: Sequence[Row], verdicts: Sequence[Verdict]) -> None:
    # A pipe has no width; cutting cells to a guessed one would lose figures.
    console = Console(width=None if sys.stdout.isatty() else NOT_A_TERMINAL_WIDTH)
    console.print(rows_table(title, rows))
    console.print(targets_table(verdicts))


def rows_table(title: str, rows: Sequence[Row]) -> Table:
    """A line between sections. Columns that no row has a figure for are left out."""
    shown = dict.fromkeys(COLUMNS[figure][0] for figure in COLUMNS if any(figure in row.figures for row in rows))
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in ("system", "measured"):
        table.add_column(name, no_wrap=True)
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("note")
    section = None
    for row in rows:
        if section not in (None, row.section):
            table.add_section()
        written = {COLUMNS[figure][0]: COLUMNS[figure][1].format(value) for figure, value in row.figures.items()}
        cells = [written.get(name, "") for name in shown]
        style = "bold red" if not row.figures else "bold" if row.system == QUIVER else ""
        table.add_row(*map(Text, (row.system, row.name, *cells, row.note)), style=style)
        section = row.section
    return table


def targets_table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(title="Targets", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("Quiver's")
    for name in ("target", "measured"):
        table.add_column(name, justify="right")
    table.add_column("met")
    for verdict in verdicts:
        target = verdict.target
        measured = "not measured" if verdict.measured is None else f"{verdict.measured:.2f} {target.unit}"
        met, style = {True: ("yes", "green"), False: ("NO", "bold red"), None: ("-", "dim")}[verdict.met]
        bound = f"{'>=' if target.at_least else '<='} {target.limit:g} {target.unit}"
        table.add_row(target.name, bound, measured, Text(met, style))
    return table


def write_json(path: Path, facts: dict[str, Any], rows: Sequence[Row], verdicts: Sequence[Verdict]) -> None:
    document = {
        **facts,
        "rows": [dataclasses.asdict(row) for row in rows],
        "targets": [
            {
                **dataclasses.asdict(verdict.target),
                "unit": verdict.target.unit,
                "measured": verdict.measured,
                "met": verdict.met,
            }
            for verdict in verdicts
        ],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
