"""Virtual time and the loops that live on it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from quiver.testing.sim.world import Violation, VirtualClock, VirtualLoop, World


def begin(loop: VirtualLoop, work: Coroutine[Any, Any, None]) -> None:
    loop.turn(loop.create_task, (work,))


def run(world: World, until_s: float) -> None:
    world.run(until_s, lambda loop: None)


def test_sleep_takes_virtual_time_and_no_other() -> None:
    world = World()
    loop, seen = VirtualLoop(world, "a"), []

    async def sleeper() -> None:
        await asyncio.sleep(3600)
        seen.append(world.now_s)

    begin(loop, sleeper())
    run(world, 3599)
    assert not seen
    run(world, 7200)
    assert seen == [3600]


def test_a_loop_has_its_own_rate_and_offset() -> None:
    world = World()
    loop, seen = VirtualLoop(world, "fast", rate=2.0, offset_s=50.0), []

    async def sleeper() -> None:
        await asyncio.sleep(10)
        seen.append((world.now_s, loop.time()))

    begin(loop, sleeper())
    run(world, 100)
    assert seen == [(5.0, 60.0)]
    assert VirtualClock(loop, 0).monotonic_s() == 250.0


def test_events_come_in_the_order_of_their_time_and_then_of_their_making() -> None:
    world, seen = World(), []
    for when_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        world.at(when_s, None, seen.append, name)
    run(world, 10)
    assert seen == ["a", "b", "c"]
    assert world.events == 3


def test_a_frozen_loop_takes_everything_in_when_it_thaws() -> None:
    world, seen = World(), []
    loop = VirtualLoop(world, "a")
    loop.is_frozen = True
    for when_s in (1.0, 2.0):
        world.at(when_s, loop, lambda: seen.append(world.now_s))
    run(world, 5)
    assert not seen
    world.thaw(loop)
    run(world, 6)
    assert seen == [5.0, 5.0]


def test_nothing_happens_to_a_dead_loop() -> None:
    world, seen = World(), []
    loop = VirtualLoop(world, "a")

    async def sleeper() -> None:
        try:
            await asyncio.sleep(1)
            seen.append("woke")
        finally:
            seen.append("closed")

    begin(loop, sleeper())
    world.at(2.0, loop, seen.append, "event")
    loop.die()
    run(world, 10)
    assert seen == ["closed"]


def test_a_cancelled_timer_is_no_event() -> None:
    world = World()
    loop = VirtualLoop(world, "a")
    loop.turn(lambda: loop.call_later(1.0, lambda: None).cancel(), ())
    run(world, 5)
    assert world.events == 0


def test_a_loop_that_turns_without_end_is_a_violation() -> None:
    world = World()
    loop = VirtualLoop(world, "a")

    def again() -> None:
        loop.call_soon(again)

    with pytest.raises(Violation, match="turns without end"):
        loop.turn(again, ())


def test_what_no_task_takes_is_kept() -> None:
    world = World()
    loop = VirtualLoop(world, "a")
    world.at(1.0, loop, lambda: loop.call_soon(lambda: 1 / 0))
    run(world, 2)
    assert isinstance(loop.unhandled[0]["exception"], ZeroDivisionError)


def test_a_timer_never_comes_before_its_time_by_its_own_clock() -> None:
    world, early = World(), []
    loop = VirtualLoop(world, "a", rate=0.9871, offset_s=733.1234567)
    for number in range(500):
        when = loop.time() + number * 0.0137

        def look(when: float = when) -> None:
            early.append(loop.time() < when)

        loop.turn(loop.call_at, (when, look))
    run(world, 100)
    assert len(early) == 500 and not any(early)
