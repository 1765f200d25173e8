"""What the tests on real processes share: a node that can be killed and started again, and a port it can keep."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from quiver import Admin, Consumer, Producer, Record

WAIT_S = 60.0
ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("QUIVER_")}
# Small files, so that a short load meets new segments, index files and check-points.
SMALL_FILES = {
    "QUIVER_LOG_SEGMENT_BYTES_MAX": "300000",
    "QUIVER_LOG_INDEX_INTERVAL_BYTES": "4096",
    "QUIVER_LOG_CHECKPOINT_BYTES": "100000",
    "QUIVER_LOG_RETENTION_MS": "none",
}


def free_port() -> int:
    """A port below those that the system gives to outgoing connections.

    A port of that range could be taken by any client while a node is down: even by the one that tries to reach it.
    """
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    dice = random.SystemRandom()
    while True:
        port = dice.randrange(10_000, low)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def end_by_signal() -> None:
    """For a command: SIGTERM is like Ctrl-C, so that all that was started is ended on the way out."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def until(condition: Callable[[], Any], timeout_s: float = WAIT_S) -> Any:
    """The first true answer."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return found


class Node:
    """One node process on one port and one directory, however often it dies. Ends with the `with` block."""

    def __init__(self, directory: Path, settings: dict[str, str] | None = None, port: int | None = None) -> None:
        self.directory = directory
        self.log_path = directory / "node.log"
        self.port = free_port() if port is None else port
        self.http_port = free_port()
        self.start_s = 0.0  # how long the last start took
        self._environ = ENVIRON | (settings or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns when it serves."""
        began_s = time.monotonic()
        ready = self.launch()
        with os.fdopen(ready, "rb") as pipe:
            line = json.loads(pipe.readline() or b"{}")
        if "address" not in line:
            self.kill()
            raise AssertionError(f"the node did not start: {line} {self.log_path.read_text()[-2000:]}")
        self.start_s = time.monotonic() - began_s

    def launch(self) -> int:
        """Starts it without waiting; returns the end of the pipe on which it says that it serves."""
        assert self._process is None
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "quiver.cli.node", "--data-dir", "data", "--node-id", "1"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--http-port", str(self.http_port)]
        read_end, write_end = os.pipe()
        try:
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [*command, "--ready-fd", str(write_end)],
                    stdin=subprocess.PIPE,  # it stops by itself when this process is gone
                    stdout=log,
                    stderr=log,
                    cwd=self.directory,
                    env=self._environ,
                    pass_fds=(write_end,),
                )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        return read_end

    def kill(self) -> None:
        """SIGKILL: no goodbye."""
        self._end(signal.SIGKILL)

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        return self._end(signal.SIGTERM)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def _end(self, number: int) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        assert process.stdin is not None
        try:
            return process.wait(WAIT_S)
        finally:
            process.stdin.close()

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)  # a stopped one could not die
            self.kill()


def create_topic(servers: str, name: str, partitions: int = 1) -> str:
    with Admin(servers) as admin:
        admin.create_topic(name, partitions)
    return name


def read_all(servers: str, topic: str) -> list[Record]:
    """All records of a topic, by partition and offset, up to where it ends now."""
    with Admin(servers) as admin:
        left = sum(latest - earliest for earliest, latest in admin.offsets(topic).values())
    found: list[Record] = []
    with Consumer(servers, [topic], start="earliest") as consumer:
        deadline = time.monotonic() + WAIT_S
        while len(found) < left:
            found += consumer.poll(10_000, timeout=1.0)
            assert time.monotonic() < deadline, f"{len(found)} of {left} records came"
    return sorted(found, key=lambda record: (record.partition, record.offset))


def values_of(records: list[Record]) -> list[bytes | None]:
    return [record.value for record in records]


@contextlib.contextmanager
def producer(servers: str, **settings: Any) -> Iterator[Producer]:
    """A producer that is closed even when its server is gone and its records never got there."""
    made = Producer(servers, **settings)
    try:
        yield made
    finally:
        with contextlib.suppress(Exception):
            made.close(timeout=0.1)


numbered = functools.partial("{}-{:06d}".format)
