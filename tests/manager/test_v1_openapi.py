"""/openapi.json is valid, complete and true; /docs needs nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from quiver.manager.classic_routes import CLASSIC_ROUTES
from quiver.manager.v1_openapi import build
from quiver.manager.v1_routes import ROUTES
from tests.manager.kit import Api, HttpNode
from tests.manager.test_wrong_input import PATHS, calls
from tests.manager.v1_kit import V1

KEYWORDS = {
    *("$ref", "title", "description", "type", "properties", "required", "additionalProperties", "items", "anyOf"),
    *("enum", "default", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern", "format"),
    *("contentEncoding", "examples"),
}
TYPES = {"object", "array", "string", "integer", "number", "boolean", "null"}


def schemas(value: Any) -> Iterator[dict[str, Any]]:
    """Every schema in a part of the document."""
    if isinstance(value, list):
        for part in value:
            yield from schemas(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            if name == "schema":
                yield from inner(part)
            else:
                yield from schemas(part)


def inner(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    for part in (*schema.get("properties", {}).values(), *schema.get("anyOf", ())):
        yield from inner(part)
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from inner(schema[name])


@pytest.fixture(scope="module")
def api_document() -> dict[str, Any]:
    return build()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def test_every_schema_is_one_and_every_reference_leads_somewhere(api_document: dict[str, Any]) -> None:
    known = api_document["components"]["schemas"]
    found = list(schemas(api_document["paths"]))
    for schema in known.values():
        found += inner(schema)
    assert len(found) > 200
    for schema in found:
        assert schema.keys() <= KEYWORDS, schema
        assert schema.get("type", "null") in TYPES
        if "$ref" in schema:
            assert schema["$ref"].removeprefix("#/components/schemas/") in known
        assert set(schema.get("required", ())) <= schema.get("properties", {}).keys()
        if "pattern" in schema:
            re.compile(schema["pattern"])


def test_every_operation_has_what_openapi_asks_for(api_document: dict[str, Any]) -> None:
    assert api_document["openapi"] == "3.1.0"
    assert {"title", "version"} <= api_document["info"].keys()
    names = [operation["operationId"] for _, _, operation in operations(api_document)]
    assert len(set(names)) == len(names)
    for path, method, operation in operations(api_document):
        in_path = re.findall(r"{(\w+)}", path)
        parameters = operation["parameters"]
        assert [p["name"] for p in parameters if p["in"] == "path"] == in_path
        assert all(p["required"] for p in parameters if p["in"] == "path")
        assert len({(p["in"], p["name"]) for p in parameters}) == len(parameters)
        assert all(p["in"] in ("path", "query", "header") for p in parameters)
        assert ("requestBody" in operation) <= (method in ("post", "put", "patch"))
        assert all("description" in response for response in operation["responses"].values())
        assert all(re.fullmatch("[1-5][0-9]{2}|default", status) for status in operation["responses"])


def test_both_apis_are_described_whole(api_document: dict[str, Any]) -> None:
    described = {(method.upper(), path) for path, method, _ in operations(api_document)}
    assert described == {(route.method, route.path) for route in (*ROUTES, *CLASSIC_ROUTES)}
    contract = {(method, path.replace("/1", "/{broker_id}")) for path, methods in PATHS.items() for method in methods}
    assert {(route.method, route.path) for route in CLASSIC_ROUTES} == contract


def test_the_classic_table_takes_what_the_contract_takes(api_document: dict[str, Any]) -> None:
    table = {(route.method, route.path): route for route in CLASSIC_ROUTES}
    for call in calls():
        route = table[call.method, call.path]
        names = {name: field for field in route.takes for name in field.names}
        for name in call.required:
            assert names[name].required, (call, name)
        for name in call.optional:
            assert not names[name].required, (call, name)


@pytest.mark.system
def test_what_the_classic_table_gives_is_given(node: HttpNode, api: Api) -> None:
    topic = api.create("described", 1)
    producer, consumer = api.producer(topic), api.consumer(topic)
    table = {(route.method, route.path): route for route in CLASSIC_ROUTES}
    for call in calls(topic, producer, consumer):
        fields = {name: value for name, value in call.valid.items() if name not in ("sequence", "prod_client", "after")}
        if call.path == "/topics":
            fields["topic_name"] = "described-too"
        elif call.path == "/brokers":
            fields["endpoint"] = node.address
        elif call.path == "/producer/client_size":
            fields = call.valid
        answer = api.call(call.method, call.path, **fields)
        assert answer.status == 200, (call, answer)
        assert answer.body.keys() == {"status", *dict(table[call.method, call.path].gives)}, call
    for path in ("/topics", "/replicas", "/brokers", "/health"):
        assert api.get(path).keys() == dict(table["GET", path].gives).keys()


@pytest.mark.system
def test_the_description_and_the_page_are_served(node: HttpNode, api_document: dict[str, Any]) -> None:
    with V1(node.http) as v1:
        served = v1.request("GET", "/openapi.json")
        assert served.headers["content-type"] == "application/json"
        assert served.body == api_document
        page = v1.request("GET", "/docs")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        text = page.raw.decode()
        assert not re.search(r"(src|href)\s*=\s*[\"'](https?:)?//", text), "nothing from elsewhere"
        assert "@import" not in text and "url(" not in text
        assert 'fetch("openapi.json")' in text


@pytest.mark.system
def test_arrow_is_not_loaded_before_records_come(tmp_path_factory: pytest.TempPathFactory) -> None:
    def has_arrow(node: HttpNode) -> bool:
        with open(f"/proc/{node.pid}/maps") as maps:
            return "libarrow" in maps.read()

    with HttpNode(tmp_path_factory.mktemp("small")) as node, V1(node.http) as v1:
        v1.create("logs")
        for path in ("/v1/topics/logs/offsets", "/v1/health", "/openapi.json", "/docs"):
            assert v1.request("GET", path).status == 200
        assert not has_arrow(node)
        v1.produce("logs", ["a"])
        assert has_arrow(node)
