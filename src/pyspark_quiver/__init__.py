"""Spark imports every installed module named pyspark_* and registers its DefaultSource: format("quiver") is there."""

from quiver.spark.source import QuiverDataSource as DefaultSource

__all__ = ["DefaultSource"]
