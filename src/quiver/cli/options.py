"""What the commands share: options, help examples, exit codes, and how a client command finds its cluster.

Rule: nothing here imports the SDK; `find_servers` decides from values, so that its order can be tested.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from quiver.cli.cluster_file import find_running
from quiver.cli.ready import EXIT_FAILED, EXIT_USER_MISTAKE
from quiver.cli.settings import load_settings
from quiver.config import DATA_DIR_DEFAULT, PORT_DEFAULT
from quiver.errors import QuiverError, RequestError, UnavailableError, UsageError

EXIT_INTERRUPTED = 130
CONNECT_TIMEOUT_S = 3.0

DataDir = Annotated[
    str | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        show_default=False,
        help=f"Data directory of the cluster. Default: QUIVER_DATA_DIR, quiver.toml, or ./{DATA_DIR_DEFAULT}.",
    ),
]
Servers = Annotated[
    str | None,
    typer.Option(
        "--servers",
        metavar="HOST:PORT,...",
        show_default=False,
        help="Where the cluster listens. Default: QUIVER_SERVERS, else the cluster of the data directory.",
    ),
]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Return when it is done, or when it has begun.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def examples(*lines: str) -> str:
    """The end of a help text. typer joins single line breaks and keeps double ones."""
    return "\n\n".join(("Examples:", *(f"$ {line}" for line in lines)))


def exit_code_of(error: QuiverError) -> int:
    """2 when the user has to change something, 1 when the cluster does."""
    return EXIT_USER_MISTAKE if isinstance(error, (RequestError, UsageError)) else EXIT_FAILED


def say(line: str) -> None:
    """For people, on standard error: standard output is for data."""
    print(line, file=sys.stderr, flush=True)


def data_dir_of(flag: str | None) -> Path:
    return Path(load_settings({"data_dir": flag}).data_dir).absolute()


def not_running(data_dir: Path) -> UnavailableError:
    return UnavailableError(f"no cluster runs on {data_dir}; 'quiver up --data-dir {data_dir}' starts one")


def find_servers(servers: str | None, data_dir: str | None, environ: Mapping[str, str] | None = None) -> str:
    """Flags before environment, and a list of servers before a directory.

    A directory that was named must have a running cluster. The default directory is only a hint: without a cluster
    there, the default address is tried.
    """
    environ = os.environ if environ is None else environ
    if servers:
        return servers
    if data_dir is None and environ.get("QUIVER_SERVERS"):
        return environ["QUIVER_SERVERS"]
    chosen = load_settings({"data_dir": data_dir}, environ=environ).data_dir
    path = Path(chosen).absolute()
    running = find_running(path)
    if running is not None and running.cluster is not None:
        return ",".join(running.cluster.servers)
    if data_dir is None and chosen == DATA_DIR_DEFAULT:
        return f"127.0.0.1:{PORT_DEFAULT}"
    if running is not None:
        raise UnavailableError(f"the cluster on {path} is still starting; its logs are in {path / 'logs'}")
    raise not_running(path)


def find_cluster(servers: str | None, data_dir: str | None) -> str:
    """The servers of `find_servers`, after one of them answered.

    A wrong address is told in seconds; the commands themselves are patient with a node that is being restarted.
    """
    from quiver import Admin

    found = find_servers(servers, data_dir)
    try:
        with Admin(found, request_timeout=CONNECT_TIMEOUT_S) as admin:
            admin.nodes()
    except UnavailableError as error:
        hint = "" if servers else "; 'quiver up' starts a cluster, --servers names another"
        raise UnavailableError(f"{error.message}{hint}") from error
    return found
