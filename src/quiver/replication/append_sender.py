"""Gives messages to peers what travels with them: the frames of an append, the check-point of a snapshot.

Rule: recent frames come from memory, older ones are read in a thread; what cannot be read any more is not sent, and the
receiver asks again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from quiver.errors import CorruptLogError
from quiver.log.checkpoint import LogStart, decode_checkpoint, encode_checkpoint
from quiver.log.disk import Disk
from quiver.log.partition_log import PartitionLog
from quiver.log.segment import read_entries
from quiver.raft import AnyMessage, Append, Raft, Snapshot
from quiver.raft.messages import AppendReply, Repair, RepairReply
from quiver.replication.frame_cache import Buffer, FrameCache
from quiver.replication.group import broker_of, decode_membership
from quiver.replication.snapshot_parts import SnapshotParts, cut
from quiver.wire.frame import FrameError, FrameHeader, Kind, decode_frame

logger = logging.getLogger("quiver.replication")

# A link that is full, or gone, is tried again after so long, and so often.
_LINK_FULL_S: Final = 0.05
_PART_TRIES_MAX: Final = 100


class Transport(Protocol):
    def send(
        self, broker: int, uid: str, message: AnyMessage, frames: Sequence[Buffer] = (), *, now: bool = False
    ) -> bool:
        """Hands a message over, or drops it. It may wait for others of the same turn, unless it is to go now."""
        ...


class NoTransport:
    """Of a group of one."""

    def send(
        self, broker: int, uid: str, message: AnyMessage, frames: Sequence[Buffer] = (), *, now: bool = False
    ) -> bool:
        return False


class AppendSender:
    def __init__(
        self,
        uid: str,
        log: PartitionLog,
        disk: Disk,
        readers: Executor,
        transport: Transport,
        on_damage: Callable[[CorruptLogError], None],
        part_bytes: int,
    ) -> None:
        """`part_bytes`: a snapshot that is longer travels in parts of this size."""
        self._uid = uid
        self._part_bytes = part_bytes
        self._installing: dict[int, asyncio.Task[None]] = {}  # the snapshot on its way to each peer
        self._log = log
        self._disk = disk
        self._readers = readers
        self._transport = transport
        self._on_damage = on_damage
        self._reading: set[asyncio.Task[None]] = set()
        self._last: dict[int, asyncio.Task[None]] = {}  # of the appends to each peer that wait to be sent
        self.cache = FrameCache(log.next_index)

    def fit(self, first: int, bytes_max: int) -> int:
        """See `Raft`."""
        cached = self.cache.fit(first, bytes_max)
        if cached is not None:
            return cached
        try:
            return max(first, min(self._log.fit(first, bytes_max), self.cache.first - 1))
        except CorruptLogError as error:  # its index had to be made again, from frames that are damaged
            self._on_damage(error)
        except OSError as error:
            logger.warning("entries_not_found uid=%s first=%d error=%r", self._uid, first, str(error))
        return first

    def send_all(self, messages: list[AnyMessage]) -> None:
        for message in messages:
            self.send(message)

    def send(self, message: AnyMessage) -> None:
        """Entries and acknowledgements go at once: a produce waits for them, and the flush that comes next may run on
        this thread. Followers must have the entries first, or the syncs would follow each other."""
        if isinstance(message, AppendReply):
            self._put(message, now=True)
        elif isinstance(message, Append) and message.last > message.prev_index:
            frames = self.cache.get(message.prev_index + 1, message.last)
            if frames is None or message.to in self._last:
                self._send_in_turn(message, frames)
            else:
                self._put(message, frames, now=True)
        elif isinstance(message, Snapshot):
            self._send_snapshot(message)
        else:
            self._put(message, now=isinstance(message, Append))

    def send_frame(self, message: Append, frame: Sequence[Buffer]) -> None:
        """An append of one entry, which need not be in the cache yet."""
        if self._last and message.to in self._last:
            self._send_in_turn(message, frame)
        else:
            self._put(message, frame, now=True)

    def tidy(self, raft: Raft) -> None:
        """Forgets frames that nobody will be sent from memory."""
        if self.cache:
            leader, needed = raft.leader, self._log.next_index
            if leader is not None:
                for peer, progress in leader.progress.items():
                    if progress.match + 1 < needed and peer not in raft.down:
                        needed = progress.match + 1
            self.cache.drop_below(needed, self._log.synced_index)

    def answer_repair(self, request: Repair, commit: int) -> None:
        """Sends the frame of a committed entry to a replica that lost it."""
        reply = RepairReply(request.to, request.sender, request.term, request.index, compacted=request.compacted)
        if request.index < self._log.first_index:
            self._put(RepairReply(request.to, request.sender, request.term, request.index, trimmed=True))
        elif request.index <= min(commit, self._log.synced_index - 1):
            self._in_background(self._deliver(reply, request.index, request.index, None, None))
        else:
            self._put(reply)

    def _send_snapshot(self, message: Snapshot) -> None:
        to = message.to
        if to in self._installing:
            return  # one is on its way, and slower than the core thought
        start = LogStart(message.index, message.index_term, self._log.base_offset)
        body = encode_checkpoint(self._log.checkpoint._replace(start=start))
        parts = cut(message, body, self._part_bytes)
        if len(parts) == 1:
            self._put(message, [body])
            return
        task = self._installing[to] = self._in_background(self._send_parts(parts))
        task.add_done_callback(lambda _: self._installing.pop(to))

    async def _send_parts(self, parts: list[tuple[Snapshot, memoryview]]) -> None:
        """As fast as the link takes them. One that takes nothing for long is left; the core begins again."""
        for message, piece in parts:
            for _ in range(_PART_TRIES_MAX):
                if self._put(message, [piece], now=True):
                    break
                await asyncio.sleep(_LINK_FULL_S)
            else:
                logger.warning("snapshot_not_sent uid=%s to=%d part=%d", self._uid, message.to, message.part)
                return
            await asyncio.sleep(0)  # what else is to be sent goes in between

    def _put(self, message: AnyMessage, frames: Sequence[Buffer] = (), *, now: bool = False) -> bool:
        return self._transport.send(broker_of(message.to), self._uid, message, frames, now=now)

    def _send_in_turn(self, message: Append, frames: Sequence[Buffer] | None) -> None:
        """Appends to one peer leave in their order, also when some must be read first: it would refuse what comes too
        early, and each refusal makes the leader send all of it again."""
        to = message.to
        before = self._last.get(to)
        task = self._in_background(self._deliver(message, message.prev_index + 1, message.last, frames, before))
        self._last[to] = task
        task.add_done_callback(lambda done: self._last.pop(to) if self._last.get(to) is done else None)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)
        return task

    async def _deliver(
        self,
        message: AnyMessage,
        first: int,
        last: int,
        frames: Sequence[Buffer] | None,
        before: asyncio.Task[None] | None,
    ) -> None:
        found = await self._read(first, last) if frames is None else frames
        if before is not None:
            await asyncio.wait([before])
        if found is not None:
            self._put(message, found)

    async def _read(self, first: int, last: int) -> Sequence[Buffer] | None:
        cuts = self._log.cuts
        try:
            read = partial(read_entries, self._disk, self._log.spans_for_index(first), first, last)
            frames = await asyncio.get_running_loop().run_in_executor(self._readers, read)
        except CorruptLogError as error:
            # Else it read where the log was being cut, or stopped in the middle of that.
            if self._log.cuts == cuts and self._log.failure is None:
                self._on_damage(error)
            return None
        except OSError as error:  # trimmed or truncated meanwhile, or a disk that the next write will find
            logger.warning("entries_not_read uid=%s first=%d error=%r", self._uid, first, str(error))
            return None
        # After a cut they may be others than the message means.
        return frames if len(frames) == last - first + 1 and self._log.cuts == cuts else None

    async def close(self) -> None:
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)


def with_body(message: AnyMessage, frames: memoryview, uid: str, parts: SnapshotParts) -> AnyMessage | None:
    """A message with what travelled with it. None for frames or a snapshot that are not whole, which the sender will
    send again, and for a snapshot of which more is to come."""
    if isinstance(message, Append) and message.last > message.prev_index:
        try:
            return with_entries(message, frames)
        except (FrameError, ValueError) as error:
            logger.warning("append_refused uid=%s sender=%d error=%r", uid, message.sender, str(error))
            return None
    if not isinstance(message, Snapshot):
        return message
    whole = parts.add(message, frames)
    if whole is not None:
        try:
            decode_checkpoint(whole.body, "a snapshot")  # here, where it can still be sent again
        except CorruptLogError as error:
            logger.warning("snapshot_refused uid=%s sender=%d error=%r", uid, message.sender, error.message)
            return None
    return whole


def with_entries(message: Append, frames: memoryview) -> Append:
    """The message with its entries, checked: header, payload, whole frame. Raises FrameError or ValueError."""
    entries: list[tuple[FrameHeader, memoryview, memoryview]] = []
    terms: list[tuple[int, int]] = []
    memberships = []
    at = 0
    while at < len(frames):
        header, payload = decode_frame(frames, at)
        if header.index != message.prev_index + 1 + len(entries):
            raise ValueError(f"found entry {header.index}, not {message.prev_index + 1 + len(entries)}")
        if not terms or terms[-1][1] != header.term:
            terms.append((header.index, header.term))
        if header.kind == Kind.MEMBERSHIP:
            memberships.append((header.index, decode_membership(payload)))
        end = at + header.frame_length
        entries.append((header, payload, frames[at:end]))
        at = end
    if message.prev_index + len(entries) != message.last:
        raise ValueError(f"{len(entries)} entries after {message.prev_index}, not up to {message.last}")
    return msgspec.structs.replace(message, terms=tuple(terms), memberships=tuple(memberships), body=entries)
