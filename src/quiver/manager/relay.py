"""HTTP requests that change metadata, handed from the manager that got them to the one that leads.

Rule: the tables of both APIs say which calls these are. All others are answered by the manager that was asked.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote_to_bytes

from quiver.manager.classic_routes import CLASSIC_ROUTES
from quiver.manager.http_server import HttpAnswer, HttpRequest
from quiver.manager.primary import Primary
from quiver.manager.v1_routes import ROUTES
from quiver.wire.quorum_messages import RelayedHttp, RelayHttp

# What concerns the connection of the client and not the request.
_HOP_HEADERS: Final = frozenset((b"connection", b"content-length", b"expect", b"host", b"transfer-encoding"))

_CHANGES: Final = [
    (route.method, [part.encode() for part in route.path.split("/")])
    for route in (*CLASSIC_ROUTES, *ROUTES)
    if route.for_primary
]
_METHODS: Final = frozenset(method for method, _ in _CHANGES)


def is_for_primary(method: str, target: bytes) -> bool:
    if method not in _METHODS:
        return False
    if target[:1] != b"/":
        target = b"/" + target.partition(b"://")[2].partition(b"/")[2]  # as a client sends it to a proxy
    path = target.partition(b"?")[0].partition(b"#")[0]
    parts = [unquote_to_bytes(part) for part in path.split(b"/")]
    return any(
        method == wanted
        and len(parts) == len(pattern)
        and all(want[:1] == b"{" or want == part for want, part in zip(pattern, parts, strict=True))
        for wanted, pattern in _CHANGES
    )


async def relay(primary: Primary, request: HttpRequest) -> HttpAnswer | None:
    """The primary's answer. None: this manager leads."""
    headers = [(name, value) for name, value in request.headers.items() if name not in _HOP_HEADERS]
    found = await primary.ask(RelayHttp(request.method, request.target, headers), request.body)
    if found is None:
        return None
    reply, body = found
    assert isinstance(reply, RelayedHttp)
    return HttpAnswer(reply.status, b"".join(body), tuple(reply.headers), reply.content_type)


def as_request(relayed: RelayHttp, body: memoryview) -> HttpRequest:
    return HttpRequest(relayed.method, relayed.target, bytes(body), True, dict(relayed.headers))


def as_reply(answer: HttpAnswer) -> tuple[RelayedHttp, tuple[bytes, ...]]:
    reply = RelayedHttp(answer.status, answer.content_type, list(answer.headers))
    return reply, (answer.body,) if answer.body else ()
