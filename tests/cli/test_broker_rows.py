"""What `quiver broker list` says of each broker."""

from __future__ import annotations

from quiver.cli.broker import broker_rows
from quiver.types import PartitionMove


def test_each_broker_is_told_with_what_it_holds_leads_and_waits_for() -> None:
    moves = [PartitionMove("logs", 0, (1, 3), (2,)), PartitionMove("logs", 1, (1, 3), ())]
    rows = broker_rows({2: "b:2", 1: "a:1", 3: "c:3"}, {1: ["leader", "follower"], 2: ["follower"]}, moves, [2])
    assert [tuple(row.values()) for row in rows] == [
        (1, "a:1", "online", 2, 1, 2),
        (2, "b:2", "draining", 1, 0, 1),
        (3, "c:3", "unreachable", 0, 0, 2),
    ]
