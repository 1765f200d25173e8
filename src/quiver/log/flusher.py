"""Runs a flush job and wakes the owner when it is done: in a thread, or here when that is quicker and harms nobody.

A thread costs two hand-overs, as much as the `fdatasync` itself on a fast disk. `FlushPolicy` decides, once for all
partitions of a broker; decision 7 says why.

Rule: a Flusher belongs to one log and runs one job at a time. What its owner sees does not depend on where a job ran.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Final

from quiver.clock import Clock
from quiver.log.checkpoint import Checkpoint
from quiver.log.disk import Buffer
from quiver.log.flush import FlushJob
from quiver.log.partition_log import PartitionLog
from quiver.log.slots import HardStateFile
from quiver.types import HardState
from quiver.wire.frame import FrameHeader

# Above this the disk takes so long that the hand-over to a thread no longer counts.
INLINE_BYTES_MAX: Final = 1024 * 1024
# Two logs that flush in turns would wait for each other on one thread; in threads they sync side by side.
ALONE_S_MIN: Final = 0.05
# The mean of inline flushes, each new one counting an eighth: a disk of 2.5 ms reaches it, or two stalls together.
INLINE_MEAN_S_MAX: Final = 0.0025
_MEAN_SHARE: Final = 1 / 8
# Any disk stalls for some milliseconds now and then: one such flush counts as this much. After one that takes longer
# than the second value the disk is not trusted.
_STALL_S: Final = 0.012
STALL_S_MAX: Final = 0.1
# What a flush may take longer for its size: large ones do not make a quick disk a slow one.
BYTES_PER_S: Final = 500_000_000
# How long a disk that was slow is left to threads; doubles each time, starts over after it was good for as long.
DISTRUST_S_MIN: Final = 0.5
DISTRUST_S_MAX: Final = 80.0


class FlushPolicy:
    """Whether a flush may block the event loop. One for each disk and loop."""

    __slots__ = ("_alone_since_s", "_distrust_s", "_last", "_mean_s", "_trusted_from_s", "clock", "in_threads")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.in_threads = 0  # flushes that run in threads now
        self._last: Flusher | None = None
        self._alone_since_s = 0.0
        self._mean_s = 0.0
        self._distrust_s = DISTRUST_S_MIN
        self._trusted_from_s = -math.inf

    def admits(self, flusher: Flusher, size_bytes: int, now_s: float) -> bool:
        """Asked at every start, also by those who will use a thread: that is how it knows who is active."""
        if flusher is not self._last:
            self._last, self._alone_since_s = flusher, now_s
        return (
            self.in_threads == 0
            and now_s - self._alone_since_s >= ALONE_S_MIN
            and now_s >= self._trusted_from_s
            and size_bytes <= INLINE_BYTES_MAX
        )

    def run(self, job: FlushJob, began_s: float) -> Exception | None:
        """Runs it on the caller's thread. The caller writes the mark."""
        job.marks_late = True
        error: Exception | None = None
        try:
            job.run()
        except Exception as raised:
            error = raised
        self.learn(job.size_bytes, began_s)
        return error

    def learn(self, size_bytes: int, began_s: float) -> None:
        """A flush of so many bytes on the caller's thread has just ended."""
        ended_s = self.clock.monotonic_s()
        took_s = max(0.0, ended_s - began_s - size_bytes / BYTES_PER_S)
        self._mean_s += (min(took_s, _STALL_S) - self._mean_s) * _MEAN_SHARE
        if self._mean_s > INLINE_MEAN_S_MAX or took_s > STALL_S_MAX:
            was_good = began_s - self._trusted_from_s > self._distrust_s
            self._distrust_s = DISTRUST_S_MIN if was_good else min(self._distrust_s * 2, DISTRUST_S_MAX)
            self._trusted_from_s = ended_s + self._distrust_s
            self._mean_s = 0.0


class Flusher:
    """`policy` None: always in threads."""

    __slots__ = ("_executor", "_policy", "_running", "_wake", "ended")

    def __init__(self, executor: Executor, policy: FlushPolicy | None, wake: Callable[[], None]) -> None:
        self._executor = executor
        self._policy = policy
        self._wake = wake
        self._running: Future[None] | None = None
        self.ended: tuple[FlushJob, Exception | None] | None = None  # what `finished` will give

    @property
    def is_busy(self) -> bool:
        return self._running is not None

    def start(self, job: FlushJob) -> None:
        """`finished` has the outcome when this returns, or later, after a wake."""
        assert self._running is None and self.ended is None
        if (policy := self._policy) is not None:
            now_s = policy.clock.monotonic_s()
            if policy.admits(self, job.size_bytes, now_s) and job.only_appends:
                self.ended = job, policy.run(job, now_s)
                return
        loop = asyncio.get_running_loop()
        self._running = self._executor.submit(job.run)
        if self._policy is not None:
            self._policy.in_threads += 1
        # The thread wakes the owner itself: an asyncio future in between would cost another turn of the loop.
        self._running.add_done_callback(lambda future: loop.call_soon_threadsafe(self._end, job, future))

    def store(self, log: PartitionLog, header: FrameHeader, frame: Buffer, now_s: float) -> bool:
        """Puts one frame on disk here and now, if that may be done on this thread and takes a single write.

        False: nothing was done. Raises LogFailedError."""
        policy = self._policy
        return policy is not None and policy.admits(self, len(frame), now_s) and log.store(header, frame, now_s)

    def stored(self, log: PartitionLog, header: FrameHeader, length: int, began_s: float) -> None:
        """To be told after `store`, when who waits for the frame has been told."""
        assert self._policy is not None
        self._policy.learn(length, began_s)
        log.stored(header, length)

    def _end(self, job: FlushJob, future: Future[None]) -> None:
        if self._policy is not None:
            self._policy.in_threads -= 1
        error = future.exception()
        assert error is None or isinstance(error, Exception)
        self._running, self.ended = None, (job, error)
        self._wake()

    def finished(self) -> tuple[FlushJob, Exception | None] | None:
        """The job that ended and its error, once; None when there is none."""
        ended, self.ended = self.ended, None
        return ended

    async def wait(self) -> None:
        """Returns when nothing runs any more."""
        if self._running is not None:
            await asyncio.wait([asyncio.wrap_future(self._running)])


class HardStateSaver:
    """Writes term and vote in a thread, one after the other, and wakes the owner when they are on disk."""

    __slots__ = ("_executor", "_file", "_saving", "_wake")

    def __init__(self, file: HardStateFile, executor: Executor, wake: Callable[[], None]) -> None:
        self._file = file
        self._executor = executor
        self._wake = wake
        self._saving: Future[None] | None = None

    def save(self, state: HardState) -> bool:
        """True once it is on disk; before that, the owner is woken to ask again. Raises what the disk says."""
        if self._saving is None:
            loop = asyncio.get_running_loop()
            self._saving = self._executor.submit(self._file.write, state)
            self._saving.add_done_callback(lambda _: loop.call_soon_threadsafe(self._wake))
        if not self._saving.done():
            return False
        saved, self._saving = self._saving, None
        saved.result()
        return True

    async def wait(self) -> None:
        """Returns when nothing is on its way any more."""
        if self._saving is not None:
            await asyncio.wait([asyncio.wrap_future(self._saving)])


async def write_checkpoint(log: PartitionLog, checkpoint: Checkpoint, executor: Executor) -> None:
    """Makes `checkpoint` the one of this log, in a thread. Raises OSError: then the one before holds.

    Meanwhile no snapshot may be installed: the thread would put the old log's check-point over it.
    """
    job = log.begin_checkpoint(checkpoint)
    log.is_checkpointing = True
    try:
        await asyncio.get_running_loop().run_in_executor(executor, job.run)
    finally:
        log.is_checkpointing = False
    log.finish_checkpoint(job)
