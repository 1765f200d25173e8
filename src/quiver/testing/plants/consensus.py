"""Planted bugs of consensus: elections, replication, membership."""

from __future__ import annotations

from typing import Any

import msgspec

from quiver.broker import catalog
from quiver.log.slots import HardStateFile
from quiver.raft import Install, Membership, Raft, TermRuns, Truncate
from quiver.raft.knowledge import Knowledge
from quiver.raft.leader import Leader
from quiver.replication.admission import Admission
from quiver.replication.group import broker_of, replica_id
from quiver.replication.raft_replica import RaftReplica
from quiver.testing.plants.registry import Patch, plant

# -- elections -------------------------------------------------------------------------------------------------------


@plant("vote-not-durable", "term and vote are written but not synced before the vote leaves")
def _vote_not_durable() -> list[Patch]:
    def write(self: Any, state: Any) -> None:
        self._slots.write(state.term, state.voted_for, sync=False)

    return [(HardStateFile, "write", write)]


@plant("vote-twice", "a replica votes for whoever asks, also twice in a term")
def _vote_twice() -> list[Patch]:
    on_vote = Raft._on_vote

    def forgetful(self: Any, message: Any) -> None:
        if not message.pre:
            self.voted_for, self.leader_id = 0, 0
        on_vote(self, message)

    return [(Raft, "_on_vote", forgetful)]


@plant("count-vote-twice", "a doubled vote message is counted as two votes")
def _count_vote_twice() -> list[Patch]:
    on_vote_reply = Raft._on_vote_reply

    def counting(self: Any, message: Any) -> None:
        if message.granted and self._votes.get(message.sender) and self.role.value != "follower":
            spare = [voter for voter in self.membership.voters if voter not in self._votes]
            self._votes.update(dict.fromkeys(spare[:1], True))
        on_vote_reply(self, message)

    return [(Raft, "_on_vote_reply", counting)]


@plant("shorter-log-elected", "a vote is given without comparing the logs")
def _shorter_log_elected() -> list[Patch]:
    on_vote = Raft._on_vote

    def trusting(self: Any, message: Any) -> None:
        on_vote(self, msgspec.structs.replace(message, last_term=2**60))

    return [(Raft, "_on_vote", trusting)]


@plant("pre-vote-ignored", "a replica that hears no leader asks for votes at once and so raises the term")
def _pre_vote_ignored() -> list[Patch]:
    return [(Raft, "campaign", lambda self: self._campaign(pre=False, transfer=False))]


# -- replication -----------------------------------------------------------------------------------------------------


@plant("commit-old-term", "an entry of an older term is committed by counting replicas (figure 8 of the paper)")
def _commit_old_term() -> list[Patch]:
    def advance(self: Any) -> None:
        raft = self._raft
        reached = {raft.me: raft.synced_index, **{peer: p.match for peer, p in self.progress.items()}}
        raft.commit = max(raft.commit, raft.membership.agreed(reached))

    return [(Leader, "advance_commit", advance)]


@plant("leader-counts-itself-early", "the leader counts its own entries before its disk has them")
def _leader_counts_itself_early() -> list[Patch]:
    advance = Leader.advance_commit

    def early(self: Any) -> None:
        raft, synced = self._raft, self._raft.synced_index
        raft.synced_index = raft.terms.last
        advance(self)
        raft.synced_index = synced

    # The owner waits for its own disk before it applies; that safety net must be gone too for this to be a bug.
    end = property(lambda self: self.raft.commit + 1)
    return [(Leader, "advance_commit", early), (RaftReplica, "commit_end", end)]


@plant("ack-before-fsync", "a follower acknowledges what it has appended, not what is on its disk")
def _ack_before_fsync() -> list[Patch]:
    acknowledge = Raft._acknowledge

    def early(self: Any) -> None:
        synced, self.synced_index = self.synced_index, self.terms.last
        acknowledge(self)
        self.synced_index = synced

    return [(Raft, "_acknowledge", early)]


@plant("truncate-on-stale-append", "an old or doubled append cuts off what came after it")
def _truncate_on_stale_append() -> list[Patch]:
    take = Raft._take_entries

    def cutting(self: Any, message: Any) -> None:
        if self.terms.conflict(message.terms, message.last) is None and message.last < self.terms.last:
            self.work.append(Truncate(message.last + 1))
            self._cut(message.last + 1)
        take(self, message)

    return [(Raft, "_take_entries", cutting)]


@plant("truncate-to-watermark", "a follower of a new leader cuts its log to what it knows to be committed (KIP-101)")
def _truncate_to_watermark() -> list[Patch]:
    become = Raft.become_follower

    def cutting(self: Any, term: int, leader_id: int) -> None:
        newer = term > self.term
        become(self, term, leader_id)
        if newer and leader_id and self.terms.last > self.commit:
            self.work.append(Truncate(self.commit + 1))
            self._cut(self.commit + 1)

    return [(Raft, "become_follower", cutting)]


@plant("commit-beyond-append", "a follower believes the leader's commit index for entries it has not compared")
def _commit_beyond_append() -> list[Patch]:
    on_append = Raft._on_append

    def believing(self: Any, message: Any) -> None:
        on_append(self, message)
        self._commit_to(message.commit)

    return [(Raft, "_on_append", believing)]


@plant("prev-not-compared", "a follower appends without looking at the entry before (§5.3)")
def _prev_not_compared() -> list[Patch]:
    on_append = Raft._on_append

    def trusting(self: Any, message: Any) -> None:
        term = self.terms.term_at(message.prev_index)
        on_append(self, message if term is None else msgspec.structs.replace(message, prev_term=term))

    return [(Raft, "_on_append", trusting)]


@plant("snapshot-over-newer-log", "a late snapshot replaces a log that has more")
def _snapshot_over_newer_log() -> list[Patch]:
    def install(self: Any, message: Any) -> None:
        self.work.append(Install(message))
        self.terms = TermRuns(message.index, message.index_term)
        self.memberships = [(message.index, message.membership)]
        self.commit = self.synced_index = self._verified = message.index
        self._acknowledge()

    return [(Raft, "_on_snapshot", install)]


@plant("applied-before-truncation", "an entry is applied while the truncation that replaces it waits for the disk")
def _applied_before_truncation() -> list[Patch]:
    end = property(lambda self: min(self.raft.commit + 1, self._log.synced_index))
    return [(RaftReplica, "commit_end", end)]


@plant("restart-commits-all", "after a restart everything in the log counts as committed")
def _restart_commits_all() -> list[Patch]:
    make = Raft.__init__

    def hasty(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        self.commit = self._verified = self.terms.last

    return [(Raft, "__init__", hasty)]


# -- membership ------------------------------------------------------------------------------------------------------


@plant("half-is-a-majority", "after a membership change half of an even number of voters is taken for a majority")
def _half_is_a_majority() -> list[Patch]:
    return [(Membership, "majority", property(lambda self: (len(self.voters) + 1) // 2))]


@plant("learner-counted", "a learner's acknowledgement counts towards the majority")
def _learner_counted() -> list[Patch]:
    def agreed(self: Any, match: Any) -> int:
        reached = sorted((match.get(member, 0) for member in self.members), reverse=True)
        return int(reached[self.majority - 1]) if reached else 0

    return [(Membership, "agreed", agreed)]


@plant("two-changes-at-once", "the next membership change does not wait until the one before is committed")
def _two_changes_at_once() -> list[Patch]:
    found, next_step, propose = Knowledge.membership_index, Admission.next_step, Leader.propose_membership
    looks_away = False

    # Who decides about the next change sees none under way. All else about it is judged as ever, and everybody else
    # sees where the last one is.
    def index(self: Any) -> Any:
        return 0 if looks_away else found.__get__(self)

    def hasty(decide: Any) -> Any:
        def decided(self: Any, about: Any) -> Any:
            nonlocal looks_away
            looks_away = True
            try:
                return decide(self, about)
            finally:
                looks_away = False

        return decided

    return [
        (Knowledge, "membership_index", property(index)),
        (Admission, "next_step", hasty(next_step)),
        (Leader, "propose_membership", hasty(propose)),
    ]


@plant("lost-disk-same-name", "a replica that lost its disk comes back under its old id")
def _lost_disk_same_name() -> list[Patch]:
    new_topic = catalog.Catalog.new_topic

    def named_again(self: Any, asked: Any, broker: int) -> Any:
        topic = new_topic(self, asked, broker)
        mine = {
            uid: next(voter for voter in found if broker_of(voter) == broker)
            for uid, found in zip(topic.partitions, asked.voters, strict=True)
        }
        return msgspec.structs.replace(topic, replicas=mine)

    return [
        (catalog.Catalog, "new_topic", named_again),
        (catalog.Catalog, "renew_replica", lambda self, topic, uid, broker: topic),
    ]


@plant("moved-back-same-name", "a replica that moved away and comes back has its old id")
def _moved_back_same_name() -> list[Patch]:
    def new_replicas(self: Any, broker: int, uids: list[str], voters: list[list[int]]) -> dict[str, int]:
        found = zip(uids, voters, strict=False)
        me = replica_id(broker, self.disk_id)
        return {uid: me for uid, named in found if broker in map(broker_of, named)}

    return [(catalog.Catalog, "_new_replicas", new_replicas)]


@plant("stale-word-obeyed", "a broker deletes a replica because of what a manager said before it said otherwise")
def _stale_word_obeyed() -> list[Patch]:
    changed_topic = catalog.Catalog.changed_topic

    def obedient(self: Any, topic: Any, asked: Any, broker: int) -> Any:
        forgotten = msgspec.structs.replace(topic, epochs=[-1] * len(topic.partitions))
        return changed_topic(self, forgotten, asked, broker)

    return [(catalog.Catalog, "changed_topic", obedient)]


@plant("leaves-before-others-vote", "by order a replica leaves before those that are wanted instead of it vote")
def _leaves_before_others_vote() -> list[Patch]:
    next_by_order = Admission._next_by_order

    def hasty(self: Any, raft: Any, heard: Any) -> Any:
        order, voting = self._order, set(map(broker_of, raft.membership.voters))
        there = tuple(broker for broker in order.brokers if broker in voting)
        self._order = order._replace(brokers=there or order.brokers)
        try:
            return next_by_order(self, raft, heard)
        finally:
            self._order = order

    return [(Admission, "_next_by_order", hasty)]
