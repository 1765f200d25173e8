"""Runs Spark work for a job: tells how far it is, and says in one sentence what Spark says in a stack trace.

Rule: what leaves is a QuiverError, with Spark's own error as its cause.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, IllegalArgumentException, ParseException, PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from quiver.errors import InvalidRequestError, QuiverError, error_from_wire

logger = logging.getLogger("quiver.spark")

_POLL_S: Final = 0.1
_REPORT_S: Final = 0.25
_STARTS_MAX: Final = 5
_OURS: Final = re.compile(r"quiver\.errors\.(\w+): (.*)")
_RAISED: Final = re.compile(r"Traceback .*\n(?: .*\n)+(\S.*)", re.MULTILINE)  # the line that ends a trace of Python
_JAVA: Final = re.compile(r"^: [\w.$]+: (.*)", re.MULTILINE)  # after a call that Java refused
_MISTAKES: Final = (AnalysisException, IllegalArgumentException, ParseException)


class JobProgress(NamedTuple):
    """Tasks are those that Spark knows of by now: it plans as it goes."""

    tasks_done: int
    tasks: int
    rows: int = 0
    batches: int = 0


OnProgress = Callable[[JobProgress], None]


def in_one_sentence(error: Exception) -> QuiverError:
    """Our own error if a task or the driver raised one; else what Python raised there, or the first line of Spark's."""
    said = str(error)
    if ours := _OURS.findall(said):
        code, message = ours[-1]
        return error_from_wire(code, message, {})
    line = first_line(said) or type(error).__name__
    if isinstance(error, _MISTAKES) and raised_in(said) is None:
        return InvalidRequestError(line)
    return QuiverError(f"Spark failed: {raised_in(said) or line}")


def raised_in(said: str) -> str | None:
    """What Python raised, our own errors by their message alone, or what Java refused; None where neither is told."""
    if ours := _OURS.findall(said):
        return str(ours[-1][1])
    raised = _RAISED.search(said) or _JAVA.search(said)
    return raised[1] if raised else None


def first_line(said: str) -> str:
    """Without Spark's codes."""
    line = next((line for line in said.splitlines() if line.strip()), "")
    return re.sub(r"^\[[\w.]+\] | SQLSTATE: \w+.*$", "", line.strip())


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise in_one_sentence(error) from error


class Tasks:
    """Counts the tasks of job groups. Spark Connect does not tell of them: all is 0 there."""

    def __init__(self, spark: SparkSession) -> None:
        self._tracker: Any = None if _is_remote(spark) else spark.sparkContext.statusTracker()

    def count(self, groups: Iterable[str]) -> tuple[int, int]:
        """Done, and known."""
        done = known = 0
        if self._tracker is not None:
            for job in (job for group in groups for job in self._tracker.getJobIdsForGroup(group)):
                info = self._tracker.getJobInfo(job)
                for stage in map(self._tracker.getStageInfo, info.stageIds if info is not None else ()):
                    if stage is not None:
                        done += stage.numCompletedTasks
                        known += stage.numTasks
        return done, known


def _is_remote(spark: SparkSession) -> bool:
    return not hasattr(spark, "_jsparkSession")


@contextlib.contextmanager
def watched(spark: SparkSession, on_progress: OnProgress | None) -> Iterator[None]:
    """Tells of the tasks of all that this thread runs meanwhile."""
    if on_progress is None or _is_remote(spark):
        yield
        return
    group, over, tasks = uuid.uuid4().hex, threading.Event(), Tasks(spark)

    def tell() -> None:
        while not over.wait(_REPORT_S):
            on_progress(JobProgress(*tasks.count([group])))

    spark.sparkContext.setJobGroup(group, "quiver")
    teller = threading.Thread(target=tell, name="quiver-progress")
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
        on_progress(JobProgress(*tasks.count([group])))


def begin(writer: DataStreamWriter) -> StreamingQuery:
    """Starts a query and waits until it has its source.

    That is a Python process to which Spark gives ten seconds to come up, and a busy machine may need longer: it is
    started again if need be. A query that failed so has read and written nothing.
    """
    for _ in range(_STARTS_MAX):
        query = writer.start()
        while query.isActive and query.status["message"] == "Initializing sources":
            time.sleep(_POLL_S)
        error = query.exception()
        if error is None or "connect back" not in str(error):
            break
        logger.warning("query_started_again name=%s: its Python process took too long to come up", query.name)
    return query


def run_query(spark: SparkSession, writer: DataStreamWriter, on_progress: OnProgress | None) -> JobProgress:
    """Until it ends by itself, or by the interrupt of who waits. Rows are those that were read."""
    with plain_errors():
        query = begin(writer)
        tasks, rows = Tasks(spark), dict[int, int]()

        def look(full: bool = False) -> JobProgress:
            last = query.lastProgress
            for progress in query.recentProgress if full else [last] if last is not None else []:
                if progress["numInputRows"] or progress["batchId"] not in rows:
                    rows[progress["batchId"]] = progress["numInputRows"]
            done = sum(1 for count in rows.values() if count)
            return JobProgress(*tasks.count([str(query.runId)]), sum(rows.values()), done)

        try:
            while query.isActive:
                if on_progress is not None:
                    on_progress(look())
                time.sleep(_POLL_S)
            error = query.exception()
            if error is not None:
                raise error
            return look(full=True)
        finally:
            query.stop()
