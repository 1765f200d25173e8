"""The pipeline of `quiver pipeline init` on real Spark: lines become tables and topics, each once, run after run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from quiver import Admin
from quiver.errors import InvalidRequestError, TopicExistsError
from quiver.spark.pipeline.connect import connect, server_of
from quiver.spark.pipeline.flows import Flow
from quiver.spark.pipeline.project import Topics, find_spec, write_project
from quiver.spark.pipeline.runner import Pipeline
from quiver.testing.processes import session_members
from tests.spark.kit import Lake
from tests.system.kit import ENVIRON, until

pytestmark = pytest.mark.timeout(900)  # a machine that does much else at the time

GOOD = [
    "2026-11-15T20:00:01 INFO a started",
    "2026-11-15T20:00:59 INFO a ready",
    "2026-11-15T20:01:00 INFO a tick",
    "2026-11-15T20:01:30 ERROR b disk is full",
    "2026-11-15T20:01:31 WARN a ",
]
BAD = ["", "no log line at all", "2026-13-45T99:00:00 INFO a impossible time", "2026-11-15T20:00:01 LOUD a no level"]
NOT_TEXT = b"\xff\xfe not text"
COUNTS = {
    ("2026-11-15T20:00:00", "INFO", "a"): 2,
    ("2026-11-15T20:01:00", "INFO", "a"): 1,
    ("2026-11-15T20:01:00", "ERROR", "b"): 1,
    ("2026-11-15T20:01:00", "WARN", "a"): 1,
}
SETTING = "spark.sql.pipelines"
# The other tests' Spark leaves out the micro-batch that sends what is over as soon as it is over.
ON_TIME = {"spark.sql.streaming.noDataMicroBatches.enabled": "true"}


def test_lines_become_tables_and_topics_run_after_run(lake: Lake, tmp_path: Path) -> None:
    topics = Topics(*(lake.new_topic() for _ in range(3)))
    lake.fill(topics.lines, [*(line.encode() for line in (*GOOD[:3], *BAD)), NOT_TEXT])
    write_project(tmp_path / "p", lake.servers, topics)
    told: list[tuple[str, str]] = []
    with connect(server_of(lake.spark)) as spark:
        pipeline = Pipeline(
            spark, find_spec(tmp_path / "p"), ON_TIME, lambda flow: told.append((flow.name, flow.state))
        )
        pipeline.run()
        assert pipeline.table("parsed").count() == 3
        later = ["2026-11-15T21:00:00 INFO a an hour later: the minutes before are over"]
        lake.fill(topics.lines, [line.encode() for line in (*GOOD[3:], *later)])
        pipeline.run()
        rows = pipeline.table("counts").selectExpr("cast(minute as string) m", "level", "producer", "lines").collect()
        texts = [row.text for row in pipeline.table("parsed").orderBy("event_time").collect()]
    assert texts == ["started", "ready", "tick", "disk is full", "", later[0].split(" a ")[1]]
    counts = {(row.m.replace(" ", "T"), row.level, row.producer): row.lines for row in rows}
    assert counts == COUNTS | {("2026-11-15T21:00:00", "INFO", "a"): 1}
    results: Counter[tuple[str, str, str]] = Counter()
    for value in lake.stored(topics.counts):
        found = json.loads(value or b"")
        results[found["minute"], found["level"], found["producer"]] += found["lines"]
    assert results == COUNTS
    dead = [*(line.encode() for line in BAD), NOT_TEXT]
    assert sorted(lake.stored(topics.dead_letters), key=repr) == sorted(dead, key=repr)
    flows = {flow.name: flow for flow in pipeline.flows.all()}
    assert {name: flow.rows for name, flow in flows.items()} == {
        "parsed": 11,
        "unparsed": 11,
        "counted": 11,
        "counts": 0,
    }
    assert flows["parsed"].lag == 0 and flows["parsed"].batch_s > 0
    assert told.count(("counts", "COMPLETED")) == 2


def test_failed_flow_is_told_in_one_line_and_started_again(lake: Lake, tmp_path: Path) -> None:
    folder = tmp_path / "p"
    topics = Topics(lines=lake.new_topic(), dead_letters=f"late-{lake.new_topic()}")
    lake.fill(topics.lines, [b"not a line"])
    write_project(folder, lake.servers, topics)
    for name in ("counts.sql", "results.py"):
        (folder / "transformations" / name).unlink()
    errors: list[str] = []

    def mend(flow: Flow) -> None:
        """Makes the topic that is missing, once it is missed."""
        if flow.state == "FAILED":
            errors.append(flow.error)
            if topics.dead_letters in flow.error:
                with Admin(lake.servers) as admin, contextlib.suppress(TopicExistsError):
                    admin.create_topic(topics.dead_letters)

    with connect(server_of(lake.spark)) as spark:
        with pytest.raises(InvalidRequestError, match="must be at least 1 second"):
            Pipeline(spark, find_spec(folder), {f"{SETTING}.execution.watchdog.minRetryTime": "1ms"}).run()
        pipeline = Pipeline(spark, find_spec(folder), {f"{SETTING}.maxFlowRetryAttempts": "20"}, mend)
        pipeline.run()
    assert any(topics.dead_letters in error for error in errors)
    assert not any("\n" in error for error in errors)
    flows = {flow.name: flow for flow in pipeline.flows.all()}
    assert flows["unparsed"].state == "COMPLETED" and flows["unparsed"].restarts >= 1
    assert lake.stored(topics.dead_letters) == [b"not a line"]


def test_command_keeps_tables_from_run_to_run(lake: Lake, tmp_path: Path) -> None:
    def quiver(*arguments: str) -> str:
        command = [sys.executable, "-m", "quiver.cli.main", "pipeline", *arguments]
        run = subprocess.run(
            command, env=ENVIRON, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False
        )
        assert run.returncode == 0, run.stderr
        return run.stdout

    assert "quiver pipeline run small" in quiver("init", "small")
    transformations = tmp_path / "small" / "transformations"
    for path in transformations.iterdir():
        path.unlink()
    (transformations / "one.sql").write_text("CREATE MATERIALIZED VIEW one AS SELECT 1 AS n")
    small = ("--master", "local[1]", "--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1", "--json")
    for number in range(2):
        (flow,) = json.loads(quiver("run", "small", *small))
        assert (flow["name"], flow["state"]) == ("one", "COMPLETED")
        if number == 0:
            interrupt(tmp_path, "small", *small)


def interrupt(folder: Path, *arguments: str) -> None:
    """Ctrl-C while Spark is busy: a word, no stack trace, and nothing goes on."""
    command = [sys.executable, "-m", "quiver.cli.main", "pipeline", "run", *arguments]
    run = subprocess.Popen(
        command, env=ENVIRON, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        until(lambda: any("java" in command_of(pid) for pid in session_members(run.pid)), 60)
        time.sleep(2)
        os.killpg(run.pid, signal.SIGINT)
        output, errors = run.communicate(timeout=60)
        assert run.returncode == 130, errors
        assert b"Traceback" not in output + errors and b" at org.apache" not in output + errors
        until(lambda: not list(session_members(run.pid)), 60)
    finally:
        for pid in (run.pid, *session_members(run.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):  # it has just ended
        return Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0]
    return ""
