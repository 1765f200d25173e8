"""A Spark driver in a process of its own that copies one topic to another, so that it can be killed.

    python -m tests.spark.copy_job '{"servers": ..., "source": ..., "sink": ..., "directory": ...}'

As a stream with a checkpoint until it is killed, or with "batch" as one write. It prints a line when Spark is there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from tests.spark.kit import settings


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    directory = Path(job["directory"])
    builder = SparkSession.builder.appName("copy").master(job.get("master", "local[2]"))
    for name, value in (settings(directory) | job.get("settings", {})).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    print("ready", flush=True)
    options = {"servers": job["servers"], "topic": job["source"], "startingOffsets": "earliest"} | job["options"]
    sink = {"servers": job["servers"], "topic": job["sink"]}
    if job.get("batch"):
        frame = spark.read.format("quiver").options(**options).load().select("value", "key")
        frame.write.format("quiver").mode("append").options(**sink).save()
    else:
        frame = spark.readStream.format("quiver").options(**options).load().select("value", "key")
        writer = frame.writeStream.format("quiver").options(**sink)
        writer.option("checkpointLocation", str(directory / "checkpoint")).start().awaitTermination()
    print("done", flush=True)


if __name__ == "__main__":
    main()
