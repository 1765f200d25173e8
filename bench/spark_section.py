"""The section `spark`: a scan by format("quiver") against a data source that makes the same batches out of nothing.

Planning is part of both, and so is everything that Spark does with a batch: the difference is what reading costs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import quiver_bench
import report
from measure import Case, Row, Sample, make_values
from plan import Bench
from servers import HERE, Server, uninterrupted

from quiver import Admin, Consumer

PARTITIONS = 2
VALUE_BYTES = 100
SWEEPS_MAX = 20
FILL_RECORDS = 100_000  # made once and sent as often as needed


class SparkDriver(Server):
    def __init__(self, directory: Path) -> None:
        environment = {
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            # Workers import the source out of nothing from here.
            "PYTHONPATH": str(HERE),
        }
        super().__init__(directory, [sys.executable, str(HERE / "spark_driver.py")], environment)

    def wait_until_ready(self) -> None:
        self.version: str = self._answer("Spark did not start")["spark"]

    def scan(self, source: str, options: dict[str, Any], records: int) -> Sample:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"source": source, "options": options}).encode() + b"\n")
        self.process.stdin.flush()
        found = self._answer("Spark ended by itself")
        if "error" in found:
            raise RuntimeError(f"the scan of {source} failed: {found['error']}")
        if (found["rows"], found["value_bytes"]) != (records, records * VALUE_BYTES):
            raise RuntimeError(f"{source} has {records} records and Spark saw {found}")
        return Sample(found["seconds"], records, records * VALUE_BYTES)

    def _answer(self, trouble: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self.failure(trouble)
        return json.loads(line)

    def stop(self) -> None:
        """Spark's workers make process groups of their own, but stay in the driver's session: that finds the rest."""
        with uninterrupted():
            super().stop()
            for _ in range(SWEEPS_MAX):
                pids = list(session_members(self.process.pid))
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                if not pids:
                    break
                time.sleep(0.05)  # one that was being started may have appeared meanwhile


def session_members(session: int) -> Iterator[int]:
    """The pids of a session's living processes."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # After the name, which may hold anything: state, parent, group, session.
            state, _, _, found = status.read_text().rpartition(")")[2].split()[:4]
            if int(found) == session and state != "Z":
                yield int(status.parent.name)


def why_no_spark() -> str | None:
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed"
    home = os.environ.get("JAVA_HOME")
    if not (Path(home, "bin", "java").exists() if home else shutil.which("java")):
        return f"Java is missing: there is none in JAVA_HOME={home}" if home else "Java is missing: it is not on PATH"
    return None


def spark(bench: Bench) -> list[Row]:
    if why := why_no_spark():
        return bench.skip("spark", report.QUIVER, [report.SPARK_SCAN], why)
    bench.progress.section("spark: filling")
    records = bench.sizes.spark_records
    with quiver_bench.fresh_topic(bench.servers, PARTITIONS) as topic:
        values = make_values(min(records, FILL_RECORDS), VALUE_BYTES)
        quiver_bench.fill_topic(bench.servers, topic, values, records // len(values))
        rows, batch_rows = shape_of(bench.servers, topic)
        bench.progress.section("spark: starting")
        sources = {
            report.QUIVER: ("quiver", {"servers": bench.servers, "topic": topic}),
            report.NOTHING: (
                "nothing",
                {"rows": ",".join(map(str, rows)), "rowsPerBatch": batch_rows, "valueBytes": VALUE_BYTES},
            ),
        }
        with SparkDriver(bench.directory / "spark") as driver:
            note = f"Spark {driver.version}, {PARTITIONS} partitions, batches of {batch_rows:,} rows"
            cases = []
            for system, (source, options) in sources.items():
                run = partial(driver.scan, source, options, records)
                run()  # not counted: the JVM compiles, the workers import
                cases.append(Case(system, report.SPARK_SCAN, "rows", run, note))
            return bench.run("spark", cases)


def shape_of(servers: str, topic: str) -> tuple[list[int], int]:
    """(rows of each partition, rows of the usual batch that a reader of the topic gets)."""
    with Admin(servers) as admin:
        rows = [end - start for start, end in admin.offsets(topic).values()]
    with Consumer(servers, [topic], start="earliest") as consumer:
        sizes = [batch.num_rows for batch in consumer.poll_arrow(quiver_bench.READ_TIMEOUT_S).to_batches()]
    return rows, statistics.mode(sizes)
