"""The process that holds the SparkSession: a JSON line with a job to run comes in, one with its figures goes out.

A process of its own, as Spark starts a JVM and Python workers, changes signal handlers, and writes what it likes to
standard output. It ends, and its JVM with it, on SIGTERM and when its standard input closes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from spark_nothing import NothingSource
from spark_rows import RowsSource

import quiver.spark

CORES = 2
JVM_STOP_TIMEOUT_S = 8.0
CHECKPOINTING = "org.apache.spark.sql.execution.streaming.checkpointing"
ERROR_CHARS_MAX = 2000  # Spark's errors carry whole stack traces; the cause comes first


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with os.fdopen(os.dup(1), "w", buffering=1) as parent:
        os.dup2(2, 1)  # whatever else is printed must not be taken for an answer
        spark = start_spark(Path.cwd())
        try:
            print(json.dumps({"spark": spark.version}), file=parent)
            for line in sys.stdin:
                print(json.dumps(answer(spark, line)), file=parent)
        finally:
            end_jvm(spark.sparkContext._gateway.proc)


def start_spark(directory: Path) -> SparkSession:
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(directory),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        # As docs/spark.md advises for a checkpoint on a local disk.
        "spark.sql.streaming.checkpointFileManagerClass": f"{CHECKPOINTING}.FileSystemBasedCheckpointFileManager",
    }
    builder = SparkSession.builder.master(f"local[{CORES}]").appName("bench")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    quiver.spark.register(spark)
    spark.dataSource.register(NothingSource)
    spark.dataSource.register(RowsSource)
    return spark


def answer(spark: SparkSession, line: str) -> dict[str, Any]:
    job = json.loads(line)
    try:
        return JOBS[job.pop("job")](spark, **job)
    except Exception as error:
        return {"error": str(error)[:ERROR_CHARS_MAX]}


def scan(spark: SparkSession, source: str, options: dict[str, Any]) -> dict[str, Any]:
    """A cheap action that needs every row: Python sources hand over all columns in any case."""
    began_s = time.perf_counter()
    frame = spark.read.format(source).options(**options).load()
    rows, value_bytes, last = frame.agg(F.count("*"), F.sum(F.length("value")), F.max("offset")).first()
    return {"seconds": time.perf_counter() - began_s, "rows": rows, "value_bytes": value_bytes, "last": last}


def write(spark: SparkSession, rows: int, value_bytes: int, options: dict[str, Any]) -> dict[str, Any]:
    """Rows that Spark makes by itself, to a topic."""
    value = F.lpad(F.col("id").cast("string"), value_bytes, "0")
    began_s = time.perf_counter()
    frame = spark.range(0, rows, numPartitions=CORES).select(value.alias("value"))
    frame.write.format("quiver").mode("append").options(**options).save()
    return {"seconds": time.perf_counter() - began_s}


def trigger(spark: SparkSession, options: dict[str, Any]) -> dict[str, Any]:
    """The micro-batches of a query over what there is: what each took outside addBatch, where Spark executes it."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as checkpoint:
        stream = spark.readStream.format("quiver").options(**options).load()
        writer = stream.writeStream.format("noop").option("checkpointLocation", checkpoint)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        found = [progress["durationMs"] for progress in query.recentProgress if progress["numInputRows"]]
    # The first one loads classes and starts Python processes.
    steps = [{name: ms for name, ms in durations.items() if name != "addBatch"} for durations in found[1:]]
    outside = [durations["triggerExecution"] - durations["addBatch"] for durations in found[1:]]
    return {"seconds": [ms / 1000 for ms in outside], "steps_ms": steps}


JOBS = {"scan": scan, "write": write, "trigger": trigger}


def end_jvm(jvm: subprocess.Popen) -> None:
    """It leaves when its standard input closes, and its Python workers leave with it."""
    assert jvm.stdin is not None
    jvm.stdin.close()
    try:
        jvm.wait(JVM_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        jvm.kill()
        jvm.wait()


if __name__ == "__main__":
    main()
