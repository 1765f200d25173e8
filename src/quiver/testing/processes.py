"""The processes of a session: what somebody started, and all that came of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def session_members(session: int) -> Iterator[int]:
    """The pids of a session's living processes."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # After the name, which may hold anything: state, parent, group, session.
            state, _, _, found = status.read_text().rpartition(")")[2].split()[:4]
            if int(found) == session and state != "Z":
                yield int(status.parent.name)
