"""What only a leader does: send entries, count acknowledgements, commit, prove that it still leads.

Rules: an entry is committed when a majority has it on disk and it is of this leader's term; older ones are committed
with it (§5.4.2). The leader counts itself only for what is on its own disk. A read is answered only after a majority
has answered a round of heartbeats that began after the read came.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from quiver.errors import InvalidRequestError, NotLeaderError
from quiver.raft.knowledge import Knowledge
from quiver.raft.membership import Membership
from quiver.raft.messages import AnyMessage, Append, AppendReply, Heartbeat, HeartbeatReply, Snapshot, TimeoutNow
from quiver.raft.progress import Progress, Way

# A snapshot that was not acknowledged after so many election time-outs is taken for lost.
_INSTALL_PATIENCE = 10


class Leader:
    __slots__ = (
        "_active_ms",
        "_beat_at_ms",
        "_check_at_ms",
        "_installing_ms",
        "_new_reads",
        "_raft",
        "_reads",
        "_round",
        "_transfer_to",
        "_transfer_until_ms",
        "first_index",
        "progress",
    )

    def __init__(self, raft: Knowledge) -> None:
        self._raft = raft
        self.progress: dict[int, Progress] = {}
        self.first_index = 0  # of this term
        self._round = 0
        self._new_reads: list[Any] = []
        self._reads: deque[tuple[int, Any, int]] = deque()  # (round, context, index)
        self._beat_at_ms = raft.now_ms
        self._check_at_ms = raft.now_ms + raft.settings.election_ms
        self._active_ms = raft.now_ms  # when there was last something to do
        self._installing_ms: dict[int, int] = {}
        self._transfer_to = 0
        self._transfer_until_ms = 0

    def begin(self) -> None:
        self.first_index = self._raft.add_own_entry()
        self._follow_membership()

    # -- inputs --------------------------------------------------------------------------------------------------

    def propose(self) -> int:
        if self._transfer_to:
            raise NotLeaderError("leadership is being handed over", leader=self._transfer_to)
        raft = self._raft
        if raft.quiet:
            self.wake()
        self._active_ms = raft.now_ms
        return raft.terms.append(raft.term)

    def propose_membership(self, membership: Membership) -> int:
        raft = self._raft
        if raft.membership_index > raft.commit or not self.is_settled:
            # Before an entry of its own term is committed, a leader may not know of a change that is under way.
            raise InvalidRequestError("another change of membership is under way")
        if not membership.voters or not membership.is_one_step_from(raft.membership):
            raise InvalidRequestError("one voter may be added or removed at a time, and one must stay")
        if len(set(membership.members)) < len(membership.members):
            raise InvalidRequestError("a replica is named twice")
        index = self.propose()
        raft.memberships.append((index, membership))
        self._follow_membership()
        return index

    def read(self, context: Any) -> None:
        self.wake()
        self._new_reads.append(context)

    def transfer(self, to: int) -> None:
        if to == self._raft.me:
            return
        if to not in self._raft.membership.voters:
            raise InvalidRequestError(f"replica {to} cannot lead: it is not a voter")
        self.wake()
        self._transfer_to = to
        self._transfer_until_ms = self._raft.now_ms + self._raft.settings.election_ms
        self._hand_over()

    def tick(self) -> None:
        raft = self._raft
        if self._transfer_to and raft.now_ms >= self._transfer_until_ms:
            self._transfer_to = 0  # it did not come to that; go on
        if raft.now_ms >= self._check_at_ms and not self._check_quorum():
            return
        for peer, since_ms in list(self._installing_ms.items()):
            if raft.now_ms - since_ms > _INSTALL_PATIENCE * raft.settings.election_ms:
                self._give_up_install(peer)
        if raft.now_ms >= self._beat_at_ms:
            quiesce = self._is_idle()
            self._beat(quiesce)
            raft.quiet = quiesce

    def on_reply(self, message: AnyMessage) -> None:
        progress = self.progress.get(message.sender)
        if progress is None:
            return
        progress.active = True
        if isinstance(message, AppendReply):
            self._on_append_reply(message, progress)
        elif isinstance(message, HeartbeatReply):
            self._on_heartbeat_reply(message, progress)

    def is_plain(self, message: AppendReply) -> bool:
        """True when `step` would only note it, and perhaps commit: there is nothing to send to who sent it. The caller
        may then tell `note` instead."""
        raft, progress = self._raft, self.progress.get(message.sender)
        return (
            progress is not None
            and message.accepted
            and message.term == raft.term
            and message.to == raft.me
            and not (raft.failed or raft.quiet or raft.woken)
            and progress.way is Way.REPLICATING
            and progress.next > raft.terms.last
            and not self._transfer_to
        )

    def has_more(self, now_ms: int) -> bool:
        """True when a commit at this time makes more to do than to answer who waits for the entries."""
        raft = self._raft
        is_due = now_ms >= self._beat_at_ms or now_ms >= self._check_at_ms
        return is_due or bool(self._new_reads) or raft.me not in raft.membership.voters

    def note(self, message: AppendReply, now_ms: int) -> None:
        """Takes an acknowledgement that `is_plain`."""
        self._raft.now_ms = now_ms
        progress = self.progress[message.sender]
        progress.active = True
        self._on_append_reply(message, progress)

    def link_changed(self, peer: int) -> None:
        """What was sent to it may be lost."""
        if peer in self.progress:
            self.progress[peer].probe()
            self._installing_ms.pop(peer, None)

    def wake(self) -> None:
        self._active_ms = self._raft.now_ms
        if self._raft.quiet:
            self._raft.quiet, self._raft.woken = False, True
            self._beat_at_ms = self._raft.now_ms
            self._check_at_ms = self._raft.now_ms + self._raft.settings.election_ms
            for progress in self.progress.values():
                progress.active = True  # nobody was asked anything meanwhile

    def sleep(self, passed_ms: int) -> None:
        """So much time has passed without counting."""
        self._check_at_ms += passed_ms
        self._active_ms += passed_ms
        self._transfer_until_ms += passed_ms

    def resign(self) -> None:
        """Wakes the others, and asks the one that has most to take over."""
        self._beat()
        if best := self.best_voter():
            self._raft.outbox.append(TimeoutNow(self._raft.me, best, self._raft.term))

    def best_voter(self) -> int:
        """The one that has most of those that can be reached; 0 when there is none."""
        raft = self._raft
        voters = [peer for peer in raft.membership.voters if peer in self.progress and peer not in raft.down]
        return max(voters, key=lambda peer: self.progress[peer].match, default=0)

    @property
    def due_ms(self) -> int:
        return min(self._beat_at_ms, self._check_at_ms)

    @property
    def is_settled(self) -> bool:
        """True once an entry of its term is committed: from then on it knows all that is (§8)."""
        return self._raft.commit >= self.first_index

    def contexts(self) -> list[Any]:
        """The reads that wait."""
        return [context for _, context, _ in self._reads] + self._new_reads

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Puts out what may go: entries to whoever lacks them, and a round of heartbeats for new reads."""
        self._begin_reads()
        raft = self._raft
        for peer, progress in self.progress.items():
            while progress.next <= raft.terms.last and progress.may_send(raft.settings.appends_in_flight_max):
                if progress.next <= raft.terms.start:
                    self._send_snapshot(peer, progress)
                else:
                    self._send_append(peer, progress, raft.fit(progress.next, raft.settings.append_bytes_max))

    def is_even(self) -> bool:
        """True when all have been sent everything and may be sent more: then the next entry is all they lack."""
        raft, end = self._raft, self._raft.terms.last + 1
        if self._transfer_to or self._new_reads or raft.quiet or raft.woken or raft.outbox or raft.work:
            return False
        in_flight_max = raft.settings.appends_in_flight_max
        for progress in self.progress.values():
            if progress.way is not Way.REPLICATING or progress.next != end or not progress.may_send(in_flight_max):
                return False
        return True

    def spread(self, index: int) -> list[Append]:
        """What the others are to be told of the entry that was just proposed, if they were `is_even` before it."""
        raft = self._raft
        me, term, commit = raft.me, raft.term, raft.commit
        prev_term = raft.terms.term_at(index - 1)
        assert prev_term is not None
        terms = ((index, term),)
        return [Append(me, peer, term, index - 1, prev_term, index, commit, terms) for peer in self.progress]

    def sent(self, index: int) -> None:
        """What `spread` gave has left."""
        for progress in self.progress.values():
            progress.sent(index)

    def _send_append(self, peer: int, progress: Progress, last: int) -> None:
        raft = self._raft
        first = progress.next
        prev_term = raft.terms.term_at(first - 1)
        assert prev_term is not None
        memberships: tuple[tuple[int, Membership], ...] = ()
        if raft.membership_index >= first:
            memberships = tuple(found for found in raft.memberships if first <= found[0] <= last)
        terms = raft.terms.runs(first, last)
        raft.outbox.append(
            Append(raft.me, peer, raft.term, first - 1, prev_term, last, raft.commit, terms, memberships)
        )
        progress.sent(last)

    def _send_snapshot(self, peer: int, progress: Progress) -> None:
        raft = self._raft
        start = raft.terms.start
        start_term = raft.terms.term_at(start)
        assert start_term is not None
        raft.outbox.append(Snapshot(raft.me, peer, raft.term, start, start_term, raft.membership_at(start)))
        progress.install(start)
        self._installing_ms[peer] = raft.now_ms

    def _give_up_install(self, peer: int) -> None:
        del self._installing_ms[peer]
        if peer in self.progress and self.progress[peer].way is Way.INSTALLING:
            self.progress[peer].probe()

    def _beat(self, quiesce: bool = False) -> None:
        raft = self._raft
        self._beat_at_ms = raft.now_ms + raft.settings.heartbeat_ms
        for peer, progress in self.progress.items():
            commit = min(progress.match, raft.commit)
            quiet = quiesce and peer not in raft.down  # one that is behind and does hear this must not fall asleep
            raft.outbox.append(Heartbeat(raft.me, peer, raft.term, commit, self._round, quiet))

    def _is_idle(self) -> bool:
        raft = self._raft
        last = raft.terms.last
        if raft.now_ms - self._active_ms < raft.settings.quiesce_ms or raft.commit != last or self.contexts():
            return False
        there = [peer for peer in self.progress if peer not in raft.down]
        # A learner is not to stay one: somebody has yet to take it in or put it out.
        is_even = all(self.progress[peer].match == last and peer not in raft.membership.learners for peer in there)
        return is_even and not self._transfer_to

    # -- replies -------------------------------------------------------------------------------------------------

    def _on_append_reply(self, message: AppendReply, progress: Progress) -> None:
        raft = self._raft
        if not message.accepted:
            agree = raft.terms.last_not_above(message.hint_index, message.hint_term)
            progress.refused(message.match, agree + 1)
            return
        if message.match > raft.terms.last:
            raise AssertionError(f"replica {message.sender} has entry {message.match}, which this leader has not made")
        if progress.accepted(message.match):
            self._active_ms = raft.now_ms
            if message.match > raft.commit:
                self.advance_commit()
        if self._installing_ms and progress.way is not Way.INSTALLING:
            self._installing_ms.pop(message.sender, None)
        if self._transfer_to == message.sender:
            self._hand_over()

    def _on_heartbeat_reply(self, message: HeartbeatReply, progress: Progress) -> None:
        progress.round = max(progress.round, message.round)
        self._answer_reads()
        if progress.way is Way.INSTALLING:
            return
        progress.waits = False  # what was sent may be lost
        if progress.in_flight or message.commit < min(progress.match, self._raft.commit):
            # Perhaps lost, perhaps only slow; or it was restarted and believes no commit until it has compared its
            # log. An append without entries tells, and costs little.
            self._compare(message.sender, progress)

    def _compare(self, peer: int, progress: Progress) -> None:
        if progress.next > self._raft.terms.start:
            self._send_append(peer, progress, progress.next - 1)
        else:
            progress.probe()  # what it would be compared with is trimmed

    def advance_commit(self) -> None:
        """Commits what a majority has on disk."""
        raft = self._raft
        match = {peer: progress.match for peer, progress in self.progress.items()}
        match[raft.me] = raft.synced_index
        membership = raft.membership
        agreed = membership.agreed(match)
        if agreed > raft.commit and raft.terms.term_at(agreed) == raft.term:
            raft.commit = agreed
            if self._new_reads:
                self._begin_reads()
            if raft.membership_index <= agreed and raft.me not in membership.voters:
                self._beat()  # the others learn of the commit before they elect one of themselves
                raft.become_follower(raft.term, 0)

    # -- quorum, reads, hand-over --------------------------------------------------------------------------------

    def _check_quorum(self) -> bool:
        """Steps down when no majority was heard in an election time-out: another may lead already."""
        raft = self._raft
        self._check_at_ms = raft.now_ms + raft.settings.election_ms
        heard = [peer for peer, progress in self.progress.items() if progress.active]
        if not raft.membership.has_majority([raft.me, *heard]):
            raft.become_follower(raft.term, 0)
            return False
        for progress in self.progress.values():
            progress.active = False
        return True

    def _begin_reads(self) -> None:
        raft = self._raft
        if not self._new_reads or not self.is_settled:
            return  # until then it may not know all that is committed (§8)
        self._round += 1
        self._reads += [(self._round, context, raft.commit) for context in self._new_reads]
        self._new_reads = []
        self._beat()
        self._answer_reads()

    def _answer_reads(self) -> None:
        raft = self._raft
        while self._reads:
            round_, context, index = self._reads[0]
            confirmed = [peer for peer, progress in self.progress.items() if progress.round >= round_]
            if not raft.membership.has_majority([raft.me, *confirmed]):
                return
            self._reads.popleft()
            raft.reads.append((context, index))

    def _hand_over(self) -> None:
        raft = self._raft
        progress = self.progress.get(self._transfer_to)
        if progress is not None and progress.match == raft.terms.last:
            raft.outbox.append(TimeoutNow(raft.me, self._transfer_to, raft.term))

    def _follow_membership(self) -> None:
        raft = self._raft
        members = set(raft.membership.members) - {raft.me}
        for gone in self.progress.keys() - members:
            del self.progress[gone]
            self._installing_ms.pop(gone, None)
        for new in sorted(members - self.progress.keys()):
            self.progress[new] = Progress(raft.terms.last)  # with something to send, so that it answers
