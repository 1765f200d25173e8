"""A replica without disk and network: the pure core, a list for a log, and the caller's duties done on it.

What is in `Disk` survives a crash. Nothing gets there by itself but what must be there before a message leaves.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import msgspec

from quiver.config import RaftSettings
from quiver.raft import AnyMessage, Append, Extend, Install, Membership, Own, Raft, Ready, TermRuns, Truncate
from quiver.types import HardState

_NEW = HardState()
_NOBODY = Membership()


class Entry(NamedTuple):
    term: int
    value: str = ""
    membership: Membership | None = None


@dataclasses.dataclass
class Disk:
    """`entries` come after `start`. `base` is the membership in force at `start`."""

    hard_state: HardState = _NEW
    start: int = 0
    start_term: int = 0
    base: Membership = _NOBODY
    base_index: int = 0
    entries: list[Entry] = dataclasses.field(default_factory=list)
    commit: int = 0  # known to be committed, and applied

    @property
    def last(self) -> int:
        return self.start + len(self.entries)

    def has(self, index: int, term: int) -> bool:
        """True when that entry is here, or is covered by what was trimmed."""
        return index <= self.start or (index <= self.last and self.entries[index - self.start - 1].term == term)


class PureNode:
    """`append_bytes_max` of the settings counts entries here."""

    def __init__(self, me: int, settings: RaftSettings, disk: Disk, now_ms: int = 0, random: int = 0) -> None:
        self.me = me
        self.disk = disk
        self.settings = settings
        self.start, self.start_term = disk.start, disk.start_term
        self.entries = list(disk.entries)
        self.clean = len(disk.entries)  # so many entries are on disk as they are here
        self.truncations = 0
        terms = TermRuns(self.start, self.start_term)
        memberships = [(disk.base_index, disk.base)]
        for index, entry in enumerate(self.entries, self.start + 1):
            terms.append(entry.term)
            if entry.membership is not None:
                memberships.append((index, entry.membership))
        self.raft = Raft(me, settings, disk.hard_state, terms, memberships, disk.commit, self._fit, now_ms, random)

    @property
    def last(self) -> int:
        return self.start + len(self.entries)

    def entry(self, index: int) -> Entry:
        return self.entries[index - self.start - 1]

    def _fit(self, first: int, bytes_max: int) -> int:
        return max(first, min(self.last, first + bytes_max - 1))

    # -- inputs that touch the log -------------------------------------------------------------------------------

    def propose(self, value: str) -> int:
        index, term = self.raft.propose()
        self._append(index, Entry(term, value))
        return index

    def propose_membership(self, membership: Membership) -> int:
        index, term = self.raft.propose_membership(membership)
        self._append(index, Entry(term, "", membership))
        return index

    def sync(self, index: int | None = None) -> None:
        """What was written up to `index`, everything by default, is on disk."""
        count = len(self.entries) if index is None else index - self.start
        if count <= self.clean:
            return
        self.disk.entries[self.clean :] = self.entries[self.clean : count]
        self.clean = count
        self.raft.synced(self.start + count, self.entries[-1 if count == len(self.entries) else count - 1].term)

    def full(self) -> None:
        """The disk is full: what is not on it is gone."""
        del self.entries[self.clean :]
        self.truncations += 1
        self.raft.rewound(self.last)

    def trim(self, start: int) -> None:
        assert start <= min(self.raft.commit, self.start + self.clean)
        term = self.raft.terms.term_at(start)
        assert term is not None
        disk, gone = self.disk, start - self.start
        disk.base_index, disk.base = [found for found in self.raft.memberships if found[0] <= start][-1]
        disk.start, disk.start_term, disk.commit = start, term, max(start, disk.commit)
        del disk.entries[:gone]
        del self.entries[:gone]
        self.start, self.start_term, self.clean = start, term, self.clean - gone
        self.raft.trimmed(start)

    # -- what the core asks for ----------------------------------------------------------------------------------

    def ready(self) -> Ready | None:
        """Does the work of the next `Ready` on the log; its messages get their bodies and may leave."""
        ready = self.raft.ready()
        if ready is None:
            return None
        if ready.hard_state is not None:
            self.disk.hard_state = ready.hard_state
        for work in ready.work:
            if isinstance(work, Truncate):
                self._truncate(work.index)
            elif isinstance(work, Extend):
                append = work.append
                for index in range(work.first, append.last + 1):
                    self._append(index, append.body[index - append.prev_index - 1])
            elif isinstance(work, Own):
                self._append(work.index, Entry(work.term))
            else:
                self._install(work)
        ready.messages = [self._with_body(message) for message in ready.messages]
        return ready

    def _with_body(self, message: AnyMessage) -> AnyMessage:
        if isinstance(message, Append) and message.last > message.prev_index:
            first = message.prev_index - self.start
            return msgspec.structs.replace(message, body=tuple(self.entries[first : message.last - self.start]))
        return message

    def _append(self, index: int, entry: Entry) -> None:
        assert index == self.last + 1, f"entry {index} after {self.last}"
        self.entries.append(entry)

    def _truncate(self, index: int) -> None:
        del self.entries[index - self.start - 1 :]
        self.clean = min(self.clean, len(self.entries))
        self.truncations += 1

    def _install(self, work: Install) -> None:
        snapshot, disk = work.snapshot, self.disk
        self.start = disk.start = disk.commit = disk.base_index = snapshot.index
        self.start_term = disk.start_term = snapshot.index_term
        disk.base = snapshot.membership
        self.entries, disk.entries = [], []
        self.clean = 0
        self.truncations += 1
