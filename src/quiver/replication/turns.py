"""When the owner of a log has its turn.

Whoever has something for it wakes it; what came by the time of its turn is taken together. Rule: turns never overlap,
and all are on the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Turns:
    __slots__ = ("_due", "_loop", "_turn")

    def __init__(self, turn: Callable[[], None]) -> None:
        self._turn = turn
        self._due = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """From here on there are turns. The first comes by itself."""
        self._loop = asyncio.get_running_loop()
        self._due = True
        self._loop.call_soon(self._run)

    def wake(self) -> None:
        """Soon: at the next turn of the loop."""
        if not self._due and self._loop is not None:
            self._due = True
            self._loop.call_soon(self._run)

    def now(self) -> None:
        """At once, where nothing more is going to come in this turn of the loop."""
        if self._loop is not None:
            self._due = False
            self._turn()

    def _run(self) -> None:
        if self._due:
            self._due = False
            self._turn()

    def stop(self) -> None:
        self._due, self._loop = False, None
