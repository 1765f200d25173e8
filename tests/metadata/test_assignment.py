"""Who reads what: every partition once, loads equal within one, and no more moves than the balance asks for."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.metadata.assignment import STRATEGIES, assign

strategies = st.sampled_from(sorted(STRATEGIES))
topics = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 12), min_size=1)
members = st.dictionaries(st.sampled_from([f"m{n}" for n in range(7)]), st.sets(st.sampled_from("abcde")))
alike = st.integers(1, 7).map(lambda count: {f"m{n}": set("abcd") for n in range(count)})
owners = st.dictionaries(
    st.tuples(st.sampled_from("abcd"), st.integers(0, 14)), st.sampled_from([f"m{n}" for n in range(9)])
)


@given(strategies, topics, members, owners)
def test_each_partition_has_one_reader_who_wants_its_topic(strategy, counts, wants, now) -> None:  # type: ignore[no-untyped-def]
    found = assign(strategy, counts, wants, now)
    wanted = {topic for of_member in wants.values() for topic in of_member}
    assert set(found) == {(topic, n) for topic, count in counts.items() if topic in wanted for n in range(count)}
    assert all(place[0] in wants[member] for place, member in found.items())
    assert found == assign(strategy, dict(reversed(counts.items())), dict(reversed(wants.items())), now)


@given(st.sampled_from(["sticky", "round-robin"]), topics, alike, owners)
def test_loads_are_equal_within_one(strategy, counts, wants, now) -> None:  # type: ignore[no-untyped-def]
    found = assign(strategy, counts, wants, now)
    loads = Counter(dict.fromkeys(wants, 0))
    loads.update(found.values())
    assert max(loads.values()) - min(loads.values()) <= 1


@given(topics, alike)
def test_range_gives_neighbours_and_balances_each_topic(counts, wants) -> None:  # type: ignore[no-untyped-def]
    found = assign("range", counts, wants, {})
    for topic, count in counts.items():
        readers = [found[topic, n] for n in range(count)]
        assert readers == sorted(readers)
        loads = Counter(dict.fromkeys(wants, 0))
        loads.update(readers)
        assert max(loads.values()) - min(loads.values()) <= 1


@given(topics, members, owners)
def test_sticky_leaves_no_move_that_would_make_loads_more_equal(counts, wants, now) -> None:  # type: ignore[no-untyped-def]
    found = assign("sticky", counts, wants, now)
    loads = Counter(found.values())
    for (topic, _), member in found.items():
        assert all(loads[other] + 1 >= loads[member] for other in wants if topic in wants[other])


@given(topics, alike, owners)
def test_sticky_moves_no_more_than_the_balance_asks_for(counts, wants, now) -> None:  # type: ignore[no-untyped-def]
    found = assign("sticky", counts, wants, now)
    kept = Counter(dict.fromkeys(wants, 0))
    kept.update(now[place] for place in found if now.get(place) in wants)
    moved = sum(now[place] != found[place] for place in found if now.get(place) in wants)
    share, more = divmod(len(found), len(wants))
    # Those who have most may keep one more, as many of them as the balance lets.
    allowed = [share + (at < more) for at in range(len(wants))]
    assert moved == sum(
        max(0, had - may) for had, may in zip(sorted(kept.values(), reverse=True), allowed, strict=True)
    )


def test_sticky_gives_the_same_when_nothing_changed() -> None:
    wants = {f"m{n}": {"a", "b"} for n in range(4)}
    first = assign("sticky", {"a": 12, "b": 3}, wants, {})
    assert assign("sticky", {"a": 12, "b": 3}, wants, first) == first


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_thousand_members_and_ten_thousand_partitions_take_little_time(strategy: str) -> None:
    wants = {f"m{n:04d}": {"a", "b"} for n in range(1000)}
    began_s = time.process_time()
    first = assign(strategy, {"a": 8000, "b": 2000}, wants, {})
    del wants["m0500"]
    assign(strategy, {"a": 8000, "b": 2000}, wants, first)
    assert time.process_time() - began_s < 2
