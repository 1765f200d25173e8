"""`quiver sim`: whole clusters in one process, broken in every way we know, and held to their promises.

Rule: it only runs and tells. What is simulated and judged is in `quiver.testing`, and this is the one place outside
tests that imports it.
"""

from __future__ import annotations

import itertools
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from quiver.cli.options import examples
from quiver.cli.ready import EXIT_FAILED
from quiver.errors import InvalidRequestError

if TYPE_CHECKING:
    from quiver.testing.sim.campaign import Report

_SEEDS_DEFAULT = 100
_PLANT_SEEDS_MAX = 1000
_VIOLATIONS_TOLD_MAX = 5


def register(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "quiver sim",
            "quiver sim --seeds 2000 --jobs 2",
            "quiver sim --seed 655",
            "quiver sim --plant ack-before-fsync",
            "quiver sim --plant all",
        )
    )(sim)


def sim(
    seeds: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="How many seeds to run. Default: 100.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, show_default=False, help="Run this seed alone, exactly as before.")
    ] = None,
    first: Annotated[int, typer.Option("--from", min=0, help="The first seed.")] = 0,
    plant: Annotated[
        str | None,
        typer.Option(metavar="NAME|all", show_default=False, help="Plant a known bug; run until it is caught."),
    ] = None,
    events: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Begin no new seed after so many events.")
    ] = None,
    hours: Annotated[
        float | None, typer.Option(min=0, show_default=False, help="Begin no new seed after so many simulated hours.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Processes that run seeds side by side.")] = 1,
) -> None:
    """Simulate brokers and managers that crash, lose disks and messages, and check every promise after every event.

    Exit code 1: a promise was broken; with --plant: a bug was not caught.
    """
    from quiver.testing.plants import PLANTS

    if plant is not None and plant not in ("all", *PLANTS):
        raise InvalidRequestError(f"no bug is called {plant!r}; there are: all, {', '.join(PLANTS)}")
    if seed is not None and seeds is not None:
        raise InvalidRequestError("--seed runs one seed, --seeds many: use one of the two")
    if plant is not None:
        count = 1 if seed is not None else seeds or _PLANT_SEEDS_MAX
        begin = first if seed is None else seed
        names = list(PLANTS) if plant == "all" else [plant]
        caught = [_catch(name, range(begin, begin + count), jobs, alone=plant != "all") for name in names]
        if not all(caught):
            raise typer.Exit(EXIT_FAILED)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: processes that run seeds end with this one
    numbers = range(seed, seed + 1) if seed is not None else range(first, first + (seeds or _SEEDS_DEFAULT))
    if not _run(numbers, jobs, events, hours):
        raise typer.Exit(EXIT_FAILED)


def _run(seeds: range, jobs: int, events_max: int | None, hours_max: float | None) -> bool:
    """True when no rule was broken."""
    from quiver.testing.sim.campaign import reports

    began_s = time.monotonic()
    done, events, simulated_s, acknowledged, commands, read, broken = 0, 0, 0.0, 0, 0, 0, []
    found = reports(seeds, jobs=jobs)
    try:
        for report in _with_bar(found, len(seeds)):
            done += 1
            events += report.events
            simulated_s += report.simulated_s
            acknowledged += report.acknowledged
            commands += report.commands
            read += report.read
            if report.violation:
                broken.append(report.seed)
                if len(broken) <= _VIOLATIONS_TOLD_MAX:
                    _tell(report)
            if (events_max and events >= events_max) or (hours_max and simulated_s >= hours_max * 3600):
                break
    finally:
        found.close()  # type: ignore[attr-defined]
        spent_s = max(time.monotonic() - began_s, 1e-9)
        print(
            f"{done} seeds, {events:,} events, {events / spent_s:,.0f} events/s, {simulated_s / 3600:.2f} simulated "
            f"hours, {acknowledged:,} records and {commands:,} commands acknowledged, {read:,} records read by groups, "
            f"{len(broken)} with a violation"
        )
    if broken:
        print("Again: " + ", ".join(f"quiver sim --seed {seed}" for seed in broken[:_VIOLATIONS_TOLD_MAX]))
    return not broken


def _tell(report: Report) -> None:
    print(f"seed {report.seed}: {report.violation}")
    for line in report.story:
        print(f"  {line}")
    sys.stdout.flush()


def _catch(name: str, seeds: range, jobs: int, alone: bool) -> bool:
    """Plants one bug and runs seeds until a rule is broken."""
    from quiver.testing.plants import PLANTS
    from quiver.testing.sim.campaign import reports

    found = reports(seeds, name, jobs)
    if alone:
        print(f"{name}: {PLANTS[name].what}")
    try:
        for count, report in zip(itertools.count(1), _with_bar(found, len(seeds)), strict=False):
            if report.violation:
                if alone:
                    _tell(report)
                print(f"{name:<30} caught after {count:>4} seeds, seed {report.seed}: {report.violation}"[:180])
                sys.stdout.flush()
                return True
    finally:
        found.close()  # type: ignore[attr-defined]
    print(f"{name:<30} NOT CAUGHT in {len(seeds)} seeds")
    return False


def _with_bar(found: Iterator[Report], total: int) -> Iterator[Report]:
    """Passes the reports on and draws how far it is, when somebody looks."""
    if not sys.stderr.isatty() or total < 2:
        yield from found
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, events, began_s = bar.add_task("", total=total, rate=""), 0, time.monotonic()
        for report in found:
            events += report.events
            rate = events / max(time.monotonic() - began_s, 1e-9)
            bar.update(task, advance=1, rate=f"{rate:,.0f} events/s")
            yield report
