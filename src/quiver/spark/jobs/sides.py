"""What a topic's messages look like to one who saw them: a consumer's log, the producers' logs, the topic, an archive.

Every side becomes a frame of the same columns: partition, offset, id, and a place in its own order (file, block, row),
which is null where a side has no order but that of its offsets.

Rule: frames only; nothing here runs a job, but Spark's look at the header of a CSV or Parquet file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from quiver.errors import InvalidRequestError
from quiver.spark.jobs.formats import Format, format_of, spark_path

# What a log may say of a message. `quiver consume --json` writes the first five of them.
COLUMNS: Final = {
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "key": "string",
    "value": "string",
    "id": "string",
    "seq": "bigint",  # its place in the log, where that is not the order of lines
}
_BROKEN: Final = "_corrupt_record"


class Side(NamedTuple):
    who: str
    frame: DataFrame
    has_order: bool  # of its own, beside that of offsets


def read_log(spark: SparkSession, paths: Sequence[str], topic: str, id: str | None, format: Format | None) -> DataFrame:
    """Messages of `topic` as a client logged them: JSON lines, CSV with a header, Parquet, or one id a line."""
    chosen, path = format or format_of(paths), spark_path(paths)
    reader = spark.read
    if chosen == "text":
        rows = reader.text(path)
    elif chosen == "csv":
        rows = reader.option("header", True).option("enforceSchema", False).csv(path)
    elif chosen == "json":
        fields = COLUMNS | ({id: "string"} if id is not None and id.isidentifier() and id not in COLUMNS else {})
        schema = ", ".join(f"`{name}` {kind}" for name, kind in fields.items())
        reader = reader.option("columnNameOfCorruptRecord", _BROKEN)
        rows = reader.schema(f"{schema}, {_BROKEN} string").json(path)
    else:
        rows = reader.parquet(path)
    placed = rows.select(
        "*",
        F.col("_metadata.file_path").alias("_file"),
        F.col("_metadata.file_block_start").alias("_block"),
        F.monotonically_increasing_id().alias("_row"),
    )
    return normal(placed, topic, id)


def normal(rows: DataFrame, topic: str, id: str | None) -> DataFrame:
    """The rows of `topic` as a side has them. Without `id`, a column of that name, or the value, names a message."""
    known = set(rows.columns)
    if id is None and not known & {"id", "value"}:
        raise InvalidRequestError(f"nothing names a message: give --id, one of {', '.join(sorted(rows.columns))}")
    names = [F.col(name) for name in ("id", "value") if name in known]
    name = F.coalesce(*map(text, names)) if id is None else text(F.expr(id))

    def column(name: str) -> Column:
        return (F.col(name) if name in known else F.lit(None)).cast(COLUMNS[name])

    in_file = "_row" in known
    seq = column("seq")
    here = rows.where(F.coalesce(column("topic") == topic, F.lit(True)))
    return here.select(
        F.coalesce(column("partition"), F.lit(0)).alias("partition"),
        column("offset").alias("offset"),
        name.alias("id"),
        (F.when(seq.isNull(), F.col("_file")) if in_file else F.lit(None).cast("string")).alias("_file"),
        (F.when(seq.isNull(), F.col("_block")) if in_file else F.lit(None).cast("bigint")).alias("_block"),
        (F.coalesce(seq, F.col("_row")) if in_file else seq).alias("_row"),
        (F.col(_BROKEN) if _BROKEN in known else F.lit(None).cast("string")).alias("_broken"),
    )


def text(column: Column) -> Column:
    """As `quiver consume --json` writes bytes: text, or {"base64":"..."} for what is not UTF-8."""
    raw = column.cast("string")  # keeps the bytes as they are
    packed = F.regexp_replace(F.base64(column.cast("binary")), r"\s", "")
    return F.when(F.is_valid_utf8(raw), raw).when(raw.isNotNull(), F.concat(F.lit('{"base64":"'), packed, F.lit('"}')))
