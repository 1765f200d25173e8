"""Log analytics: lines from a topic, parsed, counted by window, archived; what does not parse goes to its own topic.

A line is `time level producer text`, time in ISO 8601: `2026-11-15T20:03:52 ERROR service-1 disk is full`.

Rule: three queries, each exactly once by itself: dead letters and counts through Quiver's sink, the archive through
Spark's. Each micro-batch adds all counts as they are now: for one window, level and producer the last one holds.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from quiver.spark.jobs.running import begin

LEVELS: Final = ("DEBUG", "INFO", "WARN", "ERROR")
_LINE: Final = rf"^(\S+) ({'|'.join(LEVELS)}) (\S+) (.*)$"


class LogAnalytics(NamedTuple):
    servers: str
    topic: str
    dead_letters: str  # topic for lines that do not parse
    counts: str  # topic for the counts, as JSON
    archive: str  # directory for Parquet
    checkpoints: str  # directory; with it a restarted job goes on where it was
    window: str = "1 minute"
    trigger: str = "1 second"


def parse(records: DataFrame) -> DataFrame:
    """event_time, level, producer, text; event_time is null where the line does not parse."""
    line = F.col("value").cast("string")
    level = F.regexp_extract(line, _LINE, 2)
    stamp = F.when(level != "", F.try_to_timestamp(F.regexp_extract(line, _LINE, 1)))
    return records.select(
        "value",
        stamp.alias("event_time"),
        level.alias("level"),
        F.regexp_extract(line, _LINE, 3).alias("producer"),
        F.regexp_extract(line, _LINE, 4).alias("text"),
    )


def count(lines: DataFrame, window: str) -> DataFrame:
    """One row for each window, level and producer: key names them, value is JSON with their count."""
    grouped = lines.groupBy(F.window("event_time", window).alias("window"), "level", "producer").count()
    start = F.date_format("window.start", "yyyy-MM-dd'T'HH:mm:ss")
    return grouped.select(
        F.concat_ws("|", start, "level", "producer").alias("key"),
        F.to_json(F.struct(start.alias("window"), "level", "producer", "count")).alias("value"),
    )


def start(spark: SparkSession, job: LogAnalytics) -> list[StreamingQuery]:
    """Starts the three queries; they run until they are stopped."""
    lines = parse(
        spark.readStream.format("quiver")
        .option("servers", job.servers)
        .option("topic", job.topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    good = lines.where("event_time is not null")
    dead = lines.where("event_time is null").select("value")
    archive = good.select("event_time", "level", "producer", "text")
    to_archive = (
        archive.writeStream.format("parquet")
        .option("path", job.archive)
        .option("checkpointLocation", f"{job.checkpoints}/archive")
        .trigger(processingTime=job.trigger)
        .queryName("archive")
    )
    return [
        begin(_to_topic(job, dead, job.dead_letters, "append")),
        begin(_to_topic(job, count(good, job.window), job.counts, "complete")),
        begin(to_archive),
    ]


def _to_topic(job: LogAnalytics, rows: DataFrame, topic: str, mode: str) -> DataStreamWriter:
    return (
        rows.writeStream.format("quiver")
        .option("servers", job.servers)
        .option("topic", topic)
        .option("checkpointLocation", f"{job.checkpoints}/{topic}")
        .outputMode(mode)
        .trigger(processingTime=job.trigger)
        .queryName(topic)
    )
