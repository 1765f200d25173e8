"""Every block of code in the guides runs: Python on one Spark and a real node, commands as far as their options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from pyspark.sql.streaming.readwriter import DataStreamWriter
from typer.main import get_command

from quiver import Admin, Producer
from quiver.cli.main import app
from quiver.errors import TopicExistsError
from quiver.spark.pipeline.connect import connect, server_of
from quiver.spark.pipeline.runner import Pipeline
from tests.spark.kit import Lake, start
from tests.system.kit import until

pytestmark = pytest.mark.timeout(900)  # a machine that does much else at the time

TIMEOUT_S = 300
DOCS = Path(__file__).parent.parent.parent / "docs"
GUIDES = ("spark.md", "jobs.md", "pipelines.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(guide: str, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall((DOCS / guide).read_text()) if kind == language]


@pytest.fixture(scope="module")
def places(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the guides name, and what it is here; their topics are there and have some lines."""
    servers = request.getfixturevalue("node").address
    folder = tmp_path_factory.mktemp("guide")
    (folder / "app").mkdir()
    (folder / "app" / "a.log").write_text("one line\n")
    with Admin(servers) as admin, Producer(servers) as producer:
        for topic in ("logs", "error-counts", "again", "counts"):
            try:
                admin.create_topic(topic)
            except TopicExistsError:
                pytest.fail(f"another test uses the topic {topic}")
        producer.send_many("logs", [b"%d ERROR" % number for number in range(10)]).result(30)
    return {
        "127.0.0.1:9400": servers,
        '"/checkpoints': f'"{folder}/checkpoints',
        '"/archive"': f'"{folder}/archive"',
        '"/var/log/app"': f'"{folder}/app"',
    }


def here(text: str, places: dict[str, str]) -> str:
    for name, place in places.items():
        text = text.replace(name, place)
    return text


def test_python_of_the_spark_guide_runs(lake: Lake, places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataStreamWriter, "start", start)
    names: dict[str, Any] = {"spark": lake.spark}
    ten, batch, tuned = blocks("spark.md", "python")
    assert len([line for line in ten.splitlines() if line]) <= 10
    for text in (ten, batch, tuned):
        exec(compile(here(text, places), "docs/spark.md", "exec"), names)
    query = names["query"]
    try:
        assert names["tuned"].awaitTermination(TIMEOUT_S)
        until(lambda: query.exception() is not None or query.lastProgress is not None, TIMEOUT_S)
        assert query.exception() is None
    finally:
        query.stop()


def test_python_of_the_guide_to_jobs_runs(
    lake: Lake, places: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in blocks("jobs.md", "python"):
        exec(compile(here(text, places), "docs/jobs.md", "exec"), {"spark": lake.spark})


def test_transformations_of_the_guide_to_pipelines_run(lake: Lake, places: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "transformations").mkdir()
    (text,) = blocks("pipelines.md", "python")
    (tmp_path / "transformations" / "orders.py").write_text(here(text, places))
    storage = (tmp_path / "storage").as_uri()
    spec = f"name: guide\nstorage: {storage}\nlibraries:\n  - glob:\n      include: transformations/**\n"
    (tmp_path / "spark-pipeline.yml").write_text(spec)
    with connect(server_of(lake.spark)) as spark:
        pipeline = Pipeline(spark, tmp_path / "spark-pipeline.yml", {})
        pipeline.run()
        assert {flow.name: flow.state for flow in pipeline.flows.all()} == {
            "orders": "COMPLETED",
            "copied": "COMPLETED",
        }


@pytest.mark.parametrize("guide", GUIDES)
def test_commands_of_a_guide_are_taken(guide: str) -> None:
    """Their options exist and their values fit; what they do is shown elsewhere."""
    found = 0
    for line in "\n".join(blocks(guide, "")).replace("\\\n", " ").splitlines():
        if line.startswith("$ quiver "):
            words = shlex.split(line.removeprefix("$ quiver "), comments=True)
            words = words[: words.index(">")] if ">" in words else words
            command: Any = get_command(app)
            context: Any = None
            while hasattr(command, "commands"):
                context = typer.Context(command, parent=context)
                command = command.commands[words.pop(0)]
            command.make_context(command.name, list(words), parent=context)
            found += 1
    assert found
