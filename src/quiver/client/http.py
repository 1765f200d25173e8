"""A client's way to the HTTP API of the managers, on the standard library: JSON out, JSON back, patience in between.

Rule: only calls that may be repeated go through here, at whichever manager answers, and a reply says whether an earlier
try may have been carried out. Safe to share between threads: each call has a connection to itself, and connections are
kept for the next call.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode, urlsplit

from quiver.client.managers import Managers, Roles, read_roles
from quiver.errors import ForkedError, InvalidRequestError

BACKOFF_S_MIN: Final = 0.05
BACKOFF_S_MAX: Final = 1.0
RETRY_AFTER_S_MAX: Final = 5.0  # a server that asks for more patience is asked again all the same
TRY_TIMEOUT_S: Final = 10.0  # for one try: a server that is stopped, not dead, must not use up all the time there is
CONNECT_TIMEOUT_S: Final = 2.0
ASK_TIMEOUT_S: Final = 1.0  # for the question who is who, which any manager answers at once
REPLY_BYTES_MAX: Final = 16 * 1024 * 1024  # a longer one is no reply of ours
IDLE_CONNECTIONS_MAX: Final = 64  # of one manager; more threads at once than that open connections anew

Params = Mapping[str, str | int | None]


class Reply(NamedTuple):
    """`status` is that of HTTP, 0 when nobody answered. 0 and 5xx come only after the time-out."""

    status: int
    message: str
    body: dict[str, Any]
    repeated: bool = False  # an earlier try was sent and not answered: it may have been carried out
    retry_after_s: float = 0.0

    @property
    def is_success(self) -> bool:
        return self.status == 200

    @property
    def is_final(self) -> bool:
        return 0 < self.status < 500

    @property
    def is_unknown(self) -> bool:
        """Given up, and the call may have been carried out, or may still be."""
        return not self.is_final and self.repeated


class HttpLink:
    """To all managers, or to what stands before them. `urls` are given as one, as several, or joined by commas."""

    def __init__(self, urls: str | Sequence[str], timeout_s: float) -> None:
        given = urls.split(",") if isinstance(urls, str) else list(urls) if isinstance(urls, Sequence) else [""]
        self._servers = {url: _Server(url) for url in given}
        if not self._servers:
            raise InvalidRequestError("at least one address like http://127.0.0.1:8002 is needed")
        self._given = tuple(self._servers)
        self._managers = Managers(self._given)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def get(self, path: str, params: Params) -> Reply:
        return self._call("GET", f"{path}?{urlencode(_given(params))}", None)

    def post(self, path: str, params: Params) -> Reply:
        """Raises UnicodeEncodeError for text that cannot be sent."""
        return self._call("POST", path, json.dumps(_given(params), ensure_ascii=False).encode())

    def close(self) -> None:
        """Lets the connections go; a call after it opens another."""
        with self._lock:
            servers = list(self._servers.values())
        for server in servers:
            server.close()

    # -- tries ---------------------------------------------------------------------------------------------------

    def _call(self, method: str, target: str, body: bytes | None) -> Reply:
        """Tries one manager after the other until there is a final answer or the time is over."""
        if self._pid != os.getpid():
            # The child would go on with the parent's numbers and positions: messages would get lost.
            raise ForkedError("this client was made before a fork; make a new one in the child process")
        deadline_s = time.monotonic() + self._timeout_s
        rounds, repeated = 0, False
        while True:
            self._ask_who_is_who(deadline_s)
            for server in self._order(method == "GET"):
                timeout_s = min(TRY_TIMEOUT_S, max(0.001, deadline_s - time.monotonic()))
                reply = server.ask(method, target, body, timeout_s, repeated)
                self._note(server, reply)
                if reply.is_final:
                    return reply
                repeated = reply.repeated
                if time.monotonic() >= deadline_s:
                    return reply
            pause_s = max(_backoff_s(rounds), reply.retry_after_s)
            if time.monotonic() + pause_s > deadline_s:
                return reply
            time.sleep(pause_s)
            rounds += 1

    def _order(self, is_read: bool) -> list[_Server]:
        with self._lock:
            return [self._server(url) for url in self._managers.order(is_read, time.monotonic())]

    def _server(self, url: str) -> _Server:
        return self._servers.get(url) or self._servers.setdefault(url, _Server(url))

    def _note(self, server: _Server, reply: Reply) -> None:
        with self._lock:
            if reply.is_final:
                self._managers.answered(server.url)
            else:
                self._managers.failed(server.url, time.monotonic())

    def _ask_who_is_who(self, deadline_s: float) -> None:
        with self._lock:
            if not self._managers.should_ask(time.monotonic()):
                return
        for server in self._order(is_read=True):
            timeout_s = min(ASK_TIMEOUT_S, max(0.001, deadline_s - time.monotonic()))
            reply = server.ask("GET", "/replicas", None, timeout_s, repeated=False)
            if not reply.is_final:
                continue
            roles = read_roles(reply.body)
            follow = roles is not None and any(_is_one_of(self._servers[url], roles) for url in self._given)
            with self._lock:
                if follow and roles is not None:
                    self._managers.learn(roles, time.monotonic())
                else:
                    self._managers.keep_to_given(time.monotonic())
            return


def _is_one_of(server: _Server, roles: Roles) -> bool:
    """Whether an address is a manager's own, under whatever name its host was given."""
    places = {(parts.hostname, parts.port) for parts in map(urlsplit, roles.all)}
    if (server.host, server.port) in places:
        return True
    try:
        found = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any((address[0], address[1]) in places for *_, address in found)


class _Server:
    """One address, and the connections to it that are idle."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if isinstance(url, str) else "")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise InvalidRequestError(f"{url!r} is not an address like http://127.0.0.1:8002")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.host, self.port = parts.hostname, port
        self.url = url
        self._prefix = parts.path.rstrip("/")
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def ask(self, method: str, target: str, body: bytes | None, timeout_s: float, repeated: bool) -> Reply:
        """One try. `repeated` says of the tries before it that one was sent; of a reply that is not final, that this
        or an earlier one was."""
        while True:
            connection = self._idle_connection()
            was_idle = connection is not None
            earlier = repeated
            try:
                if connection is None:
                    connection = self._open(min(timeout_s, CONNECT_TIMEOUT_S))
                repeated = True
                reply = self._try(connection, method, target, body, timeout_s)
                return reply._replace(repeated=earlier if reply.is_final else True)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if was_idle:
                    continue  # the server closed it just now, as it may at any time; the next try is on a new one
                reason = str(error) or type(error).__name__
                return Reply(0, f"{self.url} does not answer: {reason}", {}, repeated)

    def _open(self, timeout_s: float) -> http.client.HTTPConnection:
        connection = self._kind(self.host, self.port, timeout=timeout_s)
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        return connection

    def _try(
        self, connection: http.client.HTTPConnection, method: str, target: str, body: bytes | None, timeout_s: float
    ) -> Reply:
        kept = False
        try:
            connection.sock.settimeout(timeout_s)
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, self._prefix + target, body, headers)
            response = connection.getresponse()
            raw = response.read(REPLY_BYTES_MAX)
            if response.length:  # what is missing: the connection was cut, or the reply has no end
                raise http.client.IncompleteRead(raw, response.length)
            reply = _reply(response, raw)
            kept = response.isclosed() and connection.sock is not None and self._keep(connection)
            return reply
        finally:
            if not kept:
                connection.close()

    def _idle_connection(self) -> http.client.HTTPConnection | None:
        """The one that was used last, unless the server has closed it meanwhile."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not _has_input(connection.sock):
                return connection
            connection.close()

    def _keep(self, connection: http.client.HTTPConnection) -> bool:
        with self._lock:
            if len(self._idle) >= IDLE_CONNECTIONS_MAX:
                return False
            self._idle.append(connection)
            return True


def _has_input(idle: socket.socket) -> bool:
    """Nothing is owed to us, so this can only be the end."""
    poll = select.poll()
    poll.register(idle, select.POLLIN)
    return bool(poll.poll(0))


def _given(params: Params) -> dict[str, str | int]:
    return {name: value for name, value in params.items() if value is not None}


def _backoff_s(attempt: int) -> float:
    """Doubles up to a maximum, with jitter so that many clients do not come back at once."""
    return min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2.0 ** min(attempt, 10)) * random.uniform(0.5, 1.0)


def _reply(response: http.client.HTTPResponse, raw: bytes) -> Reply:
    status = response.status
    body: Any = None
    with contextlib.suppress(ValueError):
        body = json.loads(raw)
    if not isinstance(body, dict):
        # A page of a proxy in between, a server that is not ours, or a reply without a length that was cut.
        if status == 200:
            raise http.client.HTTPException("its answer is not JSON")
        body = {}
    message = body.get("message")
    text = message if isinstance(message, str) else f"HTTP {status} {response.reason}"
    retry_after = response.headers.get("Retry-After", "")
    seconds = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else 0.0
    return Reply(status, text, body, retry_after_s=min(RETRY_AFTER_S_MAX, seconds))
