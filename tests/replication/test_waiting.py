"""What is told of trouble that only one replica has."""

from __future__ import annotations

from typing import Any

import pytest

from quiver.config import RaftSettings
from quiver.errors import CorruptLogError, DiskFullError, NotLeaderError
from quiver.raft import Membership, Raft, TermRuns
from quiver.replication.group import replica_id
from quiver.replication.waiting import own_trouble
from quiver.types import HardState

ME, OTHER = replica_id(1, 7), replica_id(2, 7)
ALONE, BOTH = Membership((ME,)), Membership((ME, OTHER))


def raft_of(memberships: list[tuple[int, Membership]], commit: int) -> Raft:
    terms = TermRuns(0, 0, [(1, 1)], 10)
    return Raft(ME, RaftSettings(), HardState(1, ME), terms, memberships, commit, lambda first, size: first, 0, 0)


@pytest.mark.parametrize(
    ("memberships", "commit", "told"),
    [
        ([(0, ALONE)], 10, DiskFullError),
        ([(0, BOTH)], 10, NotLeaderError),
        ([(0, BOTH), (5, ALONE)], 5, DiskFullError),
        ([(0, BOTH), (5, ALONE)], 4, NotLeaderError),  # the other may have entry 4, and the change may be undone
        ([(0, ALONE), (5, BOTH)], 4, NotLeaderError),
        ([(0, ALONE), (5, BOTH), (7, ALONE)], 7, DiskFullError),
    ],
)
def test_only_who_is_alone_for_certain_says_that_nothing_was_stored(
    memberships: list[tuple[int, Membership]], commit: int, told: type[Exception]
) -> None:
    error = own_trouble(DiskFullError("full"), raft_of(memberships, commit))
    assert type(error) is told and error.message.endswith("full")


@pytest.mark.parametrize("raft", [None, raft_of([(0, ALONE)], 0)])
def test_what_is_told_has_all_facts_and_is_made_anew(raft: Any) -> None:
    damage = CorruptLogError.at("a.seg", 7, "bad")
    told = own_trouble(damage, raft)
    assert told is not damage and (told.message, told.facts) == (damage.message, damage.facts)
