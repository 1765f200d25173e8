"""A local Spark session for jobs that bring their own."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import SparkSession


@contextlib.contextmanager
def local_session(name: str, log: Path) -> Iterator[SparkSession]:
    """`local[*]` with small shuffles and no web page; all that the JVM says goes to `log`."""
    # Workers must be this Python: another one has no Quiver.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = (
        SparkSession.builder.appName(name)
        .master("local[*]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
    )
    with _stderr_to(log):
        spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """The JVM inherits our standard error when it starts; a file takes its place for that moment."""
    sys.stderr.flush()
    kept = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
