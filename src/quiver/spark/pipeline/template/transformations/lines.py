"""Log lines from a topic: those that parse become the table `parsed`, the others go to the topic of dead letters.

A line is `time level producer text`, time in ISO 8601: `2026-11-15T20:03:52 ERROR service-1 disk is full`.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

spark = SparkSession.active()

LINE = r"^(\S+) (DEBUG|INFO|WARN|ERROR) (\S+) (.*)$"
SERVERS = spark.conf.get("quiver.servers")


@dp.temporary_view
def lines() -> DataFrame:
    """All lines; event_time is null where a line does not parse."""
    records = (
        spark.readStream.format("quiver")
        .option("servers", SERVERS)
        .option("topic", spark.conf.get("quiver.lines"))
        .option("startingOffsets", "earliest")
        .load()
    )
    line = F.col("value").cast("string")
    level = F.regexp_extract(line, LINE, 2)
    return records.select(
        "value",
        F.when(level != "", F.try_to_timestamp(F.regexp_extract(line, LINE, 1))).alias("event_time"),
        level.alias("level"),
        F.regexp_extract(line, LINE, 3).alias("producer"),
        F.regexp_extract(line, LINE, 4).alias("text"),
    ).withWatermark("event_time", spark.conf.get("quiver.lateness"))


@dp.table
def parsed() -> DataFrame:
    return (
        spark.readStream.table("lines")
        .where("event_time is not null")
        .select("event_time", "level", "producer", "text")
    )


dp.create_sink("dead_letters", "quiver", {"servers": SERVERS, "topic": spark.conf.get("quiver.dead-letters")})


@dp.append_flow(target="dead_letters")
def unparsed() -> DataFrame:
    return spark.readStream.table("lines").where("event_time is null").select("value")
