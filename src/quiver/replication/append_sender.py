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
from typing import Any, Protocol

import msgspec

from quiver.errors import CorruptLogError
from quiver.log.checkpoint import LogStart, encode_checkpoint
from quiver.log.disk import Disk
from quiver.log.partition_log import PartitionLog
from quiver.log.segment import read_entries
from quiver.raft import AnyMessage, Append, Snapshot
from quiver.raft.messages import AppendReply, Repair, RepairReply
from quiver.replication.frame_cache import Buffer, FrameCache
from quiver.replication.group import broker_of, decode_membership
from quiver.wire.frame import FrameError, FrameHeader, Kind, walk_frames

logger = logging.getLogger("quiver.replication")


class Transport(Protocol):
    def send(self, broker: int, uid: str, message: AnyMessage, frames: Sequence[Buffer] = ()) -> bool:
        """Hands a message over, or drops it. It may wait for others of the same turn."""
        ...

    def flush(self) -> None:
        """Lets go what waits."""
        ...


class NoTransport:
    """Of a group of one."""

    def send(self, broker: int, uid: str, message: AnyMessage, frames: Sequence[Buffer] = ()) -> bool:
        return False

    def flush(self) -> None:
        return


class AppendSender:
    def __init__(
        self,
        uid: str,
        log: PartitionLog,
        disk: Disk,
        readers: Executor,
        transport: Transport,
        on_damage: Callable[[CorruptLogError], None],
    ) -> None:
        self._uid = uid
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
        """Entries and acknowledgements go at once: a produce waits for them, and the flush that comes next may run on
        this thread. Followers must have the entries first, or the syncs would follow each other."""
        for message in messages:
            self.send(message)
        if any(isinstance(message, (Append, AppendReply)) for message in messages):
            self._transport.flush()

    def send(self, message: AnyMessage) -> None:
        if isinstance(message, Append) and message.last > message.prev_index:
            frames = self.cache.get(message.prev_index + 1, message.last)
            if frames is None or message.to in self._last:
                self._send_in_turn(message, frames)
            else:
                self._put(message, frames)
        elif isinstance(message, Snapshot):
            start = LogStart(message.index, message.index_term, self._log.base_offset)
            self._put(message, [encode_checkpoint(self._log.checkpoint._replace(start=start))])
        else:
            self._put(message)

    def answer_repair(self, request: Repair, commit: int) -> None:
        """Sends the frame of a committed entry to a replica that lost it."""
        reply = RepairReply(request.to, request.sender, request.term, request.index)
        if request.index < self._log.first_index:
            self._put(RepairReply(request.to, request.sender, request.term, request.index, trimmed=True))
        elif request.index <= min(commit, self._log.synced_index - 1):
            self._in_background(self._deliver(reply, request.index, request.index, None, None))
        else:
            self._put(reply)

    def _put(self, message: AnyMessage, frames: Sequence[Buffer] = ()) -> None:
        self._transport.send(broker_of(message.to), self._uid, message, frames)

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
        try:
            read = partial(read_entries, self._disk, self._log.spans_for_index(first), first, last)
            frames = await asyncio.get_running_loop().run_in_executor(self._readers, read)
        except CorruptLogError as error:
            self._on_damage(error)
            return None
        except OSError as error:  # trimmed or truncated meanwhile, or a disk that the next write will find
            logger.warning("entries_not_read uid=%s first=%d error=%r", self._uid, first, str(error))
            return None
        return frames if len(frames) == last - first + 1 else None

    async def close(self) -> None:
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)


def with_body(message: AnyMessage, frames: memoryview, uid: str) -> AnyMessage | None:
    """A message with what travelled with it. None for frames that are not whole: the sender will send them again."""
    if isinstance(message, Append) and message.last > message.prev_index:
        try:
            return with_entries(message, frames)
        except (FrameError, ValueError) as error:
            logger.warning("append_refused uid=%s sender=%d error=%r", uid, message.sender, str(error))
            return None
    return msgspec.structs.replace(message, body=frames) if isinstance(message, Snapshot) else message


def with_entries(message: Append, frames: memoryview) -> Append:
    """The message with its entries, checked: header, payload, whole frame. Raises FrameError or ValueError."""
    entries: list[tuple[FrameHeader, memoryview, memoryview]] = []
    terms: list[tuple[int, int]] = []
    memberships = []
    for at, header, payload in walk_frames(frames):
        if header.index != message.prev_index + 1 + len(entries):
            raise ValueError(f"found entry {header.index}, not {message.prev_index + 1 + len(entries)}")
        if not terms or terms[-1][1] != header.term:
            terms.append((header.index, header.term))
        if header.kind == Kind.MEMBERSHIP:
            memberships.append((header.index, decode_membership(payload)))
        entries.append((header, payload, frames[at : at + header.frame_length]))
    if message.prev_index + len(entries) != message.last:
        raise ValueError(f"{len(entries)} entries after {message.prev_index}, not up to {message.last}")
    return msgspec.structs.replace(message, terms=tuple(terms), memberships=tuple(memberships), body=entries)
