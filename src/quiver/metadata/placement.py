"""Which brokers hold which partition.

Rule: pure. Partitions and replicas go round the brokers, so that both data and leaders are spread evenly. What is
placed already moves as little as that allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

Key = tuple[str, int]  # topic and number
Places = dict[Key, tuple[int, ...]]


class Held(NamedTuple):
    """A partition that is placed: its brokers, the one that leads first, and how many there should be."""

    replicas: tuple[int, ...]
    replication_factor: int


def plan_placement(
    brokers: Sequence[int], load: dict[int, int], partitions: int, replication_factor: int
) -> list[tuple[int, ...]]:
    """The replicas of each partition, leader first; fewer than asked for when there are fewer brokers.

    `load` counts what each broker leads already; the round begins at the one with the least.
    """
    order = sorted(brokers)
    if not order:
        return [() for _ in range(partitions)]
    start = min(range(len(order)), key=lambda at: (load.get(order[at], 0), at))
    width = min(replication_factor, len(order))
    return [
        tuple(order[(start + partition + replica) % len(order)] for replica in range(width))
        for partition in range(partitions)
    ]


def plan_refuge(
    held: Mapping[Key, Held],
    usable: Collection[int],
    leaving: Collection[int] = (),
    takers: Collection[int] | None = None,
) -> Places:
    """New places for the partitions that have replicas on brokers which cannot be used, and only for those.

    `takers` are the usable brokers that can take a replica now, all without it. With too few usable brokers a replica
    stays where it is, unless its broker is leaving: then there is one less. With too few takers it waits for them.
    """
    loads = dict.fromkeys(sorted(usable if takers is None else takers), 0)
    leads: dict[int, int] = {}
    for partition in held.values():
        for at, broker in enumerate(partition.replicas):
            if broker in loads:
                loads[broker] += 1
            leads[broker] = leads.get(broker, 0) + (at == 0)
    places: Places = {}
    for key, (replicas, factor) in held.items():
        stay = [broker for broker in replicas if broker in usable]
        if len(stay) == len(replicas):
            continue
        found = _filled(stay, factor, loads)
        rest = [broker for broker in replicas if broker not in usable]
        found += [broker for broker in rest if broker not in leaving][: max(0, min(factor, len(replicas)) - len(found))]
        if not found or len(found) < min(factor, len(usable)) or len(rest) == len(set(rest).intersection(found)):
            for broker in set(found) - set(replicas):
                loads[broker] -= 1
            continue  # there is nowhere to go, or not yet
        if found[0] != replicas[0]:
            there = stay or [broker for broker in found if broker in usable] or found
            first = min(there, key=lambda broker: leads.get(broker, 0))
            found = _led_by(first, found)
            leads[first] = leads.get(first, 0) + 1
        places[key] = tuple(found)
    return places


def plan_rebalance(held: Mapping[Key, Held], usable: Collection[int]) -> Places:
    """The places that change so that every usable broker has its share of replicas, and of leaders.

    Partitions get all their replicas, then the fewest replicas move, then the fewest leaders change.
    """
    loads = dict.fromkeys(sorted(usable), 0)
    if not loads:
        return {}
    places = {key: partition.replicas for key, partition in held.items()} | plan_refuge(held, usable)
    for replicas in places.values():
        for broker in replicas:
            if broker in loads:
                loads[broker] += 1
    for key, replicas in places.items():
        if len(replicas) < held[key].replication_factor:
            places[key] = tuple(_filled(list(replicas), held[key].replication_factor, loads))
    _even_replicas(places, loads)
    _even_leaders(places, loads)
    return {key: replicas for key, replicas in places.items() if replicas != held[key].replicas}


def plan_resize(held: Mapping[Key, Held], usable: Collection[int], topic: str) -> Places:
    """The places of a topic that change so that each partition has as many replicas as are wanted.

    The leader stays; of the others those go that are not usable, then those whose broker has most."""
    loads = dict.fromkeys(sorted(usable), 0)
    for replicas, _ in held.values():
        for broker in replicas:
            if broker in loads:
                loads[broker] += 1
    places: Places = {}
    for key, (replicas, factor) in held.items():
        if key[0] != topic:
            continue
        first, *rest = replicas
        rest.sort(key=lambda broker: (broker not in loads, loads.get(broker, 0)))
        found = _filled([first, *rest[: factor - 1]], factor, loads)
        for broker in set(rest) - set(found):
            if broker in loads:
                loads[broker] -= 1
        if set(found) != set(replicas):
            places[key] = tuple(found)
    return places


def _filled(replicas: list[int], factor: int, loads: dict[int, int]) -> list[int]:
    """With so many replicas, if there are brokers for them: those that have the least."""
    found = list(replicas)
    while len(found) < factor and (free := [broker for broker in loads if broker not in found]):
        least = min(free, key=lambda broker: loads[broker])
        loads[least] += 1
        found.append(least)
    return found


def _even_replicas(places: Places, loads: dict[int, int]) -> None:
    """From the broker with most to the one with least, until they differ by one. No way needs fewer moves: each of
    them takes from what is above a fair share, or gives to what is below."""
    on: dict[int, dict[Key, None]] = {broker: {} for broker in loads}
    for key, replicas in places.items():
        for broker in replicas:
            if broker in on:
                on[broker][key] = None
    while True:
        least, most = min(loads, key=lambda b: (loads[b], b)), max(loads, key=lambda b: (loads[b], -b))
        if loads[most] - loads[least] < 2:
            return
        # It has more, so it has one that the other has not. One that it does not lead, if there is one.
        movable = [key for key in on[most] if key not in on[least]]
        key = next((key for key in movable if places[key][0] != most), movable[0])
        places[key] = tuple(least if broker == most else broker for broker in places[key])
        del on[most][key]
        on[least][key] = None
        loads[most] -= 1
        loads[least] += 1


def _even_leaders(places: Places, brokers: Collection[int]) -> None:
    """Lets brokers with many leaders give some to their followers, over others if need be."""
    led: dict[int, dict[Key, None]] = {broker: {} for broker in brokers}
    for key, replicas in places.items():
        if replicas and replicas[0] in led:
            led[replicas[0]][key] = None
    settled: set[int] = set()
    while len(settled) < len(led):
        giver = max((broker for broker in led if broker not in settled), key=lambda b: (len(led[b]), -b))
        way = _way_to_fewer(places, led, giver)
        if not way:
            settled.add(giver)
        for key, taker in way:
            del led[places[key][0]][key]
            led[taker][key] = None
            places[key] = tuple(_led_by(taker, places[key]))


def _way_to_fewer(places: Places, led: Mapping[int, Mapping[Key, None]], giver: int) -> list[tuple[Key, int]]:
    """Changes of leaders after which `giver` leads one less and another one, that leads two less, one more."""
    came_by: dict[int, tuple[Key, int] | None] = {giver: None}
    waiting = deque([giver])
    while waiting:
        broker = waiting.popleft()
        if len(led[giver]) - len(led[broker]) >= 2:
            way = []
            while (step := came_by[broker]) is not None:
                way.append((step[0], broker))
                broker = step[1]
            return way
        for key in led[broker]:
            for follower in places[key]:
                if follower in led and follower not in came_by:
                    came_by[follower] = (key, broker)
                    waiting.append(follower)
    return []


def _led_by(first: int, replicas: Sequence[int]) -> list[int]:
    return [first, *(broker for broker in replicas if broker != first)]
