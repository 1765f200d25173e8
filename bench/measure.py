"""What a figure is made of: samples taken in turns, and their median.

Rule: only the order and the arithmetic live here; what is measured is handed in as a function.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

MB = 1_000_000
KIB = 1024
MIB = 1024 * KIB


class Steps(Protocol):
    """Where a section tells how far it is."""

    def step(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: `count` records or batches with `value_bytes` bytes of values, all acknowledged or read.

    `figures` are further ones of the same run, by their name in a row.
    """

    seconds: float
    count: int
    value_bytes: int
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """One throughput figure. Cases that differ only in `variant` are ways to do the same; the fastest one counts."""

    system: str
    name: str
    unit: str  # "records", "batches", "requests" or "rows"
    run: Callable[[], Sample]
    variant: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report. `figures` are by name with the unit last: records_per_s, mb_per_s, p50_ms, rss_mb."""

    section: str
    system: str
    name: str
    figures: dict[str, float] = field(default_factory=dict)
    note: str = ""
    runs: tuple[Sample, ...] = ()


def run_in_turns(section: str, cases: Sequence[Case], repeats: int, steps: Steps) -> list[Row]:
    """Runs every case once, then every case again: a noisy moment of the machine hits them alike."""
    samples: dict[Case, list[Sample]] = {case: [] for case in cases}
    for turn in range(1, repeats + 1):
        for case in cases:
            steps.step(f"{case.system} {case.name} {case.variant} ({turn}/{repeats})")
            samples[case].append(case.run())
    return best_variants([(case, to_row(section, case, taken)) for case, taken in samples.items()])


def to_row(section: str, case: Case, samples: Sequence[Sample]) -> Row:
    figures = {
        f"{case.unit}_per_s": statistics.median(sample.count / sample.seconds for sample in samples),
        "mb_per_s": statistics.median(sample.value_bytes / sample.seconds for sample in samples) / MB,
        **{name: statistics.median(sample.figures[name] for sample in samples) for name in samples[0].figures},
    }
    return Row(section, case.system, case.name, figures, runs=tuple(samples))


def best_variants(rows: Sequence[tuple[Case, Row]]) -> list[Row]:
    """One row for each system and name: the fastest variant, with a note of what the others reached."""
    ways: dict[tuple[str, str], list[tuple[Case, Row]]] = {}
    for case, row in rows:
        ways.setdefault((case.system, case.name), []).append((case, row))
    found = []
    for same in ways.values():
        ranked = sorted(same, key=lambda way: way[1].figures[f"{way[0].unit}_per_s"], reverse=True)
        (winner, row), rest = ranked[0], ranked[1:]
        others = ", ".join(f"{case.variant} {other.figures[f'{case.unit}_per_s']:,.0f}" for case, other in rest)
        note = f"{winner.variant}, the fastest; {others}" if rest else winner.variant
        found.append(replace(row, note=note))
    return found


def latency_row(section: str, system: str, name: str, seconds: Sequence[float], note: str = "") -> Row:
    return Row(
        section, system, name, {"p50_ms": percentile_ms(seconds, 50), "p99_ms": percentile_ms(seconds, 99)}, note
    )


def percentile_ms(seconds: Sequence[float], percent: int) -> float:
    """The smallest sample that at least `percent` of all samples do not exceed."""
    ranked = sorted(seconds)
    return ranked[max(0, -(-len(ranked) * percent // 100) - 1)] * 1000


def make_values(count: int, size: int) -> list[bytes]:
    """Random, so that nothing on the way gains from repetition."""
    blob = os.urandom(count * size)
    return [blob[start : start + size] for start in range(0, count * size, size)]


def human_size(size: int) -> str:
    for unit, scale in (("MiB", MIB), ("KiB", KIB)):
        if size >= scale:
            return f"{size // scale} {unit}"
    return f"{size} B"
