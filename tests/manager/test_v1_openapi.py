"""/openapi.json is valid, complete and true; /docs needs nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin

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
def test_the_description_is_served(node: HttpNode, api_document: dict[str, Any]) -> None:
    with V1(node.http) as v1:
        served = v1.request("GET", "/openapi.json")
        assert served.headers["content-type"] == "application/json"
        assert served.body == api_document


class Page(HTMLParser):
    """What a page shows, and what it makes a browser load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = re.findall(r"""(?:fetch|import)\(\s*["'`]([^"'`]*)""", text)
        self.calls: list[tuple[str, str]] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        self._inside = "method" if ("class", "method") in attrs else tag

    def handle_data(self, data: str) -> None:
        if self._inside == "method":
            self.calls.append((data, ""))
        elif self._inside == "code" and self.calls and not self.calls[-1][1]:
            self.calls[-1] = (self.calls[-1][0], data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


@pytest.mark.system
def test_the_page_lists_every_call_and_loads_nothing_from_elsewhere(
    node: HttpNode, api_document: dict[str, Any]
) -> None:
    with V1(node.http) as v1:
        answer = v1.request("GET", "/docs")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        page = Page(answer.raw.decode())
        assert set(page.calls) == {(method.upper(), path) for path, method, _ in operations(api_document)}
        assert {path for path in api_document["paths"] if path.startswith("/v1/")} <= {path for _, path in page.calls}
        assert set(page.loads) == {"openapi.json"}
        for target in page.loads:
            assert v1.request("GET", urljoin("/docs", target)).status == 200
        for foreign in ("http:", "https:", "//cdn", "@import", "url("):
            assert foreign not in answer.raw.decode()
        # Whatever the page says, a browser takes nothing from elsewhere.
        policy = dict(part.split(maxsplit=1) for part in answer.headers["content-security-policy"].split(";"))
        assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
        assert {policy[name] for name in policy if name.endswith("-src")} == {"'none'", "'self'", "'unsafe-inline'"}


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
