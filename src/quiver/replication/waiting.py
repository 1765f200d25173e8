"""Who waits for an entry or a commit, and how it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol


class Asker(Protocol):
    """Who waits for one answer: a future, or what answers a request by itself."""

    def done(self) -> bool:
        """Answered, or gone."""
        ...

    def set_result(self, result: Any, /) -> None: ...

    def set_exception(self, error: Any, /) -> None: ...


Waiter = tuple[Asker, Any]  # who waits, and the reply


def settle(future: Asker, result: Any) -> None:
    if not future.done():
        future.set_result(result)


def refuse(waiters: Iterable[Waiter], error: Exception) -> None:
    for future, _ in waiters:
        if not future.done():
            future.set_exception(error)


class Signal:
    """Wakes everyone who waits for the next commit."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[bool], None] = {}  # woken in the order in which they came

    async def wait(self, timeout_s: float) -> bool:
        """False when it did not come in time."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(timeout_s, settle, waiter, False)
        self._waiting[waiter] = None
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiting.pop(waiter, None)

    def give(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            settle(waiter, True)

    def end(self, error: Exception) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(error)
