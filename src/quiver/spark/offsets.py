"""Offsets as Spark sees them: how far each partition of each topic was read, and the ranges a query is cut into.

Rule: pure. Ends are exclusive. A mark is kept by Spark in its checkpoint as JSON, {"logs": {"uid": "…", "0": 42}}, and
two marks are equal for Spark when their JSON is: topics and partitions have one order.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from quiver.errors import InvalidRequestError

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
GROUP: Final = "group"
STARTING: Final = "startingOffsets"
ENDING: Final = "endingOffsets"
_UID: Final = "uid"
_PARTITION: Final = re.compile("0|[1-9][0-9]{0,8}")
_EDGES: Final = {-2: EARLIEST, -1: LATEST}
_ROUNDS_MAX: Final = 3  # of measuring before a limit in bytes counts as used up
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND: Final = datetime.timedelta(microseconds=1)


class Moment(NamedTuple):
    """The first record at or after a time."""

    micros: int


class Edge(NamedTuple):
    """What a partition has: `earliest` up to `latest`. `position` is the group's, None when it has none."""

    earliest: int
    latest: int
    position: int | None = None


class Reach(NamedTuple):
    """How far so many bytes of a partition reach."""

    offset: int
    size_bytes: int


class Lookup(NamedTuple):
    topic: str
    partition: int
    micros: int


Place = str | int | Moment  # earliest, latest or group; an offset; a time
Edges = Mapping[str, Mapping[int, Edge]]


class Places(NamedTuple):
    """What an option says: a place for everything, and others for single partitions."""

    everywhere: Place
    given: dict[str, dict[int, Place]]

    def at(self, topic: str, partition: int) -> Place:
        return self.given.get(topic, {}).get(partition, self.everywhere)

    def moments(self, edges: Edges) -> list[Lookup]:
        """The times that have to be looked up before the places can be resolved."""
        places = [(topic, number, self.at(topic, number)) for topic, found in edges.items() for number in found]
        return [Lookup(topic, number, place.micros) for topic, number, place in places if isinstance(place, Moment)]


@dataclasses.dataclass(frozen=True, slots=True)
class OffsetRange:
    """Records `start` up to `end`, end exclusive, of one partition. `uid` is its topic's, empty when not known."""

    topic: str
    partition: int
    start: int
    end: int
    uid: str = ""


class Mark(NamedTuple):
    """The next offset of each partition, and which topic of that name is meant."""

    offsets: dict[str, dict[int, int]]
    uids: dict[str, str]

    @classmethod
    def from_json(cls, raw: Mapping[str, Mapping[str, Any]]) -> Mark:
        offsets = {topic: {int(n): at for n, at in found.items() if n != _UID} for topic, found in raw.items()}
        return cls(offsets, {topic: found[_UID] for topic, found in raw.items() if found.get(_UID)})

    def only(self, wants: Callable[[str, int], bool]) -> Mark:
        """Without the partitions that are not wanted."""
        offsets = {
            topic: {n: at for n, at in found.items() if wants(topic, n)} for topic, found in self.offsets.items()
        }
        return Mark(offsets, self.uids)

    def to_json(self) -> dict[str, dict[str, Any]]:
        return {
            topic: {
                **({_UID: self.uids[topic]} if self.uids.get(topic) else {}),
                **{str(number): found[number] for number in sorted(found)},
            }
            for topic, found in sorted(self.offsets.items())
        }


# -- what options say ----------------------------------------------------------------------------------------------


def parse_time(text: str, name: str) -> int:
    """Microseconds since 1970 of an ISO 8601 time that says its zone."""
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequestError(f"{name} is a time like 2026-11-15T20:00:00Z, not {text!r}") from error
    if moment.tzinfo is None:
        raise InvalidRequestError(f"{name}: {text!r} does not say its time zone; write it with Z or +05:30 at its end")
    return (moment - _EPOCH) // _MICROSECOND


def parse_places(option: str, name: str) -> Places:
    """`earliest`, `latest`, `group`, a time, or JSON {"logs": {"0": 42}}: there -2 is earliest, -1 latest, a time is a
    string, and what is not named is read from the earliest, or to the latest."""
    if option in (EARLIEST, LATEST, *([GROUP] if name == STARTING else [])):
        return Places(option, {})
    if re.match("[0-9]{4}-", option):
        return Places(_moment(option, name), {})
    try:
        given = json.loads(option)
    except (ValueError, RecursionError) as error:
        words = "'earliest', 'latest', " + ("'group', " if name == STARTING else "")
        raise InvalidRequestError(f"{name} is {words}a time or JSON, not {option!r}") from error
    if not isinstance(given, dict) or not all(
        isinstance(wanted, dict) and all(map(_PARTITION.fullmatch, wanted)) for wanted in given.values()
    ):
        raise InvalidRequestError(f'{name} as JSON is {{"topic": {{"partition": offset}}}}, not {option!r}')
    return Places(
        EARLIEST if name == STARTING else LATEST,
        {topic: {int(n): _place(at, name) for n, at in wanted.items()} for topic, wanted in given.items()},
    )


def _place(value: Any, name: str) -> Place:
    if isinstance(value, str):
        return value if value in (EARLIEST, LATEST) else _moment(value, name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequestError(f"{name}: an offset is an integer, not {value!r}")
    return _EDGES.get(value, value)


def _moment(text: str, name: str) -> Moment:
    micros = parse_time(text, name)
    if micros < 0:
        raise InvalidRequestError(f"{name}: {text!r} is before 1970")
    return Moment(micros)


def resolve(
    places: Places, edges: Edges, name: str, found: Mapping[Lookup, int], *, lenient: bool = False
) -> dict[str, dict[int, int]]:
    """The offsets that are meant. `lenient`: what was trimmed meanwhile is left out, not an error."""
    for topic, wanted in places.given.items():
        if topic not in edges:
            raise InvalidRequestError(f"{name}: topic {topic} is not one of those that are read")
        if unknown := set(wanted) - set(edges[topic]):
            raise InvalidRequestError(f"{name}: topic {topic} has no partition {min(unknown)}")
    return {
        topic: {
            number: _offset(places.at(topic, number), edge, f"{topic}-{number}", name, lenient=lenient)
            if not isinstance(place := places.at(topic, number), Moment)
            else found[Lookup(topic, number, place.micros)]
            for number, edge in partitions.items()
        }
        for topic, partitions in edges.items()
    }


def _offset(place: Place, edge: Edge, where: str, name: str, *, lenient: bool) -> int:
    if place == EARLIEST:
        return edge.earliest
    if place == LATEST:
        return edge.latest
    offset = (edge.earliest if edge.position is None else edge.position) if place == GROUP else place
    assert isinstance(offset, int)
    # A group that fell behind retention is told like anybody else.
    if offset < edge.earliest and lenient:
        return edge.earliest
    if not edge.earliest <= offset <= edge.latest:
        raise InvalidRequestError(
            f"{name}: offset {offset} of {where} is out of range: {edge.earliest} to {edge.latest}"
        )
    return offset


# -- what is between two marks -------------------------------------------------------------------------------------


def spans(start: Mark, end: Mark, *, lenient: bool = False) -> Iterator[OffsetRange]:
    """What lies between, partition by partition. One that the start does not know is read from its beginning."""
    for topic, partitions in end.offsets.items():
        uid, before = end.uids.get(topic, ""), start.uids.get(topic, "")
        known = start.offsets.get(topic, {})
        if uid and before and uid != before:
            if not lenient:
                raise InvalidRequestError(
                    f"topic {topic} was deleted and made again since it was last read; go on with a new checkpoint, or "
                    "with failOnDataLoss=false to read the new one from its beginning"
                )
            known = {}
        for number, stop in partitions.items():
            first = known.get(number, 0)
            if first > stop:
                raise InvalidRequestError(
                    f"{topic}-{number} cannot be read from offset {first} to {stop}: the end is before the start"
                )
            yield OffsetRange(topic, number, first, stop, uid)


def cut(whole: OffsetRange, rows_per_task: int | None) -> list[OffsetRange]:
    """Pieces of at most `rows_per_task`; none of an empty range."""
    step = rows_per_task or max(1, whole.end - whole.start)
    starts = range(whole.start, whole.end, step)
    return [dataclasses.replace(whole, start=at, end=min(at + step, whole.end)) for at in starts]


def share(waiting: Mapping[Any, int], most: int) -> dict[Any, int]:
    """How much of what waits each may have so that all together have at most `most`: equal parts, and what one does
    not need goes to the others."""
    taken = dict.fromkeys(waiting, 0)
    left = most
    while left > 0 and (hungry := [one for one, amount in waiting.items() if taken[one] < amount]):
        part = max(1, left // len(hungry))
        for one in hungry[:left]:
            more = min(part, waiting[one] - taken[one])
            taken[one] += more
            left -= more
    return taken


def share_bytes(
    waiting: list[OffsetRange], most: int, measure: Callable[[dict[OffsetRange, int]], dict[OffsetRange, Reach]]
) -> dict[OffsetRange, int]:
    """Where each range may end so that all together are at most `most` bytes long: equal parts, and what one does not
    need goes to the others. `measure` tells how far so many bytes reach. At least one range gets on."""
    hungry = [one for one in waiting if one.start < one.end]
    reached = {one: Reach(one.start, 0) for one in waiting}
    for _ in range(_ROUNDS_MAX):
        left = most - sum(reach.size_bytes for reach in reached.values())
        if not hungry or left < most // 8:
            break
        wider = {one: reached[one].size_bytes + max(1, left // len(hungry)) for one in hungry}
        reached |= {one: reach for one, reach in measure(wider).items() if reach.offset > reached[one].offset}
        hungry = [one for one in hungry if reached[one].offset < one.end]
    # What is stored is cut between batches only. Where these are too long for all, those who wait longest come first.
    left, ends = most, {}
    for one in sorted(waiting, key=lambda one: one.start - one.end):
        reach = reached[one]
        fits = reach.size_bytes <= left or left == most
        ends[one] = min(reach.offset, one.end) if fits else one.start
        left -= reach.size_bytes if fits and reach.offset > one.start else 0
    return ends
