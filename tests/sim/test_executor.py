"""Disk work in simulated threads."""

from __future__ import annotations

import random

from quiver.testing.faulty_disk import FaultyDisk
from quiver.testing.sim.executor import SimulatedExecutor
from quiver.testing.sim.world import VirtualLoop, World


def made() -> tuple[World, SimulatedExecutor]:
    world = World()
    return world, SimulatedExecutor(VirtualLoop(world, "a"), lambda job: 0.5)


def run(world: World, until_s: float) -> None:
    world.run(until_s, lambda loop: None)


def test_a_job_is_done_after_its_latency_and_not_before() -> None:
    world, executor = made()
    done: list[float] = []
    future = executor.submit(lambda: done.append(world.now_s) or 7)  # type: ignore[func-returns-value]
    run(world, 0.4)
    assert not done and not future.done()
    run(world, 1.0)
    assert done == [0.5] and future.result() == 7


def test_an_error_is_the_outcome() -> None:
    world, executor = made()
    future = executor.submit(lambda: 1 / 0)
    run(world, 1.0)
    assert isinstance(future.exception(), ZeroDivisionError)


def test_a_cancelled_job_is_not_done() -> None:
    world, executor = made()
    done: list[int] = []
    future = executor.submit(done.append, 1)
    assert future.cancel()
    run(world, 1.0)
    assert not done


def test_a_job_that_the_machine_interrupts_is_done_in_part() -> None:
    outcomes = set()
    for seed in range(40):
        _, executor = made()
        disk = FaultyDisk(seed)
        disk.make_directory("d")
        file = disk.open("d/f", create=True)

        def job(file=file) -> None:  # type: ignore[no-untyped-def]
            for number in range(4):
                file.pwrite([b"x" * 512], 512 * number)
                file.datasync()

        executor.submit(job)
        executor.interrupt(disk, random.Random(seed))
        disk.kill()
        outcomes.add(disk.open("d/f").size())
    assert {0, 512, 1024} <= outcomes
    assert 2048 not in outcomes
