"""A project is made, found and read; and what the runner does when runs fail, on a Spark that only pretends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark.sql.connect.proto as pb2
import pytest
from pyspark.errors import PySparkException, PySparkValueError

from quiver.errors import InvalidRequestError, InvalidTopicError, QuiverError, UnavailableError
from quiver.spark.pipeline import runner
from quiver.spark.pipeline.connect import connect
from quiver.spark.pipeline.project import Topics, find_spec, write_project
from quiver.spark.pipeline.runner import Pipeline, load_spec

SERVERS = "10.0.0.1:9400,10.0.0.2:9400"


def test_project_is_written_whole_and_never_over_another(tmp_path: Path) -> None:
    folder = tmp_path / "web logs"
    written = write_project(folder, SERVERS, Topics(lines="access"))
    assert written == [
        ".gitignore",
        "README.md",
        "spark-pipeline.yml",
        "transformations/counts.sql",
        "transformations/lines.py",
        "transformations/results.py",
    ]
    assert not any("{{" in path.read_text() for path in folder.rglob("*") if path.is_file())
    spec = load_spec(find_spec(folder / "transformations"))
    assert spec.name == "web logs"
    assert spec.storage == (folder / "storage").as_uri()
    assert spec.configuration["quiver.servers"] == SERVERS
    assert spec.configuration["quiver.lines"] == "access"
    with pytest.raises(InvalidRequestError, match="is there already"):
        write_project(folder, SERVERS, Topics())
    with pytest.raises(InvalidTopicError):
        write_project(tmp_path / "other", SERVERS, Topics(counts="a b"))
    assert not (tmp_path / "other").exists()


def test_mistakes_in_a_spec_are_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="'quiver pipeline init NAME' makes a project"):
        find_spec(tmp_path)
    for text, message in (("name: a\n", "storage"), ("- 1\n", "not the spec"), ("nom: a\nstorage: b\n", "nom")):
        (tmp_path / "spark-pipeline.yml").write_text(text)
        with pytest.raises(InvalidRequestError, match=message):
            load_spec(find_spec(tmp_path))


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("sc://127.0.0.1:1", UnavailableError),
        ("spark://127.0.0.1:1", InvalidRequestError),
        ("sc://127.0.0.1:no", InvalidRequestError),
        ("sc://", InvalidRequestError),
    ],
)
def test_server_that_is_not_there_is_told_at_once(url: str, error: type[QuiverError]) -> None:
    with pytest.raises(error, match="Spark Connect"), connect(url):
        pytest.fail("nobody listens there")


def event(message: str) -> dict[str, Any]:
    return {"pipeline_event_result": SimpleNamespace(event=SimpleNamespace(message=message))}


UNKNOWN = PySparkValueError(errorClass="UNKNOWN_RESPONSE", messageParameters={"response": "metrics"})
BROKEN = PySparkException("the server is gone")


class Pretender:
    """A Spark whose runs go as a script says: events, or an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *runs: list[str | Exception]) -> None:
        self.runs = iter(runs)
        self.conf = SimpleNamespace(isModifiable=lambda name: True, set=lambda name, value: None)
        self.dropped = 0
        self.client = SimpleNamespace(execute_command=self._drop, execute_command_as_iterator=self._listen)
        monkeypatch.setattr(runner, "create_dataflow_graph", lambda *_, **__: "graph")
        monkeypatch.setattr(runner, "SparkConnectGraphElementRegistry", lambda *_: None)
        monkeypatch.setattr(runner.sdp, "register_definitions", lambda *_: None)
        monkeypatch.setattr(runner, "start_run", self._start)

    def _drop(self, command: Any) -> None:
        self.dropped += command.HasField("pipeline_command")

    def _listen(self, command: Any) -> Iterator[dict[str, Any]]:
        """Nobody has anything to tell."""
        added = pb2.StreamingQueryListenerEventsResult(listener_bus_listener_added=True)
        yield {"streaming_query_listener_events_result": added}

    def _start(self, *_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        for step in next(self.runs):
            if isinstance(step, Exception):
                raise step
            yield event(step)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    write_project(tmp_path / "p", SERVERS, Topics())
    return find_spec(tmp_path / "p")


def test_metrics_after_the_last_event_do_not_fail_a_run(monkeypatch: pytest.MonkeyPatch, spec: Path) -> None:
    spark = Pretender(monkeypatch, ["Flow a has COMPLETED.", "Run is COMPLETED.", UNKNOWN])
    Pipeline(spark, spec, {}).run()
    assert spark.dropped == 1


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (["Flow a is RUNNING.", UNKNOWN], "Spark failed: .*UNKNOWN_RESPONSE|Spark failed: .*metrics"),
        (["Flow 'a' has FAILED.\nError: no disk", "Run is FAILED."], "pipeline p failed in a: no disk"),
        (["Flow 'a' has FAILED.\nError: no disk", BROKEN], "pipeline p failed in a: no disk"),
        ([BROKEN], "Spark failed: the server is gone"),
        (["Run is CANCELED."], "pipeline p: the run is CANCELED"),
    ],
)
def test_run_that_is_not_complete_fails(
    monkeypatch: pytest.MonkeyPatch, spec: Path, steps: list[str | Exception], message: str
) -> None:
    spark = Pretender(monkeypatch, steps)
    with pytest.raises(QuiverError, match=message):
        Pipeline(spark, spec, {}).run()
    assert spark.dropped == 1


def test_continuous_runner_begins_again_after_pauses_that_grow(monkeypatch: pytest.MonkeyPatch, spec: Path) -> None:
    good: list[str | Exception] = ["Run is COMPLETED."]
    bad: list[str | Exception] = [BROKEN]
    spark = Pretender(monkeypatch, bad, bad, bad, good, bad, good)
    pauses: list[float] = []

    def wait(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Pipeline(spark, spec, {}).run_on(7.0, wait)
    assert pauses == [1.0, 2.0, 4.0, 7.0, 1.0, 7.0]


def test_mistake_in_a_project_names_its_line_and_ends_a_continuous_run(
    monkeypatch: pytest.MonkeyPatch, spec: Path
) -> None:
    spark = Pretender(monkeypatch)
    script = spec.parent / "transformations" / "lines.py"

    def register(*_: Any) -> None:
        exec(compile("\n\nnonsense()", str(script), "exec"))

    monkeypatch.setattr(runner.sdp, "register_definitions", register)
    with pytest.raises(InvalidRequestError, match=r"^transformations/lines.py, line 3: NameError: .*nonsense"):
        Pipeline(spark, spec, {}).run_on(1.0)
