"""Keeps the nodes of a cluster on this machine running: starts them, restarts those that die, stops them all.

It owns DATA while it runs: the lock says that it runs, cluster.json says who serves where. Each node is a child process
that reports on a pipe when it serves, and whose standard input is a pipe from here, so that it ends when we do.

SIGUSR1 says that a directory DATA/broker-N was made for one more broker (`quiver broker add`).

Rule: one task per node decides about that node; only `run` ends the whole cluster. A node that gives up before it
served once needs a person, and ends the cluster with its own exit code and message; one that dies later is restarted.
A broker that was added while the cluster runs never ends it before it has served: why it did not is left in its
directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from quiver.cli.cluster_file import BrokerEntry, Cluster, ManagerEntry, SupervisorEntry, remove_cluster, write_cluster
from quiver.cli.lock import is_held
from quiver.cli.primary import find_primary
from quiver.cli.ready import EXIT_FAILED, EXIT_REMOVED, NodeReady, StartFailed, last_words, parse_report

START_FAILED_FILE: Final = "start-failed"  # in the directory of a broker that was added: why it does not run

BACKOFF_S_MIN: Final = 0.1
BACKOFF_S_MAX: Final = 10.0
BACKOFF_RESET_S: Final = 30.0  # a node that was up so long starts with the shortest delay again
_WATCH_S: Final = 0.5
STOP_TIMEOUT_S: Final = 10.0  # a node that has not stopped by then is killed


@dataclasses.dataclass(frozen=True, slots=True)
class NodeSpec:
    """One process to keep running. `command` gets `--port`, `--http-port` and `--ready-fd` added at each start, and
    `--manager` when it is a broker of its own: those start when the manager serves."""

    name: str
    id: int
    command: tuple[str, ...]
    port: int
    http_port: int
    role: str = "embedded"


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """The cluster must end with this exit code; `error` says why, empty when it was asked to."""

    code: int
    error: str = ""


@dataclasses.dataclass(slots=True)
class Backoff:
    """How long to wait before the next start: doubling, so that a node that cannot start does not burn the machine."""

    _next_s: float = BACKOFF_S_MIN

    def delay_s(self, up_s: float) -> float:
        """`up_s` is how long the node served before it died, 0 when it never did."""
        if up_s >= BACKOFF_RESET_S:
            self._next_s = BACKOFF_S_MIN
        delay_s = self._next_s
        self._next_s = min(delay_s * 2, BACKOFF_S_MAX)
        return delay_s


@dataclasses.dataclass(slots=True)
class _Node:
    """What is known of one node; changed only by its own task."""

    spec: NodeSpec
    log_path: Path
    port: int  # the asked one until the first ready, then the real one: clients keep their address
    http_port: int  # likewise
    process: Process | None = None
    ready: NodeReady | None = None  # the last ready, kept while the node is being restarted
    added: bool = False  # since the cluster runs
    backoff: Backoff = dataclasses.field(default_factory=Backoff)


class Supervisor:
    """`say` gets one line for people for each event; `on_ready` is called once, when all nodes serve. `make_broker`
    tells how to run a broker of that number, None when no broker can be added."""

    def __init__(
        self,
        data_dir: Path,
        specs: Sequence[NodeSpec],
        *,
        restart: bool,
        say: Callable[[str], None],
        on_ready: Callable[[Cluster], None],
        make_broker: Callable[[int], NodeSpec] | None = None,
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> None:
        self._data_dir = data_dir
        self._logs_dir = data_dir / "logs"
        self._nodes = [self._node(spec) for spec in specs]
        self._make_broker = make_broker
        self._removed: set[int] = set()  # brokers that were removed from the cluster since it runs
        self._restart = restart
        self._say = say
        self._on_ready = on_ready
        self._stop_timeout_s = stop_timeout_s
        self._announced = False
        self._primary = 0  # the manager that leads, as far as is known
        self._manager_ready = asyncio.Event()

    async def run(self) -> Ended:
        """Until SIGTERM, SIGINT or SIGHUP, or a node that must not be restarted. The caller holds the lock."""
        stop = asyncio.Event()
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGUSR1, asked.set)
        self._logs_dir.mkdir(exist_ok=True)
        remove_cluster(self._data_dir)  # of a supervisor that was killed: nobody may take it for ours
        keepers = [asyncio.create_task(self._keep_running(node)) for node in self._nodes]
        stopping = asyncio.create_task(stop.wait())
        watching = asyncio.create_task(self._watch_primary())
        adding = asyncio.create_task(asked.wait())
        ended: Ended | None = None
        try:
            while ended is None:
                await asyncio.wait([stopping, adding, *keepers], return_when=asyncio.FIRST_COMPLETED)
                ended = next((found for task in keepers if task.done() and (found := task.result())), None)
                if ended is None and stopping.done():
                    ended = Ended(0)
                keepers = [keeper for keeper in keepers if not keeper.done()]
                if adding.done():
                    asked.clear()
                    adding = asyncio.create_task(asked.wait())
                    keepers += [asyncio.create_task(self._keep_running(node)) for node in self._take_in()]
        finally:
            for task in (stopping, watching, adding, *keepers):
                task.cancel()
            await asyncio.gather(stopping, watching, adding, *keepers, return_exceptions=True)
            # Brokers last: what the manager still answers needs them.
            for brokers in (False, True):
                stopping_now = [node for node in self._nodes if (node.spec.role == "broker") is brokers]
                await asyncio.gather(*(self._stop(node) for node in stopping_now))
            remove_cluster(self._data_dir)
        return ended

    def _node(self, spec: NodeSpec, *, added: bool = False) -> _Node:
        return _Node(spec, self._logs_dir / f"{spec.name}.log", spec.port, spec.http_port, added=added)

    def _take_in(self) -> list[_Node]:
        """The brokers that have a directory and are not run by anybody."""
        if self._make_broker is None:
            return []
        known = {node.spec.id for node in self._nodes if node.spec.role == "broker"} | self._removed
        found = []
        for number in sorted(numbers_of("broker", self._data_dir) - known):
            directory = self._data_dir / f"broker-{number}"
            if is_held(directory / "lock"):
                continue  # somebody runs it by hand
            with contextlib.suppress(OSError):
                (directory / START_FAILED_FILE).unlink()
            found.append(self._node(self._make_broker(number), added=True))
            self._say(f"broker-{number} is added")
        self._nodes += found
        return found

    async def _keep_running(self, node: _Node) -> Ended | None:
        """None: the others go on without it."""
        while True:
            log_start = node.log_path.stat().st_size if node.log_path.exists() else 0
            up_s = 0.0
            try:
                process, said = await self._start(node)
            except OSError as error:  # no process, descriptor or disk space left
                cause = f"{node.spec.name} cannot be started: {error.strerror}"
                if node.ready is None:
                    return self._cannot_start(node, EXIT_FAILED, cause)
            else:
                if isinstance(said, NodeReady):
                    up_since = time.monotonic()
                    self._publish(node, said)
                    await process.wait()
                    up_s = time.monotonic() - up_since
                code = await process.wait()
                if code == EXIT_REMOVED:
                    self._leave_out(node)
                    return None
                if node.ready is None and code > 0:
                    # It ended by itself and never served: a restart would meet the same port, directory or damage.
                    return self._cannot_start(node, code, _reason(node, said, log_start))
                cause = f"{node.spec.name} (pid {process.pid}) {_describe_exit(code)}"
            if not self._restart and node.added and node.ready is None:
                return self._cannot_start(node, EXIT_FAILED, cause)
            if not self._restart:
                return Ended(EXIT_FAILED, f"{cause}; the cluster ends (--no-restart). Its log: {node.log_path}")
            delay_s = node.backoff.delay_s(up_s)
            self._say(f"{cause}; starting it again in {delay_s:.1f} s. Its log: {node.log_path}")
            await asyncio.sleep(delay_s)

    async def _start(self, node: _Node) -> tuple[Process, NodeReady | StartFailed | None]:
        """A new process, and what it said when it was ready or gave up; None when it died silently."""
        arguments = ["--port", str(node.port), "--http-port", str(node.http_port)]
        if node.spec.role == "broker":
            await self._manager_ready.wait()
            managers = [other.ready.address for other in self._nodes if other.spec.role == "manager" and other.ready]
            arguments += ["--manager", ",".join(managers)]
        read_fd, write_fd = os.pipe()
        try:
            with node.log_path.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *node.spec.command,
                    *(*arguments, "--ready-fd", str(write_fd)),
                    stdin=PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=(write_fd,),
                    start_new_session=True,  # Ctrl-C reaches only the supervisor, which then stops them in order
                )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        node.process = process
        return process, parse_report(await _read_line(read_fd), NodeReady)

    def _publish(self, node: _Node, ready: NodeReady) -> None:
        """Tells the world where the nodes are, as soon as each has served once."""
        restarted = node.ready is not None
        node.ready = ready
        node.port = _port_of(ready.address)
        node.http_port = _port_of(ready.http) if ready.http else node.http_port
        if node.spec.role == "manager":
            self._primary = ready.primary or self._primary
            self._manager_ready.set()
        self._tell()
        if restarted and self._announced:
            self._say(f"{node.spec.name} serves {ready.address} again (pid {ready.pid})")

    def _leave_out(self, node: _Node) -> None:
        """That broker is not part of the cluster any more; the others go on without it."""
        self._say(f"{node.spec.name} was removed from the cluster and is not started again")
        self._nodes.remove(node)
        self._removed.add(node.spec.id)
        self._tell()

    def _cannot_start(self, node: _Node, code: int, reason: str) -> Ended | None:
        """Of one that was added the others have no need. Whoever added it looks for the reason in its directory."""
        if not node.added:
            return Ended(code, reason)
        self._say(f"{node.spec.name} cannot be added: {reason}")
        self._nodes.remove(node)
        try:
            (self._data_dir / node.spec.name / START_FAILED_FILE).write_text(reason)
        except OSError as error:
            self._say(f"cannot write the reason into its directory: {error.strerror}")
        return None

    def _tell(self) -> None:
        if any(other.ready is None and not other.added for other in self._nodes):
            return
        cluster = self._write()
        if not self._announced:
            self._announced = True
            self._on_ready(cluster)

    def _write(self) -> Cluster:
        cluster = self._cluster()
        try:
            write_cluster(self._data_dir, cluster)
        except OSError as error:
            # The nodes serve; a full disk must not take them down. The next restart writes it again.
            self._say(f"cannot write cluster.json: {error.strerror}")
        return cluster

    async def _watch_primary(self) -> None:
        """Keeps the primary the first of cluster.json's HTTP addresses."""
        managers = [node for node in self._nodes if node.spec.role == "manager"]
        if len(managers) == 1 or not managers:
            return
        while True:
            await asyncio.sleep(_WATCH_S)
            ready = [node.ready.address for node in managers if node.ready is not None]
            found = await find_primary(ready) if self._announced else 0
            if found not in (0, self._primary):
                self._primary = found
                self._say(f"manager-{found} is the primary now")
                self._write()

    def _cluster(self) -> Cluster:
        known = [(node.spec.role, node.ready) for node in self._nodes if node.ready is not None]
        managers = [entry for role, entry in known if role != "broker"]
        brokers = [entry for role, entry in known if role != "manager"]
        return Cluster(
            # An SDK may ask any node; brokers first, because a manager may be one of one.
            servers=tuple(dict.fromkeys(entry.address for entry in (*brokers, *managers))),
            brokers=tuple(BrokerEntry(entry.id, entry.pid, entry.address) for entry in brokers),
            supervisor=SupervisorEntry(os.getpid(), takes_brokers=self._make_broker is not None),
            managers=tuple(ManagerEntry(entry.id, entry.pid, entry.http, entry.address) for entry in managers),
            http=tuple(entry.http for entry in sorted(managers, key=lambda one: one.id != self._primary)),
        )

    async def _stop(self, node: _Node) -> None:
        process = node.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self._stop_timeout_s)
        except TimeoutError:
            self._say(f"{node.spec.name} (pid {process.pid}) did not stop in {self._stop_timeout_s:.0f} s; killing it")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def numbers_of(role: str, data_dir: Path) -> set[int]:
    """The nodes that have a directory here."""
    found = (path.name.removeprefix(f"{role}-") for path in data_dir.glob(f"{role}-*"))
    return {int(number) for number in found if number.isdecimal()}


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def _read_line(fd: int) -> bytes:
    """The first line of a pipe, or what came before its end."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    try:
        return await reader.readline()
    finally:
        transport.close()


def _reason(node: _Node, said: NodeReady | StartFailed | None, log_start: int) -> str:
    if isinstance(said, StartFailed):
        return said.error
    return f"{node.spec.name} could not start: {last_words(node.log_path, log_start)}. Its log: {node.log_path}"


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
