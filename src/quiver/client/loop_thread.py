"""The one background event loop that all synchronous clients of a process share.

Rule: started when first needed, a daemon thread, never carried over a fork: a child gets its own.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from quiver.errors import ClosedError

T = TypeVar("T")

_lock = threading.Lock()
_shared: LoopThread | None = None


class LoopThread:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="quiver-io", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs it on the loop and waits. Ctrl-C cancels it."""
        if sys.is_finalizing():  # the thread does not run any more: this would wait for ever
            coroutine.close()
            raise ClosedError("Python is shutting down; close clients before the end of the program")
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise


def shared_loop() -> LoopThread:
    global _shared
    with _lock:
        if _shared is None or _shared.pid != os.getpid():
            _shared = LoopThread()
        return _shared


def _after_fork_in_child() -> None:
    # Another thread may have held the lock at the moment of the fork.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
