"""What Spark says in pages, in one sentence."""

from __future__ import annotations

import pytest
from pyspark.errors import AnalysisException, PySparkException

from quiver.errors import InvalidRequestError, QuiverError, UnknownTopicError
from quiver.spark.jobs.running import in_one_sentence

TRACE = """An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):
  File "a.py", line 1, in f
    raise e
{}
	at py4j.Protocol.getReturnValue(Protocol.java:476)
"""


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            AnalysisException("[PATH_NOT_FOUND] Path does not exist: /x. SQLSTATE: 42K03\n'Project"),
            InvalidRequestError,
            "Path does not exist: /x.",
        ),
        (
            PySparkException(TRACE.format("quiver.errors.UnknownTopicError: topic t does not exist")),
            UnknownTopicError,
            "topic t does not exist",
        ),
        (PySparkException(TRACE.format("OSError: disk")), QuiverError, "Spark failed: OSError: disk"),
        (PySparkException("\nJob aborted.\nmore"), QuiverError, "Spark failed: Job aborted."),
        (
            PySparkException("An error occurred while calling o1.x.\n: java.io.IOException: no space\n\tat a.b"),
            QuiverError,
            "Spark failed: no space",
        ),
        (PySparkException(""), QuiverError, "Spark failed: PySparkException"),
    ],
)
def test_error_becomes_one_sentence(error: Exception, kind: type[QuiverError], message: str) -> None:
    found = in_one_sentence(error)
    assert (type(found), found.message) == (kind, message)
