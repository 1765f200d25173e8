"""Planted bugs of what is built on consensus: reads, the partition's state, the disk."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from typing import Any

import msgspec

from quiver.broker import checkpointer, compactor
from quiver.broker.compactor import Compactor
from quiver.broker.partition import Partition
from quiver.broker.partition_state import PartitionState
from quiver.log import compaction, recovery, segment
from quiver.log.checkpoint import Checkpoint
from quiver.log.flush import FlushJob
from quiver.log.partition_log import PartitionLog
from quiver.manager import quorum
from quiver.raft import Membership
from quiver.raft.leader import Leader
from quiver.replication import group
from quiver.replication.applicant import Applicant
from quiver.replication.raft_replica import RaftReplica
from quiver.testing.plants.registry import Patch, plant
from quiver.wire.frame import HEADER_BYTES, FrameHeader, FrameTruncatedError, decode_header
from quiver.wire.messages import ProduceReply

# -- reads -----------------------------------------------------------------------------------------------------------


@plant("stale-leader-reads", "a leader answers reads without asking whether it still leads")
def _stale_leader_reads() -> list[Patch]:
    async def confirm(self: Any) -> None:
        if self.raft is not None:
            self.raft.check_leads()

    return [(Partition, "confirm", confirm)]


@plant("read-index-without-quorum", "a read is answered after the heartbeats are sent, not after they are answered")
def _read_index_without_quorum() -> list[Patch]:
    def answer(self: Any) -> None:
        while self._reads:
            _, context, index = self._reads.popleft()
            self._raft.reads.append((context, index))

    return [(Leader, "_answer_reads", answer)]


@plant("uncommitted-served", "readers get what is in the log, committed or not")
def _uncommitted_served() -> list[Patch]:
    return [(RaftReplica, "commit_end", property(lambda self: self._log.synced_index))]


# -- the partition's state -------------------------------------------------------------------------------------------


@plant("reply-before-commit", "a produce is answered when it is appended")
def _reply_before_commit() -> list[Patch]:
    admit = Partition._admit_batch

    def hasty(self: Any, entry: Any, future: Any, is_alone: bool) -> None:
        offset = self._log.next_offset
        admit(self, entry, future, is_alone)
        if not future.done():
            future.set_result(ProduceReply(offset))

    return [(Partition, "_admit_batch", hasty)]


@plant("dedup-not-rebuilt", "the table of producers is empty after a restart")
def _dedup_not_rebuilt() -> list[Patch]:
    make = PartitionState.__init__

    def forgetful(self: Any, checkpoint: Any) -> None:
        make(self, checkpoint)
        self._producers = {}

    return [(PartitionState, "__init__", forgetful)]


@plant("dedup-lost-at-leader-change", "a new leader begins with an empty table of producers")
def _dedup_lost_at_leader_change() -> list[Patch]:
    watch = RaftReplica._watch_leadership

    def forgetful(self: Any) -> None:
        led = self._led_term
        watch(self)
        if self._led_term not in (0, led):
            self._owner._tail.state._tail.clear()
            self._owner._tail.state._producers.clear()

    return [(RaftReplica, "_watch_leadership", forgetful)]


@plant("retry-appended-again", "a retry whose batch is appended but not committed is appended again")
def _retry_appended_again() -> list[Patch]:
    judge = PartitionState.judge

    def careless(self: Any, producer_id: int, epoch: int, sequence: int, count: int) -> Any:
        found = judge(self, producer_id, epoch, sequence, count)
        return None if found is not None and found.index > self.applied_index else found

    return [(PartitionState, "judge", careless)]


@plant("position-lost-at-failover", "committed positions are not in the check-point")
def _position_lost_at_failover() -> list[Patch]:
    make = PartitionState.__init__

    def forgetful(self: Any, checkpoint: Any) -> None:
        make(self, checkpoint)
        self.positions = {}

    return [(PartitionState, "__init__", forgetful)]


@plant("position-moves-back", "a late commit moves a position back")
def _position_moves_back() -> list[Patch]:
    move = PartitionState._move

    def backwards(self: Any, position: Any) -> bool:
        return move(self, msgspec.structs.replace(position, rewind=True))  # every commit as if it were a seek

    return [(PartitionState, "_move", backwards)]


@plant("offset-assigned-twice", "a new leader counts offsets from what is committed, not from the end of its log")
def _offset_assigned_twice() -> list[Patch]:
    watch = RaftReplica._watch_leadership

    def recounting(self: Any) -> None:
        led = self._led_term
        watch(self)
        if self._led_term not in (0, led):
            self._log._segments[-1].next_offset = self._owner.state.next_offset

    return [(RaftReplica, "_watch_leadership", recounting)]


# -- the disk --------------------------------------------------------------------------------------------------------


def _unchecked(buffer: Any, position: int, header: FrameHeader) -> Any:
    if len(buffer) - position < header.frame_length:
        raise FrameTruncatedError(position, header.frame_length)
    start = position + HEADER_BYTES
    return buffer[start : start + header.payload_length]


@plant("torn-frame-accepted", "recovery believes a frame whose payload a crash tore")
def _torn_frame_accepted() -> list[Patch]:
    def decode(buffer: Any, position: int = 0) -> Any:
        header = decode_header(buffer, position)
        return header, _unchecked(buffer, position, header)

    return [(segment, "decode_frame", decode)]


@plant("bad-checksum-served", "frames are served without looking at their checksum")
def _bad_checksum_served() -> list[Patch]:
    return [(segment, "checked_payload", _unchecked)]


@plant("fsync-retried", "a failed sync is tried again and then believed")
def _fsync_retried() -> list[Patch]:
    run = FlushJob.run

    def stubborn(self: Any) -> None:
        try:
            run(self)
        except OSError:
            run(self)

    return [(FlushJob, "run", stubborn)]


class _Unsynced:
    """A file whose owner does not wait for the disk."""

    def __init__(self, file: Any) -> None:
        self.pwrite = file.pwrite

    def datasync(self) -> None:
        pass


@plant("next-entry-not-synced", "a follower that takes the next entry at once acknowledges it without a sync")
def _next_entry_not_synced() -> list[Patch]:
    store = PartitionLog.store

    def hasty(self: Any, header: Any, frame: Any, now_s: float) -> bool:
        active = self._segments[-1]
        if (file := active.file) is not None:
            active.file = _Unsynced(file)
        try:
            return store(self, header, frame, now_s)
        finally:
            active.file = file

    return [(PartitionLog, "store", hasty)]


@plant("corrupt-cut-as-torn", "a damaged frame that was acknowledged is cut off like a torn write (FAST'18)")
def _corrupt_cut_as_torn() -> list[Patch]:
    open_last = recovery._open_last

    def cutting(disk: Any, path: str, first: int, base: Any, synced: int, checkpoint: Any, settings: Any) -> Any:
        return open_last(disk, path, first, base, 0, checkpoint, settings)

    return [(recovery, "_open_last", cutting)]


@plant("check-point-end-believed", "a replica that restarts while it catches up claims what its check-point counts")
def _checkpoint_end_believed() -> list[Patch]:
    make = group.LogView.__init__

    def claiming(self: Any, log: PartitionLog, bootstrap: Membership) -> None:
        make(self, log, bootstrap)
        found = group._decoder.decode(log.checkpoint.group) if log.checkpoint.group else group.Group()
        if log.checkpoint.catching_up and log.next_index <= log.checkpoint.index:
            self.terms.extend(found.terms, log.checkpoint.index)

    return [(group.LogView, "__init__", claiming)]


@plant("check-point-over-snapshot", "a check-point under way takes the place of the snapshot that came meanwhile")
def _checkpoint_over_snapshot() -> list[Patch]:
    async def careless(log: PartitionLog, checkpoint: Checkpoint, executor: Executor) -> None:
        job = log.begin_checkpoint(checkpoint)
        await asyncio.get_running_loop().run_in_executor(executor, job.run)
        log.finish_checkpoint(job)

    return [(checkpointer, "write_checkpoint", careless), (quorum, "write_checkpoint", careless)]


@plant("mark-before-sync", "the sync mark says that entries are on disk before they are")
def _mark_before_sync() -> list[Patch]:
    run = FlushJob.run

    def early(self: Any) -> None:
        self.mark.raise_to(self.end.next_index)
        run(self)

    return [(FlushJob, "run", early)]


@plant("room-taken-for-entries", "recovery takes the room behind the last entry for entries that were lost")
def _room_taken_for_entries() -> list[Patch]:
    def all_of_it(file: Any, path: str, size_bytes: int) -> int:
        return size_bytes

    return [(recovery, "_without_room", all_of_it)]


# -- compaction ------------------------------------------------------------------------------------------------------


@plant("deletions-dropped-early", "what deletes a key goes before every member has let go of what it deletes")
def _deletions_dropped_early() -> list[Patch]:
    return [(Compactor, "_all_have", lambda self, index, raft: True)]


@plant("taken-in-with-old-log", "a replica that was put out of its group is taken in again with what it had")
def _taken_in_with_old_log() -> list[Patch]:
    return [(Applicant, "_end", property(lambda self: (0, 0)))]


@plant("overtaken-read-believed", "a read that a compaction overtook is not done again")
def _overtaken_read_believed() -> list[Patch]:
    replace = PartitionLog.replace_segments

    def unnoticed(self: Any, old: Any, new: Any, path: str) -> bool:
        cuts = self.cuts
        done = replace(self, old, new, path)
        self.cuts = cuts
        return done

    return [(PartitionLog, "replace_segments", unnoticed)]


@plant("half-done-counts", "a compaction that was cut short counts as done")
def _half_done_counts() -> list[Patch]:
    async def first_only(log: Any, disk: Any, order: Any, threads: Any, goes_on: Any) -> Any:
        await compaction.compact(log, disk, order, threads, iter([True] * 3 + [False] * 10**6).__next__)
        return compaction.Findings()

    return [(compactor, "compact", first_only)]
