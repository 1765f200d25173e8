"""One Spark and one node for all tests of this folder; tests use topics of their own, so they do not meet."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from quiver.spark.pipeline.connect import SERVER
from tests.spark.kit import Lake, settings
from tests.system.kit import Node

STOP_TIMEOUT_S = 60.0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.system)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(240))  # the first of them waits for Spark to begin
            item.add_marker(pytest.mark.xdist_group("spark"))  # with --dist loadgroup there is one Spark, not two
            # What Spark's own Python warns of is not ours to mend.
            item.add_marker(pytest.mark.filterwarnings("ignore:::pyspark"))
            item.add_marker(pytest.mark.filterwarnings("ignore:::py4j"))


@pytest.fixture(scope="session")
def spark(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        message = "there is no Java: Spark is NOT TESTED"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\n{message}", file=sys.stderr, flush=True)
        pytest.skip(message)
    directory = tmp_path_factory.mktemp("spark")
    builder = SparkSession.builder.appName("quiver-tests").master("local[2]")
    for name, value in {**settings(directory), **SERVER}.items():  # pipelines come by Spark Connect
        builder = builder.config(name, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        with _stderr_to(directory / "spark.log"):
            session = builder.getOrCreate()
        try:
            session.sparkContext.setLogLevel("ERROR")
            yield session
        finally:
            _end(session)


@contextlib.contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """The JVM inherits our standard error when it starts; a file takes its place for that moment."""
    sys.stderr.flush()
    kept = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _end(session: SparkSession) -> None:
    """The session, and the JVM too, which else would stay until this Python ends."""
    gateway = SparkContext._gateway
    assert gateway is not None
    for query in session.streams.active:
        query.stop()
    session.stop()
    process = gateway.proc
    gateway.shutdown()
    process.stdin.close()
    process.wait(STOP_TIMEOUT_S)
    SparkContext._gateway = SparkContext._jvm = None


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    # Some records have old timestamps: retention must not take them away.
    with Node(tmp_path_factory.mktemp("node"), {"QUIVER_LOG_RETENTION_MS": "none"}) as made:
        yield made


@pytest.fixture
def lake(spark: SparkSession, node: Node) -> Lake:
    return Lake(spark, node.address)
