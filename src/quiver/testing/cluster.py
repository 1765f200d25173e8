"""A cluster of real processes for tests: started in a moment, killed and started again at will.

Rule: its data is of no worth. Nodes are killed, not asked, and every process that was started here ends here; should
the test process die, its nodes notice and end by themselves.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import msgspec

from quiver.errors import InvalidRequestError, UnavailableError

_START_S: Final = 30.0
_names = itertools.count(1)


class _Node:
    """One process; its port and directory stay the same however often it is started."""

    def __init__(self, name: str, arguments: tuple[str, ...], directory: Path, environ: Mapping[str, str]) -> None:
        self.name = name
        self.address = self.http = ""
        self._arguments = arguments
        self._directory = directory
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: IO[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns at once; `until_ready` waits."""
        reading, writing = os.pipe()
        flags = ["--data-dir", str(self._directory), "--ready-fd", str(writing)]
        for flag, address in (("--port", self.address), ("--http-port", self.http)):
            flags += [flag, address.rpartition(":")[2] or "0"]
        command = (sys.executable, "-P", "-m", "quiver.cli.node", *self._arguments, *flags)
        with open(writing, "wb"), (self._directory / f"{self.name}.log").open("ab") as log:
            # Standard input is a pipe that ends with this process, and so does the node.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stderr=log, pass_fds=(writing,), env={**os.environ, **self._environ}
            )
        self._ready = open(reading, "rb")  # noqa: SIM115  # closed by until_ready

    def until_ready(self, deadline_s: float) -> None:
        assert self._ready is not None
        with self._ready as pipe:
            readable, _, _ = select.select([pipe], [], [], max(0.0, deadline_s - time.monotonic()))
            line = pipe.readline() if readable else b""
        said: dict[str, Any] = msgspec.json.decode(line) if line else {}
        if "address" not in said:
            why = said.get("error") or f"it said nothing; see {self._directory / self.name}.log"
            self.kill()
            raise UnavailableError(f"{self.name} did not start: {why}")
        self.address, self.http = said["address"], said["http"]

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process = None


class QuiverCluster:
    """One broker is an embedded node, manager and broker in one process; more have a manager of its own beside them.

    `settings` are those of quiver.toml, for all nodes: retention_check_s=0.1, log_segment_bytes_max=4096.
    """

    def __init__(self, directory: Path, brokers: int = 1, **settings: object) -> None:
        if isinstance(brokers, bool) or not isinstance(brokers, int) or not 1 <= brokers <= 9:
            raise InvalidRequestError(f"brokers is a number from 1 to 9, not {brokers!r}")
        environ = {f"QUIVER_{name.upper()}": str(value) for name, value in settings.items()}
        directory.mkdir(parents=True, exist_ok=True)

        def node(name: str, number: int, *arguments: str) -> _Node:
            return _Node(name, ("--node-id", str(number), *arguments), directory, environ)

        self.directory = directory
        self._manager: _Node | None = None
        if brokers == 1:
            self._brokers = {1: node("broker-1", 1)}
        else:
            self._manager = node("manager-1", 1, "--role", "manager")
            self._start([self._manager])
            joining = ("--role", "broker", "--manager", self._manager.address)
            self._brokers = {number: node(f"broker-{number}", number, *joining) for number in range(1, brokers + 1)}
        self.restart()

    @property
    def servers(self) -> str:
        """For Producer, Consumer and Admin: all that run."""
        nodes = [*([self._manager] if self._manager else ()), *self._brokers.values()]
        return ",".join(node.address for node in nodes if node.is_running)

    @property
    def http(self) -> str:
        """The address of the HTTP API."""
        return (self._manager or self._brokers[1]).http

    @property
    def brokers(self) -> list[int]:
        """The numbers of those that run."""
        return [number for number, node in self._brokers.items() if node.is_running]

    def new_topic(self, partitions: int = 1, settings: Mapping[str, object] | None = None) -> str:
        """Makes a topic that nobody else uses, and returns its name."""
        from quiver import Admin

        name = f"topic-{os.getpid()}-{next(_names)}"
        with Admin(self.servers) as admin:
            admin.create_topic(name, partitions, settings)
        return name

    def kill_broker(self, number: int = 1) -> None:
        """As if its power were cut: no goodbye, nothing more written. The only broker takes its manager with it."""
        if number not in self._brokers:
            raise InvalidRequestError(f"there is no broker {number}; there are {sorted(self._brokers)}")
        self._brokers[number].kill()

    def restart(self) -> None:
        """Starts all brokers that do not run, where they were and with what they had; returns when they serve."""
        self._start([node for node in self._brokers.values() if not node.is_running])

    def stop(self) -> None:
        """Ends every process. The directory stays."""
        for node in (*self._brokers.values(), *([self._manager] if self._manager else ())):
            node.kill()

    def _start(self, nodes: list[_Node]) -> None:
        deadline_s = time.monotonic() + _START_S
        for node in nodes:
            node.start()
        for node in nodes:
            node.until_ready(deadline_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Clusters:
    """Those of one test session: one for each number of brokers and settings, shared by all tests that ask for it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: dict[tuple[int, frozenset[tuple[str, str]]], QuiverCluster] = {}

    def __call__(self, brokers: int = 1, **settings: object) -> QuiverCluster:
        key = (brokers, frozenset((name, str(value)) for name, value in settings.items()))
        if key not in self._made:
            self._made[key] = QuiverCluster(self._directory / f"cluster-{len(self._made) + 1}", brokers, **settings)
        cluster = self._made[key]
        cluster.restart()  # what an earlier test killed
        return cluster

    def stop(self) -> None:
        for cluster in self._made.values():
            cluster.stop()


@contextlib.contextmanager
def clusters(directory: Path) -> Iterator[Clusters]:
    made = Clusters(directory)
    try:
        yield made
    finally:
        made.stop()
