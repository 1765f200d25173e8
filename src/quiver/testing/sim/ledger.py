"""Holds every node to the rules of consensus, after every event. The numbers are those of the rules in the design.

It keeps a model of what each group has committed: the first time a replica applies an entry it enters the model, from
then on every replica must have the same one. Rules about the disk are judged by the medium, as a power cut would leave
it, at the moment a message leaves.

Rule: it only looks. What it costs does not grow with the length of a run.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from crc32c import crc32c

from quiver.broker.partition import Partition
from quiver.broker.partition_state import PartitionState
from quiver.log.compaction import Order
from quiver.raft import Membership, Raft
from quiver.raft.messages import AnyMessage, Append, AppendReply, Vote, VoteReply
from quiver.replication.frame_cache import Buffer
from quiver.replication.group import broker_of, decode_membership
from quiver.testing.sim.disk import durable_hard_state, durable_term
from quiver.testing.sim.node import Node
from quiver.testing.sim.world import Violation
from quiver.wire.batch_check import SCHEMA_ID_COMPACTED
from quiver.wire.frame import FrameHeader, Kind
from quiver.wire.messages import Position

_FRAME = struct.Struct("<8xI8s4xQQ24xI")  # payload length, both checksums, index, term, schema id
_HEADER_BYTES = 96
_SAMPLE = 8  # of so many applied entries, the whole state is compared after one
_positions_decoder = msgspec.msgpack.Decoder(list[Position])


class Committed(NamedTuple):
    header: FrameHeader
    positions: dict[str, int | None]  # what those of its consumers are after it


class Group:
    """The model of one partition's log."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.entries: list[Committed] = []  # entry 1 first
        self.commit_terms: list[int] = []  # the term in which each was committed
        self.frames: dict[tuple[int, int], bytes] = {}  # (index, term) -> checksums, of any that was sent
        self.leaders: dict[int, int] = {}  # term -> replica
        self.ruling: dict[int, list[Membership]] = {}  # term -> those its leader counted by, committed or not
        self.membership: Membership | None = None  # the last one that is committed
        self.votes: dict[tuple[int, int], int] = {}  # (replica, term) -> for whom
        self.would: dict[tuple[int, int], dict[int, None]] = {}  # (candidate, term) -> who said it would vote for it
        self.acknowledged: dict[int, dict[int, int]] = {}  # replica -> term -> index that it had on disk and said so
        self.positions: dict[str, int] = {}
        self.epochs: dict[str, int] = {}  # of who claimed last
        self.sequences: dict[tuple[int, int], int] = {}  # (producer, epoch) -> the next one
        self.images: dict[int, int] = {}  # index -> checksum of the state after it
        self.next_offset = 0
        self.gone: dict[Order, set[int]] = {}  # the offsets that an order of compaction removes

    @property
    def commit(self) -> int:
        return len(self.entries)


class Ledger:
    def __init__(self, uids: Sequence[str], replicas: int) -> None:
        """A group of so many replicas is never smaller than its majority: who leaves is a minority, or is replaced."""
        self.voters_min = replicas // 2 + 1
        self.groups: dict[str, Group] = {uid: Group(uid) for uid in uids}
        self.nodes: dict[int, Node] = {}
        self.sent: dict[tuple[int, int, int], tuple[list[bytes], int]] = {}  # batch -> its values and checksum
        self.keys: dict[tuple[int, int, int], list[tuple[bytes, bool]]] = {}  # batch -> keys, and which are deleted
        self.found: list[Violation] = []
        self._seen: dict[tuple[int, str], tuple[Any, ...]] = {}

    def group(self, uid: str) -> Group:
        return self.groups[uid]

    # -- after every event ---------------------------------------------------------------------------------------

    def check(self, node: Node) -> None:
        for uid, partition in node.partitions.items():
            assert partition.raft is not None
            raft = partition.raft.raft
            seen = (partition, raft.term, raft.leader, raft.commit, raft.membership_index)
            before = self._seen.get((node.id, uid))
            if seen != before:
                self._seen[node.id, uid] = seen
                self._check_change(node, self.group(uid), partition, raft, before)

    def _check_change(
        self, node: Node, group: Group, partition: Partition, raft: Raft, before: tuple[Any, ...] | None
    ) -> None:
        if before is None or before[0] is not partition:
            self._check_memory(node, group, raft)
        else:
            if raft.term < before[1]:
                raise Violation("3 durable votes", f"{node.name} went back from term {before[1]} to {raft.term}")
            if raft.commit < before[3] and not partition._full and not raft.failed:
                raise Violation("2 committed stays", f"{node.name} takes commit {before[3]} back to {raft.commit}")
        if raft.leader is None or raft.failed:
            return
        known = group.leaders.setdefault(raft.term, raft.me)
        if known != raft.me:
            detail = f"{_name(known)} and {_name(raft.me)} lead term {raft.term} of {group.uid}"
            raise Violation("1 one leader", detail)
        ruling = group.ruling.setdefault(raft.term, [])
        if raft.membership not in ruling:
            ruling.append(raft.membership)
        under_way = [index for index, _ in raft.memberships if index > max(raft.commit, group.commit)]
        if len(under_way) > 1:
            raise Violation("one change at a time", f"{node.name} has memberships at {under_way} under way")
        if before is None or before[2] is not raft.leader:
            self._check_elected(node, group, raft)
            self._check_complete(node, group, raft)
        elif before[3] != raft.commit and raft.commit < raft.leader.first_index:
            detail = f"{node.name} commits {raft.commit} of an older term by counting replicas (§5.4.2)"
            raise Violation("2 committed stays", detail)

    def _check_memory(self, node: Node, group: Group, raft: Raft) -> None:
        """Who comes back under an id has what it acknowledged under it, as far as that was committed."""
        acknowledged = group.acknowledged.get(raft.me, {}).items()
        kept = [i for term, i in acknowledged if i <= group.commit and group.entries[i - 1].header.term == term]
        had = max(kept, default=0)
        if raft.terms.last < had:
            detail = f"{_name(raft.me)} comes back with entries up to {raft.terms.last} and had acknowledged {had}"
            raise Violation("2 committed stays", detail)
        node.forget_failures(group.uid)  # of the replica that was here before
        last = raft.synced_index
        if last > raft.terms.start and not node.disk.flips:
            found = durable_term(node.disk, node.directory(group.uid), last)
            if found != raft.terms.term_at(last):
                detail = f"{_name(raft.me)} comes back with entry {last}, which is not whole on its disk"
                raise Violation("9 no bad frame", detail)

    def _check_elected(self, node: Node, group: Group, raft: Raft) -> None:
        """A majority voted for it, with votes that were on disk when they left."""
        voters = [voter for voter in raft.membership.voters if group.votes.get((voter, raft.term)) == raft.me]
        if not raft.membership.has_majority(voters):
            detail = f"{node.name} leads term {raft.term} of {group.uid} with the votes of {[*map(_name, voters)]}"
            raise Violation("1 one leader", detail)

    def _check_complete(self, node: Node, group: Group, raft: Raft) -> None:
        """A new leader has all that was committed in terms before its own (§5.4). One that learns late that it was
        elected, because it was paused, need not have more."""
        commit = bisect_left(group.commit_terms, raft.term)
        if raft.terms.last < commit:
            detail = f"{node.name} leads term {raft.term} with entries up to {raft.terms.last}, {commit} were"
            raise Violation("2 committed stays", f"{detail} committed in {group.uid} before")
        for index in range(raft.terms.start + 1, commit + 1):
            if raft.terms.term_at(index) != group.entries[index - 1].header.term:
                raise Violation("2 committed stays", f"{node.name} leads term {raft.term} without entry {index}")

    # -- what is applied -----------------------------------------------------------------------------------------

    def applied(
        self, node: Node, state: PartitionState, header: FrameHeader, payload: Any, refused: Sequence[int]
    ) -> None:
        """`refused`: which of the positions in the entry."""
        try:
            self._check_applied(node, state, header, payload)
        except Violation as violation:
            self.found.append(violation)  # the product would take it for a mistake of its own
            raise

    def _check_applied(self, node: Node, state: PartitionState, header: FrameHeader, payload: Any) -> None:
        found = ((uid, node.partition(uid)) for uid in self.groups)
        uid, partition = next(((u, p) for u, p in found if p is not None and p._tail.state is state), ("", None))
        if partition is None or partition.raft is None:
            return
        group = self.group(uid)
        known = self._check_entry(node, group, partition.raft.raft, header, payload)
        for consumer, offset in known.positions.items():
            if state.positions.get(consumer) != offset:
                detail = f"{node.name} has {consumer} at {state.positions.get(consumer)} after {header.index}"
                raise Violation("7 positions", f"{detail}, not at {offset}")
        if header.index % _SAMPLE == 0:
            image = zlib.crc32(state.image().state)
            if group.images.setdefault(header.index, image) != image:
                raise Violation("2 one state", f"{node.name} has another state after entry {header.index} of {uid}")

    def _check_entry(self, node: Node, group: Group, raft: Raft, header: FrameHeader, payload: Any) -> Committed:
        """Enters it, or compares it with what was entered."""
        if header.index == group.commit + 1:
            self._check_majority(raft, group, header)
            self._enter(group, header, payload)
            group.commit_terms.append(max(raft.term, group.commit_terms[-1] if group.commit_terms else 0))
        elif header.index > group.commit:
            raise Violation("2 committed stays", f"{node.name} applies {header.index}, {group.commit} are known")
        known = group.entries[header.index - 1]
        if not is_same(known.header, header):
            raise Violation(
                "2 committed stays", f"{node.name} has {_shown(header)} where {_shown(known.header)} was committed"
            )
        return known

    def _enter(self, group: Group, header: FrameHeader, payload: Any) -> None:
        if header.base_offset != group.next_offset:
            detail = f"entry {header.index} of {group.uid} begins at {header.base_offset}, not {group.next_offset}"
            raise Violation("5 dense offsets", detail)
        group.next_offset = header.next_offset
        positions: dict[str, int | None] = {}
        if header.kind == Kind.DATA:
            self._check_batch(group, header)
        elif header.kind == Kind.MEMBERSHIP:
            membership = decode_membership(payload)
            if group.membership is not None and not membership.is_one_step_from(group.membership):
                raise Violation("one change at a time", f"{group.membership} is followed by {membership}")
            if len(membership.voters) < self.voters_min:
                raise Violation("enough voters", f"{group.uid} has {membership} and needs {self.voters_min}")
            group.membership = membership
        elif header.kind == Kind.POSITIONS:
            for position in _positions_decoder.decode(payload):
                _move(group, position)
                positions[position.consumer] = group.positions.get(position.consumer)
        group.entries.append(Committed(header, positions))

    def _check_batch(self, group: Group, header: FrameHeader) -> None:
        batch = (header.producer_id, header.producer_epoch, header.sequence)
        known = self.sent.get(batch)
        if known is None or known[1] != header.payload_crc or len(known[0]) != header.record_count:
            raise Violation("phantom", f"nobody sent {_shown(header)}")
        expected = group.sequences.get(batch[:2], 0)
        if header.sequence < expected:
            raise Violation("6 once", f"{batch} is in {group.uid} again at {header.index}")
        if header.sequence > expected:
            raise Violation("6 once", f"{batch} is in {group.uid} at {header.index}, {expected} is not")
        group.sequences[batch[:2]] = header.sequence + header.record_count

    def _check_majority(self, raft: Raft, group: Group, header: FrameHeader) -> None:
        # A leader counts by the newest membership of its log, which a follower may not have yet.
        for membership in (*group.ruling.get(raft.term, ()), *(known for _, known in raft.memberships)):
            holders = [voter for voter in membership.voters if self._holds(voter, group.uid, header)]
            if membership.has_majority(holders):
                return
        where = ", ".join(map(_name, holders)) or "nowhere"
        raise Violation("4 on disk first", f"{_shown(header)} is committed and on disk only at {where}")

    def _holds(self, replica: int, uid: str, header: FrameHeader) -> bool:
        node = self.nodes[broker_of(replica)]
        partition = node.partition(uid) if node.life else None
        names = node.disk.durable_names(node.directory(uid))
        if partition is None or partition.raft is None or partition.raft.raft.me != replica or not names:
            had = self.group(uid).acknowledged.get(replica, {})
            return max(had.values(), default=0) >= header.index  # before its disk was lost
        if durable_term(node.disk, node.directory(uid), header.index) == header.term:
            return True
        return bool(partition._log.first_index > header.index)  # it came with a snapshot

    def truncating(self, node: Node, directory: str, index: int) -> None:
        """Entries from `index` on are about to be removed from a log."""
        uid = node.uid_of(directory)
        group, partition = self.group(uid), node.partitions.get(uid)
        if partition is None or index > group.commit:
            return
        found = durable_term(node.disk, directory, index)
        if found == group.entries[index - 1].header.term:
            self.found.append(Violation("2 committed stays", f"{node.name} removes {index}, which is committed"))

    def installing(self, node: Node, directory: str, start: int) -> None:
        """A log is about to be replaced by a snapshot that begins after `start`: only one that has not got that far."""
        group = self.group(node.uid_of(directory))
        if 0 < start <= group.commit:
            found = durable_term(node.disk, directory, start)
            if found == group.entries[start - 1].header.term:
                detail = f"{node.name} has entry {start} and more, and takes a snapshot of it"
                self.found.append(Violation("2 committed stays", detail))

    def damaged(self, node: Node, text: str) -> None:
        """A replica found its log damaged: only a flipped bit does that, no crash and no disk that fails or is full."""
        if not node.disk.flips:
            self.found.append(Violation("no damage by itself", f"{node.name} says {text}"))

    # -- what leaves ---------------------------------------------------------------------------------------------

    def leaving(self, node: Node, uid: str, message: AnyMessage, frames: Sequence[Buffer]) -> None:
        try:
            self._check_leaving(node, uid, message, frames)
        except Violation as violation:
            self.found.append(violation)
            raise

    def _check_leaving(self, node: Node, uid: str, message: AnyMessage, frames: Sequence[Buffer]) -> None:
        if isinstance(message, Append):
            if frames:
                self._check_frames(node, uid, message, b"".join(frames))
        elif isinstance(message, AppendReply):
            if message.accepted:
                self._check_healthy(node, uid, message)
                self._check_acknowledged(node, uid, message)
        elif isinstance(message, Vote):
            if not message.pre:
                self._check_vote(node, uid, message, message.sender)
                self._check_asked(node, uid, message)
        elif isinstance(message, VoteReply) and message.granted:
            if message.pre:
                self.group(uid).would.setdefault((message.to, message.term), {})[message.sender] = None
            else:
                self._check_vote(node, uid, message, message.to)

    def _check_vote(self, node: Node, uid: str, message: AnyMessage, voted_for: int) -> None:
        self._check_healthy(node, uid, message)
        found = durable_hard_state(node.disk, node.directory(uid))
        if found.term < message.term or (found.term == message.term and found.voted_for != voted_for):
            detail = f"{node.name} votes for {_name(voted_for)} in term {message.term}, its disk says {found}"
            raise Violation("3 durable votes", detail)
        known = self.group(uid).votes.setdefault((message.sender, message.term), voted_for)
        if known != voted_for:
            detail = f"{node.name} votes for {_name(known)} and {_name(voted_for)} in term {message.term}"
            raise Violation("1 one leader", detail)

    def _check_asked(self, node: Node, uid: str, message: Vote) -> None:
        """Who asks for votes was told by a majority that it would get them, or by the leader to ask (thesis §9.6)."""
        partition = node.partition(uid)
        assert partition is not None and partition.raft is not None
        would = self.group(uid).would.get((message.sender, message.term), {})
        if not message.transfer and not partition.raft.raft.membership.has_majority([message.sender, *would]):
            raise Violation("pre-vote", f"{node.name} asks for votes in term {message.term} before it asked about them")

    def _check_healthy(self, node: Node, uid: str, message: AnyMessage) -> None:
        if len(node.disk.met) and node.failed_syncs(uid):
            raise Violation("8 fsync stops", f"{node.name} goes on after a failed sync: {type(message).__name__}")

    def _check_acknowledged(self, node: Node, uid: str, message: AppendReply) -> None:
        partition = node.partition(uid)
        assert partition is not None and partition.raft is not None
        raft, match = partition.raft.raft, message.match
        if match <= raft.terms.start:
            return
        term = raft.terms.term_at(match)
        found = durable_term(node.disk, node.directory(uid), match)
        if term is not None:
            had = self.group(uid).acknowledged.setdefault(raft.me, {})
            had[term] = max(had.get(term, 0), match)
        if found is None or found != term:
            detail = f"{node.name} acknowledges entry {match} of term {term}, its disk has {found}"
            raise Violation("4 on disk first", detail)
        if durable_hard_state(node.disk, node.directory(uid)).term < message.term:
            raise Violation("3 durable votes", f"{node.name} speaks in term {message.term}, which its disk has not")

    def _check_frames(self, node: Node, uid: str, message: Append, data: bytes) -> None:
        known, at = self.group(uid).frames, 0
        index = message.prev_index
        while at < len(data):
            length, checksums, index, term, schema_id = _FRAME.unpack_from(data, at)
            payload = data[at + _HEADER_BYTES : at + _HEADER_BYTES + length]
            if crc32c(payload) != int.from_bytes(checksums[4:], "little"):
                raise Violation("9 no bad frame", f"{node.name} sends entry {index} with a wrong checksum")
            is_compacted = schema_id == SCHEMA_ID_COMPACTED  # what is left of it is judged at the end
            if not is_compacted and known.setdefault((index, term), checksums) != checksums:
                raise Violation("2 committed stays", f"two entries {index} of term {term} in {uid}")
            at += _HEADER_BYTES + (length + 7) // 8 * 8
        if index != message.last:
            raise Violation("9 no bad frame", f"{node.name} sends entries up to {index}, not {message.last}")


def is_same(known: FrameHeader, header: FrameHeader) -> bool:
    """Whether that is the entry, though compaction may have taken records from it."""
    if header.schema_id == SCHEMA_ID_COMPACTED and known.kind == Kind.DATA:
        what = ("schema_id", "payload_length", "payload_crc", "timestamp_min", "timestamp_max")
        known = known._replace(**{name: getattr(header, name) for name in what})
    return known == header


def _move(group: Group, position: Position) -> None:
    """What a position entry does, written down once more."""
    known, claimed = group.positions.get(position.consumer, -1), group.epochs.get(position.consumer, 0)
    if position.expected not in (None, known):
        return
    if position.act == "claim":
        group.epochs[position.consumer] = max(claimed, position.epoch)
    elif position.epoch in (0, claimed):
        group.positions[position.consumer] = position.offset if position.rewind else max(known, position.offset)


def _name(replica: int) -> str:
    return f"n{broker_of(replica)}.{replica & 0xFFFFFFFF}"


def _shown(header: FrameHeader) -> str:
    kind = Kind(header.kind).name.lower()
    batch = f" {header.producer_id}/{header.producer_epoch}/{header.sequence}" if header.producer_id else ""
    return f"{kind}{batch} at {header.index} of term {header.term}, offset {header.base_offset}"
