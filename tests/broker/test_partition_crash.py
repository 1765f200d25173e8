"""A partition under load on a disk that stops at random points, life after life.

After each restart, and at the end: every acknowledged batch is there once, at the offset that was promised, in the
order of its producer; offsets are dense; positions have not moved back; nobody was told a lie.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import pytest

from quiver.broker.partition import Partition
from quiver.errors import DiskFullError, LogFailedError, OutOfOrderSequenceError
from quiver.testing.faulty_disk import FaultyDisk, SimulatedCrash
from quiver.wire.frame import Entry
from quiver.wire.messages import Position, ProduceReply
from tests.broker.kit import LOG, Bench, batch, check_dense, frames_from, simulate

T = TypeVar("T")

PRODUCERS = 3
BATCHES = 12  # that each producer wants to store
WINDOW = 3  # that it sends without waiting


class ChanceExecutor(Executor):
    """Keeps jobs; the load runs one now and then, so that appends fall before, between and after disk work."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        self.jobs.append((functools.partial(fn, *args, **kwargs), future))
        return future

    async def run(self, chance: random.Random) -> None:
        while True:
            await asyncio.sleep(chance.choice((0, 0, 0.001, 0.01)))
            if self.jobs:
                job, future = self.jobs.pop(chance.randrange(len(self.jobs)))
                try:
                    future.set_result(job())
                except Exception as error:
                    future.set_exception(error)


@dataclasses.dataclass
class World:
    """What the clients know. It outlives the broker."""

    chance: random.Random
    disk: FaultyDisk
    wanted: dict[int, list[Entry]] = dataclasses.field(default_factory=dict)
    done: dict[int, int] = dataclasses.field(default_factory=dict)  # batches acknowledged, by producer
    promised: dict[bytes, int] = dataclasses.field(default_factory=dict)  # payload -> base offset
    position_acked: int = 0
    position_asked: int = 0
    lives: int = 0

    def __post_init__(self) -> None:
        for producer in range(1, PRODUCERS + 1):
            sequence, batches = 0, []
            for _ in range(BATCHES):
                entry = batch(
                    sequence, self.chance.randint(1, 4), producer=producer, text="x" * self.chance.randint(0, 400)
                )
                sequence += entry.record_count
                batches.append(entry)
            self.wanted[producer], self.done[producer] = batches, 0

    @property
    def finished(self) -> bool:
        return all(count == BATCHES for count in self.done.values())

    async def produce(self, partition: Partition, producer: int) -> None:
        """Sends a window at a time; what is not acknowledged is sent again, in order, with its old sequence."""
        attempts = 0
        while (done := self.done[producer]) < BATCHES:
            attempts += 1
            assert attempts < 1000, "a retry is refused for ever"
            window = self.wanted[producer][done : done + self.chance.randint(1, WINDOW)]
            replies = await asyncio.gather(*map(partition.produce, window), return_exceptions=True)
            dead = False
            for entry, reply in zip(window, replies, strict=True):
                if isinstance(reply, ProduceReply):
                    assert self.done[producer] == self.wanted[producer].index(entry), "acknowledged after a gap"
                    self.done[producer] += 1
                    assert self.promised.setdefault(bytes(entry.payload), reply.base_offset) == reply.base_offset
                else:
                    assert isinstance(reply, (DiskFullError, LogFailedError, OutOfOrderSequenceError)), reply
                    dead = dead or isinstance(reply, LogFailedError)
            if dead:
                return
            await asyncio.sleep(self.chance.random() * 0.01)

    async def consume(self, partition: Partition) -> None:
        while not self.finished:
            offset = self.chance.randint(0, partition.high_watermark)
            self.position_asked = max(self.position_asked, offset)
            try:
                held = await partition.commit_position(Position("group", offset))
            except DiskFullError:
                held = 0
            except LogFailedError:
                return
            self.position_acked = max(self.position_acked, held)
            await asyncio.sleep(self.chance.random() * 0.02)

    async def retain(self, partition: Partition) -> None:
        while True:
            await asyncio.sleep(self.chance.random() * 0.05)
            with contextlib.suppress(DiskFullError, LogFailedError):
                await partition.apply_retention()

    async def vary_space(self) -> None:
        """The disk fills up and is cleaned, again and again."""
        while True:
            await asyncio.sleep(self.chance.random() * 0.05)
            # Room for nothing, or for a part of the next write.
            self.disk.capacity_bytes = None if self.disk.capacity_bytes is not None else self.chance.choice((0, 5000))

    async def check(self, partition: Partition) -> None:
        await check_dense(partition)
        found = await frames_from(partition, partition.start_offset)
        places = {payload: header.base_offset for header, payload in found}
        assert len(places) == len(found), "a batch is there twice"
        for payload, offset in self.promised.items():
            assert offset < partition.start_offset or places.get(payload) == offset, "a promise was broken"
        for producer, batches in self.wanted.items():
            order = [bytes(entry.payload) for entry in batches]
            numbers = [order.index(payload) for header, payload in found if header.producer_id == producer]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        position = partition.state.positions.get("group")
        assert self.position_acked <= (position or 0) <= self.position_asked

    async def live(self, bench: Bench, stop_at: int | None) -> None:
        """One life of the broker, until the work is done or the disk stops."""
        self.lives += 1
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # tasks that die with the machine
        executor = ChanceExecutor()
        bench.writers = executor
        if stop_at is not None and self.chance.random() < 0.3:
            self.disk.stop_at(stop_at)  # perhaps already in recovery
        partition = bench.open()
        await self.check(partition)
        if stop_at is not None:
            self.disk.stop_at(stop_at)
        background = [asyncio.ensure_future(executor.run(self.chance)), asyncio.ensure_future(self.vary_space())]
        work = [self.produce(partition, producer) for producer in self.wanted]
        background.append(asyncio.ensure_future(self.retain(partition)))
        await asyncio.gather(*work, self.consume(partition))
        for task in background:
            task.cancel()
        if self.finished:
            await self.check(partition)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Each crash is told in the log; here they are the point."""
    logger = logging.getLogger("quiver.broker")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


SETTINGS = [
    dataclasses.replace(LOG, segment_bytes_max=2000, checkpoint_bytes=10**9),
    dataclasses.replace(LOG, segment_bytes_max=700, checkpoint_bytes=1500),
    dataclasses.replace(LOG, segment_bytes_max=700, checkpoint_bytes=1500, retention_bytes=6000),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["no check-points", "check-points", "retention"])
@pytest.mark.parametrize("block", range(3))
def test_nothing_acknowledged_is_lost_or_doubled_over_many_crashes(settings: Any, block: int) -> None:
    with quiet():
        for seed in range(block * 6, block * 6 + 6):
            chance = random.Random(f"{seed} {settings}")
            world = World(chance, FaultyDisk(seed))
            bench = Bench(world.disk, settings)
            while not world.finished:
                # The disk stops after a few operations; now and then it does not, so that the work ends.
                stop_at = chance.randint(1, 60) if world.lives < 15 else None
                with contextlib.suppress(SimulatedCrash):
                    simulate(world.live(bench, stop_at))
                world.disk.capacity_bytes = None
                if chance.random() < 0.7:
                    world.disk.crash()
                else:
                    world.disk.kill()
                assert world.lives < 40, "the load makes no progress"
            with contextlib.suppress(SimulatedCrash):
                simulate(world.live(bench, None))
