"""How an archive lies in its folder, and how it is read.

    topic=logs/partition=0/date=2026-11-15/0000000012-00000.parquet     batch 12 of the archive, its first file
    _quiver/logs/job.json, checkpoint/, staging/, batches/0000000012.json

Every reader of Parquet sees each message once: what is under way is inside `_quiver`, and readers leave out what begins
with an underscore. A day is one of UTC, by the message's own timestamp.

Rule: pure names, and frames.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from quiver.spark.jobs.formats import absolute, literal
from quiver.types import check_topic_name

# Said, not found out: Spark would take a topic called 2026 for a number.
SCHEMA: Final = (
    "offset bigint, timestamp timestamp, key binary, value binary, headers map<string, binary>, "
    "topic string, partition int, date date"
)
FOLDERS: Final = ("topic", "partition", "date")
_DAY_US: Final = 86_400_000_000
_PARTITION: Final = re.compile(r"/partition=([0-9]+)/")
_NAME: Final = re.compile(r"([0-9]{10,})-([0-9]{5,})\.parquet")


def home_of(topic: str) -> str:
    """Where the archive keeps its own of a topic, from the folder of the archive."""
    return f"_quiver/{check_topic_name(topic)}"


def file_name(batch: int, number: int) -> str:
    return f"{batch:010d}-{number:05d}.parquet"


def place_of(path: str) -> tuple[int, int] | None:
    """Batch and number of a file; None for a file that is not ours."""
    found = _NAME.fullmatch(path.rpartition("/")[2])
    return None if found is None else (int(found[1]), int(found[2]))


def partition_of(path: str) -> int:
    """0 for a file that lies elsewhere."""
    found = _PARTITION.search(path)
    return 0 if found is None else int(found[1])


def day() -> Column:
    """Of the column timestamp, in UTC whatever the session's time zone is."""
    return F.date_from_unix_date(F.floor(F.unix_micros("timestamp") / _DAY_US).cast("int"))


def read_archive(spark: SparkSession, path: str, topic: str, files: Sequence[str] | None = None) -> DataFrame:
    """The messages of a topic; of all its files, or of those with these names."""
    root = absolute(path)
    inside = [f"topic={topic}"] if files is None else files
    reader = spark.read.schema(SCHEMA).option("basePath", root)
    return reader.parquet(*(f"{literal(root)}/{name}" for name in inside))
