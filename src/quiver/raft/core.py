"""One replica's part in a group: terms, votes, what it has appended, what is committed. See the package for its rules.

What a follower does with a leader's words is in follower.py, what only a leader does in leader.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quiver.config import RaftSettings
from quiver.errors import NotLeaderError
from quiver.raft.follower import Follower
from quiver.raft.leader import Leader
from quiver.raft.membership import Membership
from quiver.raft.messages import (
    AnyMessage,
    Append,
    Heartbeat,
    HeartbeatReply,
    Snapshot,
    TimeoutNow,
    Vote,
    VoteReply,
)
from quiver.raft.ready import Ready, Role
from quiver.raft.terms import TermRuns
from quiver.types import HardState

_NOBODY = 0


class Raft(Follower):
    __slots__ = ("_votes", "leader")

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
        """`terms` describes a log that is wholly on disk. `memberships`: (index, value) of those that can still count,
        the first one in force at the log's start. `fit(first, bytes_max)` says up to which index entries from `first`
        on are together no longer than that; one at least."""
        super().__init__(me, settings, hard_state, terms, memberships, commit, fit, now_ms, random)
        self.leader: Leader | None = None
        self._votes: dict[int, bool] = {}

    # -- inputs --------------------------------------------------------------------------------------------------

    def tick(self, now_ms: int, random: int) -> None:
        """Time passes. `random` is any non-negative integer; it spreads election time-outs."""
        self._tell(now_ms)
        self._random = random
        if self.failed or self.quiet:
            return
        if self.leader is not None:
            self.leader.tick()
        elif now_ms >= self._deadline_ms:
            self.campaign()

    def step(self, message: AnyMessage, now_ms: int) -> None:
        """A message arrived. One for another replica id is dropped: it was meant for a predecessor on this disk."""
        if self.failed or message.to != self.me:
            return
        self._tell(now_ms)
        if message.term > self.term and not self._enter_term_of(message):
            return
        if message.term < self.term:
            self._answer_late(message)
        elif isinstance(message, (Append, Heartbeat, Snapshot)):
            self._on_leader(message)
        elif isinstance(message, Vote):
            self._on_vote(message)
        elif isinstance(message, VoteReply):
            self._on_vote_reply(message)
        elif isinstance(message, TimeoutNow):
            self._campaign(pre=False, transfer=True)
        elif self.leader is not None:
            self.leader.on_reply(message)

    def propose(self) -> tuple[int, int]:
        """(index, term) for one new entry. Raises NotLeaderError."""
        return self._lead().propose(), self.term

    def propose_membership(self, membership: Membership) -> tuple[int, int]:
        """(index, term) for the entry that makes this the membership. It counts from now on, committed or not.

        Raises InvalidRequestError while another is under way or if it is more than one step."""
        return self._lead().propose_membership(membership), self.term

    def read(self, context: Any) -> None:
        """Asks for an index that is at least what was committed when this was called (§8); comes in `ready.reads`."""
        self._lead().read(context)

    def transfer(self, to: int) -> None:
        """Hands leadership to another voter, once it has all entries. Proposals are refused meanwhile."""
        self._lead().transfer(to)

    def synced(self, index: int, term: int) -> None:
        """All entries up to this one are on disk."""
        if self.failed or self.terms.term_at(index) != term or index <= self.synced_index:
            return
        self.synced_index = index
        if self.leader is not None:
            self.leader.advance_commit()
        elif self.leader_id != _NOBODY:
            self._acknowledge()

    def trimmed(self, start: int) -> None:
        """Entries up to and including `start` are gone from the log."""
        self.terms.trim(start)
        while len(self.memberships) > 1 and self.memberships[1][0] <= start:
            del self.memberships[0]

    def rewound(self, last: int) -> None:
        """The disk was full: entries after `last` were not written and are gone.

        What others have committed may be among them: `commit` falls back to `last`, as after a restart."""
        self._cut(last + 1)
        self.commit = min(self.commit, last)
        self.work.clear()
        if self.role is not Role.FOLLOWER:
            self.become_follower(self.term, _NOBODY)

    def fail(self) -> None:
        """This replica's disk has failed: from now on it says nothing. A leader's last word calls for another."""
        self.work.clear()
        self.outbox.clear()
        if self.leader is not None:
            self.leader.resign()
        self.become_follower(self.term, _NOBODY)
        self.failed = True

    def peer_down(self, peer: int) -> None:
        """The connection to that replica is lost. If it leads, its time is nearly up: others may still hear it."""
        self.down.add(peer)
        if self.leader is not None:
            self.leader.link_changed(peer)
        elif peer == self.leader_id:
            self.wake()
            self._heard_ms = None
            self._deadline_ms = min(self._deadline_ms, self.now_ms + self._spread(self.settings.election_ms // 4))

    def peer_up(self, peer: int) -> None:
        self.down.discard(peer)
        if self.leader is not None and peer in self.leader.progress:
            self.leader.link_changed(peer)
            self.wake()

    def wake(self) -> None:
        """Ends the quiet: there is something to do or to fear."""
        if self.leader is not None:
            self.leader.wake()
        elif self.quiet:
            self.quiet, self.woken = False, True
            self._heard_ms = self.now_ms
            self._put_off_election()

    def ready(self) -> Ready | None:
        """What is to be done now; None when nothing is."""
        if self.leader is not None and not self.failed:
            self.leader.send()
        saved, changed = self._saved, None
        if saved.term != self.term or saved.voted_for != self.voted_for:
            self._saved = changed = HardState(self.term, self.voted_for)
        elif not (self.work or self.outbox or self.reads or self.lost_reads):
            return None
        found = Ready(changed, self.work, self.outbox, self.reads, self.lost_reads)
        self.work, self.outbox, self.reads, self.lost_reads = [], [], [], []
        return found

    @property
    def due_ms(self) -> int:
        """Before this time a tick changes nothing, unless something else happens first."""
        return self._deadline_ms if self.leader is None else self.leader.due_ms

    # -- what is known -------------------------------------------------------------------------------------------

    def _tell(self, now_ms: int) -> None:
        """A quiet group may be told no time: for what it waits for since it woke, none has passed."""
        if self.woken:
            self.woken = False
            self._deadline_ms += now_ms - self.now_ms
            if self.leader is not None:
                self.leader.sleep(now_ms - self.now_ms)
        self.now_ms = now_ms

    def _lead(self) -> Leader:
        if self.leader is None or self.failed:
            raise NotLeaderError("this replica does not lead", leader=self.leader_id)
        return self.leader

    def _in_lease(self) -> bool:
        """True while the leader we know is not to be doubted."""
        if self.leader_id == _NOBODY:
            return False
        if self.leader is not None or self.quiet:
            return True
        return self._heard_ms is not None and self.now_ms - self._heard_ms < self.settings.election_ms

    # -- terms ---------------------------------------------------------------------------------------------------

    def _enter_term_of(self, message: AnyMessage) -> bool:
        """Takes over a higher term. False: the message is to be ignored."""
        if isinstance(message, Vote):
            if not message.transfer and message.sender != self.leader_id and self._in_lease():
                # Without this a replica that was cut off would depose a good leader on its return (thesis §4.2.3).
                if self.quiet and message.sender in self.membership.members:
                    self.wake()  # one of us hears no leader: a leader speaks again, others see whether it does
                return False
            if message.pre:
                self._on_vote(message)
                return False
        elif isinstance(message, VoteReply) and message.pre and message.granted:
            self._on_vote_reply(message)
            return False
        leads = isinstance(message, (Append, Heartbeat, Snapshot))
        self.become_follower(message.term, message.sender if leads else _NOBODY)
        return True

    def _answer_late(self, message: AnyMessage) -> None:
        """Whoever speaks from an old term learns ours; with a pre-vote in between it might never otherwise."""
        if isinstance(message, (Append, Heartbeat, Snapshot)):
            self.outbox.append(HeartbeatReply(self.me, message.sender, self.term))
        elif isinstance(message, Vote) and message.pre:
            self.outbox.append(VoteReply(self.me, message.sender, self.term, granted=False, pre=True))

    def become_follower(self, term: int, leader_id: int) -> None:
        if term > self.term:
            self.term, self.voted_for = term, _NOBODY
            self._verified = self.commit
            self._heard_ms = None
        if self.leader is not None:
            self.lost_reads += self.leader.contexts()
            self.leader = None
        self.role = Role.FOLLOWER
        self.leader_id = leader_id
        self.quiet = False
        self._votes = {}
        self._put_off_election()

    # -- elections -----------------------------------------------------------------------------------------------

    def campaign(self) -> None:
        """Stands for election, if others would vote for it."""
        self._campaign(pre=True, transfer=False)

    def _campaign(self, *, pre: bool, transfer: bool) -> None:
        self._put_off_election()
        if self.failed or self.leader is not None or not (self.may_lead and self.may_vote and self.may_be_needed):
            return
        self.quiet = False
        self.leader_id = _NOBODY
        self._votes = {self.me: True}
        if pre:
            self.role, term = Role.PRE_CANDIDATE, self.term + 1
        else:
            self.role, term = Role.CANDIDATE, self.term + 1
            self.term, self.voted_for = term, self.me
            self._verified = self.commit
        if self.membership.has_majority(self._votes):
            self._won(pre)
            return
        for voter in self.membership.voters:
            if voter != self.me:
                last = self.terms.last
                self.outbox.append(Vote(self.me, voter, term, last, self.terms.last_term, pre, transfer))

    def _won(self, pre: bool) -> None:
        if pre:
            self._campaign(pre=False, transfer=False)
            return
        self.role = Role.LEADER
        self.leader_id = self.me
        self.leader = Leader(self)
        self.leader.begin()

    def _on_vote(self, message: Vote) -> None:
        up_to_date = (message.last_term, message.last_index) >= (self.terms.last_term, self.terms.last)
        free = self.voted_for in (_NOBODY, message.sender) and self.leader_id in (_NOBODY, message.sender)
        granted = up_to_date and self.may_vote and (free or (message.pre and message.term > self.term))
        if granted and not message.pre:
            self.voted_for = message.sender
            self._put_off_election()
        term = message.term if granted else self.term
        self.outbox.append(VoteReply(self.me, message.sender, term, granted, message.pre))

    def _on_vote_reply(self, message: VoteReply) -> None:
        expected = Role.PRE_CANDIDATE if message.pre else Role.CANDIDATE
        if self.role is not expected or (message.pre and message.granted and message.term != self.term + 1):
            return
        self._votes[message.sender] = message.granted
        if self.membership.has_majority(voter for voter, granted in self._votes.items() if granted):
            self._won(message.pre)
        elif self.membership.has_majority(voter for voter, granted in self._votes.items() if not granted):
            self.become_follower(self.term, _NOBODY)

    # -- what a leader says --------------------------------------------------------------------------------------

    def _on_leader(self, message: Append | Heartbeat | Snapshot) -> None:
        if self.leader is not None:
            return  # two leaders in one term cannot be; whoever says so is not believed
        if self.role is not Role.FOLLOWER or self.leader_id != message.sender:
            self.become_follower(self.term, message.sender)
        self.quiet = False
        self._heard_ms = self.now_ms
        self._put_off_election()
        if isinstance(message, Append):
            self._on_append(message)
        elif isinstance(message, Heartbeat):
            self._commit_to(min(message.commit, self._verified))
            self.outbox.append(HeartbeatReply(self.me, message.sender, self.term, message.round, self.commit))
            self.quiet = message.quiesce and self.commit == self.terms.last == message.commit
        else:
            self._on_snapshot(message)
