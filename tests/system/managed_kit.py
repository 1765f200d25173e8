"""A cluster of three managers and brokers that `quiver up --detach` supervises, and its managers one by one."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from quiver.metadata.store import schema_url, sqlite_url
from tests.metadata.kit import dump
from tests.system.kit import until
from tests.system.quick_commands import quick
from tests.system.replicated_kit import BACK_S_MAX, LOG_TROUBLE, ReplicatedCluster, free_ports

# Tables of which every row is a function of the log, with the columns that are observed and not replicated.
OBSERVED = {
    "broker_metadata": (2, 3),
    "partition_metadata": (4, 6),
    "producer_metadata": (3,),
    "consumer_metadata": (3, 4),
    "manager_metadata": (3, 4),
}
MANAGERS = (1, 2, 3)
# A primary that stays, whatever else the machine does: a change of it is no harm, and answered with 503.
PATIENT = {"QUIVER_RAFT_ELECTION_MS": "3000", "QUIVER_NET_PEER_SILENCE_S": "5", "QUIVER_METADATA_STALE_S": "10"}


class ManagedCluster(ReplicatedCluster):
    def __init__(self, directory: Path, settings: dict[str, str] | None = None, brokers: int = 1) -> None:
        super().__init__(directory, settings or {})
        self._broker_count = brokers
        self.failpoints = directory / "failpoints"
        self.failpoints.mkdir()
        self._environ = self._environ | {"QUIVER_FAILPOINTS": str(self.failpoints)}

    def start(self) -> None:
        first = free_ports(2 * len(MANAGERS) + self._broker_count)  # the last ones for HTTP
        ports = ["--port", str(first), "--http-port", str(first + len(MANAGERS) + self._broker_count)]
        command = [sys.executable, "-m", "quiver.cli.main", "up", "--brokers", str(self._broker_count)]
        command += ["--managers", str(len(MANAGERS)), "--detach", "--data-dir", str(self.data_dir), *ports]
        run = subprocess.run(command, capture_output=True, env=self._environ, timeout=60)
        assert run.returncode == 0, run.stderr.decode()
        self.servers = ",".join(broker.address for broker in self.file.brokers)

    def command(self, *arguments: str) -> str:
        run = quick(*arguments, "--data-dir", str(self.data_dir))
        assert run.returncode == 0, run.stderr.decode()
        return run.stdout.decode()

    def http_of(self, manager: int) -> str:
        return next(entry.http for entry in self.file.managers if entry.id == manager)

    def manager_pid(self, manager: int) -> int:
        return next(entry.pid for entry in self.file.managers if entry.id == manager)

    def signal_manager(self, manager: int, number: int) -> int:
        pid: int = until(lambda: self.is_alive(found := self.manager_pid(manager)) and found, BACK_S_MAX)
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            self._stopped.add(pid)
        elif number == signal.SIGCONT:
            self._stopped.discard(pid)
        return pid

    def call(self, manager: int, method: str, path: str, timeout_s: float = 15, **fields: Any) -> tuple[int, Any]:
        """Status and body; (0, None) when the connection ends without an answer."""
        where = urlsplit(self.http_of(manager))
        assert where.hostname is not None
        target = f"{path}?{urlencode(fields)}" if method == "GET" and fields else path
        body = json.dumps(fields).encode() if method != "GET" else None
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=timeout_s)
        try:
            connection.request(method, target, body)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()

    def trouble(self) -> list[str]:
        return [
            f"{path.name}: {line}"
            for path in (self.data_dir / "logs").glob("*.log")
            for line in path.read_text().splitlines()
            if any(word in line for word in (*LOG_TROUBLE, "metadata_owner_failed"))
        ]

    def primary(self) -> int:
        """The manager that leads, as soon as one says so of itself. Who was just killed may be elected again."""

        def find() -> int:
            for manager in MANAGERS:
                status, body = self.call(manager, "GET", "/health", timeout_s=1)
                if status == 200 and body["role"] == "primary" and body["cut_off_since"] is None:
                    return manager
            return 0

        return int(until(find, BACK_S_MAX))

    def until_managers_back(self, ended: dict[int, int]) -> None:
        until(lambda: all(self.manager_pid(manager) != pid for manager, pid in ended.items()), BACK_S_MAX)

    def database_of(self, manager: int) -> str:
        if url := self._environ.get("QUIVER_METADATA_URL"):
            return schema_url(url, manager)
        return sqlite_url(self.data_dir / f"manager-{manager}" / "metadata.db")

    def until_equal(self) -> list[dict[str, list[tuple[Any, ...]]]]:
        """The databases of all managers, once they have everything that was answered and are at the same transaction;
        without what is only observed."""
        answered = max(self.call(manager, "GET", "/v1/health")[1]["transaction"] for manager in MANAGERS)

        def find() -> Any:
            found = [rows_of(self.database_of(manager)) for manager in MANAGERS]
            states = {str(sorted(rows["metadata_state"])) for rows in found}
            applied = dict(found[0]["metadata_state"])["applied_transaction"]
            return found if len(states) == 1 and applied >= answered else None

        found: list[dict[str, list[tuple[Any, ...]]]] = until(find, BACK_S_MAX)
        return found


def rows_of(url: str) -> dict[str, list[tuple[Any, ...]]]:
    found: dict[str, list[tuple[Any, ...]]] = {}
    with contextlib.suppress(FileNotFoundError):
        for table, rows in dump(url).items():
            left_out = OBSERVED.get(table, ())
            found[table] = [tuple(cell for at, cell in enumerate(row) if at not in left_out) for row in rows]
    return found
