"""A supervised cluster that gets more brokers while it runs, and brokers that wait to be added."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quiver.cli.cluster_file import SUPERVISOR_LOCK, Cluster, read_cluster
from quiver.cli.lock import holder_pid, is_held
from tests.system.kit import ENVIRON, until
from tests.system.quick_commands import quick

QUIVER = (sys.executable, "-m", "quiver.cli.main")


class Growing:
    """Commands run in its directory find it by themselves."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data_dir = directory / "quiver-data"

    def run(self, *words: str, code: int = 0) -> str:
        """Standard output, or of a command that fails its error."""
        if words[0] == "up":
            run = subprocess.run([*QUIVER, *words], capture_output=True, cwd=self.directory, env=ENVIRON, timeout=90)
        else:
            run = quick(*words, cwd=self.directory)
        assert run.returncode == code, run.stderr.decode()
        assert b"Traceback" not in run.stderr
        return (run.stderr if code else run.stdout).decode()

    @property
    def file(self) -> Cluster:
        found = read_cluster(self.data_dir)
        assert found is not None
        return found

    @property
    def servers(self) -> str:
        return ",".join(self.file.servers)

    @property
    def brokers(self) -> list[int]:
        return sorted(entry.id for entry in self.file.brokers)

    def pid(self, broker: int) -> int:
        return next(entry.pid for entry in self.file.brokers if entry.id == broker)

    def log(self, name: str) -> str:
        return (self.data_dir / "logs" / f"{name}.log").read_text()

    def listed(self) -> dict[int, dict[str, Any]]:
        return {row["id"]: row for row in json.loads(self.run("broker", "list", "--json"))}

    def end(self) -> None:
        lock = self.data_dir / SUPERVISOR_LOCK
        pid = holder_pid(lock) if lock.exists() else None
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            until(lambda: not is_held(lock))


class WaitingBroker:
    """A broker process that was told of no manager."""

    def __init__(self, directory: Path, broker: int, *words: str) -> None:
        directory.mkdir(exist_ok=True)
        self.log_path = directory / f"waiting-{broker}.log"
        self.log_path.unlink(missing_ok=True)
        command = [*QUIVER, "broker", "--id", str(broker), *words]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=directory, env=ENVIRON, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def until_waiting(self) -> str:
        """Its address."""
        until(lambda: "waits to be added" in self.log)
        line = next(line for line in self.log.splitlines() if "waits to be added" in line)
        return line.split(" listens at ")[1].split(" and waits")[0]

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@contextlib.contextmanager
def waiting_broker(directory: Path, broker: int, *words: str) -> Iterator[WaitingBroker]:
    made = WaitingBroker(directory, broker, *words)
    try:
        yield made
        assert "Traceback" not in made.log
    finally:
        if made.process.poll() is None:
            made.end()
