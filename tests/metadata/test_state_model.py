"""The rules of the state machine, for any commands in any order."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.metadata.commands import (
    Command,
    CreateTopic,
    RegisterProducer,
    SettleReplicas,
    decode_command,
    encode_command,
)
from quiver.metadata.groups import Group
from quiver.metadata.image import copy_of, decode_state, difference, encode_state
from quiver.metadata.state import Applied, Consumer, Entity, Producer, Put, State, Topic
from tests.metadata.kit import attempt, image, random_command


def commands_of(seed: int, count: int = 50) -> list[Command]:
    dice, state, found = random.Random(seed), State(), []
    for _ in range(count):
        found.append(random_command(dice, state))
        attempt(state, found[-1])
    return found


seeds = st.integers(0, 2**32)


@settings(deadline=None)
@given(seeds)
def test_the_same_commands_give_the_same_state_and_the_same_answers(seed: int) -> None:
    commands = commands_of(seed)
    first, second = State(), State()
    for command in commands:
        # The second learns of it through the log, as after a restart or on another manager.
        assert attempt(first, command) == attempt(second, decode_command(encode_command(command)))
    assert image(first) == image(second)


@settings(deadline=None)
@given(seeds)
def test_a_state_out_of_a_check_point_goes_on_as_the_one_that_was_never_written(seed: int) -> None:
    """Placement too: what is counted as commands come must be what a new manager counts from the topics."""
    kept = State()
    for command in commands_of(seed):
        attempt(kept, command)
    fresh = decode_state(encode_state(kept))
    create = CreateTopic("last", ["uid"] * 5, 2, 1)
    assert attempt(fresh, create) == attempt(kept, create)


@settings(deadline=None)
@given(seeds)
def test_a_refusal_changes_nothing(seed: int) -> None:
    state = State()
    for command in commands_of(seed):
        before = image(state)
        if isinstance(attempt(state, command), str):
            assert image(state) == before


@settings(deadline=None)
@given(seeds)
def test_the_changes_tell_everything_that_is_different(seed: int) -> None:
    state = State()
    mirror: dict[tuple[type, int | str], Entity] = {}
    for command in commands_of(seed):
        applied = attempt(state, command)
        for change in applied.changes if isinstance(applied, Applied) else ():
            entity = change.entity
            key = (type(entity), entity.name if isinstance(entity, (Topic, Group)) else entity.id)
            if isinstance(change, Put):
                mirror[key] = entity
            else:
                assert mirror.pop(key) == entity
        assert sorted(map(repr, mirror.values())) == sorted(map(repr, entities(state)))


def entities(state: State) -> list[Entity]:
    found = (state.topics, state.producers, state.consumers, state.brokers, state.removed, state.managers.rows)
    found += (state.groups,)
    return [entity for kind in found for entity in kind.values()]  # type: ignore[attr-defined]


@settings(deadline=None)
@given(seeds)
def test_a_state_goes_on_from_its_image_as_if_it_had_never_stopped(seed: int) -> None:
    commands = commands_of(seed)
    state = State()
    for at, command in enumerate(commands):
        attempt(state, command)
        state.applied = at + 1
    again, copy = decode_state(encode_state(state)), copy_of(state)
    before = image(state)
    assert image(again) == image(copy) == before
    for command in commands_of(seed + 1):
        attempt(state, command)
        attempt(again, command)
    assert image(again) == image(state)
    assert image(copy) == before


@given(seeds, st.integers(0, 50))
def test_the_difference_of_two_states_makes_one_the_other(seed: int, early: int) -> None:
    """Also of states that never were one after the other."""
    first, second = State(), State()
    for command in commands_of(seed, early):
        attempt(first, command)
    for command in commands_of(seed + 1):
        attempt(second, command)
    found = {repr(entity) for entity in entities(first)}
    for change in difference(first, second):
        entity = change.entity
        if isinstance(change, Put):
            found = {known for known in found if not _is_same(known, entity)} | {repr(entity)}
        else:
            found.remove(repr(entity))
    assert found == {repr(entity) for entity in entities(second)}
    assert difference(second, second) == []


def _is_same(known: str, entity: Entity) -> bool:
    """Whether both stand for one row."""
    key = f"name={entity.name!r}," if isinstance(entity, (Topic, Group)) else f"id={entity.id},"
    return known.startswith(f"{type(entity).__name__}({key}")


@settings(deadline=None)
@given(seeds)
def test_ids_rise_and_are_never_given_twice(seed: int) -> None:
    state = State()
    last: dict[str, int] = {"producer": 0, "consumer": 0, "partition": 0}
    known: set[int] = set()

    def new(kind: str, given: int) -> None:
        assert given == last[kind] + 1
        last[kind] = given

    for command in commands_of(seed):
        applied = attempt(state, command)
        for change in applied.changes if isinstance(applied, Applied) else ():
            if not isinstance(change, Put):
                continue
            if isinstance(change.entity, Producer):
                new("producer", change.entity.id)
            elif isinstance(change.entity, Consumer):
                new("consumer", change.entity.id)
            elif isinstance(change.entity, Topic):
                for partition in change.entity.partitions:
                    if partition.id not in known:
                        known.add(partition.id)
                        new("partition", partition.id)


@settings(deadline=None)
@given(seeds)
def test_what_refers_to_a_topic_finds_it(seed: int) -> None:
    state = State()
    for command in commands_of(seed):
        attempt(state, command)
        for entity in (*state.producers.values(), *state.consumers.values()):
            partitions = state.topic(entity.topic).partitions
            assert entity.partition is None or 0 <= entity.partition < len(partitions)
        for topic in state.topics.values():
            assert [partition.number for partition in topic.partitions] == list(range(len(topic.partitions)))
            assert all(partition.topic == topic.name for partition in topic.partitions)


@settings(deadline=None)
@given(seeds)
def test_who_holds_a_partition_is_known_and_kept_until_it_is_settled(seed: int) -> None:
    state = State()
    for command in commands_of(seed):
        before = {one.uid: one for topic in state.topics.values() for one in topic.partitions}
        attempt(state, command)
        for topic in state.topics.values():
            for partition in topic.partitions:
                assert len(set(partition.replicas + partition.leaving)) == len(partition.replicas + partition.leaving)
                assert set(partition.replicas + partition.leaving) <= state.brokers.keys()
                assert partition.moving or not partition.leaving
                if partition.epoch and partition.voters:
                    assert {voter >> 32 for voter in partition.voters} == set(partition.holders)
                old = before.get(partition.uid, partition)
                assert partition.epoch >= old.epoch
                assert partition == old or partition.epoch > old.epoch
                if partition.voters and not isinstance(command, SettleReplicas):
                    assert set(old.holders) <= set(partition.holders), "a replica was given up that may be needed"


def test_the_commands_of_these_tests_do_and_refuse_everything() -> None:
    """A model test that never meets a case proves nothing about it."""
    met: set[tuple[str, bool]] = set()
    moved: set[tuple[bool, bool]] = set()
    made_by_producer = False
    for seed in range(100):
        state = State()
        for command in commands_of(seed):
            applied = attempt(state, command)
            met.add((type(command).__name__, isinstance(applied, Applied)))
            moved |= {(p.moving, bool(p.leaving)) for topic in state.topics.values() for p in topic.partitions}
            made_by_producer |= (
                isinstance(command, RegisterProducer)
                and isinstance(applied, Applied)
                and any(isinstance(change.entity, Topic) for change in applied.changes)
            )
    kinds = {kind for kind, _ in met}
    assert len(kinds) == 18
    assert met >= {(kind, True) for kind in kinds}
    assert met >= {(kind, False) for kind in kinds - {"SettleReplicas"}}
    assert moved == {(False, False), (True, False), (True, True)}
    assert made_by_producer
    assert CreateTopic.__name__ in kinds
