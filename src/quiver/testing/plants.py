"""Known bugs, to be planted: what the simulator must find, each a mistake that a real system had or nearly had.

A plant replaces methods of the product for as long as its `with` block lasts. The product has no hook for it: nothing
outside the simulator can turn one on.

Rule: a plant is one mistake, as small as it would be made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from quiver.broker import catalog, group
from quiver.broker.admission import Admission
from quiver.broker.group import broker_of
from quiver.broker.partition import Partition
from quiver.broker.partition_state import PartitionState
from quiver.broker.raft_replica import RaftReplica
from quiver.log import recovery, segment
from quiver.log.flush import FlushJob
from quiver.log.partition_log import PartitionLog
from quiver.log.slots import HardStateFile
from quiver.raft import Install, Membership, Raft, TermRuns, Truncate
from quiver.raft.leader import Leader
from quiver.wire.frame import HEADER_BYTES, FrameHeader, FrameTruncatedError, decode_header
from quiver.wire.messages import ProduceReply

Patch = tuple[Any, str, Any]


class Plant(NamedTuple):
    what: str
    patches: Callable[[], list[Patch]]


PLANTS: dict[str, Plant] = {}


def _plant(name: str, what: str) -> Callable[[Callable[[], list[Patch]]], Callable[[], list[Patch]]]:
    def keep(patches: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
        PLANTS[name] = Plant(what, patches)
        return patches

    return keep


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Turns that bug on. Raises KeyError for a name that is none of `PLANTS`."""
    with contextlib.ExitStack() as stack:
        for target, attribute, replacement in PLANTS[name].patches():
            stack.enter_context(mock.patch.object(target, attribute, replacement))
        yield


# -- elections -------------------------------------------------------------------------------------------------------


@_plant("vote-not-durable", "term and vote are written but not synced before the vote leaves")
def _vote_not_durable() -> list[Patch]:
    def write(self: Any, state: Any) -> None:
        self._slots.write(state.term, state.voted_for, sync=False)

    return [(HardStateFile, "write", write)]


@_plant("vote-twice", "a replica votes for whoever asks, also twice in a term")
def _vote_twice() -> list[Patch]:
    on_vote = Raft._on_vote

    def forgetful(self: Any, message: Any) -> None:
        if not message.pre:
            self.voted_for, self.leader_id = 0, 0
        on_vote(self, message)

    return [(Raft, "_on_vote", forgetful)]


@_plant("count-vote-twice", "a doubled vote message is counted as two votes")
def _count_vote_twice() -> list[Patch]:
    on_vote_reply = Raft._on_vote_reply

    def counting(self: Any, message: Any) -> None:
        if message.granted and self._votes.get(message.sender) and self.role.value != "follower":
            spare = [voter for voter in self.membership.voters if voter not in self._votes]
            self._votes.update(dict.fromkeys(spare[:1], True))
        on_vote_reply(self, message)

    return [(Raft, "_on_vote_reply", counting)]


@_plant("shorter-log-elected", "a vote is given without comparing the logs")
def _shorter_log_elected() -> list[Patch]:
    on_vote = Raft._on_vote

    def trusting(self: Any, message: Any) -> None:
        import msgspec

        on_vote(self, msgspec.structs.replace(message, last_term=2**60))

    return [(Raft, "_on_vote", trusting)]


@_plant("pre-vote-ignored", "a replica that hears no leader asks for votes at once and so raises the term")
def _pre_vote_ignored() -> list[Patch]:
    return [(Raft, "campaign", lambda self: self._campaign(pre=False, transfer=False))]


# -- replication -----------------------------------------------------------------------------------------------------


@_plant("commit-old-term", "an entry of an older term is committed by counting replicas (figure 8 of the paper)")
def _commit_old_term() -> list[Patch]:
    def advance(self: Any) -> None:
        raft = self._raft
        reached = {raft.me: raft.synced_index, **{peer: p.match for peer, p in self.progress.items()}}
        raft.commit = max(raft.commit, raft.membership.agreed(reached))

    return [(Leader, "advance_commit", advance)]


@_plant("leader-counts-itself-early", "the leader counts its own entries before its disk has them")
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


@_plant("ack-before-fsync", "a follower acknowledges what it has appended, not what is on its disk")
def _ack_before_fsync() -> list[Patch]:
    acknowledge = Raft._acknowledge

    def early(self: Any) -> None:
        synced, self.synced_index = self.synced_index, self.terms.last
        acknowledge(self)
        self.synced_index = synced

    return [(Raft, "_acknowledge", early)]


@_plant("truncate-on-stale-append", "an old or doubled append cuts off what came after it")
def _truncate_on_stale_append() -> list[Patch]:
    take = Raft._take_entries

    def cutting(self: Any, message: Any) -> None:
        if self.terms.conflict(message.terms, message.last) is None and message.last < self.terms.last:
            self.work.append(Truncate(message.last + 1))
            self._cut(message.last + 1)
        take(self, message)

    return [(Raft, "_take_entries", cutting)]


@_plant("truncate-to-watermark", "a follower of a new leader cuts its log to what it knows to be committed (KIP-101)")
def _truncate_to_watermark() -> list[Patch]:
    become = Raft.become_follower

    def cutting(self: Any, term: int, leader_id: int) -> None:
        newer = term > self.term
        become(self, term, leader_id)
        if newer and leader_id and self.terms.last > self.commit:
            self.work.append(Truncate(self.commit + 1))
            self._cut(self.commit + 1)

    return [(Raft, "become_follower", cutting)]


@_plant("commit-beyond-append", "a follower believes the leader's commit index for entries it has not compared")
def _commit_beyond_append() -> list[Patch]:
    on_append = Raft._on_append

    def believing(self: Any, message: Any) -> None:
        on_append(self, message)
        self._commit_to(message.commit)

    return [(Raft, "_on_append", believing)]


@_plant("prev-not-compared", "a follower appends without looking at the entry before (§5.3)")
def _prev_not_compared() -> list[Patch]:
    on_append = Raft._on_append

    def trusting(self: Any, message: Any) -> None:
        import msgspec

        term = self.terms.term_at(message.prev_index)
        on_append(self, message if term is None else msgspec.structs.replace(message, prev_term=term))

    return [(Raft, "_on_append", trusting)]


@_plant("snapshot-over-newer-log", "a late snapshot replaces a log that has more")
def _snapshot_over_newer_log() -> list[Patch]:
    def install(self: Any, message: Any) -> None:
        self.work.append(Install(message))
        self.terms = TermRuns(message.index, message.index_term)
        self.memberships = [(message.index, message.membership)]
        self.commit = self.synced_index = self._verified = message.index
        self._acknowledge()

    return [(Raft, "_on_snapshot", install)]


@_plant("applied-before-truncation", "an entry is applied while the truncation that replaces it waits for the disk")
def _applied_before_truncation() -> list[Patch]:
    end = property(lambda self: min(self.raft.commit + 1, self._log.synced_index))
    return [(RaftReplica, "commit_end", end)]


@_plant("restart-commits-all", "after a restart everything in the log counts as committed")
def _restart_commits_all() -> list[Patch]:
    make = Raft.__init__

    def hasty(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        self.commit = self._verified = self.terms.last

    return [(Raft, "__init__", hasty)]


# -- membership ------------------------------------------------------------------------------------------------------


@_plant("half-is-a-majority", "after a membership change half of an even number of voters is taken for a majority")
def _half_is_a_majority() -> list[Patch]:
    return [(Membership, "majority", property(lambda self: (len(self.voters) + 1) // 2))]


@_plant("learner-counted", "a learner's acknowledgement counts towards the majority")
def _learner_counted() -> list[Patch]:
    def agreed(self: Any, match: Any) -> int:
        reached = sorted((match.get(member, 0) for member in self.members), reverse=True)
        return int(reached[self.majority - 1]) if reached else 0

    return [(Membership, "agreed", agreed)]


@_plant("two-changes-at-once", "the next membership change does not wait until the one before is committed")
def _two_changes_at_once() -> list[Patch]:
    def next_step(self: Any, raft: Any) -> Any:
        membership = raft.membership
        for broker, new in list(self._newcomers.items()):
            old = [peer for peer in membership.members if broker_of(peer) == broker and peer != new]
            if new in membership.voters:
                del self._newcomers[broker]
            elif old or new in membership.learners:
                return membership.without(old[0]) if old else membership.with_voter(new)
        return None

    def propose(self: Any, membership: Any) -> int:
        index = int(self.propose())
        self._raft.memberships.append((index, membership))
        self._follow_membership()
        return index

    return [(Admission, "next_step", next_step), (Leader, "propose_membership", propose)]


@_plant("lost-disk-same-name", "a replica that lost its disk comes back under its old id")
def _lost_disk_same_name() -> list[Patch]:
    new_topic, renew = catalog.Catalog.new_topic, catalog.Catalog.renew_replica

    def named_again(self: Any, name: str, partitions: int, uids: Any, voters: Any, broker: int) -> Any:
        import msgspec

        topic = new_topic(self, name, partitions, uids, voters, broker)
        mine = {
            uid: next(voter for voter in found if broker_of(voter) == broker)
            for uid, found in zip(topic.partitions, voters, strict=True)
        }
        return msgspec.structs.replace(topic, replicas=mine)

    del renew
    return [
        (catalog.Catalog, "new_topic", named_again),
        (catalog.Catalog, "renew_replica", lambda self, topic, uid, broker: topic),
    ]


# -- reads -----------------------------------------------------------------------------------------------------------


@_plant("stale-leader-reads", "a leader answers reads without asking whether it still leads")
def _stale_leader_reads() -> list[Patch]:
    async def confirm(self: Any) -> None:
        if self.raft is not None:
            self.raft.check_leads()

    return [(Partition, "confirm", confirm)]


@_plant("read-index-without-quorum", "a read is answered after the heartbeats are sent, not after they are answered")
def _read_index_without_quorum() -> list[Patch]:
    def answer(self: Any) -> None:
        while self._reads:
            _, context, index = self._reads.popleft()
            self._raft.reads.append((context, index))

    return [(Leader, "_answer_reads", answer)]


@_plant("uncommitted-served", "readers get what is in the log, committed or not")
def _uncommitted_served() -> list[Patch]:
    return [(RaftReplica, "commit_end", property(lambda self: self._log.synced_index))]


# -- the partition's state -------------------------------------------------------------------------------------------


@_plant("reply-before-commit", "a produce is answered when it is appended")
def _reply_before_commit() -> list[Patch]:
    admit = Partition._admit_batch

    def hasty(self: Any, entry: Any, future: Any) -> None:
        offset = self._log.next_offset
        admit(self, entry, future)
        if not future.done():
            future.set_result(ProduceReply(offset))

    return [(Partition, "_admit_batch", hasty)]


@_plant("dedup-not-rebuilt", "the table of producers is empty after a restart")
def _dedup_not_rebuilt() -> list[Patch]:
    make = PartitionState.__init__

    def forgetful(self: Any, checkpoint: Any) -> None:
        make(self, checkpoint)
        self._producers = {}

    return [(PartitionState, "__init__", forgetful)]


@_plant("dedup-lost-at-leader-change", "a new leader does not know the sequences of entries that are not committed yet")
def _dedup_lost_at_leader_change() -> list[Patch]:
    watch = RaftReplica._watch_leadership

    def forgetful(self: Any) -> None:
        led = self._led_term
        watch(self)
        if self._led_term not in (0, led):
            self._owner._tail.state._tail.clear()

    return [(RaftReplica, "_watch_leadership", forgetful)]


@_plant("retry-appended-again", "a retry whose batch is appended but not committed is appended again")
def _retry_appended_again() -> list[Patch]:
    judge = PartitionState.judge

    def careless(self: Any, producer_id: int, epoch: int, sequence: int, count: int) -> Any:
        found = judge(self, producer_id, epoch, sequence, count)
        return None if found is not None and found.index > self.applied_index else found

    return [(PartitionState, "judge", careless)]


@_plant("position-lost-at-failover", "committed positions are not in the check-point")
def _position_lost_at_failover() -> list[Patch]:
    make = PartitionState.__init__

    def forgetful(self: Any, checkpoint: Any) -> None:
        make(self, checkpoint)
        self.positions = {}

    return [(PartitionState, "__init__", forgetful)]


@_plant("position-moves-back", "a late commit moves a position back")
def _position_moves_back() -> list[Patch]:
    def move(self: Any, position: Any) -> bool:
        known = self.positions.get(position.consumer)
        if position.expected is not None and position.expected != (-1 if known is None else known):
            return False
        self.positions[position.consumer] = position.offset
        return True

    return [(PartitionState, "_move", move)]


@_plant("offset-assigned-twice", "a new leader counts offsets from what is committed, not from the end of its log")
def _offset_assigned_twice() -> list[Patch]:
    watch = RaftReplica._watch_leadership

    def recounting(self: Any) -> None:
        led = self._led_term
        watch(self)
        if self._led_term not in (0, led):
            self._log._segments[-1].next_offset = self._owner._state.next_offset

    return [(RaftReplica, "_watch_leadership", recounting)]


# -- the disk --------------------------------------------------------------------------------------------------------


def _unchecked(buffer: Any, position: int, header: FrameHeader) -> Any:
    if len(buffer) - position < header.frame_length:
        raise FrameTruncatedError(position, header.frame_length)
    start = position + HEADER_BYTES
    return buffer[start : start + header.payload_length]


@_plant("torn-frame-accepted", "recovery believes a frame whose payload a crash tore")
def _torn_frame_accepted() -> list[Patch]:
    def decode(buffer: Any, position: int = 0) -> Any:
        header = decode_header(buffer, position)
        return header, _unchecked(buffer, position, header)

    return [(segment, "decode_frame", decode)]


@_plant("bad-checksum-served", "frames are served without looking at their checksum")
def _bad_checksum_served() -> list[Patch]:
    return [(segment, "checked_payload", _unchecked)]


@_plant("fsync-retried", "a failed sync is tried again and then believed")
def _fsync_retried() -> list[Patch]:
    run = FlushJob.run

    def stubborn(self: Any) -> None:
        try:
            run(self)
        except OSError:
            run(self)

    return [(FlushJob, "run", stubborn)]


@_plant("corrupt-cut-as-torn", "a damaged frame that was acknowledged is cut off like a torn write (FAST'18)")
def _corrupt_cut_as_torn() -> list[Patch]:
    open_last = recovery._open_last

    def cutting(disk: Any, path: str, first: int, base: Any, synced: int, checkpoint: Any, settings: Any) -> Any:
        return open_last(disk, path, first, base, 0, checkpoint, settings)

    return [(recovery, "_open_last", cutting)]


@_plant("check-point-end-believed", "a replica that restarts while it catches up claims what its check-point counts")
def _checkpoint_end_believed() -> list[Patch]:
    make = group.LogView.__init__

    def claiming(self: Any, log: PartitionLog, bootstrap: Membership) -> None:
        make(self, log, bootstrap)
        found = group._decoder.decode(log.checkpoint.group) if log.checkpoint.group else group.Group()
        if log.checkpoint.catching_up and log.next_index <= log.checkpoint.index:
            self.terms.extend(found.terms, log.checkpoint.index)

    return [(group.LogView, "__init__", claiming)]
