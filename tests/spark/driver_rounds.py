"""Rounds of sudden death of a Spark driver: it copies a topic to another and is killed at random moments.

    python -m tests.spark.driver_rounds --rounds 20
    python -m tests.spark.driver_rounds --rounds 5 --seed 7

Driver, JVM and Python workers die together, by SIGKILL, and the next driver goes on from the checkpoint. At the end the
sink must have each row of the source once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quiver import Admin, Producer
from quiver.testing.processes import session_members
from tests.system.kit import ENVIRON, Node, create_topic, end_by_signal, read_all, until, values_of

PARTITIONS = 3
ROWS_PER_ROUND = 900
ROWS_PER_TRIGGER = 100
MOMENT_S_MAX = 3.0  # a few micro-batches
START_S_MAX = 240.0  # a driver and its executors are JVMs, on cores that others use too


class Driver:
    """A driver process and all that it starts; ends with the `with` block."""

    def __init__(self, job: dict[str, Any], environ: dict[str, str] | None = None) -> None:
        self._log = Path(job["directory"]) / "driver.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.copy_job", json.dumps(job)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=ENVIRON | {"PYSPARK_PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"} | (environ or {}),
                start_new_session=True,  # Spark's workers make groups of their own, but stay in the session
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def until_rows(self, servers: str, topic: str, count: int) -> None:
        """Until the topic has so many; a driver that ends before is told at once."""

        def has_them() -> bool:
            assert self.process.poll() is None, self.log[-3000:]
            return stored_rows(servers, topic) >= count

        until(has_them, START_S_MAX)

    def kill(self) -> None:
        """At once: no goodbye of anybody."""
        while members := list(session_members(self.process.pid)):
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.process.wait()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def stored_rows(servers: str, topic: str) -> int:
    with Admin(servers) as admin:
        return sum(latest for _, latest in admin.offsets(topic).values())


def kill_drivers(servers: str, job: dict[str, Any], rounds: int, dice: random.Random) -> Counter[bytes]:
    """Starts and kills a driver so often, with more rows each time; returns all rows of the source."""
    rows: Counter[bytes] = Counter()
    for number in range(rounds):
        values = [b"%d-%d" % (number, row) for row in range(ROWS_PER_ROUND)]
        with Producer(servers) as producer:
            for partition in range(PARTITIONS):
                keys = [b"k%d" % (row % 50) for row in range(len(values[partition::PARTITIONS]))]
                producer.send_many(job["source"], values[partition::PARTITIONS], keys=keys).result(30)
        rows.update(values)
        before = stored_rows(servers, job["sink"])
        with Driver(job) as driver:
            driver.until_rows(servers, job["sink"], before + 1)
            time.sleep(dice.uniform(0.0, MOMENT_S_MAX))  # the random moment
    return rows


def job_of(servers: str, directory: Path, source: str, sink: str) -> dict[str, Any]:
    for name in (source, sink):
        create_topic(servers, name, PARTITIONS)
    options = {"maxRowsPerTrigger": ROWS_PER_TRIGGER}
    return {"servers": servers, "source": source, "sink": sink, "directory": str(directory), "options": options}


def run_rounds(directory: Path, rounds: int, seed: int, report: Callable[[str], object] = print) -> bool:
    with Node(directory / "node") as node:
        job = job_of(node.address, directory / "spark", "source", "sink")
        rows = kill_drivers(node.address, job, rounds, random.Random(seed))
        with Driver(job) as driver:
            driver.until_rows(node.address, "sink", sum(rows.values()))
        found = Counter(values_of(read_all(node.address, "sink")))
    missing, doubled = rows - found, found - rows
    report(f"{rounds} drivers killed, {sum(rows.values())} rows, {len(missing)} missing, {len(doubled)} doubled")
    return not missing and not doubled


def main() -> int:
    end_by_signal()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        return 0 if run_rounds(Path(directory), given.rounds, given.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
