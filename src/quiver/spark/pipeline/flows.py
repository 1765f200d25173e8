"""What is known of the flows of a run: their state by the run's events, their speed by Spark's progress.

Rule: pure. Events are texts, as Spark has nothing else to tell; progress is Spark's JSON.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from quiver.spark.jobs.running import first_line, raised_in

_FLOW: Final = re.compile(r"Flow '?([^' ]+)'? (?:is|has) ([A-Z]+)\b(.*)", re.DOTALL)
_RUN: Final = re.compile(r"Run (?:is|has) ([A-Z]+)\b(.*)", re.DOTALL)
_HERE: Final = "spark_catalog.default."
COMPLETED: Final = "COMPLETED"
FAILED: Final = "FAILED"
_UNDER_WAY: Final = ("PLANNING", "STARTING", "RUNNING")
_BEGINNING: Final = ("QUEUED", *_UNDER_WAY)


@dataclasses.dataclass(slots=True)
class Flow:
    name: str
    state: str = "QUEUED"
    rows: int = 0
    rows_per_s: float = 0.0
    lag: int | None = None  # rows that its sources have and it has not; None where they do not tell
    batch_s: float = 0.0
    batches: int = 0
    restarts: int = 0
    error: str = ""


class Flows:
    def __init__(self) -> None:
        self.run_state = ""
        self._flows: dict[str, Flow] = {}

    def all(self) -> list[Flow]:
        return [dataclasses.replace(flow) for flow in list(self._flows.values())]  # a listener may add one meanwhile

    def named(self, name: str) -> Flow:
        short = name.removeprefix(_HERE)
        return self._flows.setdefault(short, Flow(short))

    def begin(self) -> None:
        """Another run of the same flows: rows go on, states begin anew."""
        self.run_state = ""
        for flow in self._flows.values():
            flow.state, flow.error = "QUEUED", ""

    def event(self, message: str) -> list[Flow]:
        """Takes in what Spark says; returns the flows of which that says something new."""
        if run := _RUN.match(message):
            self.run_state = run[1]
            return self._close() if self.run_state == COMPLETED else []
        if found := _FLOW.match(message):
            flow, state = self.named(found[1]), found[2]
            if state == COMPLETED and flow.state in (COMPLETED, FAILED):
                return []  # Spark says that of each that ended, before or after it says how
            if state in _BEGINNING and self.run_state == COMPLETED:
                return []  # overtaken by the end of the run
            if flow.state == FAILED and state in _BEGINNING:
                flow.restarts += 1
            flow.state = state
            if flow.state == FAILED:
                flow.error = _first_error(found[3]) or flow.error
            return [flow]
        return []

    def _close(self) -> list[Flow]:
        """A run is complete when all its flows are. Spark tells of a flow's end in another thread than of the run's,
        and nothing more once the run's is told: the last of them may be missing."""
        ended = [flow for flow in list(self._flows.values()) if flow.state in _UNDER_WAY]
        for flow in ended:
            flow.state = COMPLETED
        return ended

    def progress(self, name: str, told: Mapping[str, Any]) -> Flow:
        """A micro-batch is done: `told` is Spark's StreamingQueryProgress."""
        flow = self.named(name)
        flow.rows += int(told.get("numInputRows") or 0)
        flow.rows_per_s = float(told.get("processedRowsPerSecond") or 0.0)
        flow.batch_s = float(told.get("batchDuration") or 0) / 1000
        flow.batches += 1
        flow.lag = lag_of(told.get("sources") or ())
        return flow


def lag_of(sources: Iterable[Mapping[str, Any]]) -> int | None:
    """Rows between where a flow is and where its topics end; None unless a source tells."""
    total: int | None = None
    for source in sources:
        here, there = _offsets(source.get("endOffset")), _offsets(source.get("latestOffset"))
        for place, latest in there.items():
            total = (total or 0) + max(0, latest - here.get(place, 0))
    return total


def _offsets(told: Any) -> dict[tuple[str, str], int]:
    """{(topic, partition): offset} of what a Quiver source says; nothing for any other."""
    try:
        found = json.loads(told) if isinstance(told, str) else told
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        (topic, number): offset
        for topic, places in found.items()
        if isinstance(places, dict)
        for number, offset in places.items()
        if number.isdigit() and isinstance(offset, int)
    }


def _first_error(text: str) -> str:
    """What was raised, or the first line, of what stands after `Error:`."""
    said = text.partition("Error:")[2]
    return raised_in(said) or re.sub(r"^Query \[id = .*?\] terminated with exception: ", "", first_line(said))
