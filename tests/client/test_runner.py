"""When a run ends and when it goes on, on a clock by hand: each look for records takes a second."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from quiver.client import runner
from quiver.client.runner import Course, Runner, run_tasks
from quiver.errors import MemberFencedError, QuiverError, UnavailableError
from quiver.types import Record

TIMEOUT_S = 3.0

ONE = Record("t", 0, 0, 0, None, b"one", {})

Look = list[Record] | QuiverError


class Source:
    """Gives what is planned, then nothing for ever. It has nothing to read for the first `waits` looks."""

    def __init__(self, clock: SimpleNamespace, plan: list[Look], waits: int, fenced_commits: int = 0) -> None:
        self._clock, self._plan = clock, plan
        self._waits = waits
        self._fenced_commits = fenced_commits
        self.looks = self.commits = 0

    def poll(self, max_records: int = 1, timeout: float = 0.0) -> list[Record]:
        assert self.looks < 1000, "it does not end"
        self._clock.now_s += 1.0
        self.looks += 1
        found = self._plan.pop(0) if self._plan else []
        if isinstance(found, QuiverError):
            raise found
        return found

    def commit(self) -> None:
        self.commits += 1
        if self.commits <= self._fenced_commits:
            raise MemberFencedError("another member of group g has this partition")

    @property
    def is_waiting(self) -> bool:
        return self.looks < self._waits


class AsyncSource(Source):
    async def poll(self, max_records: int = 1, timeout: float = 0.0) -> list[Record]:  # type: ignore[override]
        return super().poll(max_records, timeout)

    async def commit(self) -> None:  # type: ignore[override]
        super().commit()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now_s=100.0)
    made.monotonic = lambda: made.now_s
    monkeypatch.setattr(runner, "time", made)
    return made


@pytest.fixture(params=["threads", "tasks"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def play(way: str, clock: SimpleNamespace, plan: list[Look], waits: int = 0, fenced_commits: int = 0) -> Source:
    """Runs until silence. `handled` is checked: every record that was given."""
    course = Course(TIMEOUT_S, 0.0, 0.0, commits=True, skips=False, heard_at_s=clock.now_s)
    expected = sum(len(look) for look in plan if isinstance(look, list))
    if way == "threads":
        source = Source(clock, plan, waits, fenced_commits)
        handled = Runner(lambda record: None, course, threading.Event()).run({"t": source})
    else:
        source = AsyncSource(clock, plan, waits, fenced_commits)
        handled = asyncio.run(run_tasks(lambda record: None, course, asyncio.Event(), {"t": source}))  # type: ignore[dict-item]
    assert handled == expected
    return source


def test_it_ends_after_silence(way: str, clock: SimpleNamespace) -> None:
    assert play(way, clock, [[ONE], [], [], [ONE]]).looks == 4 + 3


def test_waiting_for_something_to_read_is_no_silence(way: str, clock: SimpleNamespace) -> None:
    assert play(way, clock, [], waits=20).looks == 20 + 3, "from then on silence counts"
    assert play(way, clock, [[]] * 22 + [[ONE]], waits=20).looks == 23 + 3


def test_a_server_that_cannot_be_reached_is_silent(way: str, clock: SimpleNamespace) -> None:
    assert play(way, clock, [UnavailableError("away")] * 10, waits=20).looks == 3


def test_who_is_fenced_goes_on(way: str, clock: SimpleNamespace) -> None:
    source = play(way, clock, [[ONE], [ONE]], fenced_commits=1)
    assert (source.looks, source.commits) == (2 + 3, 2)
