"""Measures Quiver on this machine: `make bench`.

Against a bare floor, Redis streams, a queue of the classic design over HTTP, and a Spark source out of nothing.

Starts real servers with their data on one disk, lets them take turns, prints a table with every figure and one with the
targets, and writes both, with the facts of the machine, to results.json.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import report
from machine import machine_facts
from measure import Row
from plan import QUICK, Bench, Sizes
from progress import SectionProgress
from sections import SECTIONS, disk
from servers import HERE, Floor, Node, RedisServer, RedisUnavailableError

NEED_REDIS = {"produce", "consume"}
RESULTS = HERE / "results.json"
RESULTS_PART = HERE / "results-part.json"  # of --quick and --only: a part never replaces the whole
DISK_FREE_BYTES_MIN = 6 * 1000**3


def main() -> int:
    arguments = _parser().parse_args()
    # Ended by a supervisor, the servers must end too: SystemExit unwinds like Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = [name for name in SECTIONS if not arguments.only or name in arguments.only]
    parent = Path(arguments.data_dir or HERE / ".data").resolve()
    parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(parent).free < DISK_FREE_BYTES_MIN and not arguments.quick:
        print(f"error: {parent} has less than {DISK_FREE_BYTES_MIN / 1e9:.0f} GB free", file=sys.stderr)
        return 2
    directory = Path(tempfile.mkdtemp(prefix="bench-", dir=parent))
    facts = {"quick": arguments.quick, "sections": chosen, "machine": machine_facts(directory)}
    try:
        rows, facts["machine"]["redis"] = measure(chosen, QUICK if arguments.quick else Sizes(), directory)
    except KeyboardInterrupt:
        print("stopped; the servers are ended", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        _ignore_signals()
        shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            parent.rmdir()  # only when it is empty
    verdicts = report.judge(report.TARGETS, rows)
    machine = facts["machine"]
    machine["fdatasync"] = {row.name: row.figures for row in rows if row.section == "disk"}
    title = f"Quiver {machine['quiver']}: {machine['cpu_count']} cores, Python {machine['python']}, {machine['kernel']}"
    report.draw(title + (", QUICK: too short to judge by" if arguments.quick else ""), rows, verdicts)
    output = Path(arguments.output or (RESULTS_PART if arguments.quick or arguments.only else RESULTS))
    report.write_json(output, facts, rows, verdicts)
    print(f"written to {output}", file=sys.stderr)
    return 0


def measure(chosen: list[str], sizes: Sizes, directory: Path) -> tuple[list[Row], str]:
    """(the rows, Redis' version or why there is none). All servers are ended when this returns or raises."""
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(SectionProgress())
        progress.section("starting the servers")
        node = stack.enter_context(Node(directory / "node"))
        floor = stack.enter_context(Floor(directory / "floor"))
        redis_port, redis_said = None, "not needed by these sections"
        if NEED_REDIS & set(chosen):
            try:
                redis = stack.enter_context(RedisServer(directory / "redis"))
                redis_port, redis_said = redis.port, redis.version
            except RedisUnavailableError as missing:
                redis_said = str(missing)
        stack.callback(_ignore_signals)
        bench = Bench(sizes, directory, progress, node.address, node.http, floor.port, redis_port, redis_said)
        rows = [row for section in (disk, *map(SECTIONS.get, chosen)) for row in section(bench)]
    return rows, redis_said


def _ignore_signals() -> None:
    """From the clean-up on, which begins with this: a second Ctrl-C must not leave servers or data behind."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, one run each: a minute, rough figures")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="a section to run; may be repeated")
    parser.add_argument("--data-dir", help="where the servers keep their data while it runs (default: bench/.data)")
    parser.add_argument("--output", help=f"result file (default: bench/{RESULTS.name}, of a part {RESULTS_PART.name})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
