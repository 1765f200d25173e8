"""What Raft promises, checked over all replicas as they go (figure 3 of the paper, and ours)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from quiver.raft import Membership, Role
from tests.raft.kit import Disk, Entry, PureNode


class Violation(AssertionError):
    pass


class WatchedNode(PureNode):
    """Tells the ledger of each entry in its log."""

    ledger: Ledger

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen_commit = self.raft.commit
        self.seen_state: tuple[Any, ...] = ()

    def _append(self, index: int, entry: Entry) -> None:
        super()._append(index, entry)
        self.ledger.saw_entry(index, entry, self.entries[-2].term if len(self.entries) > 1 else self.start_term)

    def _truncate(self, index: int) -> None:
        if index <= self.seen_commit:
            raise Violation(f"{self.me} removes {index}, {self.seen_commit} is committed")
        super()._truncate(index)

    def full(self) -> None:
        super().full()
        self.seen_commit = min(self.seen_commit, self.last)  # as after a restart: it learns of them again


class Ledger:
    def __init__(self) -> None:
        self.committed: list[Entry] = []
        self.committed_in: list[int] = []  # the term of the leader that committed it
        self.leaders: dict[int, int] = {}  # term -> who
        self.entries: dict[tuple[int, int], tuple[Entry, int]] = {}  # (index, term) -> entry, term of the one before
        self.reads: dict[str, int] = {}  # context -> what was committed when it was asked
        self._memberships: list[Membership] = []  # committed ones
        self._first: Membership | None = None

    def membership(self) -> Membership:
        """The last committed one."""
        assert self._first is not None
        return self._memberships[-1] if self._memberships else self._first

    def needed(self) -> set[int]:
        """Replicas that may not be thrown away: in the last committed membership or perhaps in one after it."""
        found = set(self.membership().members) if self._first else set()
        for (index, _), (entry, _) in self.entries.items():
            if entry.membership is not None and index > len(self.committed):
                found |= set(entry.membership.members)
        return found

    def saw_entry(self, index: int, entry: Entry, term_before: int) -> None:
        """Log matching (§5.3): an index and a term are one entry, with one entry before it, and so on down."""
        known = self.entries.setdefault((index, entry.term), (entry, term_before))
        if known != (entry, term_before):
            raise Violation(f"two entries {index} of term {entry.term}: {known} and {(entry, term_before)}")

    def check(self, node: PureNode, disk_of: Callable[[int], Disk | None]) -> Iterator[str]:
        """After every event, for the replica it happened to. Yields what is worth a line."""
        assert isinstance(node, WatchedNode)
        raft = node.raft
        if self._first is None:
            self._first = node.disk.base
        if raft.terms.last != node.last or raft.terms.start != node.start:
            raise Violation(f"{node.me} thinks it has up to {raft.terms.last}, but has {node.last}")
        if raft.synced_index > node.start + node.clean:
            raise Violation(f"{node.me} thinks {raft.synced_index} is on disk, but {node.start + node.clean} is")
        if raft.role is Role.LEADER and self.leaders.get(raft.term) != node.me:
            self._check_new_leader(node)
        if raft.commit != node.seen_commit:
            self._check_commit(node, disk_of)
        state = (raft.role.value, raft.term, raft.leader_id, raft.commit, raft.quiet)
        if state != node.seen_state:
            node.seen_state = state
            yield f"{node.me} is {state[0]} term {raft.term} of {raft.leader_id} commit {raft.commit} {raft.quiet=}"

    def _check_new_leader(self, node: WatchedNode) -> None:
        """Election safety (§5.2) and leader completeness (§5.4): it has what leaders of earlier terms committed."""
        term = node.raft.term
        if self.leaders.setdefault(term, node.me) != node.me:
            raise Violation(f"two leaders of term {term}: {self.leaders[term]} and {node.me}")
        for index in range(node.start + 1, len(self.committed) + 1):
            if self.committed_in[index - 1] >= term:
                continue  # it won late, when a higher term was at work already
            if index > node.last or node.entry(index) != self.committed[index - 1]:
                raise Violation(f"{node.me} leads term {term} without committed entry {index}")

    def _check_commit(self, node: WatchedNode, disk_of: Callable[[int], Disk | None]) -> None:
        """State machine safety (§5.4.3), and that a leader commits only what a majority has on disk."""
        raft = node.raft
        if raft.commit < node.seen_commit:
            raise Violation(f"{node.me} goes back from commit {node.seen_commit} to {raft.commit}")
        if raft.commit > node.last:
            raise Violation(f"{node.me} commits {raft.commit} and has {node.last}")
        if raft.commit > len(self.committed):
            self._check_majority(node, disk_of)
            for index in range(len(self.committed) + 1, raft.commit + 1):
                entry = node.entry(index)
                self.committed.append(entry)
                self.committed_in.append(raft.term)
                if entry.membership is not None:
                    self._memberships.append(entry.membership)
        for index in range(max(node.seen_commit, node.start) + 1, raft.commit + 1):
            if node.entry(index) != self.committed[index - 1]:
                raise Violation(f"{node.me} commits another entry {index}: {node.entry(index)}")
        if raft.commit == node.start and node.start_term != self.committed[node.start - 1].term:
            raise Violation(f"{node.me} begins after {node.start} of term {node.start_term}")
        node.seen_commit = raft.commit

    def _check_majority(self, node: WatchedNode, disk_of: Callable[[int], Disk | None]) -> None:
        raft = node.raft
        if raft.leader is None and raft.me in raft.membership.voters:
            raise Violation(f"{node.me} follows and commits {raft.commit}, but only {len(self.committed)} are")
        term = node.entry(raft.commit).term
        disks = {voter: disk_of(voter) for voter in raft.membership.voters}
        holders = [voter for voter, disk in disks.items() if disk is not None and disk.has(raft.commit, term)]
        if not raft.membership.has_majority(holders):
            raise Violation(f"{node.me} commits {raft.commit} of term {term}, on disk only at {holders}")

    def check_read(self, context: str, index: int) -> None:
        """Reads are linear (§8): all that was committed when it was asked is seen."""
        if index < self.reads.pop(context):
            raise Violation(f"read {context} is answered at {index}, which is older than the question")
