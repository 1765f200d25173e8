"""`replay`: an archive, or a range of it, into a topic, in the order it had in each partition, each message once.

What is to be sent is written down first: parts of the archive, in the order of its batches. A part is sorted by
partition and offset and written under a name that is kept, so that a part that was under way when the job died is
written again and recognised by the brokers.

Rule: a part ends where a batch of the archive ends, because only there the offsets of a partition do.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from quiver import Admin
from quiver.config import MIB
from quiver.errors import InvalidRequestError
from quiver.spark.jobs.archived import partition_of, place_of, read_archive
from quiver.spark.jobs.folder import Folder
from quiver.spark.jobs.formats import absolute
from quiver.spark.jobs.running import OnProgress, plain_errors, watched
from quiver.spark.jobs.state import Job, default_state, open_state
from quiver.types import check_topic_name

PART_BYTES_MAX: Final = 1024 * MIB
TASKS_MAX: Final = 64
_PLAN: Final = "plan.json"
_DONE: Final = "done.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Replayed:
    topic: str
    rows: int  # of this run, as are parts
    parts: int
    seconds: float
    state: str


class Plan(msgspec.Struct):
    sink: str  # the name under which the brokers know what was written
    tasks: int
    parts: list[list[str]]


def replay(
    spark: SparkSession,
    path: str,
    topic: str,
    *,
    servers: str,
    source: str | None = None,
    since: datetime.datetime | None = None,
    until: datetime.datetime | None = None,
    partitions: Sequence[int] | None = None,
    offsets: tuple[int, int] | None = None,
    spread: bool = False,
    state: str | None = None,
    on_progress: OnProgress | None = None,
) -> Replayed:
    """Sends what the archive in `path` has of the topic `source` (or `topic`) to `topic`.

    `since` and `until` are moments of the messages' timestamps, in UTC where they name no zone; `offsets` is a range of
    offsets; ends are exclusive. A message goes to the partition it came from, or with `spread` by its key. Called again
    with the same `state` it sends what it has not sent.
    """
    since, until = _in_utc(since), _in_utc(until)
    began_s, source = time.monotonic(), check_topic_name(topic if source is None else source)
    with Admin(servers) as admin:
        there = admin.describe_topic(topic)
    with plain_errors(), watched(spark, on_progress):
        files = Folder(spark, path).files(f"topic={source}")
        if not files:
            raise InvalidRequestError(f"there is no archive of topic {source} in {path}")
        told = {"since": since, "until": until, "partitions": partitions, "offsets": offsets, "spread": spread or None}
        job: Job = {"job": "replay", "topic": topic, "uid": there.uid, "archive": absolute(path), "source": source}
        job = {**job, **{name: None if value is None else str(value) for name, value in told.items()}}
        kept = open_state(spark, state or default_state(job), job)
        names = [name for name in files if partitions is None or partition_of(name) in partitions]
        if not spread:
            _check_partitions(names, topic, len(there.partitions))
        plan, done = open_plan(kept, {name: files[name] for name in names})
        rows = 0
        for number in range(done, len(plan.parts)):
            frame = _chosen(read_archive(spark, path, source, plan.parts[number]), since, until, offsets)
            rows += _send(frame, plan, number, servers, topic, spread)
            kept.write(_DONE, msgspec.json.encode(number + 1))
    where = kept.local() or kept.path
    return Replayed(topic, rows, len(plan.parts) - done, time.monotonic() - began_s, where)


def _check_partitions(names: Iterable[str], topic: str, count: int) -> None:
    needed = max(map(partition_of, names), default=0) + 1
    if needed > count:
        raise InvalidRequestError(
            f"the archive has {needed} partitions and topic {topic} has {count}: give it more, or use --spread to let "
            "keys choose"
        )


def open_plan(folder: Folder, files: Mapping[str, int]) -> tuple[Plan, int]:
    """What to send, and how much of it is done. Files that came since a plan was done are added to it."""
    kept, done = folder.read(_PLAN), msgspec.json.decode(folder.read(_DONE) or b"0", type=int)
    tasks = min(TASKS_MAX, len(set(map(partition_of, files))) or 1)
    plan = Plan(uuid.uuid4().hex, tasks, []) if kept is None else msgspec.json.decode(kept, type=Plan)
    if done == len(plan.parts):
        known = {name for part in plan.parts for name in part}
        plan.parts += cut_parts({name: size for name, size in files.items() if name not in known})
        folder.write(_PLAN, msgspec.json.encode(plan))
    return plan, done


def cut_parts(files: Mapping[str, int], bytes_max: int = PART_BYTES_MAX) -> list[list[str]]:
    """Files in the order of their batches, in parts that hold whole batches and no more than `bytes_max`, or one."""
    batches: dict[int, list[str]] = {}
    for name in files:
        place = place_of(name)
        if place is None:
            raise InvalidRequestError(f"{name} is not a file of an archive: its name says no batch")
        batches.setdefault(place[0], []).append(name)
    parts: list[list[str]] = []
    filled = bytes_max
    for _, names in sorted(batches.items()):
        size = sum(files[name] for name in names)
        if filled + size > bytes_max:
            parts.append([])
            filled = 0
        parts[-1] += names
        filled += size
    return parts


def _in_utc(moment: datetime.datetime | None) -> datetime.datetime | None:
    if moment is None:
        return None
    return moment.replace(tzinfo=datetime.UTC) if moment.tzinfo is None else moment.astimezone(datetime.UTC)


def _chosen(
    rows: DataFrame,
    since: datetime.datetime | None,
    until: datetime.datetime | None,
    offsets: tuple[int, int] | None,
) -> DataFrame:
    if since is not None:
        rows = rows.where((F.col("timestamp") >= since) & (F.col("date") >= since.date()))
    if until is not None:
        rows = rows.where((F.col("timestamp") < until) & (F.col("date") <= until.date()))
    if offsets is not None:
        rows = rows.where((F.col("offset") >= offsets[0]) & (F.col("offset") < offsets[1]))
    return rows


def _send(rows: DataFrame, plan: Plan, number: int, servers: str, topic: str, spread: bool) -> int:
    """One task for each partition or several; in each the order of a partition is that of its offsets."""
    ordered = rows.repartitionById(plan.tasks, F.col("partition") % plan.tasks)
    counted = Observation()
    columns = (
        ["key", "value", "headers", "timestamp"] if spread else ["key", "value", "headers", "timestamp", "partition"]
    )
    sent = (
        ordered.sortWithinPartitions("partition", "offset").select(*columns).observe(counted, F.count("*").alias("n"))
    )
    named = {"sink": f"replay-{plan.sink}", "sinkBatch": str(number)}
    sent.write.format("quiver").mode("append").options(servers=servers, topic=topic, **named).save()
    return int(counted.get["n"])
