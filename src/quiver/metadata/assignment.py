"""Who of a group reads which partition.

Rule: pure, and the same for the same arguments. Every partition that somebody wants has exactly one reader who wants
its topic. `sticky` leaves partitions where they are and moves only what the balance asks for.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping
from typing import Final

Place = tuple[str, int]  # topic and number of a partition
Wants = Mapping[str, Collection[str]]  # the topics of each member

STICKY: Final = "sticky"


def assign(strategy: str, counts: Mapping[str, int], wants: Wants, now: Mapping[Place, str]) -> dict[Place, str]:
    """The reader of each partition. `counts` are the partitions of each topic, `now` is who has them."""
    readers: dict[str, list[str]] = {topic: [] for topic in sorted(counts)}
    for member in sorted(wants):
        for topic in wants[member]:
            if topic in readers:
                readers[topic].append(member)
    return STRATEGIES[strategy]({topic: counts[topic] for topic in readers if readers[topic]}, readers, now)


def _range(counts: Mapping[str, int], readers: Mapping[str, list[str]], now: Mapping[Place, str]) -> dict[Place, str]:
    """Neighbouring partitions of each topic to one member."""
    found: dict[Place, str] = {}
    for topic, count in counts.items():
        share, more = divmod(count, len(readers[topic]))
        first = 0
        for at, member in enumerate(readers[topic]):
            end = first + share + (at < more)
            found.update({(topic, number): member for number in range(first, end)})
            first = end
    return found


def _round_robin(
    counts: Mapping[str, int], readers: Mapping[str, list[str]], now: Mapping[Place, str]
) -> dict[Place, str]:
    """One after the other, over all topics: whoever was given one waits until the others were."""
    found: dict[Place, str] = {}
    given: dict[str, int] = {}  # when each was last given one
    for topic, count in counts.items():
        turn = [(given.get(member, -1), member) for member in readers[topic]]
        heapq.heapify(turn)
        for number in range(count):
            member = turn[0][1]
            found[topic, number] = member
            given[member] = len(found)
            heapq.heapreplace(turn, (len(found), member))
    return found


def _sticky(counts: Mapping[str, int], readers: Mapping[str, list[str]], now: Mapping[Place, str]) -> dict[Place, str]:
    places = [(topic, number) for topic, count in counts.items() for number in range(count)]
    allowed = {topic: set(readers[topic]) for topic in counts}
    found = {place: now[place] for place in places if now.get(place) in allowed[place[0]]}
    loads = _Loads({topic: readers[topic] for topic in counts}, found.values())
    for place in places:
        if place not in found:
            found[place] = loads.lightest(place[0])
            loads.change(found[place], 1)
    of_member: dict[str, list[Place]] = {}
    for place in places:
        of_member.setdefault(found[place], []).append(place)
    moved = True
    while moved:  # ends: each move makes the loads more equal
        moved = False
        for member in sorted(of_member, key=lambda one: (-loads.of(one), one)):
            for place in reversed(list(of_member[member])):
                to = loads.lightest(place[0])
                if loads.of(to) + 1 < loads.of(member):
                    of_member[member].remove(place)
                    of_member.setdefault(to, []).append(place)
                    found[place] = to
                    loads.change(member, -1)
                    loads.change(to, 1)
                    moved = True
    return {place: found[place] for place in places}


class _Loads:
    """How many partitions each member has, and who of a topic's readers has fewest."""

    def __init__(self, readers: Mapping[str, list[str]], taken: Collection[str]) -> None:
        self._loads = {member: 0 for members in readers.values() for member in members}
        for member in taken:
            self._loads[member] += 1
        # One heap for all topics with the same readers. An entry whose load is not the member's any more is stale.
        self._heap_of: dict[str, list[tuple[int, str]]] = {}
        self._heaps_with: dict[str, list[list[tuple[int, str]]]] = {member: [] for member in self._loads}
        by_readers: dict[tuple[str, ...], list[tuple[int, str]]] = {}
        for topic, members in readers.items():
            heap = by_readers.get(tuple(members))
            if heap is None:
                heap = by_readers[tuple(members)] = [(self._loads[member], member) for member in members]
                heapq.heapify(heap)
                for member in members:
                    self._heaps_with[member].append(heap)
            self._heap_of[topic] = heap

    def of(self, member: str) -> int:
        return self._loads[member]

    def lightest(self, topic: str) -> str:
        heap = self._heap_of[topic]
        while heap[0][0] != self._loads[heap[0][1]]:
            heapq.heappop(heap)
        return heap[0][1]

    def change(self, member: str, by: int) -> None:
        self._loads[member] += by
        for heap in self._heaps_with[member]:
            heapq.heappush(heap, (self._loads[member], member))


_Strategy = Callable[[Mapping[str, int], Mapping[str, list[str]], Mapping[Place, str]], dict[Place, str]]
STRATEGIES: Final[Mapping[str, _Strategy]] = {STICKY: _sticky, "range": _range, "round-robin": _round_robin}
