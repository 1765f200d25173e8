"""The owner of one partition: it alone appends, commits, trims and check-points.

Rule: requests wait in an inbox; the owner task takes all that wait, proposes them in order, and answers each when its
entry is committed. A retry that finds its batch in the tail waits for that commit; it is not appended again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

import msgspec

from quiver.broker.partition_state import OFFSET_UNKNOWN, POSITIONS_MAX, PartitionState, Trim
from quiver.clock import Clock
from quiver.errors import (
    ConflictError,
    CorruptLogError,
    LogFailedError,
    OffsetOutOfRangeError,
    OverloadedError,
    QuiverError,
    ShuttingDownError,
)
from quiver.log.disk import Disk
from quiver.log.flusher import FlushPolicy
from quiver.log.partition_log import PartitionLog
from quiver.log.replica import SoloReplica
from quiver.log.segment import read_chunk
from quiver.types import PartitionStatus
from quiver.wire.frame import FLAG_UNSEQUENCED, Entry, FrameHeader, Kind
from quiver.wire.messages import Position, ProduceReply

logger = logging.getLogger("quiver.broker")

T = TypeVar("T")

# Requests that may wait for the owner; beyond it a produce is refused as overloaded and may be retried.
INBOX_MAX = 10_000


class Partition:
    def __init__(
        self,
        topic: str,
        number: int,
        log: PartitionLog,
        disk: Disk,
        writers: Executor,
        readers: Executor,
        clock: Clock,
        policy: FlushPolicy | None = None,
    ) -> None:
        self.topic = topic
        self.number = number
        self._disk = disk
        self._log = log
        self._writers = writers
        self._readers = readers
        self._clock = clock
        self._wake = asyncio.Event()
        self._replica = SoloReplica(log, writers, clock, self._wake.set, policy)
        self._state = PartitionState(log.checkpoint)
        self._inbox: deque[tuple[Callable[[], None], asyncio.Future[Any]]] = deque()
        # Appended and not committed: header, what `apply` needs of the payload, and who waits for it.
        self._tail: deque[tuple[FrameHeader, Any, list[tuple[asyncio.Future[Any], Any]]]] = deque()
        self._new_positions: list[tuple[Position, asyncio.Future[Any]]] = []
        self._commit_waiters: set[asyncio.Future[bool]] = set()
        self._checkpointing: asyncio.Task[None] | None = None
        self._stopping = False
        self._full = False
        self._damage: CorruptLogError | None = None
        self._task: asyncio.Task[None] | None = None
        for _, header, payload in log.scan(log.checkpoint.index + 1):
            self._state.apply(header, payload)
        self._trim()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"owner {self.topic}-{self.number}")

    # -- requests, from any task of this loop --------------------------------------------------------------------

    async def produce(self, entry: Entry) -> ProduceReply:
        """Returns once the batch is committed, with the offset of its first record."""
        return await self.submit(entry)

    def submit(self, entry: Entry) -> asyncio.Future[ProduceReply]:
        """The same as a future. Raises at once where nothing can be asked of this partition."""
        return self._ask(lambda future: self._admit_batch(entry, future))

    async def commit_position(self, position: Position) -> int:
        """Stores a consumer's position; returns the one that holds, which is higher if this would move it back."""
        await self._ask(lambda future: self._admit_position(position, future))
        return self._state.positions[position.consumer]

    async def find_batch(self, producer_id: int, epoch: int, sequence: int) -> int:
        """The first offset of a stored batch that is no longer remembered, read from the log; -1 when it is gone."""
        return await self._in_reader(lambda: partial(self._find_batch, producer_id, epoch, sequence))

    def _find_batch(self, producer_id: int, epoch: int, sequence: int) -> int:
        for _, header, _ in self._log.scan(self._log.first_index):
            found = (header.producer_id, header.producer_epoch, header.sequence) == (producer_id, epoch, sequence)
            if found and not header.flags & FLAG_UNSEQUENCED:
                return header.base_offset
        return OFFSET_UNKNOWN

    def client_count(self, client: int) -> int:
        return self._state.client_counts.get(client, 0)

    async def apply_retention(self) -> None:
        await self._ask(self._admit_retention)

    def position(self, consumer: str) -> int | None:
        return self._state.positions.get(consumer)

    @property
    def start_offset(self) -> int:
        return self._state.start_offset

    @property
    def high_watermark(self) -> int:
        return self._state.next_offset

    async def read(self, offset: int, bytes_max: int) -> memoryview:
        """Committed frames from `offset` on; empty at the end of the log."""

        def prepare() -> Callable[[], memoryview]:
            self.check_offset(offset)
            if offset == self.high_watermark:
                return lambda: memoryview(b"")
            spans = self._log.spans_for_offset(offset)
            return partial(read_chunk, self._disk, spans, offset, self._replica.commit_end, bytes_max)

        return await self._in_reader(prepare)

    async def _in_reader(self, prepare: Callable[[], Callable[[], T]]) -> T:
        """Prepares here and reads in a thread; again, when a trim took the file meanwhile."""
        while True:
            first_index = self._log.first_index
            try:
                return await asyncio.get_running_loop().run_in_executor(self._readers, prepare())
            except CorruptLogError as error:
                self._damage = error
                raise
            except OSError as error:
                if self._stopping:
                    raise ShuttingDownError(f"{self.topic}-{self.number} is stopping") from error
                if isinstance(error, FileNotFoundError) and self._log.first_index > first_index:
                    continue
                if isinstance(error, FileNotFoundError):
                    self._damage = CorruptLogError.at(str(error.filename), 0, "the file is missing")
                    raise self._damage from error
                raise LogFailedError(f"{self.topic}-{self.number} cannot be read: {error}") from error

    def check_offset(self, offset: int) -> None:
        if not self.start_offset <= offset <= self.high_watermark:
            raise OffsetOutOfRangeError.of(self.topic, self.number, offset, self.start_offset, self.high_watermark)

    async def offset_at(self, timestamp: int) -> int:
        """First offset of the batch with the first record at or after that time, or the high watermark."""
        end = self._replica.commit_end
        header = await self._in_reader(lambda: partial(self._log.find_timestamp, timestamp, end))
        return self.high_watermark if header is None else max(header.base_offset, self.start_offset)

    async def until_commit(self, timeout_s: float) -> bool:
        """Waits for something new to be committed; False when that took too long."""
        if self._stopping:
            raise ShuttingDownError("the broker is stopping")
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(timeout_s, _settle, waiter, False)
        self._commit_waiters.add(waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._commit_waiters.discard(waiter)

    def status(self) -> PartitionStatus:
        problem: QuiverError | None = self._log.failure or self._damage
        state = "failed" if self._log.failure else "corrupt" if self._damage else "full" if self._full else "online"
        return PartitionStatus(
            self.topic,
            self.number,
            state,
            self.start_offset,
            self.high_watermark,
            self._log.size_bytes,
            self._log.segment_count,
            problem.message if problem else "",
        )

    async def stop(self) -> None:
        """Finishes what is admitted, check-points, and refuses the rest."""
        self._stopping = True
        self._wake.set()
        if self._task is not None:
            await self._task
        for waiter in self._commit_waiters:
            if not waiter.done():
                waiter.set_exception(ShuttingDownError("the broker is stopping"))
        if self._checkpointing is not None:
            await asyncio.wait([self._checkpointing])
        if self._log.failure is None and self._state.applied_index > self._log.checkpoint.index:
            await self._checkpoint()

    def _ask(self, admit: Callable[[asyncio.Future[Any]], None]) -> asyncio.Future[Any]:
        if self._log.failure is not None:
            # A new one each time: a raised error holds its callers' frames, and with them every refused payload.
            raise LogFailedError(self._log.failure.message)
        if self._stopping:
            raise ShuttingDownError("the broker is stopping")
        if len(self._inbox) >= INBOX_MAX:
            raise OverloadedError(f"{self.topic}-{self.number} has {INBOX_MAX} requests waiting")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._inbox.append((lambda: admit(future), future))
        self._wake.set()
        return future

    # -- the owner -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._own()
        except Exception as error:
            # A bug, not a disk: stop this partition where it is rather than guess.
            logger.exception("owner_failed partition=%s-%d", self.topic, self.number)
            self._log.failure = LogFailedError(f"{self.topic}-{self.number} stopped by an internal error: {error}")
            self._stopping = True
            self._fail_tail(self._log.failure)
            for _, future in self._inbox:
                if not future.done():
                    future.set_exception(self._log.failure)

    async def _own(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._take_inbox()
            error = self._replica.step()
            if error is not None:
                self._fail_tail(error)
            self._commit()
            if self._stopping and not self._inbox and not self._tail:
                await self._replica.close()
                return
            if self._log.checkpoint_due and self._checkpointing is None and self._log.failure is None:
                self._checkpointing = asyncio.get_running_loop().create_task(self._checkpoint())

    def _take_inbox(self) -> None:
        while self._inbox:
            admit, future = self._inbox[0]
            if not future.done():  # else the asker is gone
                try:
                    admit()
                except QuiverError as error:
                    future.set_exception(error)
            self._inbox.popleft()
        if self._new_positions:
            self._propose_positions()

    def _admit_batch(self, entry: Entry, future: asyncio.Future[Any]) -> None:
        sequenced = 0 if entry.flags & FLAG_UNSEQUENCED else entry.producer_id
        stored = self._state.judge(sequenced, entry.producer_epoch, entry.sequence, entry.record_count)
        if stored is None:
            header = self._propose(entry)
            self._tail[-1][2].append((future, ProduceReply(header.base_offset)))
            return
        reply = ProduceReply(stored.base_offset, duplicate=True)
        if stored.index <= self._state.applied_index:
            future.set_result(reply)
        else:
            self._tail[stored.index - self._tail[0][0].index][2].append((future, reply))

    def _admit_position(self, position: Position, future: asyncio.Future[Any]) -> None:
        if position.offset > self.high_watermark:
            raise OffsetOutOfRangeError.of(
                self.topic, self.number, position.offset, self.start_offset, self.high_watermark
            )
        if position.consumer not in self._state.positions and len(self._state.positions) >= POSITIONS_MAX:
            raise OverloadedError(f"{self.topic}-{self.number} has its maximum of {POSITIONS_MAX} consumers")
        self._new_positions.append((position, future))

    def _propose_positions(self) -> None:
        """All positions of one turn share an entry."""
        asked, self._new_positions = self._new_positions, []
        try:
            payload = msgspec.msgpack.encode([position for position, _ in asked])
            self._propose(Entry.control(Kind.POSITIONS, payload))
        except QuiverError as error:
            for _, future in asked:
                future.set_exception(error)
            return
        self._tail[-1][2].extend((future, position) for position, future in asked)

    def _admit_retention(self, future: asyncio.Future[Any]) -> None:
        try:
            plan = self._log.plan_retention(self._clock.now_us())
        except OSError as error:
            raise LogFailedError(f"the age of {self.topic}-{self.number} cannot be read: {error}") from error
        # Never past what is committed, and only when it frees something.
        if plan is None or plan[0] > self._replica.commit_end or plan[1] <= self._state.start_offset:
            future.set_result(None)
            return
        self._propose(Entry.control(Kind.TRIM, msgspec.msgpack.encode(Trim(*plan))))
        self._tail[-1][2].append((future, None))

    def _propose(self, entry: Entry) -> FrameHeader:
        header = self._replica.propose(entry)
        self._state.extend(header)
        self._tail.append((header, None if header.kind == Kind.DATA else entry.payload, []))
        return header

    def _commit(self) -> None:
        end = self._replica.commit_end
        if not self._tail or self._tail[0][0].index >= end:
            return
        self._full = False
        while self._tail and self._tail[0][0].index < end:
            header, payload, waiters = self._tail[0]
            refused = self._state.apply(header, payload)
            self._tail.popleft()  # not before: whoever waits for an entry must be found when this fails
            for place in refused:
                future, position = waiters[place]
                if not future.done():
                    future.set_exception(self._conflict(position))
            for future, reply in waiters:
                _settle(future, reply)
            if header.kind == Kind.TRIM:
                logger.info("trimmed partition=%s-%d start=%d", self.topic, self.number, self._state.start_offset)
                self._log.request_checkpoint()
        waiting, self._commit_waiters = self._commit_waiters, set()
        for waiter in waiting:
            _settle(waiter, True)

    def _conflict(self, position: Position) -> ConflictError:
        current = self._state.positions.get(position.consumer)
        return ConflictError(f"the position is {current}, not {position.expected}", current=current)

    def _fail_tail(self, error: QuiverError) -> None:
        """The disk refused the tail: nothing of it was acknowledged, everyone who waits is told."""
        self._full = not isinstance(error, LogFailedError)
        logger.error("append_failed partition=%s-%d error=%r", self.topic, self.number, error.message)
        self._state.roll_back()
        tail, self._tail = self._tail, deque()
        for _, _, waiters in tail:
            for future, _ in waiters:
                if not future.done():
                    future.set_exception(error)

    async def _checkpoint(self) -> None:
        """Writes the committed state beside the log, then removes what it makes unnecessary."""
        try:
            job = self._log.begin_checkpoint(self._state.image())
            await asyncio.get_running_loop().run_in_executor(self._writers, job.run)
            self._log.finish_checkpoint(job)
            self._trim()
        except OSError as error:
            # The log is whole without it; recovery only reads more. The next one is tried after more appends.
            logger.warning("checkpoint_failed partition=%s-%d error=%r", self.topic, self.number, str(error))
        finally:
            self._checkpointing = None

    def _trim(self) -> None:
        self._log.trim_prefix(min(self._state.trim_index, self._log.checkpoint.index + 1))


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)
