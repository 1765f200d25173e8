"""The owner of one partition: it alone appends, commits, trims and check-points.

Rule: requests wait in an inbox; the owner task takes all that wait, proposes them in order, and answers each when its
entry is committed. A retry that finds its batch in the tail waits for that commit; it is not appended again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from typing import Any

import msgspec

from quiver.broker.checkpointer import Checkpointer
from quiver.broker.compactor import Compactor
from quiver.broker.log_reader import LogReader
from quiver.broker.partition_state import PartitionState
from quiver.broker.retention import plan_trim
from quiver.broker.tail import Tail
from quiver.clock import Clock
from quiver.errors import (
    DiskFullError,
    LogFailedError,
    NotLeaderError,
    OffsetOutOfRangeError,
    OverloadedError,
    QuiverError,
    ShuttingDownError,
)
from quiver.log.checkpoint import Checkpoint
from quiver.log.disk import Disk
from quiver.log.flusher import FlushPolicy
from quiver.log.partition_log import PartitionLog
from quiver.log.replica import SoloReplica
from quiver.replication.group import describe
from quiver.replication.raft_replica import RaftReplica
from quiver.replication.seat import RaftSetup
from quiver.replication.turns import Turns
from quiver.replication.waiting import Asker, Signal, own_trouble, refuse, settle
from quiver.topic_settings import TopicRules
from quiver.types import PartitionStatus
from quiver.wire.frame import FLAG_UNSEQUENCED, Entry, FrameHeader, Kind, sequence_step
from quiver.wire.messages import Position, ProduceReply

logger = logging.getLogger("quiver.broker")

INBOX_MAX = 10_000  # requests that may wait for the owner; beyond it a produce is refused as overloaded, to be retried
HAND_OVER_S = 1.0  # for another to take the lead, and for the last entries to be committed, when this replica stops
_SETTLE_S = 1.0  # how long one wait for a commit lasts before it looks again


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
        raft: RaftSetup | None = None,
    ) -> None:
        self.topic, self.number, self.rules = topic, number, TopicRules(log.settings)
        self._log, self._clock = log, clock
        self.turns = Turns(self._run)
        name = f"{topic}-{number}"
        self.reader = LogReader(name, log, disk, readers, raft.on_damage if raft else None, self._refusal)
        self.compactor = Compactor(name, log, disk, writers, self.turns.wake, self.reader.note)
        self._tail = Tail(PartitionState(log.checkpoint))
        self._inbox: deque[tuple[Asker, Entry | Callable[[Any], None]]] = deque()
        self._new_positions: list[tuple[Position, asyncio.Future[Any]]] = []
        self._committed = Signal()
        self._stopping = self._full = self._abandoned = False  # abandoned: stop without waiting for commits
        self._ended: asyncio.Future[None] | None = None  # of the last turn; None: there was no first
        self.raft: RaftReplica | None = None
        if raft is not None:
            # A trim that a crash cut short: its term is known only then.
            log.trim_prefix(log.checkpoint.start.index + 1)
            self.raft = RaftReplica(raft, log, disk, writers, readers, clock, self.turns.wake, self, policy)
        else:
            for _, header, payload in log.scan(log.checkpoint.index + 1):
                self.state.apply(header, payload)
        self._replica = self.raft or SoloReplica(log, writers, clock, self.turns.wake, policy)
        self.checkpoints = Checkpointer(name, log, self._tail, self.raft, writers, self.turns.wake)
        self.checkpoints.trim()

    def start(self) -> None:
        self._ended = asyncio.get_running_loop().create_future()
        self.turns.start()

    @property
    def state(self) -> PartitionState:
        return self._tail.state

    # -- requests, from any task of this loop --------------------------------------------------------------------

    async def produce(self, entry: Entry) -> ProduceReply:
        """Returns once the batch is committed, with the offset of its first record."""
        asker: asyncio.Future[ProduceReply] = asyncio.get_running_loop().create_future()
        self.submit(entry, asker)
        return await asker

    def submit(self, entry: Entry, asker: Asker) -> None:
        """The same, answered to `asker`. Raises at once where nothing can be asked of this partition."""
        if (raft := self.raft) is None or self._stopping or len(self._inbox) >= INBOX_MAX or not raft.leads:
            self._check_open()
        self._inbox.append((asker, entry))
        self.turns.wake()

    async def commit_position(self, position: Position) -> int | None:
        """Stores a consumer's position; returns the one that holds, which is higher if this would move it back."""
        await self.ask_position(position)
        return self.state.positions.get(position.consumer)

    def ask_position(self, position: Position) -> asyncio.Future[Any]:
        return self._ask(lambda future: self._admit_position(position, future))

    def use(self, rules: TopicRules) -> None:
        """What was set for the topic, from now on."""
        self.rules, self._log.settings = rules, rules.log

    async def apply_retention(self, registered: Collection[str] | None = ()) -> None:
        """`registered`: the consumers that were, though they may have no position here; None: that is not known."""
        await self._order(
            lambda now_us: plan_trim(self._log, self.state, self.rules, registered, now_us, self._replica.commit_end)
        )

    async def compact(self) -> None:
        """Carries out what is ordered; the leader orders what is to come next. Returns when that is done."""
        await self.compactor.carry_out(self.state.order)
        await self._order(lambda now_us: self.compactor.plan(self.state, self.rules, now_us, self.raft))

    async def _order(self, plan: Callable[[int], Entry | None]) -> None:
        if self.leads:  # else the leader's entry comes
            await self._ask(lambda future: self._admit_order(plan(self._clock.now_us()), future))

    @property
    def leads(self) -> bool:
        return self.raft is None or self.raft.leads

    @property
    def start_offset(self) -> int:
        return self.state.start_offset

    @property
    def high_watermark(self) -> int:
        return self.state.next_offset

    async def read(self, offset: int, bytes_max: int) -> memoryview:
        """Committed frames from `offset` on; empty at the end of the log."""

        def prepare() -> tuple[int, int]:
            self.check_offset(offset)
            return offset, self._replica.commit_end

        if offset == self.high_watermark:
            return memoryview(b"")
        return await self.reader.read(prepare, bytes_max)

    def check_offset(self, offset: int) -> None:
        if self.raft is not None and (offset > self.high_watermark or self.checkpoints.is_catching_up):
            self.raft.check_leads()  # another may have more than this replica knows of
        if not self.start_offset <= offset <= self.high_watermark:
            raise OffsetOutOfRangeError.of(self.topic, self.number, offset, self.start_offset, self.high_watermark)

    async def confirm(self) -> None:
        """Returns when this replica is known to lead and has applied all that was committed at the call."""
        if self.raft is None:
            return
        while self.raft.is_settling:
            await self.until_commit(_SETTLE_S)
        index = await self.raft.read()
        while self.state.applied_index < index:
            await self.until_commit(_SETTLE_S)

    async def offset_at(self, timestamp: int) -> int:
        """First offset of the batch with the first record at or after that time, or the high watermark."""
        header = await self.reader.find_timestamp(timestamp, self._replica.commit_end)
        return self.high_watermark if header is None else max(header.base_offset, self.start_offset)

    async def until_commit(self, timeout_s: float) -> bool:
        """Waits for something new to be committed; False when that took too long."""
        if self._stopping:
            raise ShuttingDownError("the broker is stopping")
        return await self._committed.wait(timeout_s)

    def status(self) -> PartitionStatus:
        state, why = self.reader.health("full" if self._full else "online")
        bounds = (self.start_offset, self.high_watermark, self._log.size_bytes, self._log.segment_count)
        status = PartitionStatus(self.topic, self.number, state, *bounds, why)
        return status if self.raft is None else describe(status, self.raft.raft)

    async def stop(self) -> None:
        """Finishes what is admitted, check-points, and refuses the rest."""
        self._stopping = self.reader.is_closing = True
        self.turns.wake()
        if (ended := self._ended) is not None:
            await asyncio.wait([ended], timeout=None if self.raft is None else HAND_OVER_S)
            if not ended.done():  # it leads without a majority: what it has is not going to be committed
                self._abandoned = True
                self.turns.wake()
                await ended
            await self._replica.close()
        await self.compactor.close()
        self._committed.end(ShuttingDownError("the broker is stopping"))
        await self.checkpoints.close()

    def _ask(self, admit: Callable[[asyncio.Future[Any]], None]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._check_open()
        self._inbox.append((future, admit))
        self.turns.wake()
        return future

    def _check_open(self) -> None:
        """Raises where nothing can be asked of this partition."""
        if (trouble := self._log.failure if self.raft is None else self.raft.trouble) is not None:
            raise self._refusal(trouble)
        if self._stopping:
            raise ShuttingDownError("the broker is stopping")
        if len(self._inbox) >= INBOX_MAX:
            raise OverloadedError(f"{self.topic}-{self.number} has {INBOX_MAX} requests waiting")
        if self.raft is not None and not self.raft.leads and not self.raft.is_settling:
            self.raft.check_leads()

    def _refusal(self, error: QuiverError) -> QuiverError:
        return own_trouble(error, None if self.raft is None else self.raft.raft)

    # -- the owner -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._own()
        except Exception as error:
            self._break_off(error)

    def settle(self, header: FrameHeader | None = None, payload: Any = None) -> None:
        """For a replica that stored this entry, or knows that more is committed, and has nothing else to do."""
        try:
            if header is not None:
                self._tail.append(header, payload)
            self._conclude()
        except Exception as error:
            self._break_off(error)

    def _break_off(self, error: Exception) -> None:
        """A bug, not a disk: stop this partition where it is rather than guess."""
        if self.raft is not None:
            self.raft.fail()
        logger.error("owner_failed partition=%s-%d", self.topic, self.number, exc_info=error)
        self._log.failure = LogFailedError(f"{self.topic}-{self.number} stopped by an internal error: {error}")
        self._stopping = True
        self.entries_removed(0, self._log.failure)
        refuse(self._inbox, self._refusal(self._log.failure))
        self._end()

    def _own(self) -> None:
        self._take_inbox()
        self._conclude(self._replica.step())

    def _conclude(self, error: DiskFullError | LogFailedError | None = None) -> None:
        if error is not None:
            self._disk_refused(error)
        if committed := self._commit():
            self._full = isinstance(error, DiskFullError)  # it may have taken the first of what came, and not the rest
        if committed or self.raft is None or self.raft.raft.leader is None:  # else it counts for nothing yet
            self._log.mark.catch_up(self._log.stop)
        if self._stopping and not self._inbox and (self._abandoned or not self._tail or not self.leads):
            self._end()
        elif self._inbox and not self._must_wait():
            self.turns.wake()
        if self._log.checkpoint_due:
            self.checkpoints.begin()

    def _end(self) -> None:
        self.turns.stop()
        if self._ended is not None:
            settle(self._ended, None)

    def _must_wait(self) -> bool:
        """A leader that does not know yet what is committed cannot judge what is asked of it."""
        return self.raft is not None and not self._stopping and self.raft.is_settling

    def _take_inbox(self) -> None:
        if not self._inbox or (not (leads := self.leads) and self._must_wait()):
            return
        is_alone = len(self._inbox) == 1
        while self._inbox:
            asker, asked = self._inbox[0]
            if not asker.done():  # else it is gone
                try:
                    if not leads and self.raft is not None:
                        self.raft.check_leads()
                    if isinstance(asked, Entry):
                        self._admit_batch(asked, asker, is_alone)
                    else:
                        asked(asker)
                except QuiverError as error:
                    asker.set_exception(error)
            self._inbox.popleft()
        if self._new_positions:
            self._propose_positions()

    def _admit_batch(self, entry: Entry, asker: Asker, is_alone: bool) -> None:
        sequenced = 0 if entry.flags & FLAG_UNSEQUENCED else entry.producer_id
        state, step = self._tail.state, sequence_step(entry.flags, entry.record_count)
        stored = state.judge(sequenced, entry.producer_epoch, entry.sequence, step)
        if stored is None:
            # What comes alone is on its way before all else; of several the last would have to wait for each.
            header = self.raft.spread(entry) if is_alone and self.raft is not None else None
            if header is None:
                header = self._replica.propose(entry)
            self._tail.append(header, entry.payload, [(asker, ProduceReply(header.base_offset))])
            return
        reply = ProduceReply(stored.base_offset, duplicate=True)
        if stored.index <= state.applied_index:
            asker.set_result(reply)
        else:
            self._tail.wait_for(stored.index, asker, reply)

    def _admit_position(self, position: Position, future: asyncio.Future[Any]) -> None:
        if position.offset > self.high_watermark:
            self.check_offset(position.offset)
        self.state.check_room(position.consumer)
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
        self._tail.wait_for_last([(future, position) for position, future in asked])

    def _admit_order(self, entry: Entry | None, future: asyncio.Future[Any]) -> None:
        if entry is None:
            future.set_result(None)
        else:
            self._propose(entry)
            self._tail.wait_for_last([(future, None)])

    def _propose(self, entry: Entry) -> FrameHeader:
        header = self._replica.propose(entry)
        self.entry_appended(header, entry.payload)
        return header

    def _commit(self) -> bool:
        committed = self._tail.commit(self._replica.commit_end)
        for header in committed:
            if header.kind == Kind.TRIM:
                logger.info("trimmed partition=%s-%d start=%d", self.topic, self.number, self.state.start_offset)
                self._log.request_checkpoint()
        if committed:
            self._committed.give()
        return bool(committed)

    def _disk_refused(self, error: DiskFullError | LogFailedError) -> None:
        """Nothing of what it refused was acknowledged; everyone who waits is told."""
        was_full, self._full = self._full, isinstance(error, DiskFullError)
        if not (was_full and self._full):  # a follower meets it with each attempt of its leader, ten times a second
            logger.error("append_failed partition=%s-%d error=%r", self.topic, self.number, error.message)
        if self.raft is None:
            self.entries_removed(0, error)

    # -- what the replica tells ----------------------------------------------------------------------------------

    def entry_appended(self, header: FrameHeader, payload: Any) -> None:
        self._tail.append(header, payload)

    def entries_removed(self, first: int, error: QuiverError) -> None:
        self._tail.remove(first, self._refusal(error))

    def leadership_lost(self) -> None:
        """What is in the tail may still be committed by another; who waits must ask there."""
        assert self.raft is not None
        logger.info("leadership_lost partition=%s-%d", self.topic, self.number)
        self._tail.send_away(NotLeaderError("another broker took the lead", leader=self.raft.leader))

    def log_replaced(self, checkpoint: Checkpoint) -> None:
        self._tail.replace(PartitionState(checkpoint))
