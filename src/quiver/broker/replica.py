"""The replication seam: entries are proposed in order and, once safe, committed in order.

`SoloReplica` is a group of one: an entry is committed when this node's disk has it. A Raft replica takes its place with
the same four members: `propose`, `step`, `commit_end`, `close`.

Rule: `step` is called by the partition's owner and by nobody else; it never blocks. Disk work runs in a thread and
wakes the owner when done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future

from quiver.clock import Clock
from quiver.errors import DiskFullError, LogFailedError
from quiver.log.flush import FlushJob
from quiver.log.partition_log import PartitionLog
from quiver.wire.frame import Entry, FrameHeader

_TERM_SOLO = 1


class SoloReplica:
    def __init__(self, log: PartitionLog, executor: Executor, clock: Clock, wake: Callable[[], None]) -> None:
        self._log = log
        self._executor = executor
        self._clock = clock
        self._wake = wake
        self._flush: tuple[FlushJob, Future[None]] | None = None
        self.commit_end = log.synced_index  # exclusive: entries below it are committed

    def propose(self, entry: Entry) -> FrameHeader:
        """Appends at the tail. Raises LogFailedError when the disk has failed."""
        return self._log.append(_TERM_SOLO, entry, self._clock.monotonic_s())

    def step(self) -> DiskFullError | LogFailedError | None:
        """Takes in finished disk work and starts what waits. An error says that all uncommitted entries are gone."""
        if self._flush is not None:
            job, future = self._flush
            if not future.done():
                return None
            self._flush = None
            error = future.exception()
            assert error is None or isinstance(error, Exception)
            try:
                self._log.finish_flush(job, error)
            except (DiskFullError, LogFailedError) as failure:
                return failure
            self.commit_end = self._log.synced_index
        if (next_job := self._log.begin_flush()) is not None:
            # The thread wakes the owner itself: an asyncio future in between would cost another turn of the loop.
            loop = asyncio.get_running_loop()
            started = self._executor.submit(next_job.run)
            started.add_done_callback(lambda _: loop.call_soon_threadsafe(self._wake))
            self._flush = (next_job, started)
        return None

    async def close(self) -> None:
        """Waits for the disk work under way. What was not committed by then was not acknowledged."""
        if self._flush is not None:
            await asyncio.wait([asyncio.wrap_future(self._flush[1])])
