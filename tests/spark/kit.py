"""Short ways for the tests of Spark to make topics, fill them, and read and write them through Spark."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from quiver import Admin, Producer
from tests.system.kit import read_all, until, values_of

QUERY_TIMEOUT_S = 120
STARTS_MAX = 5

_numbers = itertools.count(1)
_begin = DataStreamWriter.start


def settings(directory: Path) -> dict[str, str]:
    """Of a Spark for small queries."""
    return {
        "spark.driver.bindAddress": "127.0.0.1",
        # A minute of small queries is over before the second compiler has earned its time.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.driver.host": "127.0.0.1",
        "spark.local.dir": str(directory / "local"),
        # To compile and to plan again costs more than a small query itself.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "Asia/Kathmandu",  # 5:45 ahead: what depends on it shows
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }


class Lake:
    """Spark and a node, as one test sees them."""

    def __init__(self, spark: SparkSession, servers: str) -> None:
        self.spark = spark
        self.servers = servers

    def via(self, servers: str) -> Lake:
        """The same by another address, as that of a proxy."""
        return Lake(self.spark, servers)

    # -- straight ------------------------------------------------------------------------------------------------

    def new_topic(self, partitions: int = 1) -> str:
        name = f"spark-{os.getpid()}-{next(_numbers)}"
        with Admin(self.servers) as admin:
            admin.create_topic(name, partitions)
        return name

    def fill(self, topic: str, values: list[bytes], partition: int | None = None) -> None:
        """One batch for each hundred values, so that ranges begin and end inside batches."""
        with Producer(self.servers) as producer:
            for start in range(0, len(values), 100):
                producer.send_many(topic, values[start : start + 100], partition=partition).result(30)

    def stored(self, topic: str) -> list[bytes | None]:
        """All values, by partition and offset."""
        return values_of(read_all(self.servers, topic))

    # -- through Spark -------------------------------------------------------------------------------------------

    def read(self, topic: str, **options: Any) -> DataFrame:
        return self.spark.read.format("quiver").options(servers=self.servers, topic=topic, **options).load()

    def read_stream(self, topic: str, **options: Any) -> DataFrame:
        reader = self.spark.readStream.format("quiver")
        return reader.options(servers=self.servers, topic=topic, **options).load()

    def write(self, frame: DataFrame, topic: str, mode: str = "append", **options: Any) -> None:
        frame.write.format("quiver").mode(mode).options(servers=self.servers, topic=topic, **options).save()

    def write_stream(self, frame: DataFrame, topic: str, checkpoint: Any) -> DataStreamWriter:
        writer = frame.writeStream.format("quiver").options(servers=self.servers, topic=topic)
        return writer.option("checkpointLocation", str(checkpoint))

    def frame(self, rows: list[tuple[Any, ...]], schema: str) -> DataFrame:
        return self.spark.createDataFrame(rows, schema)


def start(writer: DataStreamWriter) -> StreamingQuery:
    """Returns when the query has its source.

    That is a Python process to which Spark gives ten seconds to come up; a busy machine may need longer. Nothing was
    read or written by a query that failed so, and it is started again.
    """
    for attempt in range(STARTS_MAX):
        query = _begin(writer)
        until(lambda query=query: query.status["message"] != "Initializing sources", QUERY_TIMEOUT_S)
        error = query.exception()
        if error is None or "connect back" not in str(error) or attempt == STARTS_MAX - 1:
            break
    return query


def wait_for(query: StreamingQuery, condition: Callable[[], Any]) -> None:
    """Until it is so; a query that fails meanwhile is told at once."""

    def is_so() -> Any:
        if (error := query.exception()) is not None:
            raise error
        return condition()

    until(is_so, QUERY_TIMEOUT_S)


def finish(writer: DataStreamWriter) -> StreamingQuery:
    """Runs a query over what there is now, to its end."""
    query = start(writer.trigger(availableNow=True))
    try:
        assert query.awaitTermination(QUERY_TIMEOUT_S), "the query did not end"
    finally:
        query.stop()
    return query


def numbered(count: int, name: str = "row") -> list[bytes]:
    return [f"{name}-{number:06d}".encode() for number in range(count)]


def values_in(frame: DataFrame) -> list[bytes]:
    """The values of a frame, by topic, partition and offset."""
    rows = frame.select("topic", "partition", "offset", "value").collect()
    return [bytes(row.value) for row in sorted(rows, key=lambda row: (row.topic, row.partition, row.offset))]
