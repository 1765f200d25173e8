"""A cluster that `quiver up --detach` supervises: its node may be killed and comes back by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from quiver.cli.cluster_file import SUPERVISOR_LOCK, Cluster, read_cluster
from quiver.cli.lock import holder_pid, is_held
from tests.system.kit import ENVIRON, free_port, until


class SupervisedCluster:
    """Ends with the `with` block, node and supervisor."""

    def __init__(self, directory: Path) -> None:
        self._data_dir = directory / "data"
        ports = ["--port", str(free_port()), "--http-port", str(free_port())]
        self._command = [sys.executable, "-m", "quiver.cli.main", "up", "--detach", "--data-dir", str(self._data_dir)]
        self._command += ports
        self.pids: list[int] = []  # of the node, one for each of its lives

    def start(self) -> None:
        """Returns when it takes messages."""
        run = subprocess.run(self._command, capture_output=True, env=ENVIRON, timeout=60)
        assert run.returncode == 0, run.stderr.decode()
        self.pids.append(self.file.brokers[0].pid)

    @property
    def file(self) -> Cluster:
        found = read_cluster(self._data_dir)
        assert found is not None
        return found

    @property
    def servers(self) -> str:
        return self.file.servers[0]

    @property
    def http(self) -> str:
        return self.file.http[0]

    def kill_node(self) -> None:
        """SIGKILL: no goodbye. The supervisor starts it again."""
        os.kill(self.pids[-1], signal.SIGKILL)

    def until_back(self) -> None:
        until(lambda: self.file.brokers[0].pid != self.pids[-1], 60)
        self.pids.append(self.file.brokers[0].pid)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for lock in (self._data_dir / SUPERVISOR_LOCK, self._data_dir / "broker-1" / "lock"):
            if lock.exists() and is_held(lock):
                pid = holder_pid(lock)
                if pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
                until(lambda lock=lock: not is_held(lock))
