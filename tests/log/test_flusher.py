from __future__ import annotations

import asyncio
import dataclasses
import errno
from collections.abc import Callable
from typing import Any

import pytest

from quiver.errors import DiskFullError, LogFailedError
from quiver.log.flusher import (
    ALONE_S_MIN,
    BYTES_PER_S,
    DISTRUST_S_MAX,
    DISTRUST_S_MIN,
    INLINE_BYTES_MAX,
    INLINE_MEAN_S_MAX,
    STALL_S_MAX,
    Flusher,
    FlushPolicy,
)
from quiver.log.replica import SoloReplica
from quiver.testing.faulty_disk import FaultyDisk
from tests.broker.kit import HeldExecutor, SimulatedClock, settle, simulate
from tests.log.log_kit import contents, data, open_log


@dataclasses.dataclass
class Job:
    """Stands for a flush: takes its time on the simulated clock."""

    clock: SimulatedClock
    takes_s: float = 0.0004
    size_bytes: int = 100
    only_appends: bool = True
    error: Exception | None = None

    def run(self) -> None:
        self.clock.now_s += self.takes_s
        if self.error is not None:
            raise self.error


class Kit:
    """A policy that has seen one flusher alone for long enough."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.policy = FlushPolicy(self.clock)
        self.threads = HeldExecutor()
        self.wakes = 0
        self.flusher = self.new_flusher()
        self.policy.admits(self.flusher, 100, self.clock.now_s)
        self.clock.now_s += 2 * ALONE_S_MIN

    def new_flusher(self) -> Flusher:
        return Flusher(self.threads, self.policy, self.woken)

    def woken(self) -> None:
        self.wakes += 1

    def job(self, **facts: Any) -> Any:
        return Job(self.clock, **facts)

    def runs_inline(self, flusher: Flusher | None = None, **facts: Any) -> bool:
        """Starts a job and brings it to its end, wherever it runs."""
        flusher = flusher or self.flusher
        job = self.job(**facts)

        async def main() -> bool:
            flusher.start(job)
            inline = not flusher.is_busy
            if not inline:
                self.threads.run_one()
                await settle()
            assert flusher.finished() == (job, job.error)
            return inline

        return simulate(main())


@pytest.fixture
def kit() -> Kit:
    return Kit()


# -- the policy ------------------------------------------------------------------------------------------------------


def test_lone_small_append_runs_on_the_loop(kit: Kit) -> None:
    assert kit.runs_inline()
    assert kit.wakes == 0, "the caller has the outcome already"


def test_first_flush_of_a_log_runs_in_a_thread() -> None:
    kit = Kit()
    newcomer = kit.new_flusher()
    assert not kit.runs_inline(newcomer)
    kit.clock.now_s += 2 * ALONE_S_MIN
    assert kit.runs_inline(newcomer)


def test_logs_that_flush_in_turns_use_threads(kit: Kit) -> None:
    other = kit.new_flusher()
    for _ in range(5):
        assert not kit.runs_inline(other)
        assert not kit.runs_inline()
    kit.clock.now_s += 2 * ALONE_S_MIN
    assert kit.runs_inline()


@pytest.mark.parametrize("facts", [{"only_appends": False}, {"size_bytes": INLINE_BYTES_MAX + 1}])
def test_flush_that_is_large_or_makes_files_runs_in_a_thread(kit: Kit, facts: dict[str, Any]) -> None:
    assert not kit.runs_inline(**facts)
    assert kit.runs_inline()


def test_no_flush_blocks_the_loop_while_another_runs_in_a_thread(kit: Kit) -> None:
    async def main() -> None:
        other = kit.new_flusher()
        other.start(kit.job(takes_s=1.0))
        kit.policy.admits(kit.flusher, 100, kit.clock.now_s)
        kit.clock.now_s += 2 * ALONE_S_MIN
        kit.flusher.start(kit.job())
        assert kit.flusher.is_busy
        while kit.threads.jobs:
            kit.threads.run_one()
        await settle()
        kit.flusher.finished()
        kit.flusher.start(kit.job())
        assert not kit.flusher.is_busy

    simulate(main())


def test_one_short_stall_is_forgiven_and_two_together_are_not(kit: Kit) -> None:
    assert kit.runs_inline(takes_s=0.05)
    assert all(kit.runs_inline() for _ in range(20))
    assert kit.runs_inline(takes_s=0.05)
    assert kit.runs_inline(takes_s=0.05)
    assert not kit.runs_inline()
    kit.clock.now_s += DISTRUST_S_MIN + 0.001
    assert kit.runs_inline()


def test_one_long_stall_sends_the_next_to_threads(kit: Kit) -> None:
    assert kit.runs_inline(takes_s=STALL_S_MAX + 0.001)
    assert not kit.runs_inline()


def test_disk_that_is_always_a_little_slow_is_left_to_threads(kit: Kit) -> None:
    inline = [kit.runs_inline(takes_s=2 * INLINE_MEAN_S_MAX) for _ in range(100)]
    assert 0 < sum(inline) < 20
    assert not inline[-1]


def test_fast_disk_stays_trusted(kit: Kit) -> None:
    assert all(kit.runs_inline(takes_s=INLINE_MEAN_S_MAX * 0.9) for _ in range(1000))


def test_large_flush_may_take_longer(kit: Kit) -> None:
    longer_s = INLINE_BYTES_MAX / BYTES_PER_S
    assert all(kit.runs_inline(takes_s=0.002 + longer_s, size_bytes=INLINE_BYTES_MAX) for _ in range(100))
    assert not all(kit.runs_inline(takes_s=0.003 + longer_s, size_bytes=INLINE_BYTES_MAX) for _ in range(100))


def test_distrust_doubles_to_its_maximum_while_the_disk_stays_slow(kit: Kit) -> None:
    distrust_s = DISTRUST_S_MIN
    for _ in range(10):
        assert kit.runs_inline(takes_s=1.0)
        kit.clock.now_s += distrust_s - 0.001
        assert not kit.runs_inline(takes_s=0.0)
        kit.clock.now_s += 0.002
        distrust_s = min(2 * distrust_s, DISTRUST_S_MAX)


def test_distrust_starts_over_after_the_disk_was_good(kit: Kit) -> None:
    assert kit.runs_inline(takes_s=1.0)
    kit.clock.now_s += DISTRUST_S_MIN + 0.001
    assert kit.runs_inline(takes_s=1.0)
    kit.clock.now_s += 2 * DISTRUST_S_MIN + 0.001
    assert kit.runs_inline()
    kit.clock.now_s += 2 * DISTRUST_S_MIN + 1
    assert kit.runs_inline(takes_s=1.0)
    kit.clock.now_s += DISTRUST_S_MIN + 0.001
    assert kit.runs_inline()


# -- the flusher -----------------------------------------------------------------------------------------------------


def test_thread_wakes_the_owner_and_the_outcome_is_given_once(kit: Kit) -> None:
    async def main() -> None:
        job = kit.job(only_appends=False)
        kit.flusher.start(job)
        await settle()
        assert (kit.wakes, kit.flusher.finished()) == (0, None)
        kit.threads.run_one()
        await settle()
        assert kit.wakes == 1
        assert not kit.flusher.is_busy
        assert kit.flusher.finished() == (job, None)
        assert kit.flusher.finished() is None

    simulate(main())


def test_wait_returns_when_nothing_runs_any_more(kit: Kit) -> None:
    async def main() -> None:
        await kit.flusher.wait()
        kit.flusher.start(kit.job(only_appends=False))
        waiting = asyncio.ensure_future(kit.flusher.wait())
        await settle()
        assert not waiting.done()
        kit.threads.run_one()
        await waiting
        assert kit.policy.in_threads == 0

    simulate(main())


def test_error_is_an_outcome_wherever_it_happens(kit: Kit) -> None:
    assert kit.runs_inline(error=OSError(errno.EIO, "broken"))
    assert not kit.runs_inline(error=OSError(errno.EIO, "broken"), only_appends=False)
    assert kit.runs_inline()


# -- a replica on it -------------------------------------------------------------------------------------------------


def no_space(disk: FaultyDisk) -> None:
    disk.capacity_bytes = 0


def bad_sync(disk: FaultyDisk) -> None:
    disk.fail("datasync", errno.EIO, path=".seg")


@pytest.mark.parametrize(("trouble", "expected"), [(no_space, DiskFullError), (bad_sync, LogFailedError)])
def test_failed_flush_leaves_the_same_log_inline_as_in_a_thread(
    trouble: Callable[[FaultyDisk], None], expected: type[Exception]
) -> None:
    async def outcome(*, inline: bool) -> Any:
        clock, disk, threads = SimulatedClock(), FaultyDisk(1), HeldExecutor()
        log = open_log(disk)
        replica = SoloReplica(log, threads, clock, lambda: None, FlushPolicy(clock) if inline else None)

        async def step() -> Any:
            error = replica.step()
            while threads.jobs:
                threads.run_one()
                await settle()
                error = replica.step()
            return error

        replica.propose(data(1))
        assert await step() is None
        clock.now_s += 2 * ALONE_S_MIN
        replica.propose(data(2))
        assert replica.step() is None
        assert len(threads.jobs) == (0 if inline else 1)
        assert await step() is None
        trouble(disk)
        replica.propose(data(3))
        error = await step()
        await replica.close()
        return type(error), str(error), replica.commit_end, log.next_index, str(log.failure), contents(log)

    inline, in_thread = simulate(outcome(inline=True)), simulate(outcome(inline=False))
    assert inline == in_thread
    assert inline[:1] + inline[2:4] == (expected, 3, 3)
