"""The section `spark`: a scan by format("quiver") against a data source that makes the same batches out of nothing, and
against the same source with rows; a write against the SDK's own `send_many`; what a trigger costs beside its execution.

Planning is part of all scans, and so is everything that Spark does with a batch: the difference is what reading costs.
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
from functools import partial
from pathlib import Path
from typing import Any

import quiver_bench
import report
from measure import Case, Row, Sample, latency_row, make_values
from plan import Bench
from replicated_section import cluster_of
from servers import HERE, Server, uninterrupted

from quiver import Admin, Consumer, Producer
from quiver.testing.processes import session_members

PARTITIONS = 2
VALUE_BYTES = 100
SWEEPS_MAX = 20
ROWS_SHARE = 10  # a source of rows takes so much longer that it reads a part only
TRIGGER_PARTITIONS = 100
TRIGGER_ROWS = 1000  # of one micro-batch
FILL_RECORDS = 100_000  # made once and sent as often as needed


class SparkDriver(Server):
    def __init__(self, directory: Path) -> None:
        environment = {
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            # Workers import the source out of nothing from here.
            "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))),
        }
        super().__init__(directory, [sys.executable, str(HERE / "spark_driver.py")], environment)

    def wait_until_ready(self) -> None:
        self.version: str = self._answer("Spark did not start")["spark"]

    def scan(self, source: str, options: dict[str, Any], records: int) -> Sample:
        found = self._run(job="scan", source=source, options=options)
        if (found["rows"], found["value_bytes"]) != (records, records * VALUE_BYTES):
            raise RuntimeError(f"{source} has {records} records and Spark saw {found}")
        return Sample(found["seconds"], records, records * VALUE_BYTES)

    def write(self, servers: str, records: int) -> Sample:
        with quiver_bench.fresh_topic(servers, PARTITIONS) as topic:
            options = {"servers": servers, "topic": topic}
            found = self._run(job="write", rows=records, value_bytes=VALUE_BYTES, options=options)
            check_count(servers, topic, records)
        return Sample(found["seconds"], records, records * VALUE_BYTES)

    def trigger(self, options: dict[str, Any]) -> dict[str, Any]:
        return self._run(job="trigger", options=options)

    def _run(self, **job: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        self.process.stdin.flush()
        found = self._answer("Spark ended by itself")
        if "error" in found:
            raise RuntimeError(f"the {job['job']} failed: {found['error']}")
        return found

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


def why_no_spark() -> str | None:
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed"
    home = os.environ.get("JAVA_HOME")
    if not (Path(home, "bin", "java").exists() if home else shutil.which("java")):
        return f"Java is missing: there is none in JAVA_HOME={home}" if home else "Java is missing: it is not on PATH"
    return None


def spark(bench: Bench) -> list[Row]:
    if why := why_no_spark():
        return bench.skip("spark", report.QUIVER, [report.SPARK_SCAN, report.SPARK_WRITE, report.SPARK_TRIGGER], why)
    bench.progress.section("spark: starting")
    with SparkDriver(bench.directory / "spark") as driver:
        scanned = scans(bench, driver)
        with cluster_of(bench, "spark-cluster") as cluster:
            return [*scanned, *writes(bench, driver, cluster.servers), triggers(bench, driver, cluster.servers)]


def scans(bench: Bench, driver: SparkDriver) -> list[Row]:
    bench.progress.section("spark: filling")
    records = bench.sizes.spark_records
    few = records // ROWS_SHARE
    with quiver_bench.fresh_topic(bench.servers, PARTITIONS) as topic:
        values = make_values(min(records, FILL_RECORDS), VALUE_BYTES)
        quiver_bench.fill_topic(bench.servers, topic, values, records // len(values))
        rows, batch_rows = shape_of(bench.servers, topic)
        options = {"servers": bench.servers, "topic": topic}
        shape = {"rows": ",".join(map(str, rows)), "rowsPerBatch": batch_rows, "valueBytes": VALUE_BYTES}
        part = {"untilOffset": few // PARTITIONS, "rowsPerTask": few // PARTITIONS}
        sources = {
            report.QUIVER: ("quiver", options, records),
            report.NOTHING: ("nothing", shape, records),
            report.ROWS: ("quiver_rows", options | part, few),
        }
        note = f"Spark {driver.version}, {PARTITIONS} partitions, batches of {batch_rows:,} rows"
        cases = []
        for system, (source, given, count) in sources.items():
            run = partial(driver.scan, source, given, count)
            run()  # not counted: the JVM compiles, the workers import
            cases.append(Case(system, report.SPARK_SCAN, "rows", run, note if count == records else f"{few:,} rows"))
        return bench.run("spark", cases)


def writes(bench: Bench, driver: SparkDriver, servers: str) -> list[Row]:
    bench.progress.section("spark: writing")
    records = bench.sizes.spark_writes
    write, send = partial(driver.write, servers, records), partial(send_many, servers, records)
    write()  # not counted, as above
    note = f"3 replicas, {PARTITIONS} partitions"
    return bench.run(
        "spark",
        [
            Case(report.QUIVER, report.SPARK_WRITE, "rows", write, note),
            Case(report.SDK, report.SPARK_WRITE, "rows", send, note),
        ],
    )


def send_many(servers: str, records: int) -> Sample:
    values = make_values(min(records, FILL_RECORDS), VALUE_BYTES)
    with quiver_bench.fresh_topic(servers, PARTITIONS) as topic, Producer(servers) as producer:
        began_s = time.perf_counter()
        futures = [producer.send_many(topic, values) for _ in range(records // len(values))]
        for future in futures:
            future.result()
        seconds = time.perf_counter() - began_s
        check_count(servers, topic, records)
    return Sample(seconds, records, records * VALUE_BYTES)


def triggers(bench: Bench, driver: SparkDriver, servers: str) -> Row:
    """Not in turns with anything: there is nothing to compare it with."""
    bench.progress.section("spark: triggers")
    rows = TRIGGER_ROWS * bench.sizes.spark_triggers
    with quiver_bench.fresh_topic(servers, TRIGGER_PARTITIONS) as topic, Producer(servers) as producer:
        for number in range(TRIGGER_PARTITIONS):
            producer.send_many(topic, make_values(rows // TRIGGER_PARTITIONS, VALUE_BYTES), partition=number)
        producer.flush()
        options = {"servers": servers, "topic": topic, "startingOffsets": "earliest", "maxRowsPerTrigger": TRIGGER_ROWS}
        found = driver.trigger(options)
    steps = {name: statistics.median(step[name] for step in found["steps_ms"]) for name in found["steps_ms"][0]}
    note = ", ".join(f"{name} {ms:.0f}" for name, ms in sorted(steps.items()) if name != "triggerExecution")
    return latency_row("spark", report.QUIVER, report.SPARK_TRIGGER, found["seconds"], f"ms: {note}")


def check_count(servers: str, topic: str, records: int) -> None:
    with Admin(servers) as admin:
        found = sum(end - start for start, end in admin.offsets(topic).values())
    if found != records:
        raise RuntimeError(f"{records} records were written and {found} are there")


def shape_of(servers: str, topic: str) -> tuple[list[int], int]:
    """(rows of each partition, rows of the usual batch that a reader of the topic gets)."""
    with Admin(servers) as admin:
        rows = [end - start for start, end in admin.offsets(topic).values()]
    with Consumer(servers, [topic], start="earliest") as consumer:
        sizes = [batch.num_rows for batch in consumer.poll_arrow(quiver_bench.READ_TIMEOUT_S).to_batches()]
    return rows, statistics.mode(sizes)
