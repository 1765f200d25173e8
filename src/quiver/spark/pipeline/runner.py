"""Runs a pipeline: update after update, each of which brings all tables and topics up to what the sources have.

Spark starts a flow that failed again by itself, with a pause that grows; a run whose flows failed too often ends. A
continuous runner then begins another, after a pause of its own that grows likewise: flows go on from their checkpoints.

Rule: what Spark tells at the end of a run that is complete cannot make it fail.
"""

from __future__ import annotations

import contextlib
import io
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pyspark.sql.connect.proto as pb2
from pyspark.errors import PySparkException, PySparkValueError
from pyspark.pipelines import cli as sdp
from pyspark.pipelines.spark_connect_graph_element_registry import SparkConnectGraphElementRegistry
from pyspark.pipelines.spark_connect_pipeline import create_dataflow_graph, start_run

from quiver.errors import InvalidRequestError, QuiverError, RequestError
from quiver.spark.jobs.running import in_one_sentence, plain_errors
from quiver.spark.pipeline.connect import local_tables, open_connect
from quiver.spark.pipeline.flows import COMPLETED, Flow, Flows
from quiver.spark.pipeline.listening import Listening

logger = logging.getLogger("quiver.spark")

PAUSE_S_MIN: Final = 1.0
PAUSE_S_MAX: Final = 60.0
LAST_WORDS_S_MAX: Final = 10.0  # so long after the end of a run what its queries still tell is waited for
# How Spark restarts a flow: so often, after 1, 2, 4, … seconds.
RETRIES: Final = {
    "spark.sql.pipelines.maxFlowRetryAttempts": "5",
    "spark.sql.pipelines.execution.watchdog.minRetryTime": "1s",
    "spark.sql.pipelines.execution.watchdog.maxRetryTime": "60s",
    "spark.sql.pipelines.execution.streamstate.pollingInterval": "200ms",
}

OnChange = Callable[[Flow], None]


def load_spec(path: Path) -> Any:
    try:
        return sdp.load_pipeline_spec(path)
    except (PySparkException, OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise InvalidRequestError(f"{path} is not the spec of a pipeline: {in_one_sentence(error).message}") from error


@contextlib.contextmanager
def open_pipeline(
    spec_path: Path,
    log: Path,
    conf: Mapping[str, str],
    on_change: OnChange | None = None,
    *,
    master: str = "local[*]",
    remote: str | None = None,
) -> Iterator[Pipeline]:
    """A project with a Spark to run on: at `remote`, or a server of our own on `master`, whose log is `log`."""
    spec = load_spec(spec_path)
    storage = urlsplit(spec.storage)
    kept = local_tables(unquote(storage.path)) if storage.scheme == "file" and master.startswith("local") else {}
    at_start = {name: value for name, value in {**spec.configuration, **conf}.items() if name.startswith("spark.")}
    with open_connect(f"quiver {spec.name}", log, master=master, remote=remote, conf={**kept, **at_start}) as spark:
        yield Pipeline(spark, spec_path, conf, on_change)


class Pipeline:
    """One project on one Connect session. `conf` comes over the spec's own configuration."""

    def __init__(self, spark: Any, spec_path: Path, conf: Mapping[str, str], on_change: OnChange | None = None) -> None:
        self.flows = Flows()
        self._spark = spark
        self._path = spec_path
        self._spec = load_spec(spec_path)
        self._conf = {**RETRIES, **self._spec.configuration, **conf}
        self._on_change = on_change or (lambda flow: None)

    def table(self, name: str) -> Any:
        """A table of the pipeline as a frame."""
        return self._spark.read.table(name)

    def run(self, *, full_refresh: bool = False, refresh: Sequence[str] = (), dry: bool = False) -> None:
        """One update. Raises InvalidRequestError for what is wrong in the project, QuiverError when a flow failed."""
        self.flows.begin()
        with self._listening(), self._defined() as graph:
            answers = start_run(
                self._spark,
                graph,
                full_refresh=[],
                full_refresh_all=full_refresh,
                refresh=list(refresh),
                dry=dry,
                storage=self._spec.storage,
            )
            try:
                for answer in answers:
                    if "pipeline_event_result" in answer:
                        for flow in self.flows.event(answer["pipeline_event_result"].event.message):
                            self._on_change(flow)
            except PySparkException as error:
                if not self._is_over(error):
                    raise self._failure(error) from error
        if self.flows.run_state not in (COMPLETED, ""):
            raise self._failure(None)

    def run_on(self, every_s: float, wait: Callable[[float], object] = time.sleep) -> None:
        """Update after update, until it is interrupted. One that failed is followed by another, after a pause."""
        pause_s = PAUSE_S_MIN
        while True:
            try:
                self.run()
                pause_s = PAUSE_S_MIN
                wait(every_s)
            except RequestError:
                raise
            except QuiverError as error:
                logger.warning("pipeline_run_failed name=%s again_s=%g: %s", self._spec.name, pause_s, error.message)
                wait(pause_s)
                pause_s = min(PAUSE_S_MAX, 2 * pause_s)

    @contextlib.contextmanager
    def _defined(self) -> Iterator[str]:
        """A graph of what the project says now; Spark runs one just once."""
        # What Spark reads at its start only was given to a server of our own then; nobody can set it now.
        known = self._spark.conf.isModifiable
        with plain_errors():
            conf = {key: value for key, value in self._conf.items() if not key.startswith("spark.") or known(key)}
            for name, value in conf.items():
                self._spark.conf.set(name, value)
            graph: str = create_dataflow_graph(
                self._spark,
                default_catalog=self._spec.catalog,
                default_database=self._spec.database,
                sql_conf=conf,
            )
        try:
            registry = SparkConnectGraphElementRegistry(self._spark, graph)
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    sdp.register_definitions(self._path, registry, self._spec, self._spark, graph)
            except Exception as error:  # whatever a user's file raises
                raise InvalidRequestError(f"{_place(error, self._path.parent)}{_said(error)}") from error
            yield graph
        finally:
            drop = pb2.Command()
            drop.pipeline_command.drop_dataflow_graph.dataflow_graph_id = graph
            self._spark.client.execute_command(drop)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        def hear(name: str, progress: Mapping[str, Any]) -> None:
            self._on_change(self.flows.progress(name, progress))

        with Listening(self._spark.client, hear).on() as listening:
            yield
            if not listening.wait(LAST_WORDS_S_MAX):
                logger.warning("pipeline_queries_not_ended name=%s waited_s=%g", self._spec.name, LAST_WORDS_S_MAX)

    def _is_over(self, error: PySparkException) -> bool:
        """Spark 4.3 sends metrics of Python workers after the last event, and its client does not know them."""
        trailing = isinstance(error, PySparkValueError) and error.getCondition() == "UNKNOWN_RESPONSE"
        return trailing and self.flows.run_state == COMPLETED

    def _failure(self, error: PySparkException | None) -> QuiverError:
        failed = [f"{flow.name}: {flow.error}" for flow in self.flows.all() if flow.error and flow.state != COMPLETED]
        if failed:
            return QuiverError(f"pipeline {self._spec.name} failed in {'; '.join(failed)}")
        if error is None:
            return QuiverError(f"pipeline {self._spec.name}: the run is {self.flows.run_state}")
        return in_one_sentence(error)


def _place(error: BaseException, folder: Path) -> str:
    """`transformations/lines.py, line 12: ` where the project's own code was the last to run."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(folder):
            return f"{path.relative_to(folder)}, line {frame.lineno}: "
    return ""


def _said(error: Exception) -> str:
    return in_one_sentence(error).message if isinstance(error, PySparkException) else f"{type(error).__name__}: {error}"
