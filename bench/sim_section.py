"""The section `simulator`: how many events `quiver sim` plays and judges in a second, on one core.

Rule: the seeds are always the same, and one process of its own plays them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import report
from measure import Row
from plan import Bench
from servers import run_child

FIRST_SEED = 0
_CLOSING_LINE = re.compile(r"^\d+ seeds, ([\d,]+) events, ([\d,]+) events/s, .* 0 with a violation$", re.MULTILINE)


def simulator(bench: Bench) -> list[Row]:
    seeds = bench.sizes.sim_seeds
    bench.progress.section("simulator", 1)
    bench.progress.step(f"{seeds} seeds")
    words = ("sim", "--from", str(FIRST_SEED), "--seeds", str(seeds), "--jobs", "1")
    events, events_per_s = counted(run_child([str(Path(sys.executable).parent / "quiver"), *words]).decode())
    note = f"{events:,} events of {seeds} seeds from {FIRST_SEED} on"
    return [Row("simulator", report.QUIVER, report.SIMULATOR, {"events_per_s": events_per_s}, note)]


def counted(said: str) -> tuple[int, float]:
    """(events, events per second), as the closing line says."""
    found = _CLOSING_LINE.search(said)
    if found is None:
        raise RuntimeError(f"quiver sim ended otherwise than it should: {said[-500:]}")
    events, per_s = (int(figure.replace(",", "")) for figure in found.groups())
    return events, float(per_s)
