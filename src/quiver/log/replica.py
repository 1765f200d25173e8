"""The replication seam: entries are proposed in order and, once safe, committed in order.

`SoloReplica` is a group of one: an entry is committed when this node's disk has it. A Raft replica takes its place with
the same members: `propose`, `step`, `commit_end`, `close`.

Rule: `step` is called by the partition's owner and by nobody else. Disk work runs where the flush policy puts it, and
wakes the owner when it is done later.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

from quiver.clock import Clock
from quiver.errors import DiskFullError, LogFailedError
from quiver.log.flusher import Flusher, FlushPolicy
from quiver.log.partition_log import PartitionLog
from quiver.wire.frame import Entry, FrameHeader

_TERM_SOLO = 1


class SoloReplica:
    def __init__(
        self,
        log: PartitionLog,
        executor: Executor,
        clock: Clock,
        wake: Callable[[], None],
        policy: FlushPolicy | None = None,
    ) -> None:
        self._log = log
        self._clock = clock
        self._flusher = Flusher(executor, policy, wake)
        self.commit_end = log.synced_index  # exclusive: entries below it are committed

    def propose(self, entry: Entry) -> FrameHeader:
        """Appends at the tail. Raises LogFailedError when the disk has failed."""
        return self._log.append(_TERM_SOLO, entry, self._clock.monotonic_s())

    def step(self) -> DiskFullError | LogFailedError | None:
        """Takes in finished disk work and starts what waits. An error says that all uncommitted entries are gone."""
        while True:
            if (finished := self._flusher.finished()) is not None:
                try:
                    self._log.finish_flush(*finished)
                except (DiskFullError, LogFailedError) as failure:
                    return failure
                self.commit_end = self._log.synced_index
            if self._flusher.is_busy or (job := self._log.begin_flush()) is None:
                return None
            self._flusher.start(job)

    async def close(self) -> None:
        """Waits for the disk work under way. What was not committed by then was not acknowledged."""
        await self._flusher.wait()
