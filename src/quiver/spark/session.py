"""A Spark session for commands that bring their own."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pyspark import SparkContext, java_gateway
from pyspark.errors import PySparkRuntimeError
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from quiver.errors import InvalidRequestError


@contextlib.contextmanager
def open_session(
    name: str, log: Path, master: str = "local[*]", conf: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """Without a web page, in UTC; all that the JVM says goes to `log`. `conf` comes after our own settings."""
    # Workers must be this Python: another one has no Quiver.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = (
        SparkSession.builder.appName(name)
        .master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
    )
    if master.startswith("local"):
        builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
    for key, value in (conf or {}).items():
        builder = builder.config(key, value)
    # They would write what goes wrong to standard error, pages of it; who asked gets the error itself.
    PySparkLogger.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    with _stderr_to(log), _jvm_or_nothing():
        try:
            spark = builder.getOrCreate()
        except PySparkRuntimeError as error:
            if "JAVA_GATEWAY_EXITED" not in str(error):
                raise
            raise InvalidRequestError(f"Spark did not start: it needs Java 17 or later; {log} has its words") from error
    try:
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def _jvm_or_nothing() -> Iterator[None]:
    """A start that fails or is interrupted leaves no JVM: Spark itself would forget it, and it would stay for ever."""
    started: list[Any] = []

    def start(*arguments: Any, **options: Any) -> Any:
        started.append(popen(*arguments, **options))
        return started[-1]

    launcher: Any = java_gateway
    popen, launcher.Popen = launcher.Popen, start
    try:
        yield
    except BaseException:
        for process in started:
            process.kill()
            process.wait()
            SparkContext._gateway = SparkContext._jvm = None
        raise
    finally:
        launcher.Popen = popen


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
