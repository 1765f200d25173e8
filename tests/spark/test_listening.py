"""What streaming queries tell of their progress, heard over a real Spark Connect."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quiver.spark.pipeline.connect import connect, server_of
from quiver.spark.pipeline.listening import Listening
from tests.spark.kit import Lake

pytestmark = pytest.mark.timeout(300)
HEARD_S_MAX = 120.0


def start(spark: Any, checkpoint: Path, name: str, **trigger: Any) -> Any:
    ticks = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
    writer = ticks.writeStream.format("noop").queryName(name).option("checkpointLocation", str(checkpoint))
    return writer.trigger(**trigger).start()


def test_listening_ends_while_queries_go_on_telling(lake: Lake, tmp_path: Path) -> None:
    """Spark's own listeners hang here at the first or second time."""
    with connect(server_of(lake.spark)) as spark:
        names = ["one", "two", "three", "four"]
        queries = [start(spark, tmp_path / name, name, processingTime="0 seconds") for name in names]
        try:
            for _ in range(5):
                heard = threading.Event()
                with Listening(spark.client, lambda name, told: heard.set()).on() as listening:  # noqa: B023
                    assert heard.wait(HEARD_S_MAX)
                    assert not listening.wait(0.01)  # none has ended
        finally:
            for query in queries:
                query.stop()


def test_all_that_an_ended_query_told_was_heard_once_it_told_its_end(lake: Lake, tmp_path: Path) -> None:
    rows: list[int] = []
    heard = threading.Event()

    def hear(name: str, told: Mapping[str, Any]) -> None:
        assert name == "once"
        rows.append(told["numInputRows"])
        heard.set()

    with connect(server_of(lake.spark)) as spark, Listening(spark.client, hear).on() as listening:
        start(spark, tmp_path / "c", "once", availableNow=True).awaitTermination()
        assert heard.wait(HEARD_S_MAX)
        assert listening.wait(HEARD_S_MAX)
        assert rows == [5]


def test_session_that_ends_meanwhile_leaves_nobody_waiting(lake: Lake, caplog: pytest.LogCaptureFixture) -> None:
    with connect(server_of(lake.spark)) as spark, Listening(spark.client, lambda name, told: None).on():
        spark.stop()
    assert "pipeline_progress" in caplog.text
