"""`ingest`: files into a topic, each row once, however often the job is killed and started again.

A stream of files into the streaming sink: its checkpoint knows which files are done and which were under way, and the
brokers know the batches of a task by their place. So a task must find the same rows when it runs again: files are cut
by their sizes alone, not by how many cores there are, and may not change while they are read.

Rule: the same job in the same state adds only files that it has not seen.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, StringType

from quiver import Admin
from quiver.config import MIB
from quiver.errors import InvalidRequestError
from quiver.spark.jobs.formats import Format, check_format, format_of, is_folder, spark_path
from quiver.spark.jobs.running import OnProgress, plain_errors, run_query
from quiver.spark.jobs.state import Job, default_state, open_state

SPLIT_BYTES_MAX: Final = 32 * MIB
_FILES_PER_BATCH_MAX: Final = 10_000
# How files are cut into tasks. Said for every run: another cut would be other tasks, and rows stored twice.
_CUT: Final = {
    "spark.sql.files.maxPartitionBytes": str(SPLIT_BYTES_MAX),
    "spark.sql.files.openCostInBytes": str(4 * MIB),
    "spark.sql.files.minPartitionNum": "1",
    "spark.sql.sources.parallelPartitionDiscovery.threshold": str(_FILES_PER_BATCH_MAX),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Ingested:
    topic: str
    rows: int  # of this run
    batches: int
    seconds: float
    state: str


def ingest(
    spark: SparkSession,
    topic: str,
    paths: str | Sequence[str],
    *,
    servers: str,
    format: str | None = None,
    key: str | None = None,
    value: str | None = None,
    state: str | None = None,
    on_progress: OnProgress | None = None,
) -> Ingested:
    """Sends every row of files and folders to `topic`; returns when all are acknowledged.

    text and json: a line is a message. csv and parquet: a row is a JSON object, or its column `value`. `key` is a
    column, or a field of a JSON line. Called again with the same `state` it sends only files it has not seen.
    """
    began_s = time.monotonic()
    paths = [paths] if isinstance(paths, str) else list(paths)
    with Admin(servers) as admin:
        uid = admin.describe_topic(topic).uid
    with plain_errors():
        chosen = format_of(paths) if format is None else check_format(format)
        source = spark_path(paths, is_folder=chosen == "parquet" and all(map(is_folder, paths)))
        job: Job = {"job": "ingest", "topic": topic, "uid": uid, "source": source, "format": chosen}
        job = {**job, "key": key, "value": value}
        kept = open_state(spark, state or default_state(job), job)
        session = spark.newSession()
        for name, setting in _CUT.items():
            session.conf.set(name, setting)
        messages = as_messages(_stream(session, source, chosen), chosen, key, value)
        writer = (
            messages.writeStream.format("quiver")
            .options(servers=servers, topic=topic, checkpointLocation=f"{kept.path}/checkpoint")
            .trigger(availableNow=True)
            .queryName(f"ingest {topic}")
        )
        done = run_query(session, writer, on_progress)
    return Ingested(topic, done.rows, done.batches, time.monotonic() - began_s, kept.local() or kept.path)


def _stream(spark: SparkSession, source: str, format: Format) -> DataFrame:
    options = {"maxFilesPerTrigger": str(_FILES_PER_BATCH_MAX)}
    if format != "parquet":
        options["recursiveFileLookup"] = "true"  # parquet: folders like date=2026-01-31 are columns
    if format in ("text", "json"):
        # Without a look at the files: a line is a message as it is.
        spark.read.options(**options).text(source)  # says if there are none
        return spark.readStream.format("text").options(**options).load(source)
    if format == "csv":
        # Columns by the header of a file, and an error where another file has others.
        options |= {"header": "true", "enforceSchema": "false"}
    schema = spark.read.format(format).options(**options).load(source).schema
    return spark.readStream.format(format).schema(schema).options(**options).load(source)


def as_messages(rows: DataFrame, format: Format, key: str | None, value: str | None) -> DataFrame:
    """Rows as the sink takes them: value, and key if there is to be one."""
    lines = format in ("text", "json")
    if lines and value is not None:
        raise InvalidRequestError(
            f"a line of {format} is a message as it is: --value is for columns of csv and parquet"
        )
    if format == "text" and key is not None:
        raise InvalidRequestError("a line of text has no key: --key is for json, csv and parquet")
    made = F.col("value") if lines else _value(rows, value)
    columns = [made.alias("value")]
    if format == "json" and key is not None:
        columns.append(F.get_json_object("value", f"$.{key}").alias("key"))
    elif key is not None:
        columns.append(_bytes(rows, key).alias("key"))
    return rows.select(*columns)


def _value(rows: DataFrame, value: str | None) -> Column:
    if value is not None:
        return _bytes(rows, value)
    return F.to_json(F.struct(*(F.col(f"`{name}`") for name in rows.columns)), {"ignoreNullFields": "false"})


def _bytes(rows: DataFrame, name: str) -> Column:
    """Text and bytes as they are, anything else as Spark writes it."""
    if name not in rows.columns:
        raise InvalidRequestError(f"there is no column {name}: there are {', '.join(rows.columns)}")
    column = F.col(f"`{name}`")
    return column if isinstance(rows.schema[name].dataType, (StringType, BinaryType)) else column.cast("string")
