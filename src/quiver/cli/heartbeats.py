"""The heartbeats that `quiver status` shows, out of what a manager says in GET /health.

Rule: pure. Of clients there may be a hundred thousand: those that called last come first, and the others are counted.
"""

from __future__ import annotations

import datetime
from typing import Any, Final

CLIENTS_SHOWN: Final = 20  # of each kind, where not all are asked for
_KINDS: Final = ("producer", "consumer")
_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "min"))


def last_heartbeats(health: dict[str, Any], kind: str) -> dict[int, str | None]:
    """Of managers or brokers, by id."""
    return {row[f"{kind}_id"]: row["last_heartbeat"] for row in health.get(f"{kind}s", ())}


def client_report(health: dict[str, Any], everyone: bool) -> dict[str, Any]:
    """`producers` and `consumers`, and how many there are of them."""
    report: dict[str, Any] = {}
    for kind in _KINDS:
        rows = health.get(f"{kind}s", [])
        found = [
            {"id": row[f"{kind}_id"], "topic": row["topic"], "last_heartbeat": row["last_heartbeat"]} for row in rows
        ]
        found.sort(key=lambda row: (row["last_heartbeat"] or "", row["id"]), reverse=True)
        report[f"{kind}s"] = found if everyone else found[:CLIENTS_SHOWN]
        report[f"{kind}_count"] = len(found)
    return report


def client_cells(report: dict[str, Any], now: datetime.datetime) -> list[tuple[str, str, str, str]]:
    return [
        (kind, str(row["id"]), row["topic"], ago(row["last_heartbeat"], now))
        for kind in _KINDS
        for row in report.get(f"{kind}s", ())
    ]


def left_out(report: dict[str, Any]) -> int:
    return sum(report.get(f"{kind}_count", 0) - len(report.get(f"{kind}s", ())) for kind in _KINDS)


def ago(heartbeat: str | None, now: datetime.datetime) -> str:
    """'0.4 s ago', '3 min ago'; clocks of several hosts may differ a little."""
    if heartbeat is None:
        return "never"
    passed_s = max(0.0, (now - datetime.datetime.fromisoformat(heartbeat)).total_seconds())
    for unit_s, name in _UNITS:
        if passed_s >= unit_s:
            return f"{passed_s // unit_s:.0f} {name} ago"
    return f"{passed_s:.1f} s ago"
