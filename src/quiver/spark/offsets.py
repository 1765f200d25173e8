"""Offsets as Spark sees them: {topic: {partition: next offset}}, and the ranges a query is cut into.

Rule: pure. Offsets are exclusive ends and JSON-friendly, since Spark keeps them in its checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from quiver.errors import InvalidRequestError

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
    try:
        given = json.loads(option)
    except ValueError as error:
        raise InvalidRequestError(f"{name} is 'earliest', 'latest' or JSON, not {option!r}") from error
    return {topic: dict(_resolve_topic(topic, given, found, name)) for topic, found in edges.items()}


def _resolve_topic(
    topic: str, given: Any, found: Mapping[int, tuple[int, int]], name: str
) -> Iterator[tuple[str, int]]:
    wanted = given.get(topic, {}) if isinstance(given, dict) else None
    if not isinstance(wanted, dict) or set(given) - {topic} - set(given) or not all(str(n).isdigit() for n in wanted):
        raise InvalidRequestError(f'{name} as JSON is {{"topic": {{"partition": offset}}}}')
    if unknown := {int(n) for n in wanted} - set(found):
        raise InvalidRequestError(f"{name}: topic {topic} has no partition {min(unknown)}")
    for number, (earliest, latest) in found.items():
        offset = wanted.get(str(number), -2 if name == "startingOffsets" else -1)
        if not isinstance(offset, int) or isinstance(offset, bool):
            raise InvalidRequestError(f"{name}: an offset is an integer, not {offset!r}")
        offset = {-2: earliest, -1: latest}.get(offset, offset)
        if not earliest <= offset <= latest:
            raise InvalidRequestError(
                f"{name}: offset {offset} of {topic}-{number} is out of range: {earliest} to {latest}"
            )
        yield str(number), offset


def ranges(start: Offsets, end: Offsets, rows_per_task: int | None) -> list[OffsetRange]:
    """What lies between, cut into pieces of at most `rows_per_task`."""
    found = []
    for topic, partitions in end.items():
        for number, stop in partitions.items():
            first = start.get(topic, {}).get(number, 0)
            step = rows_per_task or max(1, stop - first)
            found += [OffsetRange(topic, int(number), at, min(at + step, stop)) for at in range(first, stop, step)]
    return found


def limit_rows(start: Offsets, end: Offsets, rows_max: int) -> Offsets:
    """An end not after `end` with at most `rows_max` rows from `start`, shared fairly by partitions that have some."""
    waiting = {
        (topic, number): stop - start.get(topic, {}).get(number, 0)
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
