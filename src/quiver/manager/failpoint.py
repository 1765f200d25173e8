"""Places where a test ends the process, as a crash would, to see what is left.

Rule: without QUIVER_FAILPOINTS, which only tests set, nothing happens here. It names a directory; a manager that passes
a place for which that directory has a file `PLACE-ID` takes the file away and dies.
"""

from __future__ import annotations

import os
import signal
from typing import Final

_DIRECTORY: Final = os.environ.get("QUIVER_FAILPOINTS", "")


def pass_by(place: str, manager_id: int) -> None:
    if not _DIRECTORY:
        return
    try:
        os.unlink(f"{_DIRECTORY}/{place}-{manager_id}")
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
