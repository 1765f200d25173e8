"""A real nginx with a configuration of ours, as any user, on a free port; and managers of straw behind it."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pytest

from tests.system.kit import WAIT_S, free_port, until

_INSTALL: Final = Path(__file__).parents[2] / "scripts" / "apt-package"
_PATH: Final = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@functools.cache
def nginx_path() -> str:
    """The test that asks is skipped where nginx cannot be had, but never in CI."""
    if (found := shutil.which("nginx", path=_PATH)) is not None:
        return found
    done = subprocess.run([str(_INSTALL), "nginx", "nginx"], capture_output=True, text=True, check=False)
    if (found := shutil.which("nginx", path=_PATH)) is None:
        why = f"NOT TESTED: there is no nginx here ({done.stderr.strip()})"
        assert os.environ.get("CI") != "true", why
        pytest.skip(why)
    return found


class Nginx:
    """Runs with the configuration file that is there when the block begins; ends with the block."""

    def __init__(self, directory: Path) -> None:
        self._path = nginx_path()
        self.port = free_port()
        self.config = directory / "nginx.conf"
        self.run_dir = directory / "nginx"
        self.run_dir.mkdir(exist_ok=True)
        self.access_log = directory / "access.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def flags(self) -> list[str]:
        """What `quiver nginx-config` is told."""
        pairs = {"--listen": f"127.0.0.1:{self.port}", "--output": self.config, "--run-dir": self.run_dir}
        return [str(word) for pair in (pairs | {"--access-log": self.access_log}).items() for word in pair]

    def lines(self, since: int = 0) -> list[str]:
        return self.access_log.read_text().splitlines()[since:] if self.access_log.exists() else []

    def answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def __enter__(self) -> Self:
        command = [self._path, "-c", str(self.config), "-e", str(self.run_dir / "start.log"), "-g", "daemon off;"]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        try:
            until(lambda: self.answers() and (self.run_dir / "nginx.pid").exists())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(WAIT_S)


class StrawManager:
    """Answers everything with its name or what `body` is, or cuts the connection after it has read the request."""

    def __init__(self, name: str) -> None:
        self.body = name.encode()
        self.cuts = False
        self.status = 200
        self.calls: list[str] = []
        self._connections: set[socket.socket] = set()
        manager = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                manager._connections.add(self.request)
                super().setup()

            def finish(self) -> None:
                manager._connections.discard(self.request)
                super().finish()

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                manager.calls.append(f"{self.command} {self.path}")
                if manager.cuts:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                body = manager.body
                self.send_response(manager.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body if self.command != "HEAD" else b"")

            do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.place = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def cut_all(self) -> None:
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Nobody listens there any more."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(WAIT_S)
