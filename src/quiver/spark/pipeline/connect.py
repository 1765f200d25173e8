"""A Spark Connect session, which pipelines need: to a server, or to one that is started here for the run.

Rule: a server of our own listens on loopback, with a token that only this process and the server know.
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pyspark.errors import PySparkException

from quiver.errors import InvalidRequestError, UnavailableError
from quiver.spark.session import open_session

PORT_DEFAULT: Final = 15002
REACH_TIMEOUT_S: Final = 30.0
_TOKEN: Final = "SPARK_CONNECT_AUTHENTICATE_TOKEN"
_MODE: Final = "SPARK_CONNECT_MODE_ENABLED"  # functions of pyspark.sql make columns for Connect while this is set
# Settings of a Spark that is a Connect server too.
SERVER: Final = {
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.connect.grpc.binding.port": "0",
    # Else each flow of each run starts Python workers of its own, which takes longer than small batches do. There is
    # one user here, from whom nothing need be kept apart.
    "spark.sql.artifact.isolation.enabled": "false",
    "spark.sql.connect.serverStacktrace.enabled": "false",
}


def local_tables(folder: str) -> dict[str, str]:
    """Settings of a server of our own, by which tables and what is known of them stay in a folder from run to run."""
    return {
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.warehouse.dir": f"{folder}/tables",
        "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={folder}/catalog;create=true",
        "spark.driver.defaultJavaOptions": "-Dderby.stream.error.file=/dev/null",
    }


@contextlib.contextmanager
def open_connect(
    name: str, log: Path, *, master: str = "local[*]", remote: str | None = None, conf: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """A session at `remote` (sc://host:port), or at a server of our own on `master`."""
    if remote is not None:
        with connect(remote) as spark:
            yield spark
        return
    settings = {**SERVER, **(conf or {})}
    with (
        _set(_TOKEN, uuid.uuid4().hex),
        open_session(name, log, master, settings) as driver,
        connect(server_of(driver)) as spark,
    ):
        yield spark


def server_of(driver: Any) -> str:
    """Where the Connect server in the JVM of a classic session listens."""
    service = getattr(driver._jvm, "org.apache.spark.sql.connect.service.SparkConnectService$")
    return f"sc://localhost:{getattr(service, 'MODULE$').localPort()}"


@contextlib.contextmanager
def connect(url: str) -> Iterator[Any]:
    """A session of its own at a server."""
    from pyspark.sql.connect.session import SparkSession

    _reach(url)
    with _set(_MODE, "1"):
        try:
            spark = SparkSession.builder.remote(url).create()
        except PySparkException as error:
            raise UnavailableError(f"Spark Connect at {url} cannot be reached") from error
        try:
            yield spark
        finally:
            spark.stop()


def _reach(url: str) -> None:
    """Spark's client would go on trying for ten minutes where nobody listens."""
    try:
        there = urlsplit(url)
        host, port = there.hostname, there.port or PORT_DEFAULT
    except ValueError as error:
        raise InvalidRequestError(f"{url} is no address of Spark Connect: it is like sc://host:15002") from error
    if there.scheme != "sc" or not host:
        raise InvalidRequestError(f"{url} is no address of Spark Connect: it is like sc://host:15002")
    try:
        socket.create_connection((host, port), REACH_TIMEOUT_S).close()
    except OSError as error:
        raise UnavailableError(f"Spark Connect at {url} cannot be reached") from error


@contextlib.contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    kept = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if kept is None:
            del os.environ[name]
        else:
            os.environ[name] = kept
