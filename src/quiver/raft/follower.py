"""What a replica does with a leader's words: compares logs, takes entries in, acknowledges what is on its disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quiver.config import RaftSettings
from quiver.raft.knowledge import Knowledge
from quiver.raft.membership import Membership
from quiver.raft.messages import Append, AppendReply, Snapshot
from quiver.raft.ready import Extend, Install, Role, Truncate
from quiver.raft.terms import TermRuns
from quiver.types import HardState


class Follower(Knowledge):
    __slots__ = ("_deadline_ms", "_heard_ms", "_random", "_saved", "_verified")

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
        random: int,
    ) -> None:
        super().__init__(me, settings, hard_state, terms, memberships, commit, fit, now_ms)
        self._saved = hard_state
        self._random = random
        self._verified = commit  # our log equals the leader's of this term up to here
        self._heard_ms: int | None = None  # from the leader of this term
        self._deadline_ms = 0
        self._put_off_election()

    def _put_off_election(self) -> None:
        self._deadline_ms = self.now_ms + self.settings.election_ms + self._spread(self.settings.election_ms)

    def _spread(self, width_ms: int) -> int:
        return self._random % max(width_ms, 1)

    # -- one more entry ------------------------------------------------------------------------------------------

    def is_next(self, message: Append) -> bool:
        """True when all that comes of it is one more entry at the end, an acknowledgement, and perhaps a commit.

        The caller may then store that entry, if it is of the message's term and changes no membership, and tell
        `follow` instead of `step` and `synced`."""
        terms = self.terms
        return (
            message.sender == self.leader_id
            and message.term == self.term == self._saved.term
            and message.to == self.me
            and self.role is Role.FOLLOWER
            and message.last == terms.last + 1
            and message.prev_index == terms.last == self.synced_index
            and message.prev_term == terms.last_term
            and self.voted_for == self._saved.voted_for
            and not (self.failed or self.quiet or self.woken or self.outbox or self.work)
        )

    def follow(self, message: Append, now_ms: int) -> AppendReply:
        """The entry of a message that `is_next` is on disk. Returns what the leader is to be told."""
        self.now_ms = self._heard_ms = now_ms
        self._put_off_election()
        self.synced_index = self._verified = self.terms.append(message.term)
        self._commit_to(message.commit)
        return AppendReply(self.me, message.sender, self.term, message.last)

    # -- any append ----------------------------------------------------------------------------------------------

    def _on_append(self, message: Append) -> None:
        # What is committed is the same everywhere: below `commit` there is nothing to compare.
        if message.prev_index > self.commit and self.terms.term_at(message.prev_index) != message.prev_term:
            hint = max(self.terms.last_not_above(message.prev_index, message.prev_term), self.commit)
            hint_term = self.terms.term_at(hint) or 0
            reply = AppendReply(self.me, message.sender, self.term, message.prev_index, False, hint, hint_term)
            self.outbox.append(reply)
            return
        if message.last > self.commit:
            self._take_entries(message)
        self._verified = max(self._verified, message.last)
        self._commit_to(min(message.commit, message.last))
        if self.synced_index >= message.last or message.last == message.prev_index:
            self._acknowledge()

    def _take_entries(self, message: Append) -> None:
        first = self.terms.conflict(message.terms, message.last)
        if first is None:
            return  # an old or doubled message: everything in it is here already
        if first <= self.commit:
            raise AssertionError(f"entry {first} is committed and differs from the leader's")
        if first <= self.terms.last:
            self.work.append(Truncate(first))
            self._cut(first)
        self.work.append(Extend(message, first))
        self.terms.extend(message.terms, message.last)
        self.memberships += [found for found in message.memberships if found[0] >= first]

    def _cut(self, first: int) -> None:
        """Forgets what is known of the entries from `first` on."""
        self.terms.truncate(first)
        self.synced_index = min(self.synced_index, first - 1)
        self._verified = min(self._verified, first - 1)
        while self.memberships and self.memberships[-1][0] >= first:
            self.memberships.pop()

    def _commit_to(self, index: int) -> None:
        self.commit = max(self.commit, min(index, self.terms.last))

    def _acknowledge(self) -> None:
        """Tells the leader what of its log is on our disk, and nothing else."""
        match = min(self.synced_index, self._verified)
        self.outbox.append(AppendReply(self.me, self.leader_id, self.term, match))

    def _on_snapshot(self, message: Snapshot) -> None:
        known = message.index <= self.commit or self.terms.term_at(message.index) == message.index_term
        if known:  # our log is as long and holds more: it stays
            self._verified = max(self._verified, message.index)
            self._commit_to(message.index)
        else:
            self.work.append(Install(message))
            self.terms = TermRuns(message.index, message.index_term)
            self.memberships = [(message.index, message.membership)]
            self.commit = self.synced_index = self._verified = message.index
        self._acknowledge()
