"""`format("quiver")`: what Spark calls to plan and read a batch; stream.py has the stream, sink.py the writing.

Options are in options.py and docs/spark.md. Whatever is wrong with them is said in the driver, before a task runs.

Rule: objects here are pickled by Spark and sent to executors, so they hold options and plain values, never clients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from quiver.errors import InvalidRequestError
from quiver.spark.cluster_view import ClusterView
from quiver.spark.offsets import EARLIEST, ENDING, STARTING, Lookup, OffsetRange, Places, cut, spans
from quiver.spark.options import (
    SPARK_TYPES,
    ReadOptions,
    check_batch,
    check_stream,
    read_options,
    write_options,
)
from quiver.spark.reading import read_range
from quiver.spark.row_filter import RowFilter, from_spark
from quiver.spark.sink import QuiverStreamWriter, QuiverWriter
from quiver.spark.stream import QuiverStreamReader, RangePartition

_FROM_THE_START: Final = Places(EARLIEST, {})


class QuiverDataSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "quiver"

    def schema(self) -> str:
        return read_options(self.options).schema

    def reader(self, schema: StructType) -> QuiverReader:
        return QuiverReader(check_batch(self.options, read_options(self.options)), _columns(schema))

    def streamReader(self, schema: StructType) -> QuiverStreamReader:
        return QuiverStreamReader(check_stream(self.options, read_options(self.options)), _columns(schema))

    def writer(self, schema: StructType, overwrite: bool) -> QuiverWriter:
        if overwrite:
            raise InvalidRequestError("a topic cannot be overwritten, only added to: use .mode('append')")
        return QuiverWriter(write_options(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> QuiverStreamWriter:
        return QuiverStreamWriter(write_options(self.options), schema)


def _columns(schema: StructType) -> tuple[str, ...]:
    """What is to be read; a schema that the user gave may leave columns out, but not change them."""
    for field in schema.fields:
        wanted, found = SPARK_TYPES.get(field.name), field.dataType.simpleString()
        if wanted is None:
            raise InvalidRequestError(f"a topic has no column {field.name}, but {', '.join(SPARK_TYPES)}")
        if wanted.replace(" ", "") != found:
            raise InvalidRequestError(f"the column {field.name} of a topic is {wanted}, not {found}")
    return tuple(schema.fieldNames())


class _PushFilters:
    """Spark refuses every query of a reader that has `pushFilters`, unless spark.sql.python.filterPushdown.enabled is
    set, and tells a reader nothing of that setting. It sees by `__func__` whether the method is its own; where the
    setting is on, it calls the method without looking."""

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, push: Any) -> None:
        self._push = push

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        left: Iterable[Filter] = self._push(filters)
        return left


class QuiverReader(DataSourceReader):
    def __init__(self, options: ReadOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns
        self._filter: RowFilter = options.filter

    @property
    def pushFilters(self) -> _PushFilters:
        return _PushFilters(self._push)

    def _push(self, filters: list[Filter]) -> Iterable[Filter]:
        """Takes what it can decide by itself; Spark does the rest."""
        for one in filters:
            column = ".".join(getattr(one, "attribute", ()))
            taken = from_spark(type(one).__name__, column, getattr(one, "value", None))
            if taken is None:
                yield one
            else:
                self._filter = self._filter.both(taken)

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        with ClusterView(options.servers) as view:
            seen = view.look(options.topics, options.group)
            lenient = not options.fail_on_data_loss
            start = view.resolve(options.starting or _FROM_THE_START, STARTING, seen, lenient=lenient)
            end = view.resolve(options.ending, ENDING, seen)
            wanted = [self._filter.clip(span) for span in spans(start, end)]
            return [RangePartition(piece) for span in self._later(view, wanted) for piece in self._cut(span)]

    def _later(self, view: ClusterView, wanted: list[OffsetRange]) -> list[OffsetRange]:
        """Without what was sent too early, as far as brokers know: nothing before the first record of a time was."""
        time_min = self._filter.time_min
        if time_min is None or time_min <= 0:
            return wanted
        found = view.find(Lookup(one.topic, one.partition, time_min) for one in wanted if one.start < one.end)
        firsts = [found.get(Lookup(one.topic, one.partition, time_min), one.start) for one in wanted]
        return [
            dataclasses.replace(one, start=min(max(one.start, first), one.end))
            for one, first in zip(wanted, firsts, strict=True)
        ]

    def _cut(self, span: OffsetRange) -> list[OffsetRange]:
        return cut(span, self._options.rows_per_task)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_range(self._options, self._columns, self._filter, partition.value)
