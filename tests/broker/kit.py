"""What the broker's tests share: small batches, executors that a test controls, simulated time, a partition."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from crc32c import crc32c

from quiver.broker.partition import Partition
from quiver.config import LogSettings
from quiver.log.disk import Disk
from quiver.log.partition_log import PartitionLog
from quiver.testing.faulty_disk import FaultyDisk
from quiver.types import PartitionStatus
from quiver.wire.frame import Entry, FrameHeader, Kind, walk_frames

T = TypeVar("T")

DIRECTORY = "data/partition"
LOG = LogSettings(segment_bytes_max=1000, index_interval_bytes=200, checkpoint_bytes=10**9, retention_ms=None)


def batch(
    sequence: int = 0, count: int = 2, *, producer: int = 0, epoch: int = 0, text: str = "", timestamp: int = 0
) -> Entry:
    """A batch that can be told apart by its payload. The partition does not look into it."""
    payload = f"producer {producer} epoch {epoch} sequence {sequence} {text}".encode()
    return Entry(Kind.DATA, payload, crc32c(payload), count, timestamp, timestamp, 1, epoch, producer, sequence)


class InlineExecutor(Executor):
    """Runs each job at once, in the caller's thread: everything is a function of the seed."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class HeldExecutor(Executor):
    """Keeps jobs until the test lets them run, one by one and in order."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        self.jobs.append((functools.partial(fn, *args, **kwargs), future))
        return future

    def run_one(self) -> None:
        job, future = self.jobs.popleft()
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)


class SimulatedClock:
    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0

    def now_us(self) -> int:
        return int(self.now_s * 1_000_000)

    def monotonic_s(self) -> float:
        return self.now_s


class SimulatedTimeLoop(asyncio.SelectorEventLoop):
    """A loop that does not wait: when nothing is ready, time jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        real_select = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None) -> Any:
            assert timeout is not None, "everything waits and no timer is set: this would hang"
            self._now_s += max(0.0, timeout)
            return real_select(0)

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now_s


def simulate(main: Coroutine[Any, Any, T]) -> T:
    """Runs to the end in simulated time."""
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        return runner.run(main)


async def settle() -> None:
    """Lets everything happen that can happen now."""
    for _ in range(30):
        await asyncio.sleep(0)


def now_s() -> float:
    return asyncio.get_running_loop().time()


@dataclasses.dataclass
class Bench:
    """One partition on a disk, opened and opened again."""

    disk: Disk
    settings: LogSettings = LOG
    writers: Executor = dataclasses.field(default_factory=InlineExecutor)
    readers: Executor = dataclasses.field(default_factory=InlineExecutor)
    clock: SimulatedClock = dataclasses.field(default_factory=SimulatedClock)

    def open(self) -> Partition:
        log = PartitionLog(self.disk, DIRECTORY, self.settings)
        partition = Partition("logs", 0, log, self.disk, self.writers, self.readers, self.clock)
        partition.start()
        return partition

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Partition]:
        partition = self.open()
        try:
            yield partition
        finally:
            await partition.stop()


def held(seed: int = 0) -> tuple[Bench, HeldExecutor, FaultyDisk]:
    writers, disk = HeldExecutor(), FaultyDisk(seed)
    return Bench(disk, writers=writers), writers, disk


async def finish(writers: HeldExecutor) -> None:
    """Lets the disk do all that is asked of it."""
    await settle()
    while writers.jobs:
        writers.run_one()
        await settle()


async def frames_from(partition: Partition, offset: int, bytes_max: int = 10**6) -> list[tuple[FrameHeader, bytes]]:
    """All frames with records from an offset to the end, read as a consumer reads."""
    found: list[tuple[FrameHeader, bytes]] = []
    while offset < partition.high_watermark:
        chunk = await partition.read(offset, bytes_max)
        frames = [(header, bytes(payload)) for _, header, payload in walk_frames(chunk) if header.record_count]
        assert frames, "an empty answer below the high watermark looks like the end of the log"
        found += frames
        offset = frames[-1][0].next_offset
    return found


async def payloads(partition: Partition) -> list[bytes]:
    return [payload for _, payload in await frames_from(partition, partition.start_offset)]


async def check_dense(partition: Partition) -> None:
    """Offsets are dense, unique and rising from the log start to the high watermark."""
    expected = None
    for header, _ in await frames_from(partition, partition.start_offset):
        assert expected is None or header.base_offset == expected
        expected = header.next_offset
    assert expected is None or expected == partition.high_watermark


def describe(status: PartitionStatus) -> tuple[str, int, int]:
    return status.state, status.start_offset, status.next_offset
