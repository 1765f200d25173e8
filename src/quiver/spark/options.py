"""What a user of format("quiver") may say, checked before anything runs.

Rule: plain values. Spark pickles options and sends them to executors, so there is no client in them and no secret; an
option that is not known here is refused, and with it whatever it holds.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Final

import pyarrow as pa

from quiver.client.cluster import parse_servers
from quiver.errors import InvalidRequestError
from quiver.spark.offsets import ENDING, GROUP, LATEST, STARTING, Places, parse_places, parse_time
from quiver.spark.row_filter import RowFilter
from quiver.types import PARTITIONS_MAX, check_topic_name
from quiver.wire.fields import CONSUMER_NAME_MAX, REGISTERED
from quiver.wire.records import SCHEMA

SPARK_TYPES: Final = {
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "key": "binary",
    "value": "binary",
    "headers": "map<string, binary>",
}
ARROW_SCHEMA: Final = pa.schema([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), *SCHEMA])

_GENERAL: Final = ("servers", "topic")
_BATCH_ONLY: Final = (ENDING,)
_STREAM_ONLY: Final = ("maxRowsPerTrigger", "maxBytesPerTrigger")
_FILTERS: Final = ("partitions", "fromOffset", "untilOffset", "fromTime", "untilTime")
_READ: Final = (STARTING, "rowsPerTask", "failOnDataLoss", "columns", "group", *_FILTERS)
# Spark hands these to a source or a sink beside its own options.
_SPARKS_OWN: Final = frozenset({"checkpointlocation", "path", "queryname"})
_WRITE: Final = ("valueFormat", "sink", "sinkBatch")
_PATTERN: Final = re.compile(r"[*?\[]")
_PARTITIONS: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclasses.dataclass(frozen=True, slots=True)
class Topics:
    """Topics by name, and patterns with * ? [ ] for all topics that they match."""

    names: tuple[str, ...]
    patterns: tuple[str, ...]

    def matching(self, existing: Iterable[str]) -> list[str]:
        """The names, and what the patterns match; sorted."""
        matched = {name for name in existing if any(fnmatch.fnmatchcase(name, one) for one in self.patterns)}
        return sorted(matched | set(self.names))


@dataclasses.dataclass(frozen=True, slots=True)
class ReadOptions:
    servers: str
    topics: Topics
    starting: Places | None
    ending: Places
    rows_per_task: int | None
    rows_per_trigger: int | None
    bytes_per_trigger: int | None
    fail_on_data_loss: bool
    columns: tuple[str, ...]
    group: str | None
    filter: RowFilter

    @property
    def schema(self) -> str:
        return ", ".join(f"{name} {SPARK_TYPES[name]}" for name in self.columns)


@dataclasses.dataclass(frozen=True, slots=True)
class WriteOptions:
    """`sink` and `batch` name what a batch write stores, so that it stores it once however often it runs."""

    servers: str
    topic: str
    json_values: bool = False
    sink: str | None = None
    batch: int = 0


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """The options of a source, for a batch or a stream."""
    given = _known(options, (*_GENERAL, *_READ, *_BATCH_ONLY, *_STREAM_ONLY), "a source")
    starting = given.get(STARTING)
    group = given.get("group")
    if group is not None and (not 0 < len(group) <= CONSUMER_NAME_MAX or group.startswith(REGISTERED)):
        raise InvalidRequestError(
            f"option group is a name of 1 to {CONSUMER_NAME_MAX} characters that does not begin with {REGISTERED}"
        )
    if starting == GROUP and group is None:
        raise InvalidRequestError("startingOffsets=group needs .option('group', ...)")
    return ReadOptions(
        servers=_servers(given),
        topics=_topics(_required(given, "topic")),
        starting=None if starting is None else parse_places(starting, STARTING),
        ending=parse_places(given.get(ENDING, LATEST), ENDING),
        rows_per_task=_count(given, "rowsPerTask"),
        rows_per_trigger=_count(given, "maxRowsPerTrigger"),
        bytes_per_trigger=_count(given, "maxBytesPerTrigger"),
        fail_on_data_loss=_flag(given, "failOnDataLoss", default=True),
        columns=_columns(given.get("columns")),
        group=group,
        filter=_filter(given),
    )


def check_batch(options: Mapping[str, str], checked: ReadOptions) -> ReadOptions:
    for name in _STREAM_ONLY:
        if _has(options, name):
            raise InvalidRequestError(f"option {name} is for streams: a batch read has no triggers")
    if checked.group is not None and (checked.starting is None or checked.starting.everywhere != GROUP):
        raise InvalidRequestError("a batch read commits no position: option group is for startingOffsets=group")
    return checked


def check_stream(options: Mapping[str, str], checked: ReadOptions) -> ReadOptions:
    if _has(options, ENDING):
        raise InvalidRequestError("a stream has no end: endingOffsets is for batch reads")
    return checked


def _has(options: Mapping[str, str], wanted: str) -> bool:
    return any(name.lower() == wanted.lower() for name in options)


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """The options of a sink."""
    given = _known(options, (*_GENERAL, *_WRITE), "a sink")
    topics = _topics(_required(given, "topic"))
    if len(topics.names) != 1 or topics.patterns:
        raise InvalidRequestError("a sink writes to one topic")
    value_format = given.get("valueFormat", "raw")
    if value_format not in ("raw", "json"):
        raise InvalidRequestError(f"option valueFormat is 'raw' or 'json', not {value_format!r}")
    sink, batch = given.get("sink"), _number(given, "sinkBatch")
    if sink == "" or (sink is None and batch is not None) or (batch or 0) >= 2**32:
        raise InvalidRequestError("option sink is a name, and sinkBatch beside it a number from 0 to 4294967295")
    return WriteOptions(_servers(given), topics.names[0], value_format == "json", sink, batch or 0)


def _known(options: Mapping[str, str], names: tuple[str, ...], what: str) -> dict[str, str]:
    """The options by the names they have here, however they were spelled."""
    spelled = {name.lower(): name for name in names}
    given = {}
    for name, value in options.items():
        known = spelled.get(name.lower())
        if known is not None:
            given[known] = str(value)
        elif name.lower() not in _SPARKS_OWN:
            close = difflib.get_close_matches(name.lower(), spelled, 1)
            hint = f"did you mean {spelled[close[0]]}?" if close else f"known are {', '.join(sorted(names))}"
            raise InvalidRequestError(f"format('quiver') has no option {name} for {what}; {hint}")
    return given


def _required(given: Mapping[str, str], name: str) -> str:
    value = given.get(name)
    if not value:
        raise InvalidRequestError(f"format('quiver') needs .option({name!r}, ...)")
    return value


def _servers(given: Mapping[str, str]) -> str:
    servers = _required(given, "servers")
    parse_servers(servers)
    return servers


def _topics(text: str) -> Topics:
    names, patterns = [], []
    for name in map(str.strip, text.split(",")):
        if _PATTERN.search(name):
            patterns.append(name)
        else:
            names.append(check_topic_name(name))
    return Topics(tuple(dict.fromkeys(names)), tuple(patterns))


def _count(given: Mapping[str, str], name: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and int(value) >= 1):
        raise InvalidRequestError(f"option {name} is a whole number of 1 or more, not {value!r}")
    return int(value)


def _number(given: Mapping[str, str], name: str) -> int | None:
    value = given.get(name)
    if value is not None and not (value.isascii() and value.isdigit()):
        raise InvalidRequestError(f"option {name} is a whole number of 0 or more, not {value!r}")
    return None if value is None else int(value)


def _flag(given: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = given.get(name, str(default)).lower()
    if value not in ("true", "false"):
        raise InvalidRequestError(f"option {name} is true or false, not {value!r}")
    return value == "true"


def _columns(text: str | None) -> tuple[str, ...]:
    if text is None:
        return tuple(SPARK_TYPES)
    names = tuple(map(str.strip, text.split(",")))
    if len(set(names)) < len(names) or not set(names) <= set(SPARK_TYPES):
        raise InvalidRequestError(f"option columns is some of {', '.join(SPARK_TYPES)}, each once, not {text!r}")
    return names


def _partitions(text: str | None) -> frozenset[int] | None:
    if text is None:
        return None
    found: set[int] = set()
    for part in map(str.strip, text.split(",")):
        numbers = _PARTITIONS.fullmatch(part)
        first, last = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (1, 0)
        if not 0 <= last - first < PARTITIONS_MAX:
            raise InvalidRequestError(f"option partitions is numbers and ranges like 0,4-7, not {text!r}")
        found.update(range(first, last + 1))
    return frozenset(found)


def _time(given: Mapping[str, str], name: str) -> int | None:
    return None if name not in given else parse_time(given[name], f"option {name}")


def _filter(given: Mapping[str, str]) -> RowFilter:
    return RowFilter(
        partitions=_partitions(given.get("partitions")),
        offset_min=_number(given, "fromOffset"),
        offset_end=_number(given, "untilOffset"),
        time_min=_time(given, "fromTime"),
        time_end=_time(given, "untilTime"),
    )
