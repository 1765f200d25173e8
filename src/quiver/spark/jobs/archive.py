"""`archive`: a topic into Parquet files by topic, partition and day, each message in exactly one of them.

A batch is written to a staging folder, its list of files is written down, and then they are moved to their places. A
crash before the list: the batch is written again. After it: the rest is moved, nothing is written again. Then, with
`trim`, the position of the archive's group is moved, which lets the topic forget the messages.

Rule: nothing is let go before the files are at their places, and on a local disk synced there.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Final

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from quiver import Admin, Consumer
from quiver.errors import CorruptLogError
from quiver.spark.jobs.archived import FOLDERS, day, file_name, home_of
from quiver.spark.jobs.folder import Folder
from quiver.spark.jobs.formats import literal
from quiver.spark.jobs.running import OnProgress, plain_errors, run_query
from quiver.spark.jobs.state import open_state

logger = logging.getLogger("quiver.spark")

ROWS_PER_BATCH: Final = 5_000_000
EVERY_DEFAULT: Final = "1 minute"


@dataclasses.dataclass(frozen=True, slots=True)
class Archived:
    topic: str
    path: str
    rows: int  # of this run, as are files and batches
    files: int
    batches: int
    ends: dict[int, int]  # by partition: what is below is in the archive
    seconds: float


class Batch(msgspec.Struct):
    """What is written down of a batch once it is staged whole."""

    rows: int
    files: list[tuple[str, str]]  # in staging, and at its place
    ends: dict[int, int]


def archive(
    spark: SparkSession,
    topic: str,
    path: str,
    *,
    servers: str,
    continuous: bool = False,
    every: str = EVERY_DEFAULT,
    trim: bool = False,
    rows_per_batch: int = ROWS_PER_BATCH,
    on_progress: OnProgress | None = None,
) -> Archived:
    """Adds to the archive in `path` what the topic has and the archive has not.

    It ends when it has all that was there when it began; `continuous` goes on, a batch every so often, until it is
    interrupted. `trim` sets cleanup=consumed for the topic, with the archive as one of its consumers.
    """
    began_s = time.monotonic()
    with Admin(servers) as admin:
        uid = admin.describe_topic(topic).uid
        if trim:
            admin.alter_topic(topic, {"cleanup": "consumed"})
    with plain_errors():
        home = open_state(spark, f"{path}/{home_of(topic)}", {"job": "archive", "topic": topic, "uid": uid})
        session = spark.newSession()
        # As everybody reads it: the default is a format of old that has no time zone.
        session.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        keeper = _Keeper(Folder(spark, path), topic, servers if trim else None)
        rows = (
            session.readStream.format("quiver")
            .options(servers=servers, topic=topic, startingOffsets="earliest", maxRowsPerTrigger=str(rows_per_batch))
            .load()
        )
        writer = (
            rows.writeStream.foreachBatch(keeper.keep)
            .option("checkpointLocation", f"{home.path}/checkpoint")
            .queryName(f"archive {topic}")
        )
        writer = writer.trigger(processingTime=every) if continuous else writer.trigger(availableNow=True)
        try:
            run_query(session, writer, on_progress)
        except KeyboardInterrupt:
            if not continuous:
                raise
            logger.info("archive_interrupted topic=%s", topic)
    where = keeper.folder.local() or keeper.folder.path
    took_s = time.monotonic() - began_s
    return Archived(topic, where, keeper.rows, keeper.files, keeper.batches, keeper.ends, took_s)


class _Keeper:
    """Puts batches at their places; each may come again after a crash."""

    def __init__(self, folder: Folder, topic: str, servers: str | None) -> None:
        self.folder = folder
        self._topic = topic
        self._home = home_of(topic)
        self._servers = servers  # None: nothing is trimmed
        self.rows = self.files = self.batches = 0
        self.ends: dict[int, int] = {}

    def keep(self, frame: DataFrame, number: int) -> None:
        listed = f"{self._home}/batches/{number:010d}.json"
        known = self.folder.read(listed)
        if known is None:
            batch = self._stage(frame, number)
            self.folder.write(listed, msgspec.json.encode(batch))
        else:
            batch = msgspec.json.decode(known, type=Batch)
        self._place(batch)
        self.folder.remove(self._staging(number))
        self.rows += batch.rows
        self.files += len(batch.files)
        self.batches += 1
        self.ends |= batch.ends
        if self._servers is not None:
            release(self._servers, self._topic, batch.ends)

    def _staging(self, number: int) -> str:
        return f"{self._home}/staging/{number:010d}"

    def _stage(self, frame: DataFrame, number: int) -> Batch:
        """Writes the rows and reads back how far they reach."""
        staging = self._staging(number)
        where = f"{self.folder.path}/{staging}"
        writer = frame.withColumn("date", day()).write.mode("overwrite").partitionBy(*FOLDERS)
        writer.parquet(where, compression="zstd")
        names = [name for name in self.folder.files(staging) if name.endswith(".parquet")]
        for name in names:
            self.folder.sync(name)
        files = [
            (name, f"{name.removeprefix(f'{staging}/').rpartition('/')[0]}/{file_name(number, at)}")
            for at, name in enumerate(names)
        ]
        if not files:
            return Batch(0, [], {})
        written = frame.sparkSession.read.schema("offset bigint, partition int").parquet(literal(where))
        ends = (
            written.groupBy("partition").agg(F.count("*").alias("rows"), (F.max("offset") + 1).alias("end")).collect()
        )
        return Batch(sum(row.rows for row in ends), files, {row.partition: row.end for row in ends})

    def _place(self, batch: Batch) -> None:
        for staged, place in batch.files:
            if self.folder.exists(staged):
                self.folder.move(staged, place)
            elif not self.folder.exists(place):
                raise CorruptLogError(f"{place} of the archive is gone, and what it was made of is too: {staged}")


def release(servers: str, topic: str, ends: dict[int, int]) -> None:
    """Moves the position of the archive's group: with cleanup=consumed the topic may forget what is below."""
    if not ends:
        return
    partitions = {topic: sorted(ends)}
    with Consumer(servers, [topic], group=group_of(topic), partitions=partitions, start="earliest") as consumer:
        for partition, end in ends.items():
            consumer.seek(topic, partition, end)
        consumer.commit()


def group_of(topic: str) -> str:
    return f"archive-{topic}"
