"""Virtual time: one queue of events for all nodes, and an asyncio loop for each node that lives on it.

A node's loop runs what an event made ready until nothing is, in no time; then the next event comes, whenever that is.
Each loop has its own clock, faster or slower than the world's. A loop that is frozen takes its events in when it thaws;
one that is dead never runs again, which is how `kill -9` looks from inside.

Rule: what happens depends on the queue alone, and the queue on nothing but what was put in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import math
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

_set_running_loop = asyncio._set_running_loop

# Callbacks that one event may lead to. More means that a loop turns without end.
_TURN_CALLBACKS_MAX: Final = 20_000
# Events of one run. A run of half a minute has some ten thousand.
EVENTS_MAX: Final = 400_000


class Target(Protocol):
    """To whom an event happens. A node that was started again has another loop than before."""

    @property
    def loop(self) -> VirtualLoop: ...


_Item = tuple[float, int, "Target | None", Any, "tuple[Any, ...] | None"]


class Violation(AssertionError):
    """A rule was broken. `rule` names it."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail


class World:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._heap: list[_Item] = []
        self._number = 0

    def at(self, when_s: float, target: Target | None, callback: Callable[..., Any], *args: Any) -> None:
        """Calls it then, on the loop the target has then, or on none; a dead loop's events never come."""
        self._number += 1
        heapq.heappush(self._heap, (when_s, self._number, target, callback, args))

    def after(self, delay_s: float, target: Target | None, callback: Callable[..., Any], *args: Any) -> None:
        self.at(self.now_s + delay_s, target, callback, *args)

    def timer(self, when_s: float, loop: VirtualLoop, handle: asyncio.TimerHandle) -> None:
        self._number += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self._number, loop, handle, None))

    def run(self, until_s: float, checked: Callable[[VirtualLoop | None], None]) -> None:
        """Runs events up to that time; `checked` is called after each with the loop it happened to."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until_s:
            item = pop(heap)
            when_s, _, target, callback, args = item
            if args is None and callback._cancelled:
                continue
            self.now_s = when_s
            if target is None:
                loop = None
                assert args is not None
                callback(*args)
            else:
                loop = target.loop
                if loop.is_dead:
                    continue
                if loop.is_frozen:
                    loop.stash.append(item)
                    continue
                loop.turn(callback, args)
            self.events += 1
            if self.events > EVENTS_MAX:
                raise Violation("liveness", f"{EVENTS_MAX} events and no end: something sends without rest")
            checked(loop)
        self.now_s = until_s

    def thaw(self, loop: VirtualLoop) -> None:
        """What happened to a frozen loop meanwhile happens now, in the order in which it came."""
        loop.is_frozen = False
        stash, loop.stash = loop.stash, []
        for _, number, target, callback, args in stash:
            heapq.heappush(self._heap, (self.now_s, number, target, callback, args))


class VirtualLoop(asyncio.BaseEventLoop):
    """`rate` and `offset_s` make its time: `offset_s + rate * world time`."""

    def __init__(self, world: World, name: str, rate: float = 1.0, offset_s: float = 0.0) -> None:
        super().__init__()
        self.world = world
        self.name = name
        self.rate = rate
        self.offset_s = offset_s
        self.loop = self
        self.owner: Any = None  # whose loop this is, for those who watch
        self.is_dead = False
        self.is_frozen = False
        self.stash: list[_Item] = []
        self.unhandled: list[dict[str, Any]] = []  # what no task or future took
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._tasks_max = 200  # then those that are done are forgotten
        self._handles = self._ready  # type: ignore[attr-defined]
        self.set_exception_handler(lambda loop, context: self.unhandled.append(context))

    def __del__(self) -> None:  # the base class warns of a loop that was not closed; this one has nothing to close
        pass

    def time(self) -> float:
        return self.offset_s + self.rate * self.world.now_s

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        due_s = (when - self.offset_s) / self.rate
        while self.offset_s + self.rate * due_s < when:  # rounded down: who wakes then would find it too early
            due_s = math.nextafter(due_s, math.inf)
        self.world.timer(due_s, self, handle)
        return handle

    def create_task(self, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        task = super().create_task(coro, **options)
        if len(self._tasks) > self._tasks_max:
            self._tasks = {found: None for found in self._tasks if not found.done()}
            self._tasks_max = 2 * len(self._tasks) + 200
        self._tasks[task] = None
        return task

    def turn(self, callback: Any, args: tuple[Any, ...] | None) -> None:
        """One event: this call, or without `args` this handle, and all that it makes ready."""
        _set_running_loop(self)
        try:
            if args is None:
                callback._run()
            else:
                callback(*args)
            ready, left = self._handles, _TURN_CALLBACKS_MAX
            while ready:
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
                left -= 1
                if left == 0:
                    raise Violation("liveness", f"{self.name} turns without end")
        finally:
            _set_running_loop(None)

    def die(self) -> None:
        """The process is gone. Its tasks are closed so that nothing of them runs later."""
        self.is_dead = True
        self._handles.clear()
        self.stash = []
        tasks, self._tasks = self._tasks, {}
        _set_running_loop(self)
        before, sys.unraisablehook = sys.unraisablehook, _ignore_last_words
        try:
            for task in tasks:
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    coroutine = task.get_coro()
                    assert coroutine is not None
                    with contextlib.suppress(RuntimeError):  # it wanted to wait once more
                        coroutine.close()
        finally:
            sys.unraisablehook = before
            _set_running_loop(None)
            self._handles.clear()

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: Any) -> None:
        pass

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass


def _ignore_last_words(what: sys.UnraisableHookArgs) -> None:
    """A coroutine that was closed wanted to wait once more: its process is gone."""
    if not isinstance(what.exc_value, RuntimeError):
        sys.__unraisablehook__(what)


class VirtualClock:
    """The `Clock` of a node."""

    def __init__(self, loop: VirtualLoop, epoch_us: int) -> None:
        self._loop = loop
        self._epoch_us = epoch_us

    def now_us(self) -> int:
        return self._epoch_us + int(self._loop.time() * 1_000_000)

    def monotonic_s(self) -> float:
        return self._loop.time()
