"""Partitions and replicas go round the brokers."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from quiver.metadata.placement import plan_placement
from quiver.metadata.state import State
from tests.metadata.kit import broker, create

brokers = st.lists(st.integers(1, 50), min_size=1, max_size=8, unique=True)


def counts(broker_ids: list[int], chosen: list[int]) -> list[int]:
    found = Counter(chosen)
    return [found[broker_id] for broker_id in broker_ids]


def test_replicas_follow_their_leader_round_the_brokers() -> None:
    assert plan_placement([3, 1, 2], {}, 4, 2) == [(1, 2), (2, 3), (3, 1), (1, 2)]


def test_the_round_begins_at_the_broker_that_leads_least() -> None:
    assert plan_placement([1, 2, 3], {1: 5, 2: 1, 3: 2}, 2, 3) == [(2, 3, 1), (3, 1, 2)]


def test_fewer_brokers_than_replicas_give_fewer_replicas() -> None:
    assert plan_placement([7], {}, 2, 3) == [(7,), (7,)]
    assert plan_placement([], {}, 2, 3) == [(), ()]


@given(brokers, st.integers(1, 40), st.integers(1, 5))
def test_leaders_are_spread_evenly_and_replicas_are_different(ids: list[int], partitions: int, factor: int) -> None:
    places = plan_placement(ids, {}, partitions, factor)
    leaders = counts(ids, [replicas[0] for replicas in places])
    assert len(places) == partitions
    assert max(leaders) - min(leaders) <= 1
    for replicas in places:
        assert len(set(replicas)) == len(replicas) == min(factor, len(ids))
        assert set(replicas) <= set(ids)


@given(brokers, st.integers(1, 5), st.integers(1, 5))
def test_whole_rounds_give_every_broker_the_same_number_of_replicas(ids: list[int], rounds: int, factor: int) -> None:
    places = plan_placement(ids, {}, rounds * len(ids), factor)
    assert len(set(counts(ids, [replica for replicas in places for replica in replicas]))) == 1


@given(st.integers(1, 6), st.integers(1, 30))
def test_small_topics_one_after_the_other_are_spread_evenly(broker_count: int, topics: int) -> None:
    state = State()
    ids = list(range(1, broker_count + 1))
    for broker_id in ids:
        state.apply(broker(broker_id))
    for number in range(topics):
        state.apply(create(f"t{number}"))
    leaders = counts(ids, [topic.partitions[0].replicas[0] for topic in state.topics.values()])
    assert max(leaders) - min(leaders) <= 1
