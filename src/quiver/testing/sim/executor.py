"""Disk work in threads, without threads: a job is done after a while, on the loop, all at once.

Rule: nothing of a job is done before its time, unless the machine stops meanwhile: then chance decides how far it was.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from quiver.testing.faulty_disk import FaultyDisk, SimulatedCrash
from quiver.testing.sim.world import VirtualLoop

T = TypeVar("T")

_STEPS_MAX = 5  # changes and syncs of an interrupted job that still happened


class SimulatedExecutor(Executor):
    """`latency_s` is asked for each job."""

    def __init__(self, loop: VirtualLoop, latency_s: Callable[[Callable[..., Any]], float]) -> None:
        self._loop = loop
        self._latency_s = latency_s
        self._jobs: dict[Future[Any], Callable[[], Any]] = {}

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        self._jobs[future] = lambda: fn(*args, **kwargs)
        self._loop.world.after(self._latency_s(fn), self._loop, self._finish, future)
        return future

    def _finish(self, future: Future[Any]) -> None:
        job = self._jobs.pop(future)
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = job()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def interrupt(self, disk: FaultyDisk, chance: random.Random) -> None:
        """The machine stops: the oldest jobs may have been done, and the next one up to some step."""
        disk.stop_at(chance.randint(1, _STEPS_MAX))
        for job in self._jobs.values():
            if chance.random() < 0.3:
                continue  # its thread had not come to it
            try:
                job()
            except SimulatedCrash:
                break
            except Exception:  # nobody will hear of it
                continue
        self._jobs = {}

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass
