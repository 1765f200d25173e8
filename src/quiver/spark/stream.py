"""The stream source: how far a query is, what it reads next, and where its group is.

One reader lives in a process of the driver for as long as the query runs; others are made for planning and in tasks.

Rule: Spark asks for the next end only when everything before is done and noted in its checkpoint. So that is when the
group's position is committed: after each batch, the last one of AvailableNow included, and never too early.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from quiver.errors import InvalidRequestError
from quiver.spark.cluster_view import ClusterView, Seen
from quiver.spark.offsets import LATEST, STARTING, Mark, OffsetRange, Places, cut, share, share_bytes, spans
from quiver.spark.options import ReadOptions
from quiver.spark.reading import read_range

_FROM_NOW: Final = Places(LATEST, {})

Json = dict[str, Any]


class RangePartition(InputPartition):
    def __init__(self, value: OffsetRange) -> None:
        super().__init__(value)


class QuiverStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: ReadOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns
        self._lenient = not options.fail_on_data_loss
        self._target: Mark | None = None  # where AvailableNow ends
        self._view: ClusterView | None = None
        self._seen: Seen | None = None  # when the end was last asked for
        self._committed: dict[tuple[str, int], int] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """What travels to executors is what it was made of."""
        return type(self), (self._options, self._columns)

    # -- in the driver, one after the other ------------------------------------------------------------------------

    def initialOffset(self) -> Json:
        places = self._options.starting or _FROM_NOW
        with ClusterView(self._options.servers) as view:
            seen = view.look(self._options.topics, self._options.group)
            start = view.resolve(places, STARTING, seen, lenient=self._lenient)
        return start.only(self._options.filter.wants).to_json()

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._look().latest()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Spark knows one limit at a time; `latestOffset` keeps to both."""
        rows, size = self._options.rows_per_trigger, self._options.bytes_per_trigger
        if rows is not None:
            return ReadMaxRows(rows)
        return ReadAllAvailable() if size is None else ReadMaxBytes(size)

    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:
        begin = Mark.from_json(start)
        seen = self._look()
        self._commit_group(begin, seen)
        end = self._target or seen.latest()
        if not self._lenient and (gone := set(begin.offsets) - set(end.offsets)):
            raise InvalidRequestError(
                f"topic {min(gone)} was deleted while it was read; with failOnDataLoss=false the others are read on"
            )
        wanted = list(spans(begin, end, lenient=self._lenient))
        self._check_kept(wanted, seen)
        if not isinstance(limit, ReadAllAvailable):
            end = self._limited(wanted, end)
        return end.to_json()

    def _look(self) -> Seen:
        if self._view is None:
            self._view = ClusterView(self._options.servers)
        found = self._view.look(self._options.topics, lenient=self._lenient)
        self._seen = found.only(self._options.filter.wants)
        return self._seen

    def _commit_group(self, done: Mark, seen: Seen) -> None:
        if self._options.group is None:
            return
        assert self._view is not None
        moved = {
            (topic, number): offset
            for topic, found in done.offsets.items()
            if seen.uids.get(topic) == done.uids.get(topic)  # else they are offsets of a topic that is gone
            for number, offset in found.items()
            if self._committed.get((topic, number)) != offset
        }
        self._view.commit(self._options.group, moved)
        self._committed |= moved

    def _check_kept(self, wanted: list[OffsetRange], seen: Seen) -> None:
        """Before a task runs into it: what retention removed cannot be read."""
        for one in wanted if not self._lenient else ():
            earliest = seen.edges[one.topic][one.partition].earliest if one.topic in seen.edges else 0
            if one.start < min(earliest, one.end):
                raise InvalidRequestError(
                    f"records {one.start} to {min(earliest, one.end)} of {one.topic}-{one.partition} were removed by "
                    "retention before they were read; with failOnDataLoss=false they are left out"
                )

    def _limited(self, wanted: list[OffsetRange], end: Mark) -> Mark:
        rows, size = self._options.rows_per_trigger, self._options.bytes_per_trigger
        taken = {one: one.end - one.start for one in wanted}
        if rows is not None:
            taken = share(taken, rows)
        ends = {one: one.start + count for one, count in taken.items()}
        if size is not None:
            assert self._view is not None
            shorter = {dataclasses.replace(one, end=ends[one]): one for one in wanted}
            reached = share_bytes(list(shorter), size, self._view.measure)
            ends = {shorter[one]: stop for one, stop in reached.items()}
        offsets: dict[str, dict[int, int]] = {topic: {} for topic in end.offsets}
        for one, stop in ends.items():
            offsets[one.topic][one.partition] = stop
        return Mark(offsets, end.uids)

    def reportLatestOffset(self) -> Json:
        """Asked right after `latestOffset`: what that saw."""
        return (self._seen or self._look()).latest().to_json()

    def partitions(self, start: Json, end: Json) -> Sequence[InputPartition]:
        wanted = spans(Mark.from_json(start), Mark.from_json(end), lenient=self._lenient)
        clipped = map(self._options.filter.clip, wanted)
        return [RangePartition(piece) for span in clipped for piece in cut(span, self._options.rows_per_task)]

    def commit(self, end: Json) -> None:
        """Spark says so when it plans the next batch, and never of the last one: `latestOffset` knows earlier."""

    def stop(self) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None

    # -- in an executor ------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_range(self._options, self._columns, self._options.filter, partition.value)
