"""Which rows a query wants, as far as that can be decided before or while they are read.

Rule: pure and exact. What a filter lets through is what Spark would let through, no row more and none less.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from quiver.spark.offsets import OffsetRange

_TIMESTAMP: Final = pa.timestamp("us", "UTC")
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND: Final = datetime.timedelta(microseconds=1)


@dataclasses.dataclass(frozen=True, slots=True)
class RowFilter:
    """None stands for no limit. Ends are exclusive; times are microseconds since 1970."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    offset_min: int | None = None
    offset_end: int | None = None
    time_min: int | None = None
    time_end: int | None = None

    def both(self, other: RowFilter) -> RowFilter:
        """What both let through."""
        return RowFilter(
            _common(self.topics, other.topics),
            _common(self.partitions, other.partitions),
            _tighter(max, self.offset_min, other.offset_min),
            _tighter(min, self.offset_end, other.offset_end),
            _tighter(max, self.time_min, other.time_min),
            _tighter(min, self.time_end, other.time_end),
        )

    def wants(self, topic: str, partition: int) -> bool:
        return (self.topics is None or topic in self.topics) and (
            self.partitions is None or partition in self.partitions
        )

    def clip(self, span: OffsetRange) -> OffsetRange:
        """The part of a range that can hold wanted rows; empty when there is none."""
        if not self.wants(span.topic, span.partition):
            return dataclasses.replace(span, end=span.start)
        start = min(max(span.start, self.offset_min or 0), span.end)
        end = span.end if self.offset_end is None else min(span.end, self.offset_end)
        return dataclasses.replace(span, start=start, end=max(start, end))

    def mask(self, timestamps: pa.Array) -> pa.Array | None:
        """Which records of a batch were sent at the wanted time; None: all."""
        masks = []
        if self.time_min is not None:
            masks.append(pc.greater_equal(timestamps, pa.scalar(self.time_min, _TIMESTAMP)))
        if self.time_end is not None:
            masks.append(pc.less(timestamps, pa.scalar(self.time_end, _TIMESTAMP)))
        return pc.and_(*masks) if len(masks) == 2 else masks[0] if masks else None


def _common(one: frozenset[Any] | None, other: frozenset[Any] | None) -> frozenset[Any] | None:
    return other if one is None else one if other is None else one & other


def _tighter(choose: Callable[[int, int], int], one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else choose(one, other)


# -- what Spark asks for -------------------------------------------------------------------------------------------

_NAMES: Final = ("topic", "partition", "offset", "timestamp")


def from_spark(kind: str, column: str, value: Any) -> RowFilter | None:
    """The filter that says the same as one of Spark's; None when there is none. `kind` is the name of its class."""
    if column not in _NAMES:
        return None
    if kind == "IsNotNull":
        return RowFilter()  # none of these columns is ever null
    if kind == "EqualTo":
        kind, value = "In", (value,)
    if kind == "In" and column in ("topic", "partition"):
        return _one_of(column, value)
    if kind == "In" and len(value) == 1 and (number := _number(column, value[0])) is not None:
        return _between(column, number, number + 1)
    number = _number(column, value)
    if number is None or column == "topic":
        return None
    bounds = {
        "GreaterThan": (number + 1, None),
        "GreaterThanOrEqual": (number, None),
        "LessThan": (None, number),
        "LessThanOrEqual": (None, number + 1),
    }.get(kind)
    return None if bounds is None or column == "partition" else _between(column, *bounds)


def _one_of(column: str, values: Sequence[Any]) -> RowFilter | None:
    wanted = str if column == "topic" else int
    if not all(isinstance(value, wanted) and not isinstance(value, bool) for value in values):
        return None
    return RowFilter(topics=frozenset(values)) if column == "topic" else RowFilter(partitions=frozenset(values))


def _number(column: str, value: Any) -> int | None:
    if column == "timestamp":
        aware = isinstance(value, datetime.datetime) and value.tzinfo is not None
        return (value - _EPOCH) // _MICROSECOND if aware else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _between(column: str, first: int | None, end: int | None) -> RowFilter:
    if column == "timestamp":
        return RowFilter(time_min=first, time_end=end)
    return RowFilter(offset_min=first, offset_end=end)
