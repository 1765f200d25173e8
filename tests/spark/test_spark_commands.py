"""`quiver spark …` as a user types it: tables, JSON, exit codes, and mistakes in one line."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import quiver.spark.session
from quiver.cli.main import app
from tests.spark.kit import Lake, settings
from tests.system.kit import ENVIRON


@pytest.fixture
def quiver_spark(lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs commands on the Spark that is there: each would begin and end one of its own."""

    @contextlib.contextmanager
    def open_session(*_: object, **__: object) -> Iterator[object]:
        yield lake.spark

    monkeypatch.setattr(quiver.spark.session, "open_session", open_session)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("QUIVER_SERVERS", lake.servers)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["spark", *arguments])

    return run


def test_files_are_ingested_and_verified(quiver_spark: Any, lake: Lake, tmp_path: Path) -> None:
    topic = lake.new_topic()
    (tmp_path / "in.log").write_text("".join(f"line {number}\n" for number in range(500)))
    done = quiver_spark("ingest", topic, "in.log")
    assert done.exit_code == 0, done.output
    assert "Ingested" in done.stdout and "500" in done.stdout and f"quiver-jobs/ingest-{topic}-" in done.stdout
    again = quiver_spark("ingest", topic, "in.log", "--json")
    assert json.loads(again.stdout)["rows"] == 0

    right = quiver_spark("verify", topic, "--produced", "in.log")
    assert right.exit_code == 0, right.output
    assert "All is right: offsets dense, no offset twice, produced = seen." in right.stdout
    kept = quiver_spark("archive", topic, "kept")
    assert kept.exit_code == 0, kept.output
    assert "Archived" in kept.stdout and str(tmp_path / "kept") in kept.stdout
    copy = lake.new_topic()
    back = quiver_spark("replay", "kept", copy, "--source", topic, "--offsets", "100", "200")
    assert back.exit_code == 0, back.output
    assert "Replayed" in back.stdout and lake.stored(copy) == lake.stored(topic)[100:200]
    (tmp_path / "c1.jsonl").write_text(json.dumps({"partition": 0, "offset": 7, "value": "line 8"}) + "\n")
    wrong = quiver_spark("verify", topic, "--archive", "kept", "--consumed", "c1=c1.jsonl")
    assert wrong.exit_code == 1
    assert "all: 1 not the same for all" in wrong.stdout and "offset 7: line 7, and line 8" in wrong.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ingest", "t.x", "missing.log"), "error: topic t.x does not exist"),
        (("archive", "t.x", "there"), "error: topic t.x does not exist"),
        (
            ("replay", "there", "t", "--since", "noon"),
            "error: --since is a time such as 2026-01-31T12:00:00Z, not 'noon'",
        ),
        (("verify", "t", "--consumed", "c1"), "error: --consumed is NAME=VALUE, not 'c1'"),
        (("verify", "t", "--consumed", "c=none.jsonl"), "error: Path does not exist: "),
        (("verify", "t", "--consumed", "c=none.jsonl", "--format", "xml"), "error: the format 'xml' is not known"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(quiver_spark: Any, arguments: tuple[str, ...], message: str) -> None:
    result = quiver_spark(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(message) and len(result.stderr.splitlines()) == 1


def test_command_brings_its_own_spark_and_leaves_nothing(lake: Lake, tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"offset": 0, "value": "a"}\n{"offset": 2, "value": "b"}\n')
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "quiver.cli.main", "spark", "verify", "t", "--consumed", "c=c.jsonl"]
    small = ["--master", "local[1]", "--conf", "spark.sql.shuffle.partitions=1", "--json"]
    small += ["--conf", f"spark.driver.extraJavaOptions={settings(tmp_path)['spark.driver.extraJavaOptions']}"]
    run = subprocess.run(
        [*command, *small],
        env=ENVIRON | {"TMPDIR": str(temporary)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert run.returncode == 1, run.stderr
    assert run.stderr == ""
    (found,) = json.loads(run.stdout)["findings"]
    assert (found["what"], found["count"], found["examples"]) == ("missing", 1, ["partition 0, offsets 1 to 1"])
    assert not list(temporary.glob("quiver-*"))
