"""What brokers tell of all the partitions that they lead, put together.

Rule: pure. Of each partition the word of who leads it counts: one that was deposed and does not know it yet has the
lower term. A partition of which nobody tells is missed, not left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from msgspec import Struct

Place = tuple[str, int]  # topic and partition


class Led(Struct, array_like=True, frozen=True):
    topic: str
    partition: int
    term: int  # 0 for one without a group


class OfLeader(Protocol):
    """`broken`: replicas that the broker has and cannot use."""

    @property
    def led(self) -> list[Led]: ...

    @property
    def broken(self) -> list[Place]: ...


R = TypeVar("R", bound=OfLeader)
ByLeader = dict[Place, R]


def by_leader(replies: Iterable[R]) -> ByLeader[R]:
    """Of each partition that somebody leads, the reply that counts."""
    found: dict[Place, tuple[int, R]] = {}
    for reply in replies:
        for one in reply.led:
            known = found.get((one.topic, one.partition))
            if known is None or one.term > known[0]:
                found[one.topic, one.partition] = (one.term, reply)
    return {place: reply for place, (_, reply) in found.items()}


def missed(wanted: Mapping[Place, int], replies: Iterable[OfLeader]) -> list[Place]:
    """Those of `wanted`, which has the number of their replicas, that nobody leads now. Not those of which most
    replicas are broken: nobody is going to lead them."""
    told = list(replies)
    broken = Counter(place for reply in told for place in reply.broken)
    led = by_leader(told)
    return [place for place, count in wanted.items() if place not in led and broken[place] * 2 <= count]
