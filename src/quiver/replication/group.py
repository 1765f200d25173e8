"""What a replica of a partition must know of its group beside the log: ids, and the part that a check-point keeps.

A replica's id is its broker's id and the number of the disk it was made on, so that a broker which lost its disk comes
back as another replica: one that never acknowledged anything.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from quiver.log.checkpoint import Checkpoint
from quiver.log.partition_log import PartitionLog
from quiver.raft import Membership, Raft, TermRuns
from quiver.types import PartitionStatus, ReplicaStatus
from quiver.wire.frame import FrameHeader, Kind

_DISK_BITS: Final = 32


def replica_id(broker: int, disk_id: int) -> int:
    return broker << _DISK_BITS | disk_id


def broker_of(replica: int) -> int:
    return replica >> _DISK_BITS


class Group(msgspec.Struct, array_like=True, frozen=True):
    """`terms` and `memberships` of the entries between the log's start and the check-point."""

    terms: tuple[tuple[int, int], ...] = ()
    memberships: tuple[tuple[int, Membership], ...] = ()


_decoder = msgspec.msgpack.Decoder(Group)
_membership_decoder = msgspec.msgpack.Decoder(Membership)
encode = msgspec.msgpack.Encoder().encode


def decode_membership(payload: Any) -> Membership:
    return _membership_decoder.decode(payload)


def summarise(raft: Raft, index: int) -> bytes:
    """The group part of a check-point at `index`."""
    terms = raft.terms.runs(raft.terms.start + 1, index)
    return encode(Group(terms, tuple(found for found in raft.memberships if found[0] <= index)))


def completed(image: Checkpoint, trim_index: int, log: PartitionLog, raft: Raft) -> Checkpoint:
    """A check-point of the owner's state, with what the group must know to start from it."""
    start = log.plan_trim(min(trim_index, image.index + 1), raft.terms.term_at)
    return image._replace(start=start, generation=log.checkpoint.generation, group=summarise(raft, image.index))


class LogView:
    """Terms and memberships of a log, gathered from its check-point and the entries after it."""

    def __init__(self, log: PartitionLog, bootstrap: Membership) -> None:
        checkpoint = log.checkpoint
        group = _decoder.decode(checkpoint.group) if checkpoint.group else Group()
        start = checkpoint.start
        if start.index != log.first_index - 1:
            start = start._replace(index=log.first_index - 1, term=0)
        last = min(checkpoint.index, log.next_index - 1)  # less than the check-point while entries are on their way
        runs = [run for run in group.terms if run[0] <= last]
        self.terms = TermRuns(start.index, start.term, runs, last)
        self.memberships = [found for found in group.memberships if found[0] < log.next_index] or [(0, bootstrap)]

    def add(self, header: FrameHeader, payload: Any) -> None:
        self.terms.extend(((header.index, header.term),), header.index)
        if header.kind == Kind.MEMBERSHIP:
            self.memberships.append((header.index, decode_membership(payload)))


def describe(status: PartitionStatus, raft: Raft) -> PartitionStatus:
    """The status with what is known of the group; its leader also tells how far each replica is behind."""
    leader, membership, last = raft.leader, raft.membership, raft.terms.last
    replicas: tuple[ReplicaStatus, ...] = ()
    if leader is not None:
        match = {peer: progress.match for peer, progress in leader.progress.items()} | {raft.me: last}
        replicas = tuple(
            ReplicaStatus(broker_of(peer), peer in membership.voters, last - match.get(peer, 0))
            for peer in membership.members
        )
    return msgspec.structs.replace(
        status, leader=broker_of(raft.leader_id), role=raft.role.value, term=raft.term, replicas=replicas
    )
