"""/openapi.json: both APIs in OpenAPI 3.1, made from the tables of routes and the structs that the code uses.

Rule: nothing is written here that a table or a struct knows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from msgspec import Struct

from quiver.manager import v1_shapes as shapes
from quiver.manager.classic_routes import CLASSIC_ROUTES, ClassicRoute, Field, Type
from quiver.manager.v1_fetch import NEXT_HEADER, START_HEADER, WATERMARK_HEADER
from quiver.manager.v1_media import JSON, NDJSON
from quiver.manager.v1_routes import PRODUCE_HEADERS, ROUTES, Route
from quiver.types import PARTITIONS_MAX, TOPIC_NAME_BYTES_MAX
from quiver.wire.fields import CONSUMER_NAME_MAX

Json = dict[str, Any]

_REF: Final = "#/components/schemas/{name}"
_FETCH_HEADERS: Final = {
    NEXT_HEADER: "Fetch from here next",
    START_HEADER: "The first offset that is kept",
    WATERMARK_HEADER: "The offset after the last one committed",
}
_PATH_SCHEMAS: Final[dict[str, Json]] = {
    "topic": {
        "type": "string",
        "minLength": 1,
        "maxLength": TOPIC_NAME_BYTES_MAX,
        "pattern": shapes.TOPIC_NAME_PATTERN,
    },
    "broker": {"type": "integer", "minimum": 1},
    "consumer": {"type": "integer", "minimum": 1},
    "partition": {"type": "integer", "minimum": 0, "maximum": PARTITIONS_MAX - 1},
    "group": {"type": "string", "minLength": 1, "maxLength": CONSUMER_NAME_MAX, "pattern": "^[^#]"},
    "broker_id": {"type": "integer"},
}
_HEADER_SCHEMAS: Final[dict[str, Json]] = {
    name: {"type": "integer", "minimum": 0} if number else {"type": "string", "minLength": 1, "maxLength": 255}
    for number, name in enumerate(PRODUCE_HEADERS)
}
_NO_BRACES: Final = str.maketrans("", "", "{}")
_STATUS: Final[Json] = {"type": "string", "enum": ["success"]}
_FAILURE: Final[Json] = {
    "type": "object",
    "properties": {"status": {"type": "string", "enum": ["failure"]}, "message": {"type": "string"}},
    "required": ["status", "message"],
}


@functools.cache
def document() -> bytes:
    return msgspec.json.encode(build())


def build() -> Json:
    from importlib.metadata import version  # slow to load, and seldom needed

    paths: dict[str, Json] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    for classic in CLASSIC_ROUTES:
        paths.setdefault(classic.path, {})[classic.method.lower()] = _classic_operation(classic)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Quiver",
            "version": version("quiver"),
            "description": "v1 for batches, long polling and administration; classic for single messages.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": "v1"}, {"name": "classic"}],
        "paths": paths,
        "components": {"schemas": _components() | {"Failure": _FAILURE}},
    }


# -- v1 --------------------------------------------------------------------------------------------------------------


def _shapes() -> list[type[Struct]]:
    found: dict[type[Struct], None] = {shapes.Error: None}
    for route in ROUTES:
        for shape in (*route.body.values(), *route.answer.values()):
            if shape is not None:
                found[shape] = None
    return list(found)


def _components() -> Json:
    _, found = msgspec.json.schema_components(_shapes(), ref_template=_REF)
    return found


def _operation(route: Route) -> Json:
    answered: Json = {"description": HTTPStatus(route.status).phrase}
    if route.answer:
        answered["content"] = _content(route.answer)
    if route.call == "fetch":
        answered["headers"] = {
            name: {"description": text, "schema": {"type": "integer"}} for name, text in _FETCH_HEADERS.items()
        }
    error = {JSON: {"schema": _ref("Error")}}
    responses: Json = {str(route.status): answered}
    for status in sorted({400, *route.errors}):
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": error}
    if route.call == "health":
        responses["503"] = {"description": "No broker is here", "content": _content(route.answer)}
    responses["default"] = {"description": "Any other error", "content": error}
    operation: Json = {
        "operationId": route.call,
        "summary": route.summary,
        "tags": ["v1"],
        "parameters": [*_path_parameters(route.path), *_query_parameters(route.query), *_headers(route.headers)],
        "responses": responses,
    }
    if route.body:
        operation["requestBody"] = {"required": True, "content": _content(route.body)}
    return operation


def _content(forms: Mapping[str, type[Struct] | None]) -> Json:
    content: Json = {}
    for media, shape in forms.items():
        # A stream of Arrow is described by Arrow itself.
        content[media] = {} if shape is None else {"schema": _ref(shape.__name__)}
        if media == NDJSON and shape is not None:
            content[media]["schema"] = {"description": "One of these on each line", **_ref(shape.__name__)}
    return content


def _ref(name: str) -> Json:
    return {"$ref": _REF.format(name=name)}


def _path_parameters(path: str) -> list[Json]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    return [{"name": name, "in": "path", "required": True, "schema": _PATH_SCHEMAS[name]} for name in names]


def _query_parameters(query: type[Struct]) -> list[Json]:
    _, components = msgspec.json.schema_components([query], ref_template=_REF)
    shape = components[query.__name__]
    found = []
    for name, schema in shape["properties"].items():
        if "anyOf" in schema:  # that it may be absent is said by `required`
            (schema,) = [choice for choice in schema["anyOf"] if choice != {"type": "null"}]
        parameter = {"name": name, "in": "query", "required": name in shape["required"], "schema": schema}
        found.append(parameter | ({"description": schema["description"]} if "description" in schema else {}))
    return found


def _headers(headers: Mapping[str, str]) -> list[Json]:
    return [
        {"name": name, "in": "header", "required": False, "description": text, "schema": _HEADER_SCHEMAS[name]}
        for name, text in headers.items()
    ]


# -- classic ---------------------------------------------------------------------------------------------------------


def _classic_operation(route: ClassicRoute) -> Json:
    in_path = _path_parameters(route.path)
    taken = {parameter["name"] for parameter in in_path}
    takes = [field for field in route.takes if field.names[0] not in taken]
    properties = {"status": _STATUS} | {name: _classic_type(kind) for name, kind in route.gives}
    success = {"type": "object", "properties": properties, "required": list(properties)}
    failure = {JSON: {"schema": _ref("Failure")}}
    operation: Json = {
        "operationId": "_".join(["classic", route.method.lower(), *route.path.translate(_NO_BRACES).split("/")[1:]]),
        "summary": route.summary,
        "tags": ["classic"],
        "parameters": in_path if route.method == "POST" else [*in_path, *map(_classic_parameter, takes)],
        "responses": {
            "200": {"description": "Success", "content": {JSON: {"schema": success}}},
            "400": {"description": "Failure; nothing has changed", "content": failure},
            "503": {"description": "Failure that a retry may cure", "content": failure},
        },
    }
    if route.method == "POST":
        body = {
            "type": "object",
            "properties": {field.names[0]: _classic_schema(field) for field in takes},
            "required": [field.names[0] for field in takes if field.required],
        }
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    return operation


def _classic_type(kind: Type) -> Json:
    kinds = [{"type": one} for one in kind.split(" or ")]
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _classic_parameter(field: Field) -> Json:
    return {
        "name": field.names[0],
        "in": "query",
        "required": field.required,
        "schema": _classic_schema(field),
    }


def _classic_schema(field: Field) -> Json:
    schema: Json = {"type": field.type}
    if len(field.names) > 1:
        schema["description"] = f"Also understood as {' or '.join(field.names[1:])}"
    return schema
