"""Who called which manager, and which of the others has not heard of it yet.

Rule: pure. A sighting is told to every other manager once; again when the telling was lost. Times are those of whoever
saw it, so they say nothing about what is new: that is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

Times = dict[int, int]


class SeenTimes(Times):
    """When each was last seen, by id. `version` counts what was noted, so that asking for news costs as much as there
    is news, however many are known."""

    __slots__ = ("_order", "version")

    def __init__(self, times: Mapping[int, int] | None = None) -> None:
        super().__init__(times or {})
        self.version = 0
        self._order: dict[int, int] = {}  # the version of each that was noted, the latest last

    def note(self, known: int, seen_us: int) -> None:
        self.version += 1
        self[known] = seen_us
        self._order.pop(known, None)
        self._order[known] = self.version

    def merge(self, times: Mapping[int, int]) -> None:
        """What others have seen: the latest counts."""
        for known, seen_us in times.items():
            if seen_us > self.get(known, 0):
                self.note(known, seen_us)

    def since(self, version: int) -> Times:
        """What was noted after that version."""
        found: Times = {}
        for known in reversed(self._order):
            if self._order[known] <= version:
                break
            found[known] = self[known]
        return found

    def keep(self, known: Container[int]) -> None:
        """Forgets all others."""
        for gone in [one for one in self if one not in known]:
            del self[gone]
            self._order.pop(gone, None)


class Seen(NamedTuple):
    """When each was last seen, by id."""

    producers: Times
    consumers: Times


class _Owed:
    def __init__(self) -> None:
        self.news = Seen({}, {})
        self.told = Seen({}, {})
        self.told_us = 0


class Sightings:
    """Kept by the primary, for each other manager."""

    def __init__(self) -> None:
        self._owed: dict[int, _Owed] = {}

    def note(self, by: int, seen: Seen) -> None:
        """Manager `by` has seen these."""
        for manager, owed in self._owed.items():
            if manager != by:
                _merge(owed.news, seen)

    def for_manager(self, manager: int, heard_us: int, now_us: int, everything: Callable[[], Seen]) -> Seen:
        """What to tell a manager now. `heard_us` is the last telling that it got; a new one is told everything."""
        owed = self._owed.get(manager)
        if owed is None:
            owed = self._owed[manager] = _Owed()
            _merge(owed.news, everything())
        elif owed.told_us != heard_us:
            _merge(owed.news, owed.told)
        owed.told, owed.told_us, owed.news = owed.news, now_us, Seen({}, {})
        return owed.told

    def clear(self) -> None:
        """Another manager led meanwhile: what the others know is not known."""
        self._owed.clear()


def _merge(into: Seen, seen: Seen) -> None:
    for mine, theirs in zip(into, seen, strict=True):
        mine.update({known: at for known, at in theirs.items() if at > mine.get(known, 0)})
