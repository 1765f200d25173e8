"""Partitions and replicas go round the brokers."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from quiver.metadata.placement import Held, Key, plan_placement, plan_rebalance, plan_refuge
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


# -- what is placed already ------------------------------------------------------------------------------------------


@st.composite
def clusters(draw: st.DrawFn) -> tuple[dict[Key, Held], list[int], list[int]]:
    """Partitions anywhere, the brokers of which some can be used, and which those are."""
    ids = draw(st.lists(st.integers(1, 9), min_size=1, max_size=7, unique=True))
    count = draw(st.integers(0, 25))
    held: dict[Key, Held] = {}
    for number in range(count):
        replicas = draw(st.lists(st.sampled_from(ids), min_size=1, max_size=4, unique=True))
        held["t", number] = Held(tuple(replicas), draw(st.integers(1, 4)))
    usable = draw(st.lists(st.sampled_from(ids), min_size=1, unique=True))
    return held, ids, usable


def after(held: dict[Key, Held], places: dict[Key, tuple[int, ...]]) -> dict[Key, tuple[int, ...]]:
    return {key: partition.replicas for key, partition in held.items()} | places


@given(clusters())
def test_no_broker_has_two_replicas_of_a_partition(cluster: tuple[dict[Key, Held], list[int], list[int]]) -> None:
    held, ids, usable = cluster
    gone = [broker for broker in ids if broker not in usable]
    for places in (plan_refuge(held, usable), plan_refuge(held, usable, gone), plan_rebalance(held, usable)):
        for replicas in places.values():
            assert replicas
            assert len(set(replicas)) == len(replicas)


@given(clusters())
def test_refuge_keeps_what_can_stay_and_fills_what_must_go(
    cluster: tuple[dict[Key, Held], list[int], list[int]],
) -> None:
    held, ids, usable = cluster
    gone = {broker for broker in ids if broker not in usable}
    places = plan_refuge(held, usable, gone)
    for key, replicas in after(held, places).items():
        before, factor = held[key]
        stayed = set(before) & set(usable)
        assert stayed <= set(replicas)
        assert not gone & set(replicas), "someone is left on a broker that leaves"
        if key in places:
            assert len(replicas) == max(len(stayed), min(factor, len(usable)))
        else:
            assert not gone & set(before)


@given(clusters())
def test_away_brokers_keep_what_nobody_else_can_take(cluster: tuple[dict[Key, Held], list[int], list[int]]) -> None:
    held, _, usable = cluster
    for key, replicas in after(held, plan_refuge(held, usable)).items():
        before, factor = held[key]
        assert len(replicas) >= min(factor, len(before))
        away = [broker for broker in replicas if broker not in usable]
        assert set(away) <= set(before)
        if away and not set(usable) <= set(replicas):
            assert len(replicas) > factor or replicas == before or len(before) > factor


@given(clusters())
def test_rebalance_gives_everyone_a_share_with_the_fewest_moves(
    cluster: tuple[dict[Key, Held], list[int], list[int]],
) -> None:
    held, _, usable = cluster
    filled = {key: Held(replicas, held[key].replication_factor) for key, replicas in _filled_up(held, usable).items()}
    found = after(filled, plan_rebalance(filled, usable))
    replicas = [broker for places in found.values() for broker in places if broker in usable]
    loads = counts(usable, replicas)
    assert max(loads) - min(loads) <= 1
    before = counts(usable, [broker for one in filled.values() for broker in one.replicas if broker in usable])
    low, high = sum(before) // len(usable), -(-sum(before) // len(usable))
    needed = max(sum(max(0, load - high) for load in before), sum(max(0, low - load) for load in before))
    moved = sum(len(set(found[key]) - set(filled[key].replicas)) for key in filled)
    assert moved == needed


def _filled_up(held: dict[Key, Held], usable: list[int]) -> dict[Key, tuple[int, ...]]:
    """On usable brokers alone, with all replicas: from here on only balance is left to do."""
    places = after(held, plan_refuge(held, usable, set(range(10)) - set(usable)))
    return {
        key: (*replicas, *[broker for broker in usable if broker not in replicas][: max(0, factor - len(replicas))])
        for (key, replicas), factor in zip(
            places.items(), [partition.replication_factor for partition in held.values()], strict=True
        )
    }


@given(clusters())
def test_rebalance_leaves_no_better_leaders_and_then_nothing_to_do(
    cluster: tuple[dict[Key, Held], list[int], list[int]],
) -> None:
    held, _, usable = cluster
    found = after(held, plan_rebalance(held, usable))
    again = {key: Held(replicas, held[key].replication_factor) for key, replicas in found.items()}
    assert plan_rebalance(again, usable) == {}
    for key, replicas in found.items():
        assert len(replicas) >= min(held[key].replication_factor, len(usable))


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 3))
def test_a_new_broker_gets_its_share_of_replicas_and_leaders(old: int, partitions: int, factor: int) -> None:
    placed = plan_placement(range(1, old + 1), {}, partitions, factor)
    held = {("t", number): Held(replicas, factor) for number, replicas in enumerate(placed)}
    everyone = list(range(1, old + 2))
    found = after(held, plan_rebalance(held, everyone))
    replicas = counts(everyone, [broker for places in found.values() for broker in places])
    leaders = counts(everyone, [places[0] for places in found.values()])
    assert max(replicas) - min(replicas) <= 1
    assert max(leaders) - min(leaders) <= 1
    assert replicas[-1] == sum(old + 1 in places for places in found.values())


def test_a_plan_in_full() -> None:
    held = {("t", number): Held((1, 2), 2) for number in range(4)}
    assert plan_rebalance(held, [1, 2, 3]) == {("t", 0): (3, 2), ("t", 1): (3, 1), ("t", 2): (2, 1)}
    assert plan_refuge(held, [1, 3], [2]) == dict.fromkeys(held, (1, 3))
    assert plan_refuge(held, [1]) == {}
    assert plan_refuge(held, [1], [2]) == dict.fromkeys(held, (1,))
