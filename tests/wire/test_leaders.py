"""What brokers tell of what they lead, put together: one word for each partition, and nothing left out unseen."""

from __future__ import annotations

from quiver.wire.group_messages import PositionsReply, StoredPosition, positions_of
from quiver.wire.leaders import Led, by_leader, missed


def told(offset: int, *led: tuple[str, int, int], broken: tuple[tuple[str, int], ...] = ()) -> PositionsReply:
    stored = [StoredPosition(topic, number, "g", offset, 0, 100) for topic, number, _ in led]
    return PositionsReply(stored, [Led(*one) for one in led], list(broken))


def test_the_highest_term_counts() -> None:
    deposed, leader = told(5, ("logs", 0, 3), ("logs", 1, 4)), told(9, ("logs", 0, 7))
    for replies in ([deposed, leader], [leader, deposed]):
        found = by_leader(replies)
        assert found == {("logs", 0): leader, ("logs", 1): deposed}
        assert sorted((one.partition, one.offset) for one in positions_of(found)) == [(0, 9), (1, 5)]


def test_what_nobody_leads_is_missed() -> None:
    wanted = {("logs", 0): 3, ("logs", 1): 3, ("alone", 0): 1}
    assert missed(wanted, []) == list(wanted)
    assert missed(wanted, [told(0, ("logs", 0, 1))]) == [("logs", 1), ("alone", 0)]
    assert missed(wanted, [told(0, ("logs", 0, 1), ("logs", 1, 2)), told(0, ("alone", 0, 0))]) == []


def test_what_most_replicas_call_broken_is_not_waited_for() -> None:
    one, two = told(0, broken=(("logs", 0), ("alone", 0))), told(0, broken=(("logs", 0),))
    wanted = {("logs", 0): 3, ("alone", 0): 1}
    assert missed(wanted, [one]) == [("logs", 0)]  # two of its replicas may still agree on a leader
    assert missed(wanted, [one, two]) == []
