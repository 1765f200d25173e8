"""A client's way to the HTTP API of a manager, on the standard library: JSON out, JSON back, patience in between.

Rule: only calls that may be repeated go through here, and a reply says whether an earlier try may have been carried
out. Safe to share between threads: each call has a connection to itself, and connections are kept for the next call.
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
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode, urlsplit

from quiver.errors import ForkedError, InvalidRequestError

BACKOFF_S_MIN: Final = 0.05
BACKOFF_S_MAX: Final = 1.0
RETRY_AFTER_S_MAX: Final = 5.0  # a server that asks for more patience is asked again all the same
TRY_TIMEOUT_S: Final = 10.0  # for one try: a server that is stopped, not dead, must not use up all the time there is
REPLY_BYTES_MAX: Final = 16 * 1024 * 1024  # a longer one is no reply of ours
IDLE_CONNECTIONS_MAX: Final = 64  # more threads at once than that open connections anew

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
    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url if isinstance(url, str) else "")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise InvalidRequestError(f"{url!r} is not an address like http://127.0.0.1:8002")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, port
        self._prefix = parts.path.rstrip("/")
        self._url = url
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._pid = os.getpid()

    def get(self, path: str, params: Params) -> Reply:
        return self._call("GET", f"{path}?{urlencode(_given(params))}", None)

    def post(self, path: str, params: Params) -> Reply:
        """Raises UnicodeEncodeError for text that cannot be sent."""
        return self._call("POST", path, json.dumps(_given(params), ensure_ascii=False).encode())

    def close(self) -> None:
        """Lets the connections go; a call after it opens another."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # -- tries ---------------------------------------------------------------------------------------------------

    def _call(self, method: str, target: str, body: bytes | None) -> Reply:
        """Tries until there is a final answer or the time is over."""
        if self._pid != os.getpid():
            # The child would go on with the parent's numbers and positions: messages would get lost.
            raise ForkedError("this client was made before a fork; make a new one in the child process")
        deadline_s = time.monotonic() + self._timeout_s
        attempt, repeated = 0, False
        while True:
            timeout_s = min(TRY_TIMEOUT_S, max(0.001, deadline_s - time.monotonic()))
            connection = self._idle_connection()
            was_idle = connection is not None
            try:
                if connection is None:
                    connection = self._open(timeout_s)
                repeated_before, repeated = repeated, True
                reply = self._try(connection, method, target, body, timeout_s)._replace(repeated=repeated_before)
                if reply.is_final:
                    return reply
                reply = reply._replace(repeated=True)
            except (OSError, http.client.HTTPException) as error:
                reason = str(error) or type(error).__name__
                reply = Reply(0, f"{self._url} does not answer: {reason}", {}, repeated)
                self.close()
                if was_idle:
                    continue  # the server closed it just now, as it may at any time; the next try is on a new one
            pause_s = max(_backoff_s(attempt), reply.retry_after_s)
            if time.monotonic() + pause_s > deadline_s:
                return reply
            time.sleep(pause_s)
            attempt += 1

    def _open(self, timeout_s: float) -> http.client.HTTPConnection:
        connection = self._kind(self._host, self._port, timeout=timeout_s)
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
