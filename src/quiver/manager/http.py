"""The HTTP door: bodies within limits, parameters out of JSON and query, answers as the contract says.

Rule: never a 500. A wrong request is a 400 that says what is wrong; what a retry may cure is a 503 with Retry-After.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from quiver.errors import InvalidRequestError, QuiverError, RequestError
from quiver.manager.classic import ClassicApi
from quiver.manager.params import Params

logger = logging.getLogger("quiver.http")

Call = Callable[[Params], Awaitable[dict[str, Any]]]

_RETRY_AFTER_S: Final = 1
_STOP_TIMEOUT_S: Final = 5
_BACKLOG: Final = 2048
_decoder = msgspec.json.Decoder()
_encode = msgspec.json.Encoder().encode


def _answer(status: int, body: dict[str, Any], **headers: str) -> Response:
    return Response(_encode(body), status, headers or None, "application/json")


def _failure(status: int, message: str, **headers: str) -> Response:
    return _answer(status, {"status": "failure", "message": message}, **headers)


class ClassicHttp:
    """The routes of the classic API as an ASGI application."""

    def __init__(self, api: ClassicApi, body_bytes_max: int, body_timeout_s: float) -> None:
        self._body_bytes_max = body_bytes_max
        self._body_timeout_s = body_timeout_s
        paths: dict[str, dict[str, Call]] = {
            "/topics": {"GET": api.list_topics, "POST": api.create_topic},
            "/topics/partitions": {"GET": api.list_partitions},
            "/topics/partition": {"GET": api.list_partitions},
            "/producer/register": {"POST": api.register_producer},
            "/consumer/register": {"POST": api.register_consumer},
            "/producer/produce": {"POST": api.produce},
            "/consumer/consume": {"GET": api.consume},
            "/consumer/set_offset": {"POST": api.set_offset},
            "/size": {"GET": api.size},
            "/producer/client_size": {"GET": api.client_size},
            "/replicas": {"GET": api.replicas},
            "/brokers": {"GET": api.list_brokers, "POST": api.add_broker},
            "/brokers/{broker_id}": {"DELETE": api.remove_broker},
            "/health": {"GET": api.health},
        }
        self.app = Starlette(
            routes=[Route(path, self._endpoint(calls), methods=list(calls)) for path, calls in paths.items()],
            exception_handlers={HTTPException: _refuse},
        )

    def _endpoint(self, calls: dict[str, Call]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                call = calls.get(request.method)
                if call is None:
                    return _failure(405, f"{request.method} is not a method of {request.url.path}")
                result = await call(Params(await self._params(request)))
                return _answer(200, {"status": "success", **result})
            except RequestError as error:
                return _failure(400, error.message)
            except QuiverError as error:
                return _failure(503, error.message, **{"Retry-After": str(_RETRY_AFTER_S)})
            except ClientDisconnect:
                return _failure(400, "the client went away")
            except Exception:
                logger.exception("http_failed method=%s path=%s", request.method, request.url.path)
                message = "internal error; the server's log says more"
                return _failure(503, message, **{"Retry-After": str(_RETRY_AFTER_S)})

        return endpoint

    async def _params(self, request: Request) -> dict[str, Any]:
        values: dict[str, Any] = {**request.query_params, **request.path_params}
        body = await self._body(request)
        if body:
            try:
                found = _decoder.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
            if not isinstance(found, dict):
                raise InvalidRequestError("the body must be a JSON object")
            values.update(found)
        return values

    async def _body(self, request: Request) -> bytes:
        length = request.headers.get("content-length")
        if length is None and "transfer-encoding" not in request.headers:
            return b""
        limit = self._body_bytes_max
        refusal = InvalidRequestError(f"the body is larger than the limit of {limit} bytes")
        if length is not None and (not length.isdigit() or int(length) > limit):
            raise refusal
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._body_timeout_s):
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        raise refusal
                    parts.append(part)
        except TimeoutError as error:
            raise InvalidRequestError(f"the body did not arrive within {self._body_timeout_s:g} s") from error
        return b"".join(parts)


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: f"no such path: {request.url.path}", 405: f"{request.method} is not a method of {request.url.path}"}
    return _failure(error.status_code, what.get(error.status_code, error.detail))


class _Server(uvicorn.Server):
    """Signals belong to the node."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Uvicorn inside our loop."""

    def __init__(self, app: Any) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=_STOP_TIMEOUT_S,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket) -> None:
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Finishes the requests under way."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise InvalidRequestError(
            f"cannot listen on {host}:{port} for HTTP: {error.strerror}; --http-port chooses another port"
        ) from error
