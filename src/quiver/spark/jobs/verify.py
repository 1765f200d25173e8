"""`verify`: is what everybody saw of a topic the same, whole, once, in order, and what was produced?

- offsets of each side are dense: no gap, none twice;
- each side saw its messages in the order of their offsets, and an offset is the same message for all of them. Where a
  log has no offsets, the n-th message of a partition must be the same for all;
- with the producers' logs: each message was seen as often as it was produced. Without them, and where `id` is told,
  once.

Rule: four aggregations over all rows, whatever their number; rows are only fetched as examples of what differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Final, NamedTuple

from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F

from quiver.errors import InvalidRequestError
from quiver.spark.jobs.archived import read_archive
from quiver.spark.jobs.formats import Format
from quiver.spark.jobs.running import OnProgress, plain_errors, watched
from quiver.spark.jobs.sides import Side, normal, read_log
from quiver.types import check_topic_name

STORED: Final = "topic"
ARCHIVE: Final = "archive"
_PLACE: Final = ("_file", "_block", "_row")
_SHOWN_CHARS: Final = 80

Log = str | Sequence[str] | DataFrame


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """`count` of `what` in what `who` saw. `who` is empty where it concerns all."""

    what: str
    who: str
    count: int
    examples: tuple[str, ...]


class SideCounts(NamedTuple):
    """Of one partition of one side; first and last are offsets, None where the log has none."""

    who: str
    partition: int
    rows: int
    first: int | None
    last: int | None


class Verified(NamedTuple):
    topic: str
    produced: int | None  # rows of the producers' logs
    sides: tuple[SideCounts, ...]
    findings: tuple[Finding, ...]
    checks: tuple[str, ...]  # what could be looked at

    @property
    def right(self) -> bool:
        return not self.findings


def verify(
    spark: SparkSession,
    topic: str,
    *,
    produced: Log | None = None,
    consumed: Mapping[str, Log] | None = None,
    archive: str | None = None,
    servers: str | None = None,
    id: str | None = None,
    format: Format | None = None,
    examples: int = 5,
    on_progress: OnProgress | None = None,
) -> Verified:
    """Compares what was produced with what consumers logged, an archive has, and the topic itself if `servers` is told.

    A log is a path, several, or a frame with some of the columns topic, partition, offset, id, value, seq. `id` is a
    column or a SQL expression over them that names a message.
    """
    check_topic_name(topic)
    with plain_errors(), watched(spark, on_progress):
        sides = [_side(spark, name, log, topic, id, format) for name, log in (consumed or {}).items()]
        if archive is not None:
            rows = read_archive(spark, archive, topic)
            sides.append(Side(ARCHIVE, normal(rows, topic, id), False))
        if servers is not None:
            reader = spark.read.format("quiver").options(servers=servers, topic=topic)
            rows = (reader.option("columns", "topic,partition,offset,value") if id is None else reader).load()
            sides.append(Side(STORED, normal(rows, topic, id), False))
        if not sides:
            raise InvalidRequestError("there is nothing to verify: name the logs of consumers, an archive or a cluster")
        made = None if produced is None else _side(spark, "", produced, topic, id, format).frame
        return _Check(topic, sides, made, id is not None, examples).run()


def _side(spark: SparkSession, who: str, log: Log, topic: str, id: str | None, format: Format | None) -> Side:
    if who in (STORED, ARCHIVE):
        raise InvalidRequestError(f"a consumer cannot be called {who!r} here: choose another name")
    if isinstance(log, str):
        log = [log]
    if isinstance(log, Sequence):
        return Side(who, read_log(spark, log, topic, id, format), True)
    return Side(who, normal(log, topic, id), "seq" in log.columns)


class _Check:
    """One run over all sides; each step adds what it finds."""

    def __init__(
        self, topic: str, sides: list[Side], produced: DataFrame | None, ids_told: bool, examples: int
    ) -> None:
        self._topic = topic
        self._sides = sides
        self._who = [side.who for side in sides]
        lines = reduce(DataFrame.unionByName, (side.frame.withColumn("who", F.lit(side.who)) for side in sides))
        self._broken = lines.where("_broken is not null")
        self._all = lines.where("_broken is null")
        self._produced = produced
        self._ids_told = ids_told
        self._examples = examples
        self._findings: list[Finding] = []
        self._checks: list[str] = []

    def run(self) -> Verified:
        grouped = self._all.groupBy("who", "partition").agg(
            F.count("*").alias("rows"),
            F.count("offset").alias("placed"),
            F.min("offset").alias("first"),
            F.max("offset").alias("last"),
        )
        counts = sorted(grouped.collect(), key=lambda row: (self._who.index(row.who), row.partition))
        self._unreadable()
        whole = {row.who for row in counts} - {row.who for row in counts if row.placed < row.rows}
        if whole:
            self._offsets(whole, [row for row in counts if row.who in whole])
        ordered = whole & {side.who for side in self._sides if side.has_order}
        if ordered:
            self._order(ordered)
        if len(self._sides) > 1 and whole != set(self._who):
            self._ranks()
        total = self._ids()
        sides = tuple(SideCounts(row.who, row.partition, row.rows, row.first, row.last) for row in counts)
        return Verified(self._topic, total, sides, tuple(self._findings), tuple(self._checks))

    # -- steps -----------------------------------------------------------------------------------------------------

    def _unreadable(self) -> None:
        for row in self._broken.groupBy("who").count().collect():
            lines = self._broken.where(F.col("who") == row["who"])
            self._found("unreadable", row["who"], row["count"], lines, _shown("_broken"), *_PLACE)

    def _offsets(self, whole: set[str], counts: list[Row]) -> None:
        """Gaps and repeats of each side, and offsets that are not the same message for all."""
        self._checks += ["offsets dense", "no offset twice"]
        who = [name for name in self._who if name in whole]
        seen = [F.count(F.when(F.col("who") == name, 1)).alias(f"n{at}") for at, name in enumerate(who)]
        name = F.struct("id")  # a struct: an id that is missing is also one to agree on
        by_offset = self._all.where(F.col("who").isin(who)).groupBy("partition", "offset")
        each = by_offset.agg(*seen, F.min(name).alias("one"), F.max(name).alias("other"))
        is_split = ~F.col("one").eqNullSafe(F.col("other"))
        sums = [F.sum((F.col(f"n{at}") > 0).cast("bigint")).alias(f"d{at}") for at in range(len(who))]
        more = [F.sum(F.greatest(F.col(f"n{at}") - 1, F.lit(0))).alias(f"r{at}") for at in range(len(who))]
        total = each.groupBy("partition").agg(*sums, *more, F.sum(is_split.cast("bigint")).alias("split")).collect()
        at_offset = F.format_string("partition %d, offset %d", "partition", "offset")
        for at, name_of in enumerate(who):
            distinct = {row.partition: row[f"d{at}"] for row in total}
            own = [row for row in counts if row.who == name_of]
            if missing := sum(row["last"] - row["first"] + 1 - distinct[row.partition] for row in own):
                self._gaps(name_of, missing)
            if twice := sum(row[f"r{at}"] for row in total):
                times = F.format_string("%s: %d times", at_offset, f"n{at}")
                self._found("offset twice", name_of, twice, each.where(f"n{at} > 1"), times, "partition", "offset")
        if len(who) > 1:
            self._checks.append("same message at an offset for all")
            if split := sum(row.split for row in total):
                both = F.format_string("%s: %s, and %s", at_offset, _shown("one.id"), _shown("other.id"))
                self._found("not the same for all", "", split, each.where(is_split), both, "partition", "offset")

    def _gaps(self, who: str, missing: int) -> None:
        window = Window.partitionBy("partition").orderBy("offset")
        following = self._all.where(F.col("who") == who).withColumn("next", F.lead("offset").over(window))
        gap = F.format_string("partition %d, offsets %d to %d", "partition", F.col("offset") + 1, F.col("next") - 1)
        self._found("missing", who, missing, following.where("next > offset + 1"), gap, "partition", "offset")

    def _order(self, ordered: set[str]) -> None:
        self._checks.append("seen in the order of offsets")
        window = Window.partitionBy("who", "partition").orderBy(*_PLACE)
        rows = self._all.where(F.col("who").isin(sorted(ordered)))
        back = rows.withColumn("before", F.lag("offset").over(window)).where("offset < before")
        for row in back.groupBy("who").count().collect():
            said = F.format_string("partition %d, offset %d after %d", "partition", "offset", "before")
            self._found("out of order", row["who"], row["count"], back.where(F.col("who") == row["who"]), said, *_PLACE)

    def _ranks(self) -> None:
        """For logs without offsets: the n-th message of a partition is the same for all."""
        self._checks.append("same order for all")
        places = [F.col(name) for name in _PLACE]
        window = Window.partitionBy("who", "partition").orderBy(*places, "offset")
        ranked = self._all.withColumn("rank", F.row_number().over(window)).groupBy("partition", "rank")
        name = F.struct("id")
        each = ranked.agg(F.min(name).alias("one"), F.max(name).alias("other"))
        differs = each.where(~F.col("one").eqNullSafe(F.col("other")))
        if count := differs.count():
            said = F.format_string(
                "partition %d, message %d: %s, and %s", "partition", "rank", _shown("one.id"), _shown("other.id")
            )
            self._found("order differs", "", count, differs, said, "partition", "rank")

    def _ids(self) -> int | None:
        """What each side saw too seldom or too often; returns how much was produced."""
        if self._produced is None and not self._ids_told:
            return None
        rows = self._all.select("who", "id")
        if self._produced is not None:
            rows = rows.unionByName(self._produced.select(F.lit("").alias("who"), "id"))
            self._checks.append("produced = seen")
        else:
            self._checks.append("no id twice")
        seen = [F.count(F.when(F.col("who") == name, 1)).alias(f"n{at}") for at, name in enumerate(self._who)]
        made = F.count(F.when(F.col("who") == "", 1)) if self._produced is not None else F.lit(1)
        each = rows.groupBy("id").agg(*seen, made.alias("made"))
        kinds: dict[str, tuple[str, str]] = {
            "lost": ("made - n{0}", "made > n{0}"),
            "doubled": ("n{0} - made", "made > 0 and n{0} > made"),
            "never produced": ("n{0}", "made = 0 and n{0} > 0"),
        }
        if self._produced is None:
            del kinds["lost"], kinds["never produced"]
        sums = [
            F.sum(F.when(F.expr(where.format(at)), F.expr(count.format(at))).otherwise(0)).alias(f"{kind}{at}")
            for at in range(len(self._who))
            for kind, (count, where) in kinds.items()
        ]
        total = each.agg(F.sum("made").alias("made"), *sums).collect()[0]
        for at, who in enumerate(self._who):
            for kind, (_, where) in kinds.items():
                if count := total[f"{kind}{at}"]:
                    times = F.format_string("%s: made %d, seen %d times", _shown("id"), "made", f"n{at}")
                    self._found(kind, who, count, each.where(where.format(at)), times, "id")
        return None if self._produced is None else int(total["made"] or 0)

    def _found(self, what: str, who: str, count: int, rows: DataFrame, said: Column, *order: str) -> None:
        chosen = rows.orderBy(*order).limit(self._examples).select(said.alias("said")).collect()
        self._findings.append(Finding(what, who, int(count), tuple(row.said for row in chosen)))


def _shown(name: str) -> Any:
    return F.coalesce(F.substring(name, 1, _SHOWN_CHARS), F.lit("no id"))
