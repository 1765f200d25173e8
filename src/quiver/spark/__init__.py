"""Quiver as a Spark data source: `format("quiver")`, Arrow in both directions; and bulk jobs on it.

    from quiver.spark import ingest, verify
    ingest(spark, "logs", "/var/log/app", servers="127.0.0.1:9400")

Rule: the only room that imports pyspark. The driver plans with offsets; executors talk to brokers directly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quiver.spark.jobs.archive import archive
    from quiver.spark.jobs.ingest import ingest
    from quiver.spark.jobs.replay import replay
    from quiver.spark.jobs.verify import verify

_JOBS = ("archive", "ingest", "replay", "verify")


def register(spark: Any) -> None:
    """Registers the format by hand, where Spark's own discovery of installed modules is off."""
    from quiver.spark.source import QuiverDataSource

    spark.dataSource.register(QuiverDataSource)


def __getattr__(name: str) -> Any:
    # Jobs bring pyspark with them: whoever only registers the format, or asks for help, does not wait for it.
    if name in _JOBS:
        return getattr(import_module(f"quiver.spark.jobs.{name}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["archive", "ingest", "register", "replay", "verify"]
