"""Offsets as Spark sees them: {topic: {partition: next offset}}, and the ranges a query is cut into.

Rule: pure. Offsets are exclusive ends and JSON-friendly, since Spark keeps them in its checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from quiver.errors import InvalidRequestError

_PARTITION = re.compile("0|[1-9][0-9]{0,8}")

Offsets = dict[str, dict[str, int]]
Edges = Mapping[str, Mapping[int, tuple[int, int]]]  # topic -> partition -> (earliest, latest)


@dataclasses.dataclass(frozen=True, slots=True)
class OffsetRange:
    """Records `start` up to `end`, end exclusive, of one partition."""

    topic: str
    partition: int
    start: int
    end: int


def resolve(option: str, edges: Edges, name: str) -> Offsets:
    """`earliest`, `latest` or JSON {"topic": {"0": 42}}; there -2 is earliest, -1 latest, and gaps are the default."""
    if option in ("earliest", "latest"):
        which = 0 if option == "earliest" else 1
        return {topic: {str(n): ends[which] for n, ends in found.items()} for topic, found in edges.items()}
    given = _parse(option, name)
    if unknown := set(given) - set(edges):
        raise InvalidRequestError(f"{name}: topic {min(unknown)} is not one of those that are read")
    return {topic: _resolve_topic(topic, given.get(topic, {}), found, name) for topic, found in edges.items()}


def _parse(option: str, name: str) -> dict[str, dict[int, Any]]:
    try:
        given = json.loads(option)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} is 'earliest', 'latest' or JSON, not {option!r}") from error
    if not isinstance(given, dict) or not all(
        isinstance(wanted, dict) and all(map(_PARTITION.fullmatch, wanted)) for wanted in given.values()
    ):
        raise InvalidRequestError(f'{name} as JSON is {{"topic": {{"partition": offset}}}}, not {option!r}')
    return {topic: {int(number): at for number, at in wanted.items()} for topic, wanted in given.items()}


def _resolve_topic(
    topic: str, wanted: Mapping[int, Any], found: Mapping[int, tuple[int, int]], name: str
) -> dict[str, int]:
    if unknown := set(wanted) - set(found):
        raise InvalidRequestError(f"{name}: topic {topic} has no partition {min(unknown)}")
    offsets = {}
    for number, (earliest, latest) in found.items():
        offset = wanted.get(number, -2 if name == "startingOffsets" else -1)
        if not isinstance(offset, int) or isinstance(offset, bool):
            raise InvalidRequestError(f"{name}: an offset is an integer, not {offset!r}")
        offset = {-2: earliest, -1: latest}.get(offset, offset)
        if not earliest <= offset <= latest:
            raise InvalidRequestError(
                f"{name}: offset {offset} of {topic}-{number} is out of range: {earliest} to {latest}"
            )
        offsets[str(number)] = offset
    return offsets


def ranges(start: Offsets, end: Offsets, rows_per_task: int | None) -> list[OffsetRange]:
    """What lies between, cut into pieces of at most `rows_per_task`."""
    found = []
    for topic, partitions in end.items():
        for number, stop in partitions.items():
            first = _first(start, topic, number, stop)
            step = rows_per_task or max(1, stop - first)
            found += [OffsetRange(topic, int(number), at, min(at + step, stop)) for at in range(first, stop, step)]
    return found


def _first(start: Offsets, topic: str, number: str, stop: int) -> int:
    first = start.get(topic, {}).get(number, 0)
    if first > stop:
        # An empty range would hide it: a query that went on from a topic that was made anew would wait for ever.
        raise InvalidRequestError(
            f"{topic}-{number} cannot be read from offset {first} to {stop}: the end is before the start. "
            "Was the topic deleted and made again?"
        )
    return first


def limit_rows(start: Offsets, end: Offsets, rows_max: int) -> Offsets:
    """An end not after `end` with at most `rows_max` rows from `start`, shared fairly by partitions that have some."""
    waiting = {
        (topic, number): stop - _first(start, topic, number, stop)
        for topic, partitions in end.items()
        for number, stop in partitions.items()
    }
    taken = dict.fromkeys(waiting, 0)
    left = rows_max
    while left > 0 and (hungry := [pair for pair, rows in waiting.items() if taken[pair] < rows]):
        share = max(1, left // len(hungry))
        for pair in hungry[:left]:
            rows = min(share, waiting[pair] - taken[pair])
            taken[pair] += rows
            left -= rows
    return {
        topic: {number: start.get(topic, {}).get(number, 0) + taken[topic, number] for number in partitions}
        for topic, partitions in end.items()
    }
