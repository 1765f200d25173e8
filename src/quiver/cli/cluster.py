"""`quiver up` and `quiver down`: a cluster on this machine begins and ends.

Rule: no import of the SDK here; `up` is ready in under a second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from quiver.cli.cluster_file import Cluster, Running, find_running
from quiver.cli.launch import PATIENCE_S, make_plan, run_cluster, say_on_stderr, start_detached
from quiver.cli.options import DataDir, data_dir_of, examples, not_running, say
from quiver.cli.settings import PORT_MAX
from quiver.config import HTTP_PORT_DEFAULT, PORT_DEFAULT
from quiver.errors import InvalidRequestError, UnavailableError

# The supervisor gives its nodes 10 s and then kills them, so it is gone well before this.
DOWN_TIMEOUT_S = 30.0
_POLL_S = 0.03
BROKERS_MAX = 100

Brokers = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=BROKERS_MAX,
        show_default=False,
        help="Number of broker processes. Default: as many as the data directory has, else 1.",
    ),
]
Managers = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=5,
        show_default=False,
        help="Number of managers: 1, 3 or 5. Default: as many as the data directory has, else 1.",
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=PORT_MAX,
        show_default=False,
        help=f"Port, of several nodes the first; 0 takes free ones. Default: {PORT_DEFAULT}.",
    ),
]
HttpPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=PORT_MAX,
        show_default=False,
        help="Port of the HTTP API, of several managers the first; 0 takes free ones. "
        f"Default: {HTTP_PORT_DEFAULT}, or free with --port 0.",
    ),
]
MetadataUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL", show_default=False, help="SQL database for metadata. Default: SQLite in the data directory."
    ),
]


def register(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "quiver up",
            "quiver up --brokers 3",
            "quiver up --brokers 3 --managers 3",
            "quiver up --detach --data-dir /var/lib/quiver",
            "quiver up --port 0 --detach",
            "quiver up --host 0.0.0.0 --insecure",
        )
    )(up)
    app.command(epilog=examples("quiver down", "quiver down --data-dir /var/lib/quiver"))(down)


def up(
    brokers: Brokers = None,
    managers: Managers = None,
    data_dir: DataDir = None,
    host: Annotated[
        str | None, typer.Option(show_default=False, help="Address to listen on. Default: 127.0.0.1.")
    ] = None,
    port: Port = None,
    http_port: HttpPort = None,
    metadata_url: MetadataUrl = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address that is not loopback: there is no TLS and no token.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it takes messages; it runs on.")] = False,
    no_restart: Annotated[bool, typer.Option("--no-restart", help="End when a node dies.")] = False,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", show_default=False, help="Settings file. Default: ./quiver.toml.")
    ] = None,
) -> None:
    """Start a cluster on this machine.

    It keeps messages in the data directory and restarts a node that dies. One broker and one manager are a single
    process; with more, each is a process of its own, topics are replicated on up to three brokers, and the metadata on
    all managers.

    Settings come from these options, then QUIVER_* variables, then quiver.toml.
    """
    flags = {
        "data_dir": data_dir,
        "host": host,
        "port": port,
        "http_port": http_port,
        "metadata_url": metadata_url,
        "insecure": insecure or None,
    }
    plan = make_plan(flags, restart=not no_restart, config=config, brokers=brokers, managers=managers)
    if detach:
        ready = start_detached(plan, say)
        where = ", ".join((*ready.servers, *ready.http))
        print(f"Quiver serves {where} in the background (pid {ready.pid}); data and logs are in {plan.data_dir}")
        print(f"'quiver down --data-dir {plan.data_dir}' stops it.")
        return

    def announce(cluster: Cluster) -> None:
        with contextlib.suppress(BrokenPipeError):  # the cluster does not need its reader
            print(f"Quiver serves {', '.join((*cluster.servers, *cluster.http))}; data and logs are in {plan.data_dir}")
            print("Ctrl-C stops it; every acknowledged message is kept.", flush=True)

    ended = run_cluster(plan, say_on_stderr, announce)
    if ended.error:
        say(f"error: {ended.error}")
    raise typer.Exit(ended.code)


def down(data_dir: DataDir = None) -> None:
    """Stop the cluster of a data directory. Stored messages stay."""
    path = data_dir_of(data_dir)
    running = find_running(path)
    if running is None:
        raise not_running(path)
    if running.pid is None:
        raise UnavailableError(f"the cluster on {path} begins or ends just now; try again")
    try:
        os.kill(running.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it ended by itself since we looked
    except PermissionError as error:
        raise InvalidRequestError(f"process {running.pid} of the cluster on {path} is not yours to stop") from error
    _wait_until_gone(path, running)
    print(f"The cluster on {path} has stopped.")


def _wait_until_gone(path: Path, stopped: Running) -> None:
    began = time.monotonic()
    told = False
    while (now := find_running(path)) is not None and now.pid in (stopped.pid, None):
        waited_s = time.monotonic() - began
        if waited_s > DOWN_TIMEOUT_S:
            raise UnavailableError(f"the cluster on {path} still runs after {waited_s:.0f} s (pid {stopped.pid})")
        if not told and waited_s > PATIENCE_S:
            told = True
            say(f"waiting for the cluster to stop (pid {stopped.pid})")
        time.sleep(_POLL_S)
