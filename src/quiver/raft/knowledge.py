"""What a replica knows, whether it leads or follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quiver.config import RaftSettings
from quiver.raft.membership import Membership
from quiver.raft.messages import AnyMessage
from quiver.raft.ready import LogWork, Own, Role
from quiver.raft.terms import TermRuns
from quiver.types import HardState


class Knowledge:
    __slots__ = (
        "commit",
        "down",
        "failed",
        "fit",
        "leader_id",
        "lost_reads",
        "may_lead",
        "may_vote",
        "me",
        "memberships",
        "now_ms",
        "outbox",
        "quiet",
        "reads",
        "role",
        "settings",
        "synced_index",
        "term",
        "terms",
        "voted_for",
        "woken",
        "work",
    )

    def __init__(
        self,
        me: int,
        settings: RaftSettings,
        hard_state: HardState,
        terms: TermRuns,
        memberships: Sequence[tuple[int, Membership]],
        commit: int,
        fit: Callable[[int, int], int],
        now_ms: int,
    ) -> None:
        self.me = me
        self.settings = settings
        self.term, self.voted_for = hard_state
        self.role = Role.FOLLOWER
        self.leader_id = 0  # nobody
        self.may_lead = True  # false: it does not stand for election
        self.may_vote = True  # false: its log is damaged, and it cannot judge another's
        self.failed = False
        self.terms = terms
        self.memberships = list(memberships)
        self.commit = commit
        self.fit = fit
        self.synced_index = terms.last
        self.quiet = False
        self.woken = False  # since the time was last told
        self.down: set[int] = set()  # peers without a connection
        self.now_ms = now_ms
        self.outbox: list[AnyMessage] = []
        self.work: list[LogWork] = []
        self.reads: list[tuple[Any, int]] = []
        self.lost_reads: list[Any] = []

    @property
    def membership(self) -> Membership:
        return self.memberships[-1][1] if self.memberships else Membership()

    @property
    def membership_index(self) -> int:
        return self.memberships[-1][0] if self.memberships else 0

    def membership_at(self, index: int) -> Membership:
        """The one in force after that entry."""
        found = Membership()
        for at, membership in self.memberships:
            if at <= index:
                found = membership
        return found

    @property
    def may_be_needed(self) -> bool:
        """A voter; or one whose removal is not committed: perhaps only its log has that entry (thesis §4.2.2)."""
        return self.me in self.membership.voters or self.me in self.membership_at(self.commit).voters

    def add_own_entry(self) -> int:
        index = self.terms.append(self.term)
        self.work.append(Own(index, self.term))
        return index

    def become_follower(self, term: int, leader_id: int) -> None:
        raise NotImplementedError
