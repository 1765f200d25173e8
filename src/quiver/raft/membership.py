"""Who is in a group: voters decide, learners only receive.

Rule: a membership differs from the one before it by a single voter (Raft thesis §4.1), so that any majority of the old
and any majority of the new have a member in common. Learners do not count, so any number of them may change beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct


class Membership(Struct, array_like=True, frozen=True):
    """Replica ids. An id is given once: a replica that lost its disk comes back under another."""

    voters: tuple[int, ...] = ()
    learners: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        return self.voters + self.learners

    @property
    def majority(self) -> int:
        return len(self.voters) // 2 + 1

    def has_majority(self, replicas: Iterable[int]) -> bool:
        """True when those hold a majority. Each counts once, and only if it may vote."""
        return len(set(self.voters).intersection(replicas)) >= self.majority

    def agreed(self, match: Mapping[int, int]) -> int:
        """The highest index that a majority has reached."""
        if not self.voters:
            return 0
        return sorted([match.get(voter, 0) for voter in self.voters])[-self.majority]

    def is_one_step_from(self, other: Membership) -> bool:
        return len(set(self.voters) ^ set(other.voters)) <= 1

    def with_learner(self, replica: int) -> Membership:
        return Membership(_without(self.voters, replica), (*_without(self.learners, replica), replica))

    def with_voter(self, replica: int) -> Membership:
        return Membership((*_without(self.voters, replica), replica), _without(self.learners, replica))

    def without(self, replica: int) -> Membership:
        return Membership(_without(self.voters, replica), _without(self.learners, replica))


def _without(replicas: tuple[int, ...], gone: int) -> tuple[int, ...]:
    return tuple(replica for replica in replicas if replica != gone)
