"""The process of one node: `python -m quiver.cli.node`. The supervisor starts it; it also runs alone.

It locks its directory, starts what its role asks for, tells its parent, and serves until it is told to stop: by
SIGTERM, SIGINT, or the end of its standard input, which is a pipe from the supervisor and closes when that dies. A node
without a supervisor would otherwise keep the port and the directory from the next one.

Rule: every import counts here (`quiver up` is ready in under a second): no typer, rich or pyarrow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import uvloop

from quiver.cli.lock import FileLock
from quiver.cli.ready import EXIT_FAILED, EXIT_REMOVED, EXIT_USER_MISTAKE, NodeReady, ReadyPipe, StartFailed
from quiver.cli.settings import load_settings
from quiver.config import NodeSettings, check_listen_address
from quiver.errors import InvalidRequestError, NodeRemovedError, QuiverError, RequestError

# The orphan of a killed supervisor needs a moment to end; the next node waits for it so long.
DIRECTORY_LOCK_WAIT_S = 3.0

# What the system says when the address or directory a user gave cannot be used.
_USER_ERRNOS = frozenset(
    {
        errno.EADDRINUSE,
        errno.EADDRNOTAVAIL,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.EEXIST,
        errno.ENOTDIR,
        errno.ENAMETOOLONG,
    }
)

# What one process can be. An embedded node is manager and broker in one.
ROLES = ("embedded", "manager", "broker")

_GC_ALLOCATIONS = 20_000  # more than are freed, until the search for cycles begins; Python's own is 700

logger = logging.getLogger("quiver.node")


class Node(Protocol):
    """`http` is empty for a node without an HTTP port, `primary` is 0 for one that is no manager of several."""

    @property
    def address(self) -> str: ...

    @property
    def http(self) -> str: ...

    @property
    def primary(self) -> int: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    parent = ReadyPipe(arguments.ready_fd)
    settings = None
    try:
        settings = load_settings(_flags(arguments), arguments.config)
        check_listen_address(settings.host, settings.insecure)
        with lock_directory(settings, arguments.role):
            uvloop.run(serve(settings, parent, arguments.role))
        return 0
    except (QuiverError, OSError) as error:
        failure = explain(error, settings)
        parent.report(failure)
        print(f"error: {failure.error}", file=sys.stderr)
        return failure.code


def lock_directory(settings: NodeSettings, role: str) -> FileLock:
    """Makes DATA/broker-N or DATA/manager-N and owns it: two processes that write one log would destroy it."""
    name = f"{'manager' if role == 'manager' else 'broker'}-{settings.node_id}"
    directory = Path(settings.data_dir) / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / "lock")
        if lock.acquire(DIRECTORY_LOCK_WAIT_S):
            return lock
    except OSError as error:
        raise InvalidRequestError(f"cannot write to the data directory {directory}: {error.strerror}") from error
    raise InvalidRequestError(f"the data directory {directory} is in use by another process")


def make_node(settings: NodeSettings, role: str, on_removed: Callable[[NodeRemovedError], None]) -> Node:
    if role == "embedded":
        from quiver.cli.embedded import EmbeddedNode

        return EmbeddedNode(settings)
    from quiver.cli.cluster_nodes import BrokerNode, ManagerNode

    if role == "manager":
        return ManagerNode(settings, on_removed)
    return BrokerNode(settings, on_removed, lambda address: _say_waiting(settings.node_id, address))


def _say_waiting(broker_id: int, address: str) -> None:
    with contextlib.suppress(OSError):  # whoever read our output may be gone
        print(
            f"Broker {broker_id} listens at {address} and waits to be added to a cluster: "
            f"'quiver broker add {address}' does that. Ctrl-C ends it.",
            flush=True,
        )


async def serve(settings: NodeSettings, parent: ReadyPipe, role: str) -> None:
    """Runs the node until something asks it to stop. Raises NodeRemovedError when its cluster does not want it."""
    stop = asyncio.Event()
    removed: list[NodeRemovedError] = []

    def on_removed(error: NodeRemovedError) -> None:
        removed.append(error)
        stop.set()

    _watch_for_stop(asyncio.get_running_loop(), stop)
    node = make_node(settings, role, on_removed)
    if not await _start(node, stop, role):
        if removed:
            raise removed[0]
        return
    try:
        logger.info("node_ready id=%d address=%s http=%s", settings.node_id, node.address, node.http)
        parent.report(NodeReady(settings.node_id, os.getpid(), node.address, node.http, node.primary))
        # What is here now stays; and a node makes few cycles, so the search for them need not be done so often.
        gc.freeze()
        gc.set_threshold(_GC_ALLOCATIONS)
        await stop.wait()
        logger.info("node_stopping id=%d", settings.node_id)
    finally:
        await node.stop()
    if removed:
        raise removed[0]


async def _start(node: Node, stop: asyncio.Event, role: str) -> bool:
    """False when it was told to stop before it served."""
    if role == "embedded":
        await node.start()  # a stop that is asked for meanwhile is done right after: recovery is not cut short
        return True
    # A broker waits for its managers, and these wait for each other, for ever if need be; that wait can be ended.
    starting, stopping = asyncio.ensure_future(node.start()), asyncio.ensure_future(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        stopping.cancel()
        starting.result()
        return True
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    return False


def explain(error: QuiverError | OSError, settings: NodeSettings | None) -> StartFailed:
    """One line for the user, and whose fault it is."""
    if isinstance(error, NodeRemovedError):
        return StartFailed(error.message, EXIT_REMOVED)
    if isinstance(error, QuiverError):
        return StartFailed(error.message, EXIT_USER_MISTAKE if isinstance(error, RequestError) else EXIT_FAILED)
    where = f"{settings.host}:{settings.port}" if settings else "the node"
    if isinstance(error, socket.gaierror):
        return StartFailed(f"cannot listen on {where}: {error.strerror}", EXIT_USER_MISTAKE)
    if error.errno == errno.EADDRINUSE:
        return StartFailed(f"cannot listen on {where}: the port is in use by another process", EXIT_USER_MISTAKE)
    # The event loop wraps the system's words in its own; the number gives them back.
    reason = os.strerror(error.errno) if error.errno else str(error)
    what = f"cannot use {error.filename}" if error.filename else f"cannot listen on {where}"
    return StartFailed(f"{what}: {reason}", EXIT_USER_MISTAKE if error.errno in _USER_ERRNOS else EXIT_FAILED)


def _watch_for_stop(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # Only a pipe or socket means a supervisor: a node started with </dev/null or from a terminal has none to outlive.
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        loop.add_reader(0, _on_stdin, loop, stop)


def _on_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    try:
        if os.read(0, 4096):
            return
    except BlockingIOError:
        return
    except OSError:
        pass
    loop.remove_reader(0)
    stop.set()


def _flags(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("data_dir", "node_id", "host", "port", "http_port", "metadata_url", "insecure", "manager", "peers")
    return {name: getattr(arguments, name) for name in names}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="quiver.cli.node", description="Runs one Quiver node.")
    parser.add_argument("--data-dir", help="where the node keeps its logs, in DATA/broker-N")
    parser.add_argument("--node-id", type=int, help="N, from 1")
    parser.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=int, help="port to listen on; 0 takes a free one")
    parser.add_argument("--http-port", type=int, help="port of the HTTP API; 0 takes a free one")
    parser.add_argument("--metadata-url", help="SQL database for metadata; SQLite in the data directory when not given")
    parser.add_argument("--role", choices=ROLES, default="embedded", help="what to run; default: both in one")
    parser.add_argument("--manager", help="addresses of the managers, for a broker")
    parser.add_argument("--peers", help="all managers, as 1=host:port,2=host:port, for a manager of several")
    parser.add_argument("--insecure", action="store_true", default=None, help="allow an address that is not loopback")
    parser.add_argument("--config", help="settings file; quiver.toml of the current directory when not given")
    parser.add_argument("--ready-fd", type=int, help="descriptor that gets one JSON line when the node serves")
    return parser


if __name__ == "__main__":
    sys.exit(main())
