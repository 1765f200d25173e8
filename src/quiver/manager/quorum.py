"""The metadata log and what it makes: propose → committed → applied.

The log is a partition log of commands: transaction id is the entry's index. A group of one for now; a Raft replica
takes the place of `SoloReplica`. Applied state is kept in memory for readers and written behind to the SQL store, which
says up to which transaction it got.

Rule: a change is acknowledged when its command is on disk and applied in memory. The store may lag, never lead: on
start exactly the transactions it lacks are applied again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Final

import msgspec
import sqlalchemy as sa

from quiver.clock import Clock
from quiver.config import LogSettings
from quiver.errors import CorruptLogError, LogFailedError, QuiverError, RequestError, ShuttingDownError
from quiver.log.disk import Disk
from quiver.log.partition_log import PartitionLog
from quiver.log.replica import SoloReplica
from quiver.metadata.commands import Command, decode_command, encode_command
from quiver.metadata.state import Put, Remove, State
from quiver.metadata.store import Store
from quiver.wire.frame import Entry, Kind

logger = logging.getLogger("quiver.manager")

# Commands that may wait to be written; beyond it a proposal waits for its turn at the door.
_PROPOSALS_MAX: Final = 1_000
_STORE_RETRY_S: Final = 1.0
# Metadata is small and is kept whole: nothing is trimmed before managers hand over snapshots.
_LOG_SETTINGS: Final = LogSettings(segment_bytes_max=8 * 1024 * 1024, retention_ms=None)


class MetadataQuorum:
    def __init__(self, disk: Disk, directory: str, store: Store, clock: Clock, writers: Executor) -> None:
        self._store = store
        self._log = PartitionLog(disk, directory, _LOG_SETTINGS)
        self._wake = asyncio.Event()
        self._replica = SoloReplica(self._log, writers, clock, self._wake.set)
        self._tail: deque[tuple[int, Command, asyncio.Future[Any]]] = deque()
        self._door = asyncio.Semaphore(_PROPOSALS_MAX)
        self._unstored: list[Put | Remove] = []
        self._unstored_wake = asyncio.Event()
        # One thread: the store sees transactions one after the other.
        self._store_thread = ThreadPoolExecutor(1, "quiver-store")
        self._owner: asyncio.Task[None] | None = None
        self._storer: asyncio.Task[None] | None = None
        self._stopping = False
        self.state = State()
        self.stored = 0  # the last transaction in the database

    @property
    def last_transaction(self) -> int:
        return self._log.next_index - 1

    async def start(self) -> None:
        """Loads the database and applies exactly the transactions that it lacks."""
        self.state = await self.in_store(self._store.load)
        self.stored = self.state.applied
        if self.stored > self.last_transaction:
            raise CorruptLogError(
                f"the metadata database has transaction {self.stored}, but the log ends at {self.last_transaction}: "
                "they do not belong together"
            )
        for _, header, payload in self._log.scan(self.stored + 1):
            self._apply(header.index, decode_command(payload))
        if self.state.applied > self.stored:
            logger.info("metadata_replayed from=%d to=%d", self.stored + 1, self.state.applied)
            await self._write_store()
        loop = asyncio.get_running_loop()
        self._owner = loop.create_task(self._run())
        self._storer = loop.create_task(self._keep_store())

    async def propose(self, command: Command) -> Any:
        """The command's result once it is on disk and applied. Raises RequestError when the state refuses it."""
        async with self._door:
            if self._stopping:
                raise ShuttingDownError("the manager is stopping")
            entry = Entry.control(Kind.COMMAND, encode_command(command))
            try:
                header = self._replica.propose(entry)
            except LogFailedError as error:
                # A new one each time: a raised error holds its callers' frames.
                raise LogFailedError(error.message) from None
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._tail.append((header.index, command, future))
            self._wake.set()
            return await future

    async def in_store(self, function: Any, *arguments: Any) -> Any:
        """Runs a blocking call on the store's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._store_thread, function, *arguments)

    async def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._owner is not None and self._storer is not None:
            await self._owner
            self._storer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._storer
            try:
                await self._write_store()
            except (sa.exc.SQLAlchemyError, OSError) as error:
                logger.warning("store_behind transaction=%d error=%r", self.stored, str(error))
        self._store_thread.shutdown()
        self._store.close()

    async def _run(self) -> None:
        try:
            await self._own()
        except Exception as error:
            # A bug, not a disk: stop here rather than guess, and let nobody wait for an answer that will not come.
            logger.exception("metadata_owner_failed")
            self._log.failure = LogFailedError(f"the metadata stopped by an internal error: {error}")
            self._fail_tail(self._log.failure)

    async def _own(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            error = self._replica.step()
            if error is not None:
                self._fail_tail(error)
            while self._tail and self._tail[0][0] < self._replica.commit_end:
                self._commit(*self._tail[0])
                self._tail.popleft()  # not before: whoever waits must be found when this fails
            if self._stopping and not self._tail:
                await self._replica.close()
                return

    def _commit(self, index: int, command: Command, future: asyncio.Future[Any]) -> None:
        result = self._apply(index, command)
        if future.done():
            return  # the asker is gone; the change stands
        if isinstance(result, RequestError):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _apply(self, index: int, command: Command) -> Any:
        try:
            applied = self.state.apply(command)
        except RequestError as refusal:
            self.state.applied = index
            self._unstored_wake.set()  # the database says that it is done with this one too
            return refusal
        self.state.applied = index
        self._unstored.extend(applied.changes)
        self._unstored_wake.set()
        return applied.result

    def _fail_tail(self, error: QuiverError) -> None:
        logger.error("metadata_append_failed error=%r", error.message)
        tail, self._tail = self._tail, deque()
        for _, _, future in tail:
            if not future.done():
                future.set_exception(error)

    # -- the database, written behind ----------------------------------------------------------------------------

    async def _keep_store(self) -> None:
        while True:
            await self._unstored_wake.wait()
            try:
                await self._write_store()
            except (sa.exc.SQLAlchemyError, OSError) as error:
                # The log has it all; until the database is well again only its readers see less.
                logger.error("store_failed transaction=%d error=%r", self.stored, str(error))
                await asyncio.sleep(_STORE_RETRY_S)

    async def _write_store(self) -> None:
        changes, self._unstored = self._unstored, []
        self._unstored_wake.clear()
        applied, counters = self.state.applied, msgspec.structs.replace(self.state.counters)
        try:
            await self.in_store(self._store.apply, applied, counters, changes)
        except BaseException:
            self._unstored = changes + self._unstored
            self._unstored_wake.set()
            raise
        self.stored = applied
