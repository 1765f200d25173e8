"""An HTTP/1.1 server for small requests, on httptools' parser.

Rule: one answer, one write. Limits are checked as bytes come in, so that a large or slow request is refused before it
is taken in whole; the connection then ends, since what follows on it cannot be understood. Requests of one connection
are answered in order, one at a time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final, NamedTuple, cast

import httptools

from quiver.errors import InvalidRequestError

logger = logging.getLogger("quiver.http")

CONNECTIONS_MAX: Final = 4096  # beyond it a new connection gets a 503 and is closed
PIPELINE_MAX: Final = 32  # requests of one connection that wait; beyond it the server stops reading from it
HEAD_BYTES_MAX: Final = 64 * 1024  # request line and headers; a longer head is refused
KEEP_ALIVE_S: Final = 75.0  # an idle connection is closed after so long
SLOW_READER_S: Final = 30.0  # a client that does not read its answer is cut after so long
_STOP_TIMEOUT_S: Final = 5.0
_SWEEP_S: Final = 0.5
_LINGER_S: Final = 1.0
_BACKLOG: Final = 2048


class HttpRequest(NamedTuple):
    """Names of headers are in small letters. `is_leaving` says that it is no use to wait for anything: the client has
    hung up or said its last, or the server stops."""

    method: str
    target: bytes
    body: bytes
    keep_alive: bool
    headers: Mapping[bytes, bytes] = {}
    is_leaving: Callable[[], bool] = bool  # false


class HttpAnswer(NamedTuple):
    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    content_type: str = "application/json"


Handler = Callable[[HttpRequest], Awaitable[HttpAnswer]]
# Status, sentence, and the target as far as it came.
Refuse = Callable[[int, str, bytes], HttpAnswer]


def _encode(answer: HttpAnswer, *, keep_alive: bool, with_body: bool = True) -> bytes:
    if answer.status == HTTPStatus.NO_CONTENT:
        extra = "".join(f"{name}: {value}\r\n" for name, value in answer.headers)
        end = "\r\n" if keep_alive else "connection: close\r\n\r\n"
        return f"HTTP/1.1 204 No Content\r\n{extra}{end}".encode("latin-1")
    extra = "".join(f"{name}: {value}\r\n" for name, value in answer.headers)
    if not keep_alive:
        extra += "connection: close\r\n"
    head = (
        f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\n"
        f"content-type: {answer.content_type}\r\n"
        f"content-length: {len(answer.body)}\r\n{extra}\r\n"
    )
    return head.encode("latin-1") + (answer.body if with_body else b"")


class _Connection(asyncio.Protocol):
    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[HttpRequest] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._no_more = False  # nothing that still comes is a request
        self._farewell: bytes | None = None  # said after the last answer that is still due
        self._begun_at_s: float | None = None  # a request is coming in since
        self._stuck_at_s: float | None = None  # the client does not read since
        self._heard_at_s = time.monotonic()
        self._target, self._headers = b"", {b"": b""}
        self._in_head = False
        self._head_bytes = self._head_unparsed_bytes = self._body_bytes = 0
        self._body: list[bytes] = []

    # -- asyncio's side ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._server.admit(self):
            full = f"the server has its maximum of {CONNECTIONS_MAX} connections"
            self._give_up(503, "the server is stopping" if self._server.stopping else full)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._waiting.clear()
        self._server.forget(self)

    def data_received(self, data: bytes) -> None:
        if self._closing or self._no_more:
            return
        self._heard_at_s = time.monotonic()
        head = self._headers if self._in_head else None
        try:
            self._parser.feed_data(data)
            if self._in_head and self._headers is head:
                # The parser tells of a header when it is whole: one without end would fill the memory unseen.
                self._head_unparsed_bytes += len(data)
                self._count_head(0)
        except httptools.HttpParserUpgrade:
            self._no_more = True  # the request is answered as if it had not asked for another protocol
        except httptools.HttpParserError as error:
            self._give_up(400, f"this is not an HTTP request: {error}")

    def eof_received(self) -> bool:
        """A client that has said all it will say may still read its answers."""
        self._no_more = True
        return self._task is not None or bool(self._waiting) or self._farewell is not None

    def pause_writing(self) -> None:
        self._stuck_at_s = time.monotonic()
        self._set_reading(False)

    def resume_writing(self) -> None:
        self._stuck_at_s = None
        self._set_reading(True)
        self._serve_next()

    # -- the parser's side ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._begun_at_s = self._heard_at_s
        self._target, self._headers = b"", {}
        self._in_head = True
        self._head_bytes = self._head_unparsed_bytes = self._body_bytes = 0
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value
        self._count_head(len(name) + len(value))

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if max(self._head_bytes, self._head_unparsed_bytes) > HEAD_BYTES_MAX:
            self._give_up(431, f"the request's head is longer than {HEAD_BYTES_MAX} bytes")

    def on_headers_complete(self) -> None:
        self._in_head = False
        length = self._headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._server.body_bytes_max:
            self._refuse_body()
        elif self._headers.get(b"expect", b"").lower() == b"100-continue" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._body.append(body)
        if self._body_bytes > self._server.body_bytes_max:
            self._refuse_body()

    def _refuse_body(self) -> None:
        self._give_up(413, f"the body is larger than the limit of {self._server.body_bytes_max} bytes")

    def on_message_complete(self) -> None:
        if self._closing or self._no_more:
            return
        self._begun_at_s = None
        method = self._parser.get_method().decode("latin-1")
        keep_alive = self._parser.should_keep_alive()
        body = b"".join(self._body)
        self._waiting.append(HttpRequest(method, self._target, body, keep_alive, self._headers, self._is_leaving))
        if len(self._waiting) > PIPELINE_MAX:
            self._set_reading(False)
        self._serve_next()

    # -- answering -----------------------------------------------------------------------------------------------

    def _serve_next(self) -> None:
        if self._task is None and self._waiting and self._stuck_at_s is None and not self._closing:
            request = self._waiting.popleft()
            self._task = asyncio.get_running_loop().create_task(self._serve(request))

    async def _serve(self, request: HttpRequest) -> None:
        answer = await self._server.handler(request)
        self._task = None
        self._heard_at_s = time.monotonic()
        if self._closing or self._transport is None:
            return
        is_last = self._no_more and self._farewell is None and not self._waiting
        keep_alive = request.keep_alive and not self._server.stopping and not is_last
        self._transport.write(_encode(answer, keep_alive=keep_alive, with_body=request.method != "HEAD"))
        if not keep_alive:
            self.close()
        elif self._waiting:
            self._serve_next()
        elif self._farewell is not None:
            self._say_farewell()
        elif self._stuck_at_s is None:
            self._set_reading(True)

    def _give_up(self, status: int, message: str) -> None:
        """Says why and ends: what comes next on this connection cannot be told apart from the rest of this.

        Not before the requests that came first are answered: the client takes answers in order.
        """
        if not self._closing and not self._no_more:
            self._no_more, self._begun_at_s = True, None
            self._farewell = _encode(self._server.refuse(status, message, self._target), keep_alive=False)
            if self._task is None and not self._waiting:
                self._say_farewell()

    def _say_farewell(self) -> None:
        """Closing at once, with bytes unread, would reset the connection and take the answer away from the client."""
        if self._transport is not None and self._farewell is not None:
            self._transport.write(self._farewell)
            self._transport.write_eof()
            self._farewell = None
            asyncio.get_running_loop().call_later(_LINGER_S, self.close)

    def close(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def _is_leaving(self) -> bool:
        return self._closing or self._no_more or self._server.stopping

    def _set_reading(self, wanted: bool) -> None:
        if self._transport is not None and not self._transport.is_closing():
            (self._transport.resume_reading if wanted else self._transport.pause_reading)()

    @property
    def task(self) -> asyncio.Task[None] | None:
        return self._task

    def check_limits(self, now_s: float) -> None:
        if self._stuck_at_s is not None:
            if now_s - self._stuck_at_s > SLOW_READER_S and self._transport is not None:
                self._closing = True
                self._transport.abort()
        elif self._begun_at_s is not None:
            if now_s - self._begun_at_s > self._server.body_timeout_s:
                self._give_up(408, f"the body did not arrive within {self._server.body_timeout_s:g} s")
        elif self._task is None and now_s - self._heard_at_s > KEEP_ALIVE_S:
            self.close()


class HttpServer:
    """`handler` answers a request and never raises; `refuse` puts a refusal into the API's form."""

    def __init__(self, handler: Handler, refuse: Refuse, body_bytes_max: int, body_timeout_s: float) -> None:
        self.handler = handler
        self.refuse = refuse
        self.body_bytes_max = body_bytes_max
        self.body_timeout_s = body_timeout_s
        self.stopping = False
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), sock=listener, backlog=_BACKLOG)
        self._sweeper = loop.create_task(self._sweep())

    async def stop(self) -> None:
        """Stops listening, finishes the requests under way, closes."""
        self.stopping = True
        if self._server is None or self._sweeper is None:
            return
        self._server.close()
        self._sweeper.cancel()
        tasks = [connection.task for connection in self._connections if connection.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_TIMEOUT_S)
        for connection in list(self._connections):
            connection.close()
        await asyncio.wait([self._sweeper])

    def admit(self, connection: _Connection) -> bool:
        if len(self._connections) >= CONNECTIONS_MAX or self.stopping:
            return False
        self._connections.add(connection)
        return True

    def forget(self, connection: _Connection) -> None:
        self._connections.discard(connection)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            now_s = time.monotonic()
            for connection in list(self._connections):
                connection.check_limits(now_s)


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise InvalidRequestError(
            f"cannot listen on {host}:{port} for HTTP: {error.strerror}; --http-port chooses another port"
        ) from error
