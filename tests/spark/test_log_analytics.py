"""The log pipeline: what parses is counted and archived, what does not goes to the dead letters, all exactly once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from quiver.spark.log_analytics import LogAnalytics, parse, start
from tests.spark.kit import Lake

GOOD = [
    "2026-11-15T20:00:01 INFO a started",
    "2026-11-15T20:00:59 INFO a ready",
    "2026-11-15T20:01:00 INFO a tick",
    "2026-11-15T20:01:30 ERROR b disk is full",
]
BAD = ["", "no log line at all", "2026-13-45T99:00:00 INFO a impossible time", "2026-11-15T20:00:01 LOUD a no level"]


@pytest.mark.timeout(300)
def test_lines_are_counted_by_window_level_and_producer(lake: Lake, tmp_path: Path) -> None:
    lines, dead, counted = (lake.new_topic() for _ in range(3))
    not_text = b"\xff\xfe not text"
    lake.fill(lines, [*(line.encode() for line in (*GOOD, *BAD)), not_text])
    job = LogAnalytics(lake.servers, lines, dead, counted, str(tmp_path / "archive"), str(tmp_path / "checkpoints"))
    queries = start(lake.spark, job)
    for query in queries:
        query.processAllAvailable()
        query.stop()
    counts = {}
    for value in lake.stored(counted):
        found = json.loads(value or b"")
        counts[found["window"], found["level"], found["producer"]] = found["count"]
    assert counts == {
        ("2026-11-15T20:00:00", "INFO", "a"): 2,
        ("2026-11-15T20:01:00", "INFO", "a"): 1,
        ("2026-11-15T20:01:00", "ERROR", "b"): 1,
    }
    assert sorted(lake.stored(dead), key=repr) == sorted([*(line.encode() for line in BAD), not_text], key=repr)
    archived = lake.spark.read.parquet(job.archive).orderBy("event_time").collect()
    assert [row.text for row in archived] == ["started", "ready", "tick", "disk is full"]


def test_a_line_without_text_still_parses(spark: SparkSession) -> None:
    rows = spark.createDataFrame([(b"2026-11-15T20:00:01 WARN a ",)], "value binary")
    row = parse(rows).first()
    assert row is not None
    assert (row.level, row.producer, row.text) == ("WARN", "a", "")
