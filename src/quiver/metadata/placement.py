"""Which brokers hold which partition.

Rule: pure. Partitions and replicas go round the brokers, so that both data and leaders are spread evenly.
"""

from __future__ import annotations

from collections.abc import Sequence


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
