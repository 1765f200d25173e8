"""The metadata in SQL, written behind: the log has it all, the database shows it to whoever asks in SQL.

Rule: it may lag, never lead. After a start it gets exactly what it lacks: the changes of the transactions after its own
last one. What is of another cluster, or ahead of the log it should follow, is made anew from the state.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
import sqlalchemy as sa

from quiver.manager.failpoint import pass_by
from quiver.metadata.image import copy_of
from quiver.metadata.state import Put, Remove, State
from quiver.metadata.store import Store

logger = logging.getLogger("quiver.manager")

_STORE_RETRY_S: Final = 1.0


class Database:
    def __init__(self, store: Store, manager_id: int) -> None:
        self._store = store
        self._manager_id = manager_id
        # One thread: the store sees transactions one after the other.
        self._thread = ThreadPoolExecutor(1, "quiver-store")
        self._changes: list[Put | Remove] = []
        self._state = State()
        self._has = 0  # the last transaction that the database had when it was opened
        self._anew = False  # its rows are of no worth
        self._differs = False  # its rows are of a state that this log cannot bring forward
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.stored = 0  # the last transaction in the database
        self.rebuilt = 0  # how often rows were made from a state: what is observed is not in them

    async def open(self, cluster_id: str, state: State, last_index: int) -> None:
        """`state` is what the log begins from, `last_index` is its last entry."""
        self._store.cluster = cluster = _number_of(cluster_id)
        has, of = await self.run(self._store.position)
        self._anew = of not in (0, cluster) or has > last_index
        if self._anew:
            logger.warning("database_made_anew transaction=%d last=%d", has, last_index)
        self.stored = self._has = 0 if self._anew else has
        self._follow(state)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep())

    def _follow(self, state: State) -> None:
        self._state = state
        self._differs = self._anew or state.applied > self._has
        if self._differs:
            self._wake.set()

    def replaced(self, state: State) -> None:
        """A snapshot took the place of the state: what changed between is not known."""
        self._changes.clear()
        self._has = self.stored
        self._follow(state)

    def applied(self, changes: Sequence[Put | Remove]) -> None:
        """A transaction was applied to the state, refused or not."""
        if self._state.applied > self._has:  # else the database has had it since an earlier life
            self._changes.extend(changes)
            self._wake.set()

    async def run(self, function: Any, *arguments: Any) -> Any:
        """Runs a blocking call on the store's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def close(self) -> None:
        """Writes what is left, if the database lets it."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            try:
                await self._write()
            except (sa.exc.SQLAlchemyError, OSError) as error:
                logger.warning("store_behind transaction=%d error=%r", self.stored, str(error))
        self._thread.shutdown()
        self._store.close()

    async def _keep(self) -> None:
        while True:
            await self._wake.wait()
            try:
                await self._write()
            except (sa.exc.SQLAlchemyError, OSError) as error:
                # The log has it all; until the database is well again only its readers see less.
                logger.error("store_failed transaction=%d error=%r", self.stored, str(error))
                await asyncio.sleep(_STORE_RETRY_S)

    async def _write(self) -> None:
        self._wake.clear()
        state = self._state
        applied, differs = state.applied, self._differs
        if applied <= self._has and not differs:
            return
        pass_by("database", self._manager_id)
        changes, self._changes, self._differs = self._changes, [], False
        try:
            if differs:
                await self.run(self._become, copy_of(state), self._anew)
                self._anew = False
                self.rebuilt += 1
            else:
                await self.run(self._store.apply, applied, msgspec.structs.replace(state.counters), changes)
        except BaseException:
            if state is self._state:
                self._changes = changes + self._changes
            self._differs = self._differs or differs
            self._wake.set()
            raise
        self.stored = applied

    def _become(self, state: State, anew: bool) -> None:
        self._store.become(state, anew=anew)


def _number_of(cluster_id: str) -> int:
    """A column of numbers keeps it: 62 bits of its hash, never 0."""
    return int.from_bytes(hashlib.blake2b(cluster_id.encode(), digest_size=8).digest(), "little") % (2**62 - 1) + 1
