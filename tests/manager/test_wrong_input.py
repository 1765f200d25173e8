"""Whatever a client sends, it is told what is wrong with it, in the form of the contract, and nothing has changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.manager.kit import Answer, Api, HttpNode, state_of

pytestmark = pytest.mark.system

CLIENT = "client"
TEXT, INTEGER = "text", "integer"


class Call(NamedTuple):
    method: str
    path: str
    required: dict[str, str]
    optional: dict[str, str]
    valid: dict[str, Any]


def calls(topic: str = "logs", producer: int = 1, consumer: int = 1) -> list[Call]:
    """Every call that takes something, in a form that would succeed."""
    name = {"topic": TEXT}
    partition = {"partition_id": INTEGER}
    produced = {"key": TEXT, "prod_client": TEXT, "sequence": INTEGER}
    of_consumer = {"consumer_id": INTEGER}
    message = {"topic": topic, "producer_id": producer, "message": "m", "key": "k", "partition_id": 0}
    counted = {"partitions": INTEGER, "replication_factor": INTEGER}
    return [
        Call("POST", "/topics", {"topic_name": TEXT}, counted, {"topic_name": "new", "partitions": 2}),
        Call("GET", "/topics/partitions", name, {}, {"topic": topic}),
        Call("GET", "/topics/partition", name, {}, {"topic": topic}),
        Call("POST", "/producer/register", name, partition, {"topic": topic, "partition_id": 0}),
        Call("POST", "/consumer/register", name, partition, {"topic": topic, "partition_id": 0}),
        Call(
            "POST",
            "/producer/produce",
            name | {"producer_id": INTEGER, "message": TEXT},
            partition | produced,
            message | {"prod_client": CLIENT, "sequence": 3},
        ),
        Call(
            "GET",
            "/consumer/consume",
            name | of_consumer,
            partition | {"after": INTEGER},
            {"topic": topic, "consumer_id": consumer, "partition_id": 0, "after": 0},
        ),
        Call(
            "POST",
            "/consumer/set_offset",
            of_consumer | {"offset": INTEGER},
            name | partition,
            {"topic": topic, "consumer_id": consumer, "offset": 0, "partition_id": 0},
        ),
        Call("GET", "/size", name | of_consumer, partition, {"topic": topic, "consumer_id": consumer}),
        Call("GET", "/producer/client_size", {"prod_client": TEXT}, {}, {"prod_client": CLIENT}),
        Call("POST", "/brokers", {"endpoint": TEXT}, {}, {"endpoint": "127.0.0.1:1"}),
    ]


PATHS = {
    "/topics": {"GET", "POST"},
    "/topics/partitions": {"GET"},
    "/topics/partition": {"GET"},
    "/producer/register": {"POST"},
    "/consumer/register": {"POST"},
    "/producer/produce": {"POST"},
    "/consumer/consume": {"GET"},
    "/consumer/set_offset": {"POST"},
    "/size": {"GET"},
    "/producer/client_size": {"GET"},
    "/replicas": {"GET"},
    "/brokers": {"GET", "POST"},
    "/brokers/1": {"DELETE"},
    "/health": {"GET"},
}
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")

NO_INTEGERS = ("x", "", "1.5", "9" * 30, "9" * 6000, "\x00", True, 1.5, 1e300, 2**70, -(2**63), [], [1], {}, {"a": {}})
NO_STRINGS = (5, -1, 1.5, True, [], ["a"], {}, {"a": "b"})


@pytest.fixture(scope="module")
def furnished(node: HttpNode) -> Iterator[HttpNode]:
    """Producer 1 and consumer 1 of topic "logs", with three messages in each of its two partitions, half read."""
    with Api(node.http) as api:
        api.create("logs", 2)
        api.create("other")
        assert (api.producer("logs"), api.consumer("logs")) == (1, 1)
        for number in range(3):
            api.produce("logs", 1, f"m{number}", partition_id=0, prod_client=CLIENT, sequence=number)
            api.produce("logs", 1, f"n{number}", partition_id=1)
        for _ in range(3):
            api.consume("logs", 1)
    yield node


@pytest.fixture
def api(furnished: HttpNode) -> Iterator[Api]:
    """Checks that nothing was changed."""
    with Api(furnished.http) as made:
        before = state_of(made, [CLIENT])
        yield made
        assert state_of(made, [CLIENT]) == before


def send(api: Api, call: Call, fields: dict[str, Any]) -> Answer:
    """With a JSON body, whatever the method: only so can a value have any type."""
    return api.request(call.method, call.path, body=json.dumps(fields).encode())


def refused(answer: Answer, words: str = "") -> None:
    assert answer.status == 400, answer
    assert words in answer.message


@pytest.mark.parametrize("call", calls(), ids=lambda call: f"{call.method} {call.path}")
def test_each_missing_field_is_named(api: Api, call: Call) -> None:
    for field in call.required:
        fields = {name: value for name, value in call.valid.items() if name != field}
        if call.path == "/topics":
            refused(send(api, call, fields), "topic is missing")
        else:
            refused(send(api, call, fields), f"{field} is missing")
            refused(send(api, call, fields | {field: None}), f"{field} is missing")
    refused(api.request(call.method, call.path), "is missing")
    refused(api.request(call.method, call.path, body=b"{}"), "is missing")


@pytest.mark.parametrize("call", calls(), ids=lambda call: f"{call.method} {call.path}")
def test_each_field_of_a_wrong_type_is_named(api: Api, call: Call) -> None:
    for field, kind in (call.required | call.optional).items():
        shown = "topic" if field == "topic_name" else field
        for value in NO_INTEGERS if kind == INTEGER else NO_STRINGS:
            refused(send(api, call, call.valid | {field: value}), f"{shown} must be a")


JSON_BODIES: dict[str, bytes] = {
    "nothing but spaces": b"  \n ",
    "no JSON": b"hello",
    "form": b"topic=logs&producer_id=1&message=m",
    "list": b"[]",
    "list of objects": b'[{"topic": "logs"}]',
    "string": b'"topic"',
    "number": b"1",
    "null": b"null",
    "true": b"true",
    "half an object": b'{"topic": "logs"',
    "two objects": b'{"topic": "logs"}{"topic": "logs"}',
    "single quotes": b"{'topic': 'logs'}",
    "trailing comma": b'{"topic": "logs",}',
    "byte order mark": b'\xef\xbb\xbf{"topic": "logs"}',
    "UTF-16": '{"topic": "logs"}'.encode("utf-16"),
    "bad UTF-8 in a value": b'{"topic": "logs\xff"}',
    "bad UTF-8 in a name": b'{"t\xc3(opic": "logs"}',
    "overlong UTF-8": b'{"topic": "logs\xc0\x80"}',
    "surrogate in UTF-8": b'{"topic": "logs\xed\xa0\x80"}',
    "lone high surrogate": b'{"topic": "logs\\ud800"}',
    "lone low surrogate": b'{"topic": "logs\\udc00"}',
    "surrogates the wrong way round": b'{"topic": "logs\\udc00\\ud800"}',
    "half an escape": b'{"topic": "logs\\u12"}',
    "raw control character": b'{"topic": "logs\x01"}',
    "NaN": b'{"topic": "logs", "partition_id": NaN}',
    "Infinity": b'{"topic": "logs", "partition_id": -Infinity}',
    "too large a float": b'{"topic": "logs", "partition_id": 1e999}',
    "huge number": b'{"topic": "logs", "partition_id": ' + b"9" * 100_000 + b"}",
    "leading zero": b'{"topic": "logs", "partition_id": 01}',
    "deep list": b'{"topic": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep and open": b"[" * 500_000,
    "zeros": bytes(1000),
    "gzip": bytes.fromhex("1f8b0800000000000003"),
}


@pytest.mark.parametrize("name", JSON_BODIES)
@pytest.mark.parametrize(("method", "path"), [("POST", "/consumer/register"), ("GET", "/topics/partitions")])
def test_a_body_that_is_no_json_object_is_refused(api: Api, name: str, method: str, path: str) -> None:
    refused(api.request(method, path, body=JSON_BODIES[name]))


def test_a_message_that_is_no_text_is_not_stored(api: Api) -> None:
    for message in (b'"\\ud800"', b'"a\\udfffb"', b'"\xff"', b'"\xed\xb0\x80"', b"5", b"null", b"{}", b"[]", b"NaN"):
        body = b'{"topic": "logs", "producer_id": 1, "message": %s}' % message
        refused(api.request("POST", "/producer/produce", body=body))


@pytest.mark.parametrize("query", ["message=%ff", "message=%ed%a0%80", "message=a%c3", "%ff=1&message=a"])
def test_a_query_that_is_no_text_is_not_stored_as_something_else(api: Api, query: str) -> None:
    answer = api.request("POST", f"/producer/produce?topic=logs&producer_id=1&{query}")
    refused(answer, "the query is not valid UTF-8")


BAD_NAMES = (
    *("", " ", ".", "..", "a b", "a/b", "/a", "../a", "a\\b", "ü", "\u0430", "a\x00", "\x00", "a\n", "\na", "a\t"),
    *("x" * 250, "x" * 100_000, "a,b", "a:b", "a*", "a?", "#a", "%41", "a;drop table", "'", '"', "🏹", "a\u200b"),
)


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: ascii(name)[:20])
def test_a_name_that_is_not_allowed_makes_no_topic(api: Api, name: str) -> None:
    for answer in (
        api.call("POST", "/topics", topic_name=name),
        api.call("POST", "/producer/register", topic=name),
        api.request("POST", "/topics", query={"topic_name": name[:1000]}),
    ):
        refused(answer, "topic name")
    refused(api.call("POST", "/consumer/register", topic=name), "does not exist")
    refused(api.call("POST", "/producer/produce", topic=name, producer_id=1, message="m"), "does not exist")
    refused(api.call("GET", "/topics/partitions", topic=name[:1000]), "does not exist")


@pytest.mark.parametrize("partitions", [0, -1, 10_001, 10**9, 2**62, -(2**62), "0", "-5"])
def test_a_number_of_partitions_that_is_not_allowed_makes_no_topic(api: Api, partitions: Any) -> None:
    refused(api.call("POST", "/topics", topic_name="new", partitions=partitions), "partitions must be between 1 and")


@pytest.mark.parametrize("factor", [0, -1, 101, 2**62])
def test_a_replication_factor_that_is_not_allowed_makes_no_topic(api: Api, factor: int) -> None:
    answer = api.call("POST", "/topics", topic_name="new", replication_factor=factor)
    refused(answer, "replication_factor must be between 1 and 100")


@pytest.mark.parametrize("path", PATHS)
def test_a_method_that_a_path_does_not_have_is_refused(api: Api, path: str) -> None:
    for method in METHODS:
        if method not in PATHS[path]:
            answer = api.request(method, path, body=b'{"topic": "logs", "consumer_id": 1}')
            assert answer.status == 405
            assert answer.message == f"{method} is not a method of {path}"
            assert set(answer.headers["allow"].split(", ")) == PATHS[path]


def test_looking_is_not_consuming(api: Api) -> None:
    """A HEAD has no body in its answer, so the message would be lost."""
    for path in PATHS:
        status, headers, body = api.raw("HEAD", f"{path}?topic=logs&consumer_id=1")
        assert (status, body) == (405, b"")
        assert headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/nope", "/topics/", "/topics/nope", "/Topics", "//topics", "/topics//partitions", "/producer"),
        *("/consumer/", "/brokers/1/2", "/v0/topics", "/.", "/..", "/../topics", "/topics/../topics"),
        *("/%00", "/%ff", "/%2e%2e", "/topics%00", "/topics;a=b", "/" + "a" * 60_000, "*", "/index.html"),
    ],
    ids=lambda path: path[:20],
)
def test_a_path_that_does_not_exist_is_said(api: Api, path: str) -> None:
    for method in ("GET", "POST", "DELETE", "PUT"):
        answer = api.request(method, path, body=b'{"topic": "logs"}')
        assert answer.status == 404
        assert answer.message.startswith("no such path: ")


def test_the_valid_form_of_each_call_is_valid(node: HttpNode, furnished: HttpNode) -> None:
    """Else the tests above would refuse for another reason. Last, and without the fixture: it changes things."""
    with Api(node.http) as api:
        for call in calls():
            answer = send(api, call, call.valid)
            if call.path == "/brokers":
                assert "127.0.0.1:1 cannot join" in answer.message
            else:
                assert answer.status == 200, (call, answer)
