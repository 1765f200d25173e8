"""The metadata log and what it makes: propose → committed → applied.

The log is a partition log of commands, replicated by Raft among the managers: transaction id is the entry's index. The
applied state is kept in memory for readers, check-pointed beside the log, and written behind to a SQL database.

Rule: a change is acknowledged when a majority of the managers has its command on disk and it is applied here. State and
database hold what is committed and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from concurrent.futures import Executor
from typing import Any, Final, NamedTuple

from quiver.clock import Clock
from quiver.config import LogSettings, RaftSettings
from quiver.errors import (
    DiskFullError,
    LogFailedError,
    NotLeaderError,
    OutcomeUnknownError,
    RequestError,
    ShuttingDownError,
)
from quiver.log.checkpoint import Checkpoint
from quiver.log.disk import Disk
from quiver.log.flusher import write_checkpoint
from quiver.log.partition_log import PartitionLog
from quiver.manager.database import Database
from quiver.manager.failpoint import pass_by
from quiver.manager.mending import Mending
from quiver.metadata.commands import Command, decode_command, encode_command
from quiver.metadata.image import copy_of, decode_state, encode_state
from quiver.metadata.store import Store
from quiver.raft import AnyMessage
from quiver.replication.append_sender import NoTransport, Transport
from quiver.replication.group import broker_of, completed
from quiver.replication.raft_replica import RaftReplica
from quiver.replication.seat import RaftSetup, Seat
from quiver.replication.waiting import Signal, refuse, settle
from quiver.wire.frame import Entry, FrameHeader, Kind

logger = logging.getLogger("quiver.manager")

METADATA_UID: Final = "metadata"
# Commands that may wait to be committed; beyond it a proposal waits for its turn at the door.
_PROPOSALS_MAX: Final = 1_000
_TICK_S: Final = 0.02
# A manager that stops gives another so long to take the lead, and its own last commands so long to be committed.
_HAND_OVER_S: Final = 1.0
_WAIT_S: Final = 1.0  # how long one wait for a commit lasts before it looks again
# Whoever is behind by less gets transactions from the log, whoever is behind by more a snapshot.
_KEPT_MIN: Final = 10_000
# Segments are small: only whole ones are trimmed.
LOG_SETTINGS: Final = LogSettings(segment_bytes_max=1024 * 1024, checkpoint_bytes=4 * 1024 * 1024, retention_ms=None)


class _Waiting(NamedTuple):
    header: FrameHeader
    payload: bytes
    asker: asyncio.Future[Any] | None


class MetadataQuorum:
    """One manager's part in the quorum. `seat` says which replica it is, and of which group."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        store: Store,
        clock: Clock,
        writers: Executor,
        seat: Seat,
        transport: Transport | None = None,
        settings: RaftSettings | None = None,
        log_settings: LogSettings | None = None,
    ) -> None:
        self._writers = writers
        self._log = PartitionLog(disk, directory, log_settings or LOG_SETTINGS)
        self._wake = asyncio.Event()
        self._tail: deque[_Waiting] = deque()
        self._inbox: deque[tuple[bytes, asyncio.Future[Any]]] = deque()
        self._door = asyncio.Semaphore(_PROPOSALS_MAX)
        self._changed = Signal()  # given when something is applied, or another manager leads
        self._led_by = 0
        self._applied_term = self._log.checkpoint.term
        self._checkpointing: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._owner: asyncio.Task[None] | None = None
        self._stopping = self._abandoned = False
        self._ticks = len(seat.voters) > 1 or bool(seat.admits)  # else it is alone for ever
        self.full = ""  # why a manager that is alone can take no changes now
        self.state = decode_state(self._log.checkpoint.state)
        self.state.applied = self._log.checkpoint.index
        self.database = Database(store, broker_of(seat.me))
        self._log.trim_prefix(self._log.checkpoint.start.index + 1)  # a trim that a crash cut short
        transport = transport or NoTransport()
        self.mending = Mending(disk, writers, transport)
        setup = RaftSetup(seat, directory, settings or RaftSettings(), transport, self.mending.found)
        self.replica = RaftReplica(setup, self._log, disk, writers, writers, clock, self._wake.set, self, None)
        self.mending.of(self.replica, self._log)

    # -- what is known -------------------------------------------------------------------------------------------

    @property
    def last_transaction(self) -> int:
        return self._log.next_index - 1

    @property
    def me(self) -> int:
        return broker_of(self.replica.raft.me)

    @property
    def leads(self) -> bool:
        return self.replica.leads

    @property
    def primary(self) -> int:
        """The manager that leads, 0 when that is not known."""
        return self.replica.leader

    @property
    def term(self) -> int:
        return self.replica.raft.term

    @property
    def voters(self) -> tuple[int, ...]:
        return self.replica.raft.membership.voters

    @property
    def _is_alone(self) -> bool:
        return self.voters == (self.replica.raft.me,)

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self, cluster_id: str = "") -> None:
        """Begins to take part. What is committed is known when somebody leads; see `until_led`."""
        await self.database.open(cluster_id, self.state, self.last_transaction)
        self.database.start()
        loop = asyncio.get_running_loop()
        self._owner = loop.create_task(self._run())
        if self._is_alone:
            self.replica.raft.campaign()  # there is nobody to wait for
        if self._ticks:
            self._tasks.append(loop.create_task(self._keep_ticking()))
        self._wake.set()

    async def until_led(self) -> None:
        """Returns when this manager leads or knows who does, or is alone on a full disk. Raises when that failed."""
        while not (self.leads or self.full or (self.primary and self.primary != self.me)):
            await self.until_changed(_WAIT_S)

    async def until_leading(self) -> None:
        """Waits while a new leader finds out what is committed. Raises NotLeaderError when another leads."""
        while self.replica.is_settling:
            await self.until_changed(_WAIT_S)
        if not self.leads:
            raise self._not_leader()

    async def until_applied(self, index: int) -> None:
        while self.state.applied < index:
            await self.until_changed(_WAIT_S)

    async def until_changed(self, timeout_s: float) -> bool:
        """Waits until something is applied or another leads. Raises when that will never be."""
        self._check_open()
        return await self._changed.wait(timeout_s)

    async def stop(self) -> None:
        """Lets another lead, if one can; finishes what is proposed; check-points."""
        await self.replica.hand_over(_HAND_OVER_S)
        self._stopping = True
        self._wake.set()
        if self._owner is not None:
            await asyncio.wait([self._owner], timeout=None if self._is_alone else _HAND_OVER_S)
            self._abandoned = True  # it leads without a majority: what it has is not going to be committed
            self._wake.set()
            await self._owner
        self._changed.end(ShuttingDownError("the manager is stopping"))
        await self.mending.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(
            *self._tasks, *([self._checkpointing] if self._checkpointing else []), return_exceptions=True
        )
        if self._owner is not None and self._may_checkpoint:
            await self._checkpoint()
        await self.database.close()

    # -- requests ------------------------------------------------------------------------------------------------

    async def propose(self, command: Command) -> Any:
        """The command's result once it is committed and applied. Raises RequestError when the state refuses it,
        NotLeaderError when another manager leads: then nothing was done."""
        async with self._door:
            self._check_open()
            if not (self.leads or self.replica.is_settling or self._is_alone):
                raise self._not_leader()
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._inbox.append((encode_command(command), future))
            self._wake.set()
            return await future

    async def confirm(self) -> int:
        """The last transaction that was acknowledged when this was called, applied here; proves that this one leads."""
        await self.until_leading()
        self._check_open()
        index = await self.replica.read()
        await self.until_applied(index)
        return index

    def receive(self, uid: str, message: AnyMessage, frames: memoryview) -> None:
        if uid == METADATA_UID and not self.mending.receive(message, frames):
            self.replica.receive(message, frames)

    def link_changed(self, manager: int, up: bool) -> None:
        self.replica.link_changed(manager, up)

    def _check_open(self) -> None:
        if self._log.failure is not None:
            raise LogFailedError(self._log.failure.message)  # anew: a raised one holds its callers' frames
        if self._stopping:
            raise ShuttingDownError("the manager is stopping")

    def _not_leader(self) -> NotLeaderError:
        who = f"manager {self.primary} does" if self.primary else "no manager does now"
        return NotLeaderError(f"manager {self.me} does not lead: {who}", leader=self.primary)

    # -- the owner -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._own()
        except Exception as error:
            # A bug, not a disk: stop here rather than guess, and let nobody wait for an answer that will not come.
            self.replica.fail()
            logger.exception("metadata_owner_failed")
            self._log.failure = LogFailedError(f"the metadata stopped by an internal error: {error}")
            self._send_away(self._log.failure)
            self._disk_refused(self._log.failure)

    async def _own(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._take_inbox()
            if (error := self.replica.step()) is not None:
                self._disk_refused(error)
            self._commit()
            if self._is_finished():
                await self.replica.close()
                return
            if self._inbox and not self._must_wait():
                self._wake.set()
            if self._log.checkpoint_due and self._checkpointing is None and self._may_checkpoint:
                self._checkpointing = asyncio.get_running_loop().create_task(self._checkpoint())

    def _is_finished(self) -> bool:
        return self._stopping and (self._abandoned or not (self._inbox or self._tail) or not self.replica.leads)

    def _must_wait(self) -> bool:
        """A leader that does not know yet what is committed cannot judge what is asked of it."""
        return self.replica.is_settling and not self._stopping

    def _take_inbox(self) -> None:
        raft = self.replica.raft
        if self._inbox and self._is_alone and raft.leader is None and self._log.failure is None:
            raft.may_lead = True  # the disk was full; whether it is still so shows when it writes
            raft.campaign()
            return
        if self._must_wait():
            return
        while self._inbox:
            payload, future = self._inbox.popleft()
            if future.done():
                continue  # the asker is gone
            try:
                header = self.replica.propose(Entry.control(Kind.COMMAND, payload))
            except (NotLeaderError, LogFailedError):
                failure = self._log.failure
                future.set_exception(LogFailedError(failure.message) if failure else self._not_leader())
            else:
                self._tail.append(_Waiting(header, payload, future))

    def _disk_refused(self, error: DiskFullError | LogFailedError) -> None:
        logger.error("metadata_append_failed error=%r", error.message)
        inbox, self._inbox = self._inbox, deque()
        for _, future in inbox:
            if not future.done():
                future.set_exception(type(error)(error.message))
        if isinstance(error, LogFailedError):
            self._changed.end(error)
        elif self._is_alone:
            self.full = error.message
            self._changed.give()

    def _commit(self) -> None:
        end, changed = self.replica.commit_end, self._led_by != self.primary
        if self.leads:
            self.full = ""
        elif self.full:
            end = self._log.synced_index  # it is alone: what is on its disk is committed, also while nobody leads
        while self._tail and self._tail[0].header.index < end:
            header, payload, asker = self._tail[0]
            if asker is not None:
                pass_by("committed", self.me)
            result = self._apply(header, payload)
            self._tail.popleft()  # not before: whoever waits must be found when this fails
            changed = True
            if asker is None or asker.done():
                continue  # nobody waits here, or not any more; the change stands
            if isinstance(result, RequestError):
                asker.set_exception(result)
            else:
                settle(asker, result)
        self._led_by = self.primary
        if changed:
            self._changed.give()

    def _apply(self, header: FrameHeader, payload: bytes) -> Any:
        result: Any = None
        changes: Any = ()
        if header.kind == Kind.COMMAND:
            try:
                result, changes = self.state.apply(decode_command(payload))
            except RequestError as refusal:
                result = refusal
        self.state.applied, self._applied_term = header.index, header.term
        self.database.applied(changes)
        return result

    def _send_away(self, error: Exception) -> None:
        for place, waiting in enumerate(self._tail):
            refuse([(waiting.asker, None)] if waiting.asker else [], error)
            self._tail[place] = waiting._replace(asker=None)

    async def _keep_ticking(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.replica.tick()

    # -- what the replica tells ----------------------------------------------------------------------------------

    def entry_appended(self, header: FrameHeader, payload: Any) -> None:
        if header.index > self.state.applied:  # else the state came with a snapshot and has it already
            self._tail.append(_Waiting(header, bytes(payload), None))

    def entries_removed(self, first: int, error: Exception) -> None:
        while self._tail and self._tail[-1].header.index >= first:
            asker = self._tail.pop().asker
            if asker is not None and not asker.done():
                # Others may have got it from a leader whose own disk refused it.
                asker.set_exception(type(error)(str(error)) if self._is_alone else self._unknown())

    def leadership_lost(self) -> None:
        """What is in the tail may still be committed by another; who waits cannot be told here."""
        self._send_away(LogFailedError(self._log.failure.message) if self._log.failure else self._unknown())

    def log_replaced(self, checkpoint: Checkpoint) -> None:
        self._tail.clear()
        self.state = decode_state(checkpoint.state)
        self.state.applied, self._applied_term = checkpoint.index, checkpoint.term
        self.database.replaced(self.state)

    def _unknown(self) -> OutcomeUnknownError:
        return OutcomeUnknownError("the primary changed meanwhile: this may or may not have been done")

    # -- check-points --------------------------------------------------------------------------------------------

    @property
    def _may_checkpoint(self) -> bool:
        """Not while the log lacks entries that the state already counts, or a snapshot is to take its place."""
        is_whole = self._log.synced_index > self.state.applied and not self.replica.is_replacing
        return is_whole and self._log.failure is None

    async def _checkpoint(self) -> None:
        """Writes the state beside the log, then removes the entries that nobody near needs."""
        loop = asyncio.get_running_loop()
        try:
            state, term = copy_of(self.state), self._applied_term
            image = await loop.run_in_executor(self._writers, encode_state, state)
            if self._log.checkpoint.index >= state.applied or not self._may_checkpoint:
                return  # a snapshot came meanwhile
            found = Checkpoint(state.applied, term, 0, image)
            done = completed(found, max(1, state.applied + 1 - _KEPT_MIN), self._log, self.replica.raft)
            await write_checkpoint(self._log, done, self._writers)
            self._log.trim_prefix(self._log.checkpoint.start.index + 1)
            self.replica.raft.trimmed(self._log.first_index - 1)
        except OSError as error:
            # The log is whole without it; recovery only reads more. The next one is tried after more appends.
            logger.warning("metadata_checkpoint_failed error=%r", str(error))
        finally:
            self._checkpointing = None
            self._wake.set()  # a snapshot may wait for it
