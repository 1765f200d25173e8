"""The door of the v1 API: from a request to a call of the table, from what it raises to an answer.

Rule: never a 500 for a client's mistake. Path, method, query and body are judged in this order, before the call.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, unquote_to_bytes

import httptools
import msgspec

from quiver.errors import InvalidRequestError, QuiverError
from quiver.manager.http_server import HttpAnswer, HttpRequest
from quiver.manager.v1_admin import Administration
from quiver.manager.v1_call import Call
from quiver.manager.v1_docs import page
from quiver.manager.v1_errors import HttpRefusal, answer_of, refusal
from quiver.manager.v1_fetch import Fetching
from quiver.manager.v1_groups import GroupCalls
from quiver.manager.v1_media import JSON, content_type
from quiver.manager.v1_openapi import document
from quiver.manager.v1_produce import Producing
from quiver.manager.v1_routes import ROUTES, Route

logger = logging.getLogger("quiver.http")

Handle = Callable[[Call], Awaitable[HttpAnswer]]
_QUERY_FIELDS_MAX: Final = 100
_DIGITS_MAX: Final = 19


class V1Http:
    """The v1 API as a handler of requests."""

    def __init__(
        self, administration: Administration, groups: GroupCalls, producing: Producing, fetching: Fetching
    ) -> None:
        calls: dict[str, Handle] = {
            "list_groups": groups.list_groups,
            "describe_group": groups.describe_group,
            "unregister_consumer": groups.unregister_consumer,
            "produce": producing.to_topic,
            "produce_to_partition": producing.to_partition,
            "fetch": fetching.fetch,
        }
        # By segments of the path, None where the path has a name.
        self._paths: dict[tuple[str | None, ...], dict[str, tuple[Route, Handle]]] = {}
        for route in ROUTES:
            handle: Handle = calls.get(route.call) or getattr(administration, route.call)
            self._paths.setdefault(_pattern(route.path), {})[route.method] = (route, handle)
        self._decoders = {shape: msgspec.json.Decoder(shape) for route in ROUTES if (shape := route.reads_json)}
        self._static: dict[bytes, Callable[[], HttpAnswer]] = {
            b"/openapi.json": lambda: HttpAnswer(200, document()),
            b"/docs": page,
        }

    async def answer(self, request: HttpRequest) -> HttpAnswer:
        try:
            url = httptools.parse_url(request.target)
            path: bytes = url.path or b""
            if path in self._static:
                if request.method not in ("GET", "HEAD"):
                    raise HttpRefusal(
                        405, f"{request.method} is not a method of {path.decode()}", ("allow", "GET, HEAD")
                    )
                return self._static[path]()
            route, handle, names = self._find(path, request.method)
            query = _query(url.query, route.query)
            return await handle(Call(request, names, query, self._body(request, route)))
        except HttpRefusal as refused:
            return refused.answer
        except QuiverError as error:
            return answer_of(error)
        except httptools.HttpParserInvalidURLError:
            return refusal(400, "the request's target is not a valid URL")
        except Exception:
            logger.exception("http_failed method=%s target=%r", request.method, request.target[:200])
            return refusal(500, "internal error; the server's log says more")

    def _find(self, path: bytes, method: str) -> tuple[Route, Handle, Mapping[str, str]]:
        try:
            # Decoded piece by piece: a slash in a name is part of the name.
            segments = [unquote_to_bytes(segment).decode() for segment in path.split(b"/")[1:]]
        except UnicodeDecodeError as error:
            raise InvalidRequestError("the path is not valid UTF-8") from error
        for pattern, methods in self._paths.items():
            if len(pattern) == len(segments) and all(
                got if want is None else want == got for want, got in zip(pattern, segments, strict=True)
            ):
                found = methods.get("GET" if method == "HEAD" else method)
                if found is None:
                    allowed = sorted(methods.keys() | ({"HEAD"} if "GET" in methods else set()))
                    raise HttpRefusal(405, f"{method} is not a method of this path", ("allow", ", ".join(allowed)))
                route, handle = found
                return route, handle, _names(route.path, segments)
        raise HttpRefusal(404, f"no such path: {path.decode('latin-1')[:200]}")

    def _body(self, request: HttpRequest, route: Route) -> Any:
        shape = route.reads_json
        if shape is None:
            return None
        content_type(request.headers, (JSON,))
        try:
            return self._decoders[shape].decode(request.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequestError(f"the body is not as it should be: {error}") from error


def _pattern(path: str) -> tuple[str | None, ...]:
    return tuple(None if part.startswith("{") else part for part in path.split("/")[1:])


def _names(path: str, segments: list[str]) -> dict[str, str]:
    parts = path.split("/")[1:]
    return {part[1:-1]: got for part, got in zip(parts, segments, strict=True) if part.startswith("{")}


def _query(raw: bytes | None, shape: type[msgspec.Struct]) -> Any:
    if not raw:
        return shape()
    try:
        pairs: list[tuple[str, Any]] = parse_qsl(
            raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_QUERY_FIELDS_MAX
        )
        found = dict(pairs)
        if len(found) != len(pairs):
            raise InvalidRequestError("a query parameter is given twice")
        for name in _numbers_of(shape) & found.keys():
            found[name] = _number(name, found[name])
        return msgspec.convert(found, shape)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"query: {error}") from error
    except ValueError as error:  # not ASCII, not UTF-8 once decoded, too many, too long a number
        raise InvalidRequestError(f"the query cannot be read: {error}") from error


@functools.cache
def _numbers_of(shape: type[msgspec.Struct]) -> frozenset[str]:
    """The query parameters that are numbers, maybe absent."""
    info: Any = msgspec.inspect.type_info(shape)
    return frozenset(field.name for field in info.fields if _is_number(field.type))


def _is_number(kind: Any) -> bool:
    if isinstance(kind, msgspec.inspect.Metadata):
        return _is_number(kind.type)
    if isinstance(kind, msgspec.inspect.UnionType):
        return any(map(_is_number, kind.types))
    return isinstance(kind, msgspec.inspect.IntType)


def _number(name: str, text: str) -> int:
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS_MAX:
        return int(text)
    raise InvalidRequestError(f"query: {name} must be an integer")
