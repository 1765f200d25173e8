"""What the commands on Spark share: options, and a Spark of their own for one job.

Rule: pyspark is imported when a job begins.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from quiver.errors import InvalidRequestError, QuiverError

Topic = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False, help="Name of the topic.")]
Master = Annotated[
    str, typer.Option(metavar="URL", help="Spark's master: local[*], spark://host:7077, k8s://https://host:443, yarn.")
]
Conf = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="NAME=VALUE", show_default=False, help="Setting of Spark, may be repeated."),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="NAME", show_default=False, help="text, csv, json (lines) or parquet; else by name."
    ),
]
State = Annotated[
    str | None,
    typer.Option(metavar="DIR", show_default=False, help="Where the job keeps how far it is. Default: ./quiver-jobs/…"),
]


@contextlib.contextmanager
def session(name: str, master: str, conf: list[str] | None) -> Iterator[Any]:
    """Spark for one job."""
    settings = dict(pair(one, "--conf") for one in conf or ())
    with logged() as log:
        from quiver.spark.session import open_session

        with open_session(f"quiver {name}", log, master, settings) as spark:
            yield spark


@contextlib.contextmanager
def logged() -> Iterator[Path]:
    """Where Spark may write its log. It stays only when the job failed for a reason of Spark's own."""
    with tempfile.NamedTemporaryFile(prefix="quiver-spark-", suffix=".log", delete=False) as file:
        log = Path(file.name)
    try:
        yield log
    except QuiverError as error:
        if type(error) is QuiverError:
            raise QuiverError(f"{error.message}; Spark's log is {log}") from error
        log.unlink()
        raise
    except ImportError as error:
        log.unlink()
        raise InvalidRequestError(f"{error.name} is not installed: pip install 'quiver[spark]'") from error
    except BaseException:
        log.unlink()
        raise
    log.unlink()


def pair(text: str, option: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not (name and found and value):
        raise InvalidRequestError(f"{option} is NAME=VALUE, not {text!r}")
    return name, value
