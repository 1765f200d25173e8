"""Groups: partitions change hands one owner at a time, epochs only grow, members keep what they keep."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.errors import GroupActiveError, InvalidRequestError, UnknownGroupError
from quiver.metadata import group_table
from quiver.metadata.commands import ChangeGroup, DeleteGroup, DeleteTopic, FenceGroup
from quiver.metadata.groups import Change, Group, Member, Released
from quiver.metadata.state import Applied, State
from tests.metadata.kit import add_partitions, attempt, broker, create, random_command


def member(name: str, *topics: str) -> Member:
    return Member(name, topics or ("a",), 10_000)


def started(partitions: int = 4) -> State:
    state = State()
    state.apply(broker(1))
    state.apply(create("a", partitions))
    return state


def change(state: State, **fields: object) -> Group:
    group: Group = state.apply(ChangeGroup("g", Change(**fields), "sticky")).result  # type: ignore[arg-type]
    return group


def owned(group: Group, name: str) -> set[int]:
    return {share.partition for share in group.shares if share.owner == name}


def wanted(group: Group, name: str) -> set[int]:
    return {share.partition for share in group.shares if share.target == name}


def release_all(group: Group) -> list[Released]:
    return [Released(s.owner, s.topic, s.partition, s.epoch) for s in group.shares if s.owner != s.target]


def test_the_first_member_has_everything_at_once() -> None:
    group = change(started(), joined=[member("m1")])
    assert owned(group, "m1") == {0, 1, 2, 3}
    assert group.generation > 0


def test_a_newcomer_gets_its_share_only_when_the_owner_lets_go() -> None:
    state = started()
    change(state, joined=[member("m1")])
    group = change(state, joined=[member("m2")])
    moving = wanted(group, "m2")
    assert len(moving) == 2
    assert owned(group, "m1") == {0, 1, 2, 3}, "nothing is taken away"
    kept = {share for share in group.shares if share.partition not in moving}
    first, second = release_all(group)
    group = change(state, released=[first])
    assert owned(group, "m2") == {first.partition}
    group = change(state, released=[second])
    assert owned(group, "m2") == moving
    assert kept <= set(group.shares), "what stays keeps its epoch"
    assert all(share.epoch > first.epoch for share in group.shares if share.owner == "m2")


def test_what_a_member_had_goes_to_others_when_it_is_gone() -> None:
    state = started()
    group = change(state, joined=[member("m1"), member("m2")])
    epochs = {share.partition: share.epoch for share in group.shares}
    lost = owned(group, "m2")
    group = change(state, left=["m2"])
    assert owned(group, "m1") == {0, 1, 2, 3}
    assert {s.partition for s in group.shares if s.epoch != epochs[s.partition]} == lost


def test_a_release_of_an_older_epoch_or_of_somebody_else_is_nothing() -> None:
    state = started()
    change(state, joined=[member("m1")])
    group = change(state, joined=[member("m2")])
    right = release_all(group)[0]
    wrong = [Released("m2", right.topic, right.partition, right.epoch)]
    wrong += [Released("m1", right.topic, right.partition, right.epoch - 1)]
    assert change(state, released=wrong) == group


def test_what_is_let_go_of_by_mistake_comes_back_under_a_new_epoch() -> None:
    state = started(1)
    group = change(state, joined=[member("m1")])
    share = group.shares[0]
    again = change(state, released=[Released("m1", "a", 0, share.epoch)]).shares[0]
    assert (again.owner, again.epoch > share.epoch) == ("m1", True)


def test_new_partitions_are_shared_and_deleted_topics_are_gone() -> None:
    state = started(2)
    before = change(state, joined=[member("m1"), member("m2")])
    state.apply(add_partitions("a", 2, 2))
    group = state.groups["g"]
    assert [len(owned(group, name)) for name in ("m1", "m2")] == [2, 2]
    assert set(before.shares) <= set(group.shares)
    assert group.generation > before.generation
    state.apply(DeleteTopic("a"))
    assert state.groups["g"].shares == ()
    state.apply(create("a", 3))
    assert len(state.groups["g"].shares) == 3, "a topic that is made again is read again"


def test_other_topics_of_a_member_take_away_only_what_it_no_longer_wants() -> None:
    state = started(2)
    state.apply(create("b", 2))
    change(state, joined=[member("m1", "a", "b")])
    group = change(state, joined=[member("m1", "b")])
    assert {s.topic for s in group.shares if s.target == "m1"} == {"b"}
    assert {s.topic for s in group.shares if s.owner == "m1"} == {"a", "b"}, "until it lets go"
    group = change(state, released=release_all(group))
    assert {s.topic for s in group.shares} == {"b"}


def test_a_group_with_members_is_not_deleted_and_an_unknown_one_is_said_to_be() -> None:
    state = started()
    with pytest.raises(UnknownGroupError):
        state.apply(DeleteGroup("g"))
    with pytest.raises(UnknownGroupError):
        change(state, left=["m1"])
    change(state, joined=[member("m1")])
    with pytest.raises(GroupActiveError, match="1 active member"):
        state.apply(DeleteGroup("g"))
    last = change(state, left=["m1"])
    assert last.shares == ()
    state.apply(DeleteGroup("g"))
    again = change(state, joined=[member("m1")])
    assert again.shares[0].epoch > 4, "epochs of a group that is made again go on where they were"
    assert again.generation > last.generation, "who knew the old one takes the new one for newer"


def test_who_sets_positions_has_an_epoch_between_those_before_and_after() -> None:
    state = started()
    before = change(state, joined=[member("m1")])
    with pytest.raises(GroupActiveError, match="1 active member"):
        state.apply(FenceGroup("g"))
    change(state, left=["m1"])
    epoch = state.apply(FenceGroup("g")).result
    assert epoch > max(share.epoch for share in before.shares)
    assert epoch < min(share.epoch for share in change(state, joined=[member("m2")]).shares)
    assert state.apply(FenceGroup("of positions alone")).result > epoch


def test_groups_and_members_have_a_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_table, "GROUP_MEMBERS_MAX", 2)
    monkeypatch.setattr(group_table, "GROUPS_MAX", 1)
    state = started()
    change(state, joined=[member("m1"), member("m2")])
    with pytest.raises(InvalidRequestError, match="maximum of 2 members"):
        change(state, joined=[member("m3")])
    change(state, joined=[member("m2", "b")])
    with pytest.raises(InvalidRequestError, match="1 groups already"):
        state.apply(ChangeGroup("h", Change([member("m1")]), "sticky"))


@given(st.integers(0, 2**32))
def test_ownership_is_single_and_its_epochs_only_grow(seed: int) -> None:
    """For any commands: who has a partition keeps it until it lets go or leaves, and no epoch is used twice."""
    dice, state = random.Random(seed), State()
    epochs: set[int] = set()
    numbers: set[int] = set()  # generations
    for _ in range(60):
        before = dict(state.groups)
        command = random_command(dice, state)
        if not isinstance(attempt(state, command), Applied):
            continue
        for name, group in state.groups.items():
            old = before.get(name, Group(name))
            if group == old or (group.members, group.shares) == (old.members, old.shares):
                assert group.generation == old.generation
            else:
                assert group.generation not in numbers
                numbers.add(group.generation)
            names = {one.id for one in group.members}
            places = [(share.topic, share.partition) for share in group.shares]
            assert places == sorted(set(places))
            given = {(share.topic, share.partition): share for share in old.shares}
            for share in group.shares:
                assert share.owner in names and share.target in names | {""}
                assert share.partition < len(state.topics[share.topic].partitions)
                had = given.get((share.topic, share.partition))
                if had is not None and had.epoch == share.epoch:
                    assert had.owner == share.owner
                    continue
                assert share.epoch not in epochs
                epochs.add(share.epoch)
                if had is not None and isinstance(command, ChangeGroup) and had.owner in names:
                    change = command.change
                    let_go = Released(had.owner, had.topic, had.partition, had.epoch) in change.released
                    assert let_go or had.owner in change.left
