"""Who is to be in a group: replicas on new disks are taken in, and a manager may order which brokers hold it.

A replica on a new disk: learner, out with the predecessor, voter. By order: a replica of a wanted broker becomes a
learner when it asks, a voter when it has caught up; then the others leave, those that do not answer first. A leader
that is to leave hands over, and its successor is asked again. Who was put out and is wanted again begins anew.

Rule: one step at a time, and the next only when the one before is committed. A predecessor leaves before the newcomer
votes: it will never answer again, and counting it would make the majority larger for nothing. Nobody leaves before all
that are wanted vote, nor if those that answer would not be a majority then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from quiver.errors import ConflictError
from quiver.raft import Membership, Raft
from quiver.raft.messages import Join, Outdated
from quiver.replication.group import broker_of

_HAND_OVER_AGAIN_MS: Final = 3000  # proposals wait while one is tried
_HAND_OVER_TRIES: Final = 3  # then the order counts as done with another leader


class Order(NamedTuple):
    """`brokers` are to hold the partition, the one that should lead first; none: nothing was ordered."""

    epoch: int = 0
    brokers: tuple[int, ...] = ()


class HandOver(NamedTuple):
    """This replica should lead."""

    to: int


Step = Membership | HandOver | Outdated


class Admission:
    def __init__(self, admits: Collection[int] = ()) -> None:
        """`admits`: brokers that are let in though nobody of the group has their number."""
        self.admits = admits
        self._newcomers: dict[int, Join] = {}  # by broker: what the replica that it has now said
        self._rounds: dict[int, tuple[int, int]] = {}  # learner -> what was committed when its round began, and when
        self._order = Order()
        self._tries = 0  # to hand over by this order
        self._tried_ms = 0

    def asked(self, message: Join, raft: Raft) -> None:
        broker = broker_of(message.sender)
        if raft.leader is not None:  # else by the time it leads this may no longer be so
            self._newcomers[broker] = message
        if raft.quiet and broker_of(raft.leader_id) == broker:
            raft.wake()  # the leader that it was is no more, and in a quiet group nobody else would tell

    def order(self, epoch: int, brokers: Sequence[int]) -> None:
        """Holds until the next one, or until this replica no longer leads."""
        if epoch < self._order.epoch:
            raise ConflictError(
                f"the order of epoch {epoch} is older than that of epoch {self._order.epoch}", current=self._order.epoch
            )
        if (order := Order(epoch, tuple(brokers))) != self._order:
            self._order, self._tries = order, 0

    def forget(self) -> None:
        """Another leads. Its orders may be newer, and this replica may lead again without having heard of them."""
        self._order = Order()
        self._newcomers = {}

    def has_more(self, raft: Raft) -> bool:
        """True when somebody wants the group to be another."""
        return bool(self._newcomers or self._order.brokers or raft.membership.learners)

    def next_step(self, raft: Raft) -> Step | None:
        """What this leader should do now."""
        if not self.has_more(raft):
            return None
        membership, leader = raft.membership, raft.leader
        if leader is None or raft.membership_index > raft.commit:
            return None
        active = [peer for peer, progress in leader.progress.items() if progress.active and peer not in raft.down]
        heard = [raft.me, *active]
        wanted = self._order.brokers
        for learner in membership.learners:
            replaced = learner not in heard and any(broker_of(peer) == broker_of(learner) for peer in heard)
            if replaced or (wanted and broker_of(learner) not in wanted):
                self._newcomers.pop(broker_of(learner), None)
                return membership.without(learner)  # that broker has another replica now, and it is there; or none
        for broker, asked in list(self._newcomers.items()):
            new = asked.sender
            old = [peer for peer in membership.members if broker_of(peer) == broker and peer != new]
            has_place = bool(old) or new in membership.learners or broker in self.admits
            if new in membership.voters or not (broker in wanted if wanted else has_place):
                del self._newcomers[broker]
                self._rounds.pop(new, None)
            elif new not in membership.learners:
                if not asked.last_index:
                    return membership.with_learner(new)
                del self._newcomers[broker]  # it asks again, under another id
                return Outdated(raft.me, new, raft.term, asked.last_index, asked.last_term)
            elif self._has_caught_up(raft, new, leader.progress[new].match):
                return membership.without(old[0]) if old else membership.with_voter(new)
        return self._next_by_order(raft, heard) if wanted else None

    def _has_caught_up(self, raft: Raft, learner: int, match: int) -> bool:
        """Under load it is always a little behind. It is close when it reached, within an election time-out, what was
        committed at the beginning of that time (thesis §4.2.1)."""
        target, began_ms = self._rounds.get(learner, (raft.commit, raft.now_ms))
        if match < target:
            self._rounds[learner] = (target, began_ms)
            return False
        self._rounds[learner] = (raft.commit, raft.now_ms)
        return match >= raft.commit or raft.now_ms - began_ms <= raft.settings.election_ms

    def is_done(self, raft: Raft) -> bool:
        """True when the group is as ordered, and that is committed."""
        membership, wanted = raft.membership, self._order.brokers
        reached = sorted(map(broker_of, membership.voters)) == sorted(wanted) and not membership.learners
        is_led = self._tries >= _HAND_OVER_TRIES or self._successor(raft, wanted[:1]) is None
        return reached and raft.membership_index <= raft.commit and is_led

    def _next_by_order(self, raft: Raft, heard: list[int]) -> Step | None:
        membership, wanted = raft.membership, self._order.brokers
        if not set(wanted) <= set(map(broker_of, membership.voters)):
            return None  # until a replica of each has asked, and has caught up
        leaving = [voter for voter in membership.voters if broker_of(voter) not in wanted]
        for voter in sorted(leaving, key=lambda voter: voter in heard):
            if voter != raft.me and membership.without(voter).has_majority(heard):
                return membership.without(voter)
        if leaving and leaving != [raft.me]:
            return None
        successor = self._successor(raft, wanted if leaving else wanted[:1])
        if successor is None or raft.now_ms < self._tried_ms + _HAND_OVER_AGAIN_MS * (self._tries > 0):
            return None
        if not leaving and self._tries >= _HAND_OVER_TRIES:
            return None
        self._tries, self._tried_ms = self._tries + 1, raft.now_ms
        return HandOver(successor)

    @staticmethod
    def _successor(raft: Raft, brokers: Sequence[int]) -> int | None:
        """The first replica of these brokers that is there and has everything; None when one of them leads."""
        leader = raft.leader
        if leader is None or broker_of(raft.me) in brokers:
            return None
        voters = {broker_of(voter): voter for voter in raft.membership.voters if voter not in raft.down}
        there = [voters[broker] for broker in brokers if broker in voters]
        return next((peer for peer in there if leader.progress[peer].match >= raft.commit), None)
