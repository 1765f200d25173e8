"""The measured servers as processes: started here, known by pid, ended here.

Rule: a server that was started is ended, whatever happens in between; its data and its log lie in the given directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import redis
import redis_bench

from quiver.cli.ready import NodeReady, last_words, parse_report

HERE = Path(__file__).resolve().parent
STOP_TIMEOUT_S = 15.0
START_TIMEOUT_S = 20.0
CHILD_TIMEOUT_S = 300.0


class RedisUnavailableError(Exception):
    """There is no redis-server here, and why."""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A Ctrl-C that comes meanwhile takes effect at the end: cut short, the clean-up would leave a process behind."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def end(process: subprocess.Popen[bytes], number: int) -> None:
    """Asks, and kills what has not ended in time. Its pipes are closed."""
    if process.poll() is None:
        process.send_signal(number)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def run_child(command: Sequence[str]) -> bytes:
    """What it printed. It is ended when this raises."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=CHILD_TIMEOUT_S)
    finally:
        with uninterrupted():
            end(process, signal.SIGKILL)
    if process.returncode:
        raise RuntimeError(f"{Path(command[1]).name} failed")
    return output


class Server:
    """A child in a process group of its own: Ctrl-C reaches the benchmark alone, which then ends its servers."""

    stop_signal: int = signal.SIGTERM

    def __init__(
        self, directory: Path, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log_path = directory / "server.log"
        # Settings of this shell or directory must not change what is measured.
        clean = {name: value for name, value in os.environ.items() if not name.startswith("QUIVER_")}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=directory,
                env={**clean, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                **options,
            )
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def wait_until_ready(self) -> None:
        raise NotImplementedError

    def failure(self, what: str) -> RuntimeError:
        return RuntimeError(f"{what}: {last_words(self.log_path, 0)}")

    def memory_bytes(self) -> Mapping[str, int]:
        """The process's memory by the system's names; VmRSS is now, VmHWM the most since `forget_peak`."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Vm")}

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def stop(self) -> None:
        with uninterrupted():
            end(self.process, self.stop_signal)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and self.process.poll() is not None:
            error.add_note(f"{type(self).__name__} had ended by itself: {last_words(self.log_path, 0)}")
        self.stop()


class Node(Server):
    """A Quiver node with its default settings."""

    def __init__(self, directory: Path) -> None:
        reader, self._writer = os.pipe()
        command = [sys.executable, "-m", "quiver.cli.node", "--data-dir", str(directory)]
        command += ["--node-id", "1", "--host", "127.0.0.1", "--port", "0", "--http-port", "0"]
        command += ["--ready-fd", str(self._writer)]
        with os.fdopen(reader, "rb") as self._ready:
            super().__init__(directory, command, pass_fds=(self._writer,))

    def wait_until_ready(self) -> None:
        os.close(self._writer)  # the node has its own; without this a node that dies would not end the pipe
        report = parse_report(self._ready.readline(), NodeReady)
        if not isinstance(report, NodeReady):
            raise self.failure("the Quiver node did not start")
        self.address, self.http = report.address, report.http


class Floor(Server):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory, [sys.executable, str(HERE / "floor.py"), str(directory / "frames")])

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self.failure("the floor's server did not start")
        self.port = int(line)


class ReplicatedFloor(Floor):
    def __init__(self, directory: Path, followers: Sequence[int]) -> None:
        command = [sys.executable, str(HERE / "replicated_floor.py"), str(directory / "frames"), *map(str, followers)]
        Server.__init__(self, directory, command)


class RedisServer(Server):
    """Every write on disk before its answer. Snapshots and rewriting of the log are off: they would only cost it."""

    def __init__(self, directory: Path) -> None:
        _ensure_redis()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(directory),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            "auto-aof-rewrite-percentage": "0",
            "logfile": str(directory / "server.log"),
        }
        command = ["redis-server", *(word for name, value in settings.items() for word in (f"--{name}", value))]
        super().__init__(directory, command)

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            with contextlib.suppress(redis.ConnectionError), redis_bench.client_of(self.port) as client:
                self.version = str(client.info("server")["redis_version"])
                return
            time.sleep(0.05)
        raise self.failure("redis-server did not start")


def _ensure_redis() -> None:
    if shutil.which("redis-server") is None:
        script = HERE.parent / "scripts" / "apt-package"
        tried = subprocess.run([script, "redis-server", "redis-server"], capture_output=True, text=True, check=False)
        if tried.returncode:
            said = tried.stderr.strip().splitlines()
            raise RedisUnavailableError(said[-1] if said else "redis-server cannot be installed")
