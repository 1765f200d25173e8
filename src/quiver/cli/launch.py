"""Starts the supervisor for `quiver up`: in this process, or as one of its own that stays (`--detach`).

Rule: imports stay light, see node.py; `python -m quiver.cli.launch` is the detached process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import errno
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quiver.cli.cluster_file import Cluster, find_running, supervisor_lock
from quiver.cli.ready import EXIT_USER_MISTAKE, ClusterReady, ReadyPipe, StartFailed, last_words, parse_report
from quiver.cli.settings import CONFIG_DEFAULT, PORT_MAX, load_settings
from quiver.cli.supervisor import Ended, NodeSpec, Supervisor, numbers_of
from quiver.errors import InvalidRequestError, QuiverError, RequestError, UnavailableError

# Those who only look (status, down) hold the lock for microseconds; so long a start waits before it believes them.
SUPERVISOR_LOCK_WAIT_S = 0.3
MANAGER_COUNTS = (1, 3, 5)
PATIENCE_S = 2.0  # then a waiting command says what it waits for


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to run, with every setting decided and every path absolute."""

    data_dir: Path
    host: str
    port: int
    http_port: int
    metadata_url: str
    insecure: bool
    restart: bool
    config: str | None
    brokers: int = 1
    managers: int = 1

    def arguments(self) -> tuple[str, ...]:
        """The flags that a node and the detached supervisor share."""
        found = ["--data-dir", str(self.data_dir), "--host", self.host]
        if self.metadata_url:
            found += ["--metadata-url", self.metadata_url]
        if self.insecure:
            found.append("--insecure")
        if self.config is not None:
            found += ["--config", self.config]
        return tuple(found)

    def specs(self) -> list[NodeSpec]:
        """One embedded node, or managers and brokers, on ports one after the other."""
        command = self._command()
        if self.is_embedded:
            return [NodeSpec("broker-1", 1, (*command, "1"), self.port, self.http_port)]
        specs: list[NodeSpec] = []
        ports = self._manager_ports()
        host = f"[{self.host}]" if ":" in self.host else self.host
        peers = ",".join(f"{number}={host}:{port}" for number, port in enumerate(ports, 1))
        for number, port in enumerate(ports, 1):
            manager = (*command, str(number), "--role", "manager", *(("--peers", peers) if self.managers > 1 else ()))
            http_port = self.http_port + number - 1 if self.http_port else 0
            specs.append(NodeSpec(f"manager-{number}", number, manager, port, http_port, "manager"))
        return specs + [self._broker(number) for number in range(1, self.brokers + 1)]

    @property
    def is_embedded(self) -> bool:
        return self.brokers == self.managers == 1

    def added_broker(self, number: int) -> NodeSpec:
        """One that is added while the cluster runs: as the next start will have it, but on a free port if need be."""
        spec = self._broker(number)
        return spec if spec.port <= PORT_MAX and self._is_free(spec.port) else dataclasses.replace(spec, port=0)

    def _broker(self, number: int) -> NodeSpec:
        port = self.port + self.managers + number - 1 if self.port else 0
        return NodeSpec(
            f"broker-{number}", number, (*self._command(), str(number), "--role", "broker"), port, 0, "broker"
        )

    def _command(self) -> tuple[str, ...]:
        # -P: a file of the user's directory must not stand in for a module of ours.
        return (sys.executable, "-P", "-m", "quiver.cli.node", *self.arguments(), "--node-id")

    def _is_free(self, port: int) -> bool:
        with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the broker will
            try:
                probe.bind((self.host, port))
            except OSError:
                return False
        return True

    def _manager_ports(self) -> list[int]:
        """Managers must know each other's ports before they start."""
        if self.port or self.managers == 1:
            return [self.port + place for place in range(self.managers)]
        with contextlib.ExitStack() as held:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            taken = [held.enter_context(socket.socket(family)) for _ in range(self.managers)]
            for one in taken:
                one.bind((self.host, 0))
            return [int(one.getsockname()[1]) for one in taken]


def make_plan(
    flags: dict[str, Any],
    *,
    restart: bool,
    config: str | None,
    brokers: int | None = None,
    managers: int | None = None,
) -> Plan:
    settings = load_settings(flags, config)
    used = Path(config or CONFIG_DEFAULT)
    count = decide_count("broker", "messages", brokers, Path(settings.data_dir))
    manager_count = decide_count("manager", "metadata", managers, Path(settings.data_dir))
    if manager_count not in MANAGER_COUNTS:
        raise InvalidRequestError(f"--managers {manager_count} is not possible: 1, 3 or 5 managers make a quorum")
    if settings.port + count + manager_count - 1 > PORT_MAX:
        raise InvalidRequestError(f"port {settings.port} leaves no room for {count} brokers above it")
    if (settings.http_port or 0) + manager_count - 1 > PORT_MAX:
        raise InvalidRequestError(f"port {settings.http_port} leaves no room for {manager_count} managers above it")
    return Plan(
        data_dir=Path(settings.data_dir).absolute(),
        host=settings.host,
        port=settings.port,
        http_port=settings.http_port or 0,
        metadata_url=settings.metadata_url,
        insecure=settings.insecure,
        restart=restart,
        config=str(used.absolute()) if used.exists() else None,
        brokers=count,
        managers=manager_count,
    )


def decide_count(role: str, what: str, asked: int | None, data_dir: Path) -> int:
    """As many as were asked for, else as many as the data directory has. Never fewer: what they hold would miss."""
    held = max(numbers_of(role, data_dir), default=1)
    if asked is None:
        return held
    if asked < held:
        raise InvalidRequestError(
            f"{data_dir.absolute()} has the {what} of {held} {role}s; --{role}s {asked} would leave some out"
        )
    return asked


def run_cluster(plan: Plan, say: Callable[[str], None], on_ready: Callable[[Cluster], None]) -> Ended:
    """Owns the data directory and supervises until the cluster ends."""
    prepare_data_dir(plan.data_dir)
    lock = supervisor_lock(plan.data_dir)
    if not lock.acquire(SUPERVISOR_LOCK_WAIT_S):
        raise already_running(plan.data_dir)
    with lock:
        make_broker = None if plan.is_embedded else plan.added_broker
        supervisor = Supervisor(
            plan.data_dir, plan.specs(), restart=plan.restart, say=say, on_ready=on_ready, make_broker=make_broker
        )
        return asyncio.run(supervisor.run())


def start_detached(plan: Plan, say: Callable[[str], None]) -> ClusterReady:
    """Returns when the cluster takes messages; raises what kept it from that."""
    prepare_data_dir(plan.data_dir)
    if find_running(plan.data_dir) is not None:
        raise already_running(plan.data_dir)
    log_path = plan.data_dir / "logs" / "supervisor.log"
    command = [sys.executable, "-P", "-m", "quiver.cli.launch", *plan.arguments(), "--port", str(plan.port)]
    command += ["--http-port", str(plan.http_port), "--brokers", str(plan.brokers), "--managers", str(plan.managers)]
    if not plan.restart:
        command.append("--no-restart")
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd, "rb", buffering=0) as reader:
        with log_path.open("ab") as log:
            log_start = log.tell()
            child = subprocess.Popen(
                [*command, "--ready-fd", str(write_fd)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(write_fd,),
                start_new_session=True,
            )
        os.close(write_fd)
        try:
            if not select.select([reader], [], [], PATIENCE_S)[0]:
                say(f"the cluster is still starting (pid {child.pid}); its logs are in {log_path.parent}")
            said = parse_report(reader.readline(), ClusterReady)
        except KeyboardInterrupt:
            child.terminate()
            child.wait()
            raise
    if isinstance(said, ClusterReady):
        return said
    child.wait()
    raise _failure(said, log_path, log_start)


def prepare_data_dir(data_dir: Path) -> None:
    try:
        (data_dir / "logs").mkdir(parents=True, exist_ok=True)
        if not os.access(data_dir, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise InvalidRequestError(f"cannot write to the data directory {data_dir}: {error.strerror}") from error


def already_running(data_dir: Path) -> InvalidRequestError:
    running = find_running(data_dir)
    cluster = running.cluster if running else None
    pid = f" (pid {running.pid})" if running and running.pid else ""
    where = f" and serves {', '.join(cluster.servers)}" if cluster else ""
    return InvalidRequestError(
        f"a cluster runs already on {data_dir}{where}{pid}; 'quiver down --data-dir {data_dir}' stops it"
    )


def say_on_stderr(line: str) -> None:
    """One dated line. Whoever read our output may be gone; the cluster goes on."""
    with contextlib.suppress(OSError):
        print(time.strftime("%Y-%m-%d %H:%M:%S"), line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    parent = ReadyPipe(arguments.ready_fd)

    def announce(cluster: Cluster) -> None:
        say_on_stderr(f"cluster_ready servers={','.join(cluster.servers)} pid={os.getpid()}")
        parent.report(ClusterReady(cluster.servers, cluster.http, os.getpid()))

    flags = {
        name: getattr(arguments, name) for name in ("data_dir", "host", "port", "http_port", "metadata_url", "insecure")
    }
    try:
        counts = {"brokers": arguments.brokers, "managers": arguments.managers}
        plan = make_plan(flags, restart=not arguments.no_restart, config=arguments.config, **counts)
        ended = run_cluster(plan, say_on_stderr, announce)
    except QuiverError as error:
        ended = Ended(EXIT_USER_MISTAKE if isinstance(error, RequestError) else 1, error.message)
    if ended.error:
        say_on_stderr(f"error: {ended.error}")
        parent.report(StartFailed(ended.error, ended.code))
    else:
        say_on_stderr("cluster_stopped")
    return ended.code


def _failure(said: StartFailed | None, log_path: Path, log_start: int) -> QuiverError:
    if said is not None:
        return (InvalidRequestError if said.code == EXIT_USER_MISTAKE else UnavailableError)(said.error)
    return UnavailableError(f"the cluster could not start: {last_words(log_path, log_start)}. Its log: {log_path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="quiver.cli.launch", description="Supervises a Quiver cluster.")
    parser.add_argument("--data-dir")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--http-port", type=int)
    parser.add_argument("--brokers", type=int)
    parser.add_argument("--managers", type=int)
    parser.add_argument("--metadata-url")
    parser.add_argument("--insecure", action="store_true", default=None)
    parser.add_argument("--no-restart", action="store_true")
    parser.add_argument("--config")
    parser.add_argument("--ready-fd", type=int)
    return parser


if __name__ == "__main__":
    sys.exit(main())
