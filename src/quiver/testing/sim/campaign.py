"""Many runs: seed after seed, in one process or several, until all are done or a limit is reached.

Rule: what a seed does depends on nothing here; with more processes only the order of the results may differ.
"""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Final, NamedTuple

from quiver.testing.plants import planted
from quiver.testing.sim.group_run import GroupsPlay
from quiver.testing.sim.manager_run import ManagersPlay
from quiver.testing.sim.run import BrokersPlay, Outcome, play

TRACE_LINES: Final = 60
_AHEAD: Final = 4  # runs given to each process before their results are taken


class Report(NamedTuple):
    """What is kept of a run. `violation` is empty when there was none; `story` tells what led to it."""

    seed: int
    events: int
    simulated_s: float
    digest: int
    acknowledged: int  # records
    commands: int  # the same of managers
    read: int  # records that members of groups have read
    violation: str
    story: list[str]


def report(seed: int, plant: str = "", lines: int = TRACE_LINES) -> Report:
    """Runs one seed: its brokers, its managers, then its groups, up to the first violation."""
    runs: list[Outcome] = []
    with planted(plant):
        for kind in (BrokersPlay, ManagersPlay, GroupsPlay):
            runs.append(play(kind(seed)))
            if runs[-1].violation is not None:
                break
    found, violation, story = runs[-1], "", list[str]()
    if found.violation is not None:
        violation = str(found.violation)
        story = [*found.trace.last(lines), "", *found.state]
        if found.violation.__cause__ is not None:
            story += ["", *"".join(traceback.format_exception(found.violation.__cause__)).splitlines()]
    digest = 0
    for run in runs:
        digest = digest << 32 | run.digest
    acknowledged, commands, read = ([run.acknowledged for run in runs] + [0, 0])[:3]
    events, simulated_s = sum(run.events for run in runs), sum(run.simulated_s for run in runs)
    return Report(seed, events, simulated_s, digest, acknowledged, commands, read, violation, story)


def reports(seeds: Iterable[int], plant: str = "", jobs: int = 1) -> Iterator[Report]:
    """Runs them all; close the iterator to stop early."""
    if jobs <= 1:
        for seed in seeds:
            yield report(seed, plant)
        return
    # A fresh interpreter for each: a fork would share what this process has open.
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _leave_interrupts_to_the_parent)
    waiting: set[Future[Report]] = set()
    left = iter(seeds)
    try:
        while True:
            with contextlib.suppress(StopIteration):
                while len(waiting) < jobs * _AHEAD:
                    waiting.add(pool.submit(report, next(left), plant))
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from sorted((future.result() for future in done), key=lambda found: found.seed)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
