"""Messages a second, from two looks at the same partitions.

Rule: pure; when one looked is an argument. A partition that was not seen before has no rate, and one that was made
again under its name (its end moved back) has none either.
"""

from __future__ import annotations

from typing import Any

Key = tuple[str, int]


class Rates:
    def __init__(self) -> None:
        self._ends: dict[Key, int] = {}
        self._looked_s = 0.0

    def look(self, topics: list[dict[str, Any]], now_s: float) -> None:
        """Gives each partition of a report its `rate`: messages a second since the last look, or None."""
        passed_s = now_s - self._looked_s
        seen: dict[Key, int] = {}
        for topic in topics:
            for row in topic["partitions"]:
                key, end = (topic["name"], row["partition"]), row["next_offset"]
                before = self._ends.get(key)
                known = before is not None and end >= before and passed_s > 0
                row["rate"] = (end - (before or 0)) / passed_s if known else None
                seen[key] = end
        self._ends, self._looked_s = seen, now_s


def shown(rate: float | None) -> str:
    """'-', '0', '0.4', '12', '1,200'"""
    if rate is None:
        return "-"
    return f"{rate:.1f}" if 0 < rate < 10 else f"{rate:,.0f}"
