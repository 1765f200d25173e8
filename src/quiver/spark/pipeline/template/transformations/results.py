"""The same counts to a topic, each once: when no line of that minute can come any more."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

spark = SparkSession.active()

dp.create_sink(
    "results", "quiver", {"servers": spark.conf.get("quiver.servers"), "topic": spark.conf.get("quiver.counts")}
)


@dp.append_flow(target="results")
def counted() -> DataFrame:
    """key: minute|level|producer. value: JSON with their count."""
    lines = spark.readStream.table("lines").where("event_time is not null")
    counts = lines.groupBy(F.window("event_time", "1 minute"), "level", "producer").agg(F.count("*").alias("lines"))
    minute = F.date_format("window.start", "yyyy-MM-dd'T'HH:mm:ss")
    return counts.select(
        F.concat_ws("|", minute, "level", "producer").alias("key"),
        F.to_json(F.struct(minute.alias("minute"), "level", "producer", "lines")).alias("value"),
    )
