"""The client's shared loop at the end of its life."""

from __future__ import annotations

import subprocess
import sys


def test_a_client_that_is_closed_when_python_shuts_down_does_not_hold_it_up() -> None:
    """A generator with a client in it, left open to the end, is closed when the loop's thread runs no more."""
    script = """
import asyncio
from quiver.client.loop_thread import shared_loop
def kept():
    thread = shared_loop()
    thread.call(asyncio.sleep(0))
    try:
        yield
    finally:
        thread.call(asyncio.sleep(0))
left_open = kept()
next(left_open)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "ClosedError: Python is shutting down" in done.stderr
