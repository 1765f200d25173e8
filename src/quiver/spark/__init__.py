"""Quiver as a Spark data source: `format("quiver")`, Arrow in both directions.

Rule: the only room that imports pyspark. The driver plans with offsets; executors talk to brokers directly.
"""

from __future__ import annotations

from typing import Any


def register(spark: Any) -> None:
    """Registers the format by hand, where Spark's own discovery of installed modules is off."""
    from quiver.spark.source import QuiverDataSource

    spark.dataSource.register(QuiverDataSource)


__all__ = ["register"]
