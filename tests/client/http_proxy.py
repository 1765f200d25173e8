"""An HTTP proxy between classic clients and one node that loses requests and replies on purpose.

A loss is asked for by path and step, so that "the reply got lost" is a fact and not a matter of timing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import http.client
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


class Loss(enum.Enum):
    REQUEST = "the connection ends before the request is forwarded"
    REPLY = "the node has answered, and the connection ends before the client hears of it"
    HALF_REPLY = "the connection ends in the middle of the reply"
    UNAVAILABLE = "the node has answered, and the client hears 503"
    BAD_GATEWAY = "nothing is forwarded, and the client hears 502 with a page of HTML"


@dataclasses.dataclass(slots=True)
class _Order:
    loss: Loss
    path: str
    skip: int
    before: Callable[[], object]


class HttpProxy:
    """Runs in threads of its own until its `with` block ends."""

    def __init__(self, port: int) -> None:
        self._upstream_port = port
        self._orders: list[_Order] = []
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self.connections = 0
        self.paths: list[str] = []  # of the requests that came, in order
        proxy = self

        class Handler(_Handler):
            def setup(self) -> None:
                self.proxy = proxy
                super().setup()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def lose(
        self, loss: Loss, path: str, skip: int = 0, times: int = 1, before: Callable[[], object] = lambda: None
    ) -> None:
        """Loses the next `times` such exchanges, `skip` others later. Orders queue up. `before` runs at the step."""
        with self._lock:
            self._orders += [_Order(loss, path, skip if turn == 0 else 0, before) for turn in range(times)]

    def lose_no_more(self) -> None:
        with self._lock:
            self._orders.clear()

    @property
    def left(self) -> int:
        return len(self._orders)

    def count(self, path: str) -> int:
        return self.paths.count(path)

    def hang_up(self) -> None:
        """Ends the connections that are open now, as a server does with idle ones."""
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def opened(self, connection: socket.socket) -> None:
        with self._lock:
            self.connections += 1
            self._sockets.add(connection)

    def closed(self, connection: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(connection)

    def match(self, path: str) -> _Order | None:
        with self._lock:
            self.paths.append(path)
            for order in self._orders:
                if order.path == path:
                    if order.skip:
                        order.skip -= 1
                        return None
                    self._orders.remove(order)
                    return order
            return None

    def forward(self, method: str, target: str, body: bytes) -> tuple[int, bytes, str]:
        upstream = http.client.HTTPConnection("127.0.0.1", self._upstream_port, timeout=30)
        try:
            upstream.request(method, target, body or None, {"Content-Type": "application/json"})
            response = upstream.getresponse()
            return response.status, response.read(), response.headers["Content-Type"]
        finally:
            upstream.close()

    def close(self) -> None:
        self._server.shutdown()
        self.hang_up()
        self._server.server_close()
        self._thread.join(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: HttpProxy

    def handle(self) -> None:
        self.proxy.opened(self.connection)
        try:
            with contextlib.suppress(OSError):
                super().handle()
        finally:
            self.proxy.closed(self.connection)

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        order = self.proxy.match(self.path.partition("?")[0])
        loss = None if order is None else order.loss
        if order is not None and loss in (Loss.REQUEST, Loss.BAD_GATEWAY):
            order.before()
        if loss is Loss.REQUEST:
            self.close_connection = True
            return
        if loss is Loss.BAD_GATEWAY:
            self._answer(502, b"<html>502 Bad Gateway</html>", "text/html")
            return
        try:
            status, reply, kind = self.proxy.forward(self.command, self.path, body)
        except (OSError, http.client.HTTPException):
            self.close_connection = True  # no node: the client sees its connection end
            return
        if order is not None:
            order.before()
        if loss is Loss.REPLY:
            self.close_connection = True
        elif loss is Loss.UNAVAILABLE:
            self._answer(503, b'{"status": "failure", "message": "try again"}', "application/json")
        else:
            self._answer(status, reply, kind, cut=loss is Loss.HALF_REPLY)

    do_POST = do_GET

    def _answer(self, status: int, body: bytes, kind: str, *, cut: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = self.close_connection or cut

    def log_message(self, format: str, *args: Any) -> None:
        pass
