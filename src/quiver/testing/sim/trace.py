"""What happened, in order: the last events as text for whoever looks for a cause, and a number that stands for all.

Rule: two runs of one seed have the same number; where they do not, something is left to chance.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from quiver.testing.sim.world import World

LINES_MAX: Final = 20_000
_DAMAGE: Final = ("frame_corrupt", "partition_corrupt", "replica_rebuilt")


class Trace:
    def __init__(self, world: World) -> None:
        self._world = world
        self._lines: deque[tuple[float, str, Any]] = deque(maxlen=LINES_MAX)
        self.digest = 0

    def say(self, who: str, what: str) -> None:
        now_s = self._world.now_s
        self._lines.append((now_s, who, what))
        self.digest = zlib.crc32(f"{now_s:.6f} {who} {what}".encode(), self.digest)

    def message(self, to: str, sender: int, encoded: bytes, message: Any) -> None:
        """A message arrived. Its text is made only when somebody reads it."""
        self._lines.append((self._world.now_s, to, (sender, message)))
        self.digest = zlib.crc32(encoded, self.digest)

    def last(self, count: int) -> list[str]:
        lines = list(self._lines)[-count:]
        return [f"{now_s:10.4f} {who:4} {_text(what)}" for now_s, who, what in lines]


def _text(what: Any) -> str:
    if isinstance(what, str):
        return what
    sender, message = what
    fields = [
        f"{name}={_short(getattr(message, name))}"
        for name in message.__struct_fields__
        if name not in ("sender", "to", "body") and getattr(message, name) not in ((), None)
    ]
    return f"<- n{sender} {type(message).__name__} {' '.join(fields)}"


def _short(value: Any) -> str:
    return str(value).replace("Membership", "")


class LogHandler(logging.Handler):
    """Puts what the product logs into the trace. `failures`: what it logged as its own mistake.

    `on_damage` is told what it logged of a log that it found damaged.
    """

    def __init__(self, trace: Trace, name_of_running: Any, on_damage: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._trace = trace
        self._name = name_of_running
        self._on_damage = on_damage
        self.failures: list[tuple[str, BaseException]] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self._trace.say(self._name(), text)
        if text.startswith(_DAMAGE):
            self._on_damage(text)
        if record.exc_info is not None and record.exc_info[1] is not None:
            error = record.exc_info[1]
            self.failures.append((f"{text}: {error!r}", error))
