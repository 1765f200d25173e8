"""What Spark tells of a run, as a user sees it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quiver.spark.pipeline.flows import Flows, lag_of

PARSED = "spark_catalog.default.parsed"


def told(rows: int, here: dict[str, int], there: dict[str, int]) -> dict[str, Any]:
    source = {"endOffset": json.dumps({"logs": {"uid": "x", **here}}), "latestOffset": json.dumps({"logs": there})}
    return {"numInputRows": rows, "processedRowsPerSecond": 50.0, "batchDuration": 1500, "sources": [source]}


def test_flow_goes_through_its_states_and_counts_restarts() -> None:
    flows = Flows()
    assert flows.event("Run is RUNNING.") == []
    for message in (
        f"Flow {PARSED} is QUEUED.",
        f"Flow {PARSED} is RUNNING.",
        f"Flow '{PARSED}' has FAILED.\nError: [STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: "
        "no broker. SQLSTATE: XXKST\n=== Streaming Query ===",
    ):
        (flow,) = flows.event(message)
    assert (flow.name, flow.state, flow.error, flow.restarts) == ("parsed", "FAILED", "no broker.", 0)
    assert flows.event(f"Flow {PARSED} has COMPLETED.") == []  # as Spark says of it too
    assert flow.state == "FAILED"
    flows.event(f"Flow {PARSED} is STARTING.")
    flows.event(f"Flow {PARSED} has COMPLETED.")
    flows.event("Run is COMPLETED.")
    assert (flow.state, flow.restarts, flows.run_state) == ("COMPLETED", 1, "COMPLETED")
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1\nquiver.errors.UnknownTopicError: no topic x\n'
    flows.event(f"Flow '{PARSED}' has FAILED.\nError: [STREAM_FAILED] Query [id = 1] terminated with: {trace}")
    flows.event(f"Flow '{PARSED}' has FAILED more than 5 times and will not be restarted.")
    assert (flow.state, flow.error) == ("FAILED", "no topic x")
    assert flows.event("something else") == []


def test_flow_whose_end_spark_did_not_tell_ends_with_its_run() -> None:
    flows = Flows()
    for message in (
        "Flow counts is PLANNING.",
        f"Flow {PARSED} is RUNNING.",
        f"Flow {PARSED} has COMPLETED.",
        "Flow late is RUNNING.",
        "Flow other is EXCLUDED.",
    ):
        flows.event(message)
    assert [flow.name for flow in flows.event("Run is COMPLETED.")] == ["counts", "late"]
    for message in ("Flow late is RUNNING.", "Flow late has COMPLETED."):  # told too late: nothing new
        assert flows.event(message) == []
    states = {flow.name: flow.state for flow in flows.all()}
    assert states == {"counts": "COMPLETED", "parsed": "COMPLETED", "late": "COMPLETED", "other": "EXCLUDED"}


def test_flow_that_a_run_left_alone_is_not_told_as_complete() -> None:
    flows = Flows()
    flows.event(f"Flow {PARSED} is RUNNING.")
    flows.event("Run is COMPLETED.")
    flows.begin()
    assert flows.event("Run is COMPLETED.") == []  # a dry run starts none of them
    assert flows.named(PARSED).state == "QUEUED"


def test_run_that_failed_completes_no_flow() -> None:
    flows = Flows()
    flows.event(f"Flow {PARSED} is RUNNING.")
    assert flows.event("Run is FAILED.") == []
    assert flows.named(PARSED).state == "RUNNING"


def test_progress_adds_up_over_batches_and_runs() -> None:
    flows = Flows()
    flows.event(f"Flow {PARSED} is RUNNING.")
    flows.progress(PARSED, told(100, {"0": 60, "1": 40}, {"0": 70, "1": 45, "2": 5}))
    flows.begin()
    flow = flows.progress(PARSED, told(20, {"0": 70, "1": 50}, {"0": 70, "1": 50}))
    assert (flow.rows, flow.batches, flow.rows_per_s, flow.batch_s, flow.lag) == (120, 2, 50.0, 1.5, 0)
    assert [one.name for one in flows.all()] == ["parsed"]


@pytest.mark.parametrize(
    ("sources", "lag"),
    [
        ([], None),
        ([{"endOffset": None, "latestOffset": None}], None),
        ([{"endOffset": '{"logOffset":3}', "latestOffset": "not json"}], None),
        ([{"endOffset": None, "latestOffset": '{"t": {"0": 7}}'}], 7),
        ([told(1, {"0": 60}, {"0": 70, "1": 5})["sources"][0]], 15),
    ],
)
def test_lag_is_what_the_topics_have_more(sources: list[dict[str, Any]], lag: int | None) -> None:
    assert lag_of(sources) == lag
