"""Majorities of one membership and of its neighbours always have a member in common."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from quiver.raft import Membership

IDS = st.integers(1, 7)
MEMBERSHIPS = st.builds(
    lambda voters, learners: Membership(tuple(sorted(voters)), tuple(sorted(learners - voters))),
    st.sets(IDS, min_size=1),
    st.sets(IDS),
)


def smallest_majorities(membership: Membership) -> list[set[int]]:
    return [set(found) for found in combinations(membership.voters, membership.majority)]


@given(MEMBERSHIPS, MEMBERSHIPS)
def test_majorities_of_neighbours_intersect(old: Membership, new: Membership) -> None:
    if new.is_one_step_from(old):
        for one in smallest_majorities(old):
            assert all(one & other for other in smallest_majorities(new))


@given(MEMBERSHIPS, IDS)
def test_every_single_change_is_one_step_and_can_be_taken_back(old: Membership, replica: int) -> None:
    for new in (old.with_learner(replica), old.with_voter(replica), old.without(replica)):
        assert new.is_one_step_from(old)
        assert old.is_one_step_from(new)
        assert len(set(new.members)) == len(new.members)
        assert set(new.members) - {replica} == set(old.members) - {replica}
    assert replica in old.with_learner(replica).learners
    assert replica in old.with_voter(replica).voters
    assert replica not in old.without(replica).members


@given(MEMBERSHIPS, IDS, IDS)
def test_two_voters_at_once_are_more_than_one_step(old: Membership, one: int, other: int) -> None:
    if one != other and {one, other} <= set(old.voters):
        assert not old.without(one).without(other).is_one_step_from(old)
        assert not old.without(one).without(other).with_learner(one).is_one_step_from(old)


@given(MEMBERSHIPS, st.lists(IDS, max_size=12))
def test_a_majority_counts_each_voter_once_and_no_learner(membership: Membership, replicas: list[int]) -> None:
    voters = {replica for replica in replicas if replica in membership.voters}
    assert membership.has_majority(replicas) == (len(voters) > len(membership.voters) / 2)


@given(MEMBERSHIPS, st.dictionaries(IDS, st.integers(0, 9)))
def test_agreed_is_the_highest_index_that_a_majority_has(membership: Membership, match: dict[int, int]) -> None:
    reached = [
        index
        for index in range(10)
        if membership.has_majority(v for v in membership.voters if match.get(v, 0) >= index)
    ]
    assert membership.agreed(match) == max(reached)


def test_nobody_agrees_on_anything() -> None:
    assert Membership().agreed({1: 9}) == 0
    assert not Membership().has_majority([1, 2, 3])
