"""Judges a history: what producers were told against what consumers saw.

    history = History()
    told, saw = history.producer("p1"), history.reader("c1")
    told.sent(b"1")
    told.acknowledged(b"1", producer.send("logs", b"1", partition=0).result())
    for record in consumer:
        saw.saw(record)
    assert not history.judge()

A value stands for its message, so every value that is sent must be different. One `ProducerLog` for each thread that
sends, one `Reader` for each consumer object; a consumer that is opened again is another reader of the same name.

Rule: pure. It knows neither clients nor time; the caller tells it what happened, in the order in which it happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from typing import Final, NamedTuple

from quiver.types import Record, RecordMetadata

# Violations of one kind that are told one by one; of the rest only the number is told.
TOLD_PER_KIND_MAX: Final = 20
_VALUE_CHARACTERS_MAX: Final = 60

LOST: Final = "lost"  # acknowledged and never seen
DUPLICATE: Final = "duplicate"  # stored twice, or handed twice to one reader
REORDERED: Final = "reordered"  # not in the order it was sent in, or not the same order for all readers
PHANTOM: Final = "phantom"  # seen and never sent, or sent and refused
MISPLACED: Final = "misplaced"  # not at the place that the acknowledgement named
GAP: Final = "gap"  # an offset that no record has
REWOUND: Final = "rewound"  # a committed position that moved back

Place = tuple[str, int]  # topic and partition
Gone = Set[tuple[Place, int]]


class Violation(NamedTuple):
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


class ProducerLog:
    """What one sender did and was told. For one thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.order: list[bytes] = []
        self.acks: dict[bytes, RecordMetadata] = {}
        self.refused: set[bytes] = set()

    def sent(self, value: bytes) -> None:
        """About to be sent. Until it is told otherwise its outcome is unknown: it may be stored or not."""
        self.order.append(value)

    def acknowledged(self, value: bytes, where: RecordMetadata) -> None:
        self.acks[value] = where

    def failed(self, value: bytes) -> None:
        """The producer was told that it is not stored. One that only gave up has an unknown outcome."""
        self.refused.add(value)


class _Jump(NamedTuple):
    place: Place
    offset: int
    resumed: bool


class Reader:
    """What one consumer object saw, from where it began. For one thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.events: list[Record | _Jump] = []

    def saw(self, record: Record) -> None:
        self.events.append(record)

    def resumed(self, topic: str, partition: int, offset: int) -> None:
        """It goes on where earlier readers of its name left off: never beyond what they saw."""
        self.events.append(_Jump((topic, partition), offset, True))

    def jumped(self, topic: str, partition: int, offset: int) -> None:
        """It was sent elsewhere by a seek, or by retention: the next offset of this partition is this one."""
        self.events.append(_Jump((topic, partition), offset, False))


class Positions:
    """The committed positions of one group, in the order in which they were told. For one thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.events: list[tuple[bool, Place, int]] = []

    def committed(self, topic: str, partition: int, offset: int) -> None:
        """A commit returned."""
        self.events.append((True, (topic, partition), offset))

    def found(self, topic: str, partition: int, offset: int | None) -> None:
        """The position was asked for, or reading began there. None: the group has none."""
        self.events.append((False, (topic, partition), -1 if offset is None else offset))


class History:
    """Collects the logs of all actors. `judge` is called when they are done."""

    def __init__(self) -> None:
        self.producers: list[ProducerLog] = []
        self.readers: list[Reader] = []
        self.groups: list[Positions] = []
        self._gone: set[tuple[Place, int]] = set()

    def may_be_gone(self, topic: str, partition: int, offsets: Iterable[int]) -> None:
        """Compaction may have taken these records: a reader that does not see them misses nothing."""
        self._gone.update(((topic, partition), offset) for offset in offsets)

    def producer(self, name: str) -> ProducerLog:
        self.producers.append(ProducerLog(name))
        return self.producers[-1]

    def reader(self, name: str) -> Reader:
        self.readers.append(Reader(name))
        return self.readers[-1]

    def group(self, name: str) -> Positions:
        self.groups.append(Positions(name))
        return self.groups[-1]

    @property
    def acknowledged_count(self) -> int:
        return sum(len(log.acks) for log in self.producers)

    def judge(self) -> list[Violation]:
        """Everything that is wrong, worst first; empty for a clean history.

        Lost is what no reader saw: at least one must have read everything to the end.
        """
        stored, disagreements = _stored(self.readers)
        places: dict[bytes, list[tuple[Place, int]]] = {}
        for (place, offset), value in sorted(stored.items()):
            places.setdefault(value, []).append((place, offset))
        found = [
            *_lost(self.producers, places, self._gone),
            *_duplicates(places),
            *_phantoms(self.producers, places),
            *_misplaced(self.producers, places),
            *disagreements,
            *_reordered(self.producers, places),
            *_gaps(stored, self._gone),
            *(violation for reader in self.readers for violation in _reading(reader, self._gone)),
            *_skipped(self.readers, self._gone),
            *(violation for group in self.groups for violation in _rewound(group)),
        ]
        return list(_shortened(found))


def _stored(readers: list[Reader]) -> tuple[dict[tuple[Place, int], bytes], list[Violation]]:
    """The log as the readers saw it together, and where they do not agree."""
    stored: dict[tuple[Place, int], bytes] = {}
    first: dict[tuple[Place, int], str] = {}
    found: list[Violation] = []
    for reader in readers:
        for record in reader.events:
            if not isinstance(record, Record):
                continue
            at = ((record.topic, record.partition), record.offset)
            value = b"" if record.value is None else record.value
            known = stored.setdefault(at, value)
            by = first.setdefault(at, reader.name)
            if known != value:
                detail = f"{_at(*at)} is {_shown(known)} for {by} and {_shown(value)} for {reader.name}"
                found.append(Violation(REORDERED, detail))
    return stored, found


def _are_gone(gone: Gone, place: Place, start: int, end: int) -> bool:
    """Whether a reader may go from one offset to the other."""
    return start < end and all((place, offset) in gone for offset in range(start, end))


def _lost(
    producers: list[ProducerLog], places: dict[bytes, list[tuple[Place, int]]], gone: Gone
) -> Iterator[Violation]:
    for log in producers:
        for value, where in log.acks.items():
            if value not in places and ((where.topic, where.partition), where.offset) not in gone:
                at = _at((where.topic, where.partition), where.offset)
                yield Violation(LOST, f"{_shown(value)} of {log.name} was acknowledged at {at} and nobody saw it")


def _duplicates(places: dict[bytes, list[tuple[Place, int]]]) -> Iterator[Violation]:
    for value, found in places.items():
        if len(found) > 1:
            where = ", ".join(_at(*at) for at in found)
            yield Violation(DUPLICATE, f"{_shown(value)} is stored {len(found)} times: {where}")


def _phantoms(producers: list[ProducerLog], places: dict[bytes, list[tuple[Place, int]]]) -> Iterator[Violation]:
    sent = {value for log in producers for value in log.order}
    refused = {value: log.name for log in producers for value in log.refused}
    for value, found in places.items():
        if value not in sent:
            yield Violation(PHANTOM, f"{_shown(value)} at {_at(*found[0])} was never sent")
        elif value in refused:
            detail = f"{_shown(value)} at {_at(*found[0])}: {refused[value]} was told that it is not stored"
            yield Violation(PHANTOM, detail)


def _misplaced(producers: list[ProducerLog], places: dict[bytes, list[tuple[Place, int]]]) -> Iterator[Violation]:
    for log in producers:
        for value, where in log.acks.items():
            told = ((where.topic, where.partition), where.offset)
            if value in places and told not in places[value]:
                actual = _at(*places[value][0])
                yield Violation(MISPLACED, f"{_shown(value)} was acknowledged at {_at(*told)} and stands at {actual}")


def _reordered(producers: list[ProducerLog], places: dict[bytes, list[tuple[Place, int]]]) -> Iterator[Violation]:
    """In each partition the first copies of one sender's messages must stand in the order they were sent in."""
    for log in producers:
        last: dict[Place, tuple[int, bytes]] = {}
        for value in log.order:
            for place, offset in places.get(value, ())[:1]:
                before = last.get(place)
                if before is not None and offset < before[0]:
                    detail = f"{_shown(value)} of {log.name} at {_at(place, offset)} was sent after {_shown(before[1])}"
                    yield Violation(REORDERED, f"{detail} at offset {before[0]}")
                last[place] = (offset, value)


def _gaps(stored: dict[tuple[Place, int], bytes], gone: Gone) -> Iterator[Violation]:
    last: dict[Place, int] = {}
    for place, offset in sorted(stored):
        follows = place not in last or offset == last[place] + 1 or _are_gone(gone, place, last[place] + 1, offset)
        if not follows:
            yield Violation(GAP, f"{_at(place, last[place])} is followed by offset {offset}")
        last[place] = offset


def _reading(reader: Reader, gone: Gone) -> Iterator[Violation]:
    """One reader meets each offset once, in order, without a hole, unless it was told to jump."""
    expected: dict[Place, int] = {}
    seen: dict[Place, set[int]] = {}
    for record in reader.events:
        if not isinstance(record, Record):
            expected[record.place] = record.offset
            seen.pop(record.place, None)
            continue
        place, offset = (record.topic, record.partition), record.offset
        wanted = expected.get(place, offset)
        expected[place] = offset + 1
        offsets = seen.setdefault(place, set())
        if offset != wanted and not _are_gone(gone, place, wanted, offset):
            kind = DUPLICATE if offset in offsets else GAP if offset > wanted else REORDERED
            yield Violation(kind, f"{reader.name} got {_at(place, offset)} where offset {wanted} follows")
        offsets.add(offset)


def _skipped(readers: list[Reader], gone: Gone) -> Iterator[Violation]:
    """Readers of one name see everything together: one that resumes begins no later than the last one ended."""
    ends: dict[tuple[str, Place], int] = {}
    for reader in readers:
        for event in reader.events:
            if isinstance(event, Record):
                ends[reader.name, (event.topic, event.partition)] = event.offset + 1
                continue
            end = ends.get((reader.name, event.place))
            skips = event.resumed and end is not None and event.offset > end
            if skips and end is not None and not _are_gone(gone, event.place, end, event.offset):
                detail = f"{reader.name} resumed at {_at(event.place, event.offset)} and had seen nothing from {end} on"
                yield Violation(GAP, detail)
            ends[reader.name, event.place] = event.offset


def _rewound(group: Positions) -> Iterator[Violation]:
    held: dict[Place, int] = {}
    for is_commit, place, offset in group.events:
        if offset < held.get(place, -1):
            what = "committed" if is_commit else "found"
            yield Violation(REWOUND, f"{group.name} {what} {_at(place, offset)} after {held[place]} was committed")
        if is_commit:
            held[place] = offset


def _shortened(found: list[Violation]) -> Iterator[Violation]:
    told: Counter[str] = Counter()
    for violation in found:
        told[violation.kind] += 1
        if told[violation.kind] <= TOLD_PER_KIND_MAX:
            yield violation
    for kind, count in told.items():
        if count > TOLD_PER_KIND_MAX:
            yield Violation(kind, f"... and {count - TOLD_PER_KIND_MAX} more")


def _at(place: Place, offset: int) -> str:
    return f"{place[0]}-{place[1]}@{offset}"


def _shown(value: bytes) -> str:
    text = value[: _VALUE_CHARACTERS_MAX + 1].decode(errors="replace")
    return repr(text if len(text) <= _VALUE_CHARACTERS_MAX else text[:_VALUE_CHARACTERS_MAX] + "...")
