from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

import quiver.net.server


@pytest.fixture(params=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a test's coroutine on either loop, with an end to all waiting."""
    runner = uvloop.run if request.param == "uvloop" else asyncio.run

    async def to_its_end(main: Coroutine[Any, Any, None]) -> None:
        await asyncio.wait_for(main, 20)
        for _ in range(5):  # transports that were closed last are gone a few turns later
            await asyncio.sleep(0)

    def run_to_end(main: Coroutine[Any, Any, None]) -> None:
        runner(to_its_end(main))

    return run_to_end


@pytest.fixture
def fast_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time-outs are looked at every few milliseconds instead of every second."""
    monkeypatch.setattr(quiver.net.server, "_SWEEP_S", 0.01)
