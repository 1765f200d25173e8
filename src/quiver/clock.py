"""Time as a value that is handed in, so that a simulator can hand in another.

Rule: the only module besides shells' timers that asks the system for the time.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_us(self) -> int:
        """Wall-clock microseconds since 1970 UTC; stamps records, may jump."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that never go back; measures ages and time-outs."""
        ...


class SystemClock:
    def now_us(self) -> int:
        return time.time_ns() // 1000

    monotonic_s = staticmethod(time.monotonic)
