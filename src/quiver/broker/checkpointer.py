"""Writes a partition's check-points, and removes what they make unnecessary.

Rule: one at a time, never beyond what is committed, and none while the log lacks entries that the state counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor

from quiver.broker.tail import Tail
from quiver.log.flusher import write_checkpoint
from quiver.log.partition_log import PartitionLog
from quiver.replication.group import completed
from quiver.replication.raft_replica import RaftReplica

logger = logging.getLogger("quiver.broker")


class Checkpointer:
    """`wake` gives the owner a turn: a snapshot may wait for the check-point that is being written."""

    __slots__ = ("_log", "_name", "_raft", "_tail", "_under_way", "_wake", "_writers")

    def __init__(
        self,
        name: str,
        log: PartitionLog,
        tail: Tail,
        raft: RaftReplica | None,
        writers: Executor,
        wake: Callable[[], None],
    ) -> None:
        self._name, self._log, self._tail, self._raft = name, log, tail, raft
        self._writers, self._wake = writers, wake
        self._under_way: asyncio.Task[None] | None = None

    @property
    def is_catching_up(self) -> bool:
        """True while the log lacks entries that the state already counts, or a snapshot is to take its place."""
        replacing = self._raft is not None and self._raft.is_replacing
        return replacing or self._log.synced_index <= self._tail.state.applied_index

    def begin(self) -> None:
        """The log says that one is due."""
        if not (self._under_way or self._log.failure or self.is_catching_up):
            self._under_way = asyncio.get_running_loop().create_task(self._write())

    async def close(self) -> None:
        """Writes the last one."""
        if self._under_way is not None:
            await asyncio.wait([self._under_way])
        if self._log.failure is None and self._tail.state.applied_index > self._log.checkpoint.index:
            await self._write()

    async def _write(self) -> None:
        """Writes the committed state beside the log, then removes what it makes unnecessary."""
        try:
            if not self.is_catching_up:  # a snapshot may have come since this was due
                state = self._tail.state
                image = state.image()
                if self._raft is not None:
                    image = completed(image, state.trim_index, self._log, self._raft.raft)
                await write_checkpoint(self._log, image, self._writers)
                self.trim()
        except OSError as error:
            # The log is whole without it; recovery only reads more. The next one is tried after more appends.
            logger.warning("checkpoint_failed partition=%s error=%r", self._name, str(error))
        finally:
            self._under_way = None
            self._wake()

    def trim(self) -> None:
        if self._raft is None:
            self._log.trim_prefix(min(self._tail.state.trim_index, self._log.checkpoint.index + 1))
        else:
            self._log.trim_prefix(self._log.checkpoint.start.index + 1)
            self._raft.raft.trimmed(self._log.first_index - 1)
