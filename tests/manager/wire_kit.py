"""HTTP byte by byte: a connection on which a test says every byte, and the bytes of requests."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

from tests.manager.kit import Answer, checked
from tests.system.kit import WAIT_S


class Wire:
    """A connection on which a test says every byte."""

    def __init__(self, http: str) -> None:
        where = urlsplit(http)
        self.socket = socket.create_connection((where.hostname, where.port), timeout=WAIT_S)
        self._file = self.socket.makefile("rb")

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self.socket.sendall(part)

    def answer(self) -> Answer:
        status_line = self._file.readline()
        assert status_line.startswith(b"HTTP/1.1 "), status_line
        headers: dict[str, str] = {}
        while line := self._file.readline().strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return checked(int(status_line.split()[1]), headers, self._file.read(int(headers["content-length"])))

    def line(self) -> bytes:
        return self._file.readline()

    def is_closed(self) -> bool:
        """Waits for the server to close it."""
        return self._file.read(1) == b""

    def close(self) -> None:
        self._file.close()
        self.socket.close()


def head(method: str, path: str, *headers: str) -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: quiver", *headers, "", "")).encode("latin-1")


def post(path: str, **fields: Any) -> bytes:
    body = json.dumps(fields).encode()
    return head("POST", path, f"Content-Length: {len(body)}") + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
