"""The HTTP door: paths to calls, parameters out of JSON and query, answers as the contract says.

Rule: never a 500. A wrong request is a 400 that says what is wrong; what a retry may cure is a 503 with Retry-After.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

import httptools
import msgspec

from quiver.errors import InvalidRequestError, QuiverError, RequestError
from quiver.manager.classic import ClassicApi
from quiver.manager.classic_routes import CLASSIC_ROUTES
from quiver.manager.http_server import HttpAnswer, HttpRequest
from quiver.manager.params import Params
from quiver.manager.v1_errors import refusal

logger = logging.getLogger("quiver.http")

Call = Callable[[Params], Awaitable[dict[str, Any]]]

_RETRY_LATER: Final = ("retry-after", "1")
_BROKER_PREFIX: Final = "/brokers/"
_BROKER_PATH: Final = "/brokers/{broker_id}"
_V1_PATHS: Final = (b"/v1", b"/openapi.json", b"/docs")
_decoder = msgspec.json.Decoder()
_encode = msgspec.json.Encoder().encode


def failure(status: int, message: str, *headers: tuple[str, str]) -> HttpAnswer:
    if status == 503:
        headers = (*headers, _RETRY_LATER)
    return HttpAnswer(status, _encode({"status": "failure", "message": message}), headers)


def is_v1(target: bytes) -> bool:
    """Which of the two APIs a request is for; the classic one answers what is for neither."""
    if target[:1] != b"/":
        target = b"/" + target.partition(b"://")[2].partition(b"/")[2]  # as a client sends it to a proxy
    return target.startswith(b"/v1/") or target.partition(b"?")[0] in _V1_PATHS


def refuse(status: int, message: str, target: bytes) -> HttpAnswer:
    """A request that was not taken in: too large, too slow, or no HTTP. The contract of the classic API knows 400."""
    if is_v1(target):
        return refusal(status, message)
    return failure(503 if status == 503 else 400, message)


class ClassicHttp:
    """The classic API as a handler of requests."""

    def __init__(self, api: ClassicApi) -> None:
        self._paths: dict[str, dict[str, Call]] = {}
        for route in CLASSIC_ROUTES:
            self._paths.setdefault(route.path, {})[route.method] = getattr(api, route.call)
        self._broker_calls = self._paths.pop(_BROKER_PATH)

    async def answer(self, request: HttpRequest) -> HttpAnswer:
        try:
            url = httptools.parse_url(request.target)
            path = (url.path or b"").decode("latin-1")
            calls, from_path = self._paths.get(path), {}
            if calls is None:
                path = unquote(path)
                calls = self._paths.get(path)
            if calls is None and path.startswith(_BROKER_PREFIX) and path.count("/") == _BROKER_PREFIX.count("/"):
                calls, from_path = self._broker_calls, {"broker_id": path.removeprefix(_BROKER_PREFIX)}
            if calls is None:
                return failure(404, f"no such path: {path}")
            call = calls.get(request.method)
            if call is None:
                allowed = ("allow", ", ".join(sorted(calls)))
                return failure(405, f"{request.method} is not a method of {path}", allowed)
            values = _query(url.query) | _json(request.body) | from_path
            result = await call(Params(values))
            return HttpAnswer(200, _encode({"status": "success", **result}))
        except RequestError as error:
            return failure(400, error.message)
        except httptools.HttpParserInvalidURLError:
            return failure(400, "the request's target is not a valid URL")
        except QuiverError as error:
            return failure(503, error.message)
        except Exception:
            logger.exception("http_failed method=%s target=%r", request.method, request.target[:200])
            return failure(503, "internal error; the server's log says more")


def _query(raw: bytes | None) -> dict[str, Any]:
    if not raw:
        return {}
    text = raw.decode("latin-1")
    if text.isascii() and "%" not in text and "+" not in text and "&&" not in text:
        return dict(part.partition("=")[::2] for part in text.split("&"))
    try:
        return dict(parse_qsl(text, keep_blank_values=True, errors="strict"))
    except (UnicodeDecodeError, ValueError) as error:
        raise InvalidRequestError("the query is not valid UTF-8") from error


def _json(body: bytes) -> dict[str, Any]:
    if not body:
        return {}
    try:
        found = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return found
