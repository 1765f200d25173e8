"""Whatever is wrong with a v1 request: a status that says whose fault it is, one form of error, and nothing changed."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from quiver.manager.v1_media import ARROW, JSON, NDJSON
from quiver.manager.v1_routes import ROUTES
from quiver.manager.v1_shapes import RECORDS_MAX
from tests.manager.kit import HttpNode
from tests.manager.v1_kit import V1, Reply, arrow, checked, log_of

pytestmark = pytest.mark.system

RECORDS = "/v1/topics/logs/records"
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def furnished(node: HttpNode) -> HttpNode:
    with V1(node.http) as client:
        client.create("logs", 2)
        client.produce("logs", ["a", "b"], 0)
        client.json("PUT", "/v1/groups/g/topics/logs/partitions/0/position", {"offset": 1})
    return node


@pytest.fixture
def v1(furnished: HttpNode) -> Iterator[V1]:
    """Checks that nothing was changed."""
    with V1(furnished.http) as made:
        before = log_of(made)
        yield made
        assert log_of(made) == before
    assert "http_failed" not in furnished.log
    assert "Traceback" not in furnished.log


def post(v1: V1, body: Any, media: str = JSON, **headers: str) -> Reply:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return v1.request("POST", RECORDS, raw, {"content-type": media} | headers)


# -- paths and methods -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/v1",
        "/v1/",
        "/v1/nope",
        "/v1/topics/",
        "/v1/topics//records",
        "/v1/topics/logs/records/",
        "/v1/topics/logs/partitions",
        "/v1/topics/logs/partitions/0",
        "/v1/groups/nobody",
        "/v1/%2e%2e/topics",
        "/v1/topics/logs%2frecords",
        "/v1/topics/nobody",
        "/v1/topics/nobody/offsets",
        "/v1/topics/nobody/partitions/0/records",
        "/v1/topics/logs/partitions/2/records",
        "/v1/topics/logs/partitions/-1/records",
        "/v1/topics/logs/partitions/x/records",
        "/v1/topics/logs/partitions/0.0/records",
        "/v1/topics/logs/partitions/%D9%A1/records",
        f"/v1/topics/logs/partitions/{'9' * 5000}/records",
        f"/v1/topics/{'x' * 5000}",
        "/v1/groups/g/topics/nobody/positions",
        "/v1/groups/g/topics/logs/partitions/7/position",
    ],
)
def test_what_is_not_there_is_a_404(v1: V1, path: str) -> None:
    assert v1.request("GET", path).status == 404


@pytest.mark.parametrize("path", sorted({route.path for route in ROUTES}))
def test_a_method_that_a_path_does_not_have_is_a_405_that_names_those_it_has(v1: V1, path: str) -> None:
    has = {route.method for route in ROUTES if route.path == path}
    has |= {"HEAD"} if "GET" in has else set()
    target = path.format(topic="logs", partition=0, group="g", broker=1, consumer=1)
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"} - has:
        reply = v1.request(method, target)
        assert reply.status == 405
        assert set(reply.headers["allow"].split(", ")) == has


def test_the_description_and_the_page_are_only_read(v1: V1) -> None:
    assert v1.request("POST", "/docs", b"").status == 405
    assert v1.request("DELETE", "/openapi.json").status == 405


@pytest.mark.parametrize("path", ["/v1/topics/%ff", "/v1/groups/%ff/topics/logs/positions"])
def test_a_path_that_is_not_utf8_is_refused(v1: V1, path: str) -> None:
    assert v1.request("GET", path).status == 400


@pytest.mark.parametrize(
    "query",
    [
        "offset=-1",
        "offset=x",
        "offset=",
        "offset=latest%0a",
        "offset=1%0a0",
        "offset=" + "9" * 30,
        "offset=1.5",
        "max_records=0",
        "max_records=100001",
        "max_records=" + "9" * 5000,
        "max_bytes=0",
        "max_bytes=1e3",
        "wait_ms=-1",
        "wait_ms=30001",
        "wait_ms=NaN",
        "encoding=hex",
        "ofset=1",
        "offset=0&offset=1",
        "offset=%ff",
        "&".join(f"a{number}=1" for number in range(200)),
    ],
)
def test_a_query_that_is_wrong_is_refused(v1: V1, query: str) -> None:
    reply = v1.request("GET", f"/v1/topics/logs/partitions/0/records?{query}")
    assert reply.status == 400, reply


def test_a_query_where_none_belongs_is_refused(v1: V1) -> None:
    assert v1.request("GET", "/v1/topics?prefix=a").status == 400
    assert v1.request("DELETE", "/v1/topics/logs?force=1").status == 400
    assert (
        v1.request("POST", f"{RECORDS}?partition=1", b'{"records":[{"value":"a"}]}', {"content-type": JSON}).status
        == 400
    )


# -- media types -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": ""},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {"content-type": "\xff\xfe"},
        {"content-type": "application/vnd.apache.arrow.file"},
    ],
)
def test_a_body_of_another_type_is_a_415(v1: V1, headers: dict[str, str]) -> None:
    body = b'{"records":[{"value":"a"}]}'
    assert v1.request("POST", RECORDS, body, headers).status == 415
    assert v1.request("POST", "/v1/topics", b'{"name":"new"}', headers).status == 415
    put = "/v1/groups/g/topics/logs/partitions/0/position"
    assert v1.request("PUT", put, b'{"offset":2}', headers).status == 415


def test_administration_speaks_json_only(v1: V1) -> None:
    assert v1.request("POST", "/v1/topics", b'{"name":"new"}', {"content-type": NDJSON}).status == 415


@pytest.mark.parametrize("accept", ["text/html", f"{JSON};q=0", "application/json;q=x", "nonsense", ",;"])
def test_a_form_that_cannot_be_given_is_a_406(v1: V1, accept: str) -> None:
    reply = v1.fetch("logs", accept=accept)
    assert reply.status == 406


# -- records ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"value": "a", "value_base64": "YQ=="},
        {"value": 1},
        {"value": ["a"]},
        {"value_base64": "not base64!"},
        {"value_base64": "YQ"},
        {"value": "a", "key": "k", "key_base64": "aw=="},
        {"value": "a", "key": 5},
        {"value": "a", "partition": 2},
        {"value": "a", "partition": -1},
        {"value": "a", "partition": "0"},
        {"value": "a", "partition": 10**40},
        {"value": "a", "timestamp": 2**63},
        {"value": "a", "timestamp": 1.5},
        {"value": "a", "timestamp": "2024-01-01T00:00:00"},
        {"value": "a", "timestamp": "yesterday"},
        {"value": "a", "headers": {"a": 1}},
        {"value": "a", "headers": [{"name": "a"}]},
        {"value": "a", "headers": [{"name": "a", "value": "x", "value_base64": "eA=="}]},
        {"value": "a", "headers": [["a", "b"]]},
        {"value": "a", "headers": "x"},
        {"value": "a", "ttl": 5},
        None,
        [],
        "a",
    ],
)
def test_one_wrong_record_refuses_all(v1: V1, record: Any) -> None:
    assert post(v1, {"records": [{"value": "good"}, record]}).status == 400
    lines = b'{"value":"good"}\n' + json.dumps(record).encode() + b"\n"
    assert post(v1, lines, NDJSON).status == 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"records":[]}',
        b'{"records":{}}',
        b'{"records":[{"value":"a"}],"topic":"logs"}',
        b'{"records":[{"value":"a"}]',
        b'{"records":[{"value":"a"}]}}',
        b'{"records":[{"value":"\xff"}]}',
        b'{"records":[{"value":"\\ud800"}]}',
        b"[" * 100_000,
        b'{"records":' * 50_000,
        b'{"records":[{"value":' + b"[" * 100_000,
        b'{"records":[{"partition":' + b"9" * 100_000 + b',"value":"a"}]}',
        b"\x00" * 100,
    ],
)
def test_a_body_that_is_no_such_json_is_refused(v1: V1, body: bytes) -> None:
    assert post(v1, body).status == 400
    assert post(v1, body, NDJSON).status == 400
    assert post(v1, body, ARROW).status == 400


def test_too_many_records_are_a_413(v1: V1) -> None:
    count = RECORDS_MAX + 1
    assert post(v1, b'{"records":[' + b'{"value":""},' * RECORDS_MAX + b'{"value":""}]}').status == 413
    assert post(v1, b'{"value":""}\n' * count, NDJSON).status == 413
    assert post(v1, arrow(pa.table({"value": pa.array([b""] * count, pa.binary())})), ARROW).status == 413


def test_a_record_that_is_too_large_is_a_413(v1: V1) -> None:
    large = "x" * (MIB + 1)
    reply = post(v1, {"records": [{"value": "good"}, {"value": large}]})
    assert (reply.status, reply.error["code"], reply.error["limit"]) == (413, "message_too_large", MIB)
    assert post(v1, {"records": [{"value": "x" * MIB, "key": "k"}]}).status == 413
    assert post(v1, {"records": [{"value": "", "headers": {"h": large}}]}).status == 413
    assert post(v1, arrow(pa.table({"value": [b"good", large.encode()]})), ARROW).status == 413
    headers = pa.array([[("h", large.encode())]], pa.map_(pa.string(), pa.binary()))
    assert post(v1, arrow(pa.table({"value": [b""], "headers": headers})), ARROW).status == 413


# -- Arrow -----------------------------------------------------------------------------------------------------------


def tables() -> dict[str, pa.Table]:
    return {
        "no value": pa.table({"key": ["a"]}),
        "unknown column": pa.table({"value": ["a"], "offset": [1]}),
        "numbers": pa.table({"value": [1]}),
        "dictionary": pa.table({"value": pa.array(["a"] * 10).dictionary_encode()}),
        "view": pa.table({"value": pa.array([b"a"], pa.binary_view())}),
        "null": pa.table({"value": pa.nulls(3)}),
        "list": pa.table({"value": [["a"]]}),
        "date": pa.table({"value": ["a"], "timestamp": pa.array([1], pa.date32())}),
        "time out of range": pa.table({"value": ["a"], "timestamp": pa.array([2**62], pa.timestamp("s"))}),
        "headers": pa.table({"value": ["a"], "headers": [["a"]]}),
        "partition out of range": pa.table({"value": ["a"], "partition": [2]}),
        "partition as text": pa.table({"value": ["a"], "partition": ["0"]}),
        "no rows": pa.table({"value": pa.array([], pa.binary())}),
        "twice": pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["value", "value"]),
        "none": pa.table({}),
    }


@pytest.mark.parametrize("name", tables())
def test_a_stream_of_other_columns_is_refused(v1: V1, name: str) -> None:
    reply = post(v1, arrow(tables()[name]), ARROW)
    assert reply.status == 400, reply


def test_a_stream_that_is_cut_or_damaged_is_refused_or_whole(v1: V1) -> None:
    """Refused at every length and with every byte wrong; no damage may bring the node down."""
    whole = arrow(pa.table({"valu": ["a" * 50], "key": ["k"]}))  # never right, whatever the damage
    for length in range(0, len(whole), 7):
        assert post(v1, whole[:length], ARROW).status == 400
    for place in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[place] ^= 0x41
        assert post(v1, bytes(damaged), ARROW).status in (400, 413)


def test_a_few_bytes_do_not_become_many(v1: V1) -> None:
    huge = pa.table({"value": pa.array([b"\x00" * 1000] * 50_000, pa.binary())})
    body = arrow(huge, "zstd")
    assert len(body) < MIB
    reply = post(v1, body, ARROW)
    assert (reply.status, reply.error["code"]) == (413, "message_too_large")


# -- producers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"quiver-sequence": "0"},
        {"quiver-epoch": "0"},
        {"quiver-producer": "", "quiver-sequence": "0"},
        {"quiver-producer": "x" * 256, "quiver-sequence": "0"},
        {"quiver-producer": "\xff", "quiver-sequence": "0"},
        {"quiver-producer": "p", "quiver-sequence": "-1"},
        {"quiver-producer": "p", "quiver-sequence": "x"},
        {"quiver-producer": "p", "quiver-sequence": ""},
        {"quiver-producer": "p", "quiver-sequence": "9" * 30},
        {"quiver-producer": "p", "quiver-sequence": "0", "quiver-epoch": "4294967296"},
        {"quiver-producer": "p", "quiver-epoch": "1"},
    ],
)
def test_a_producer_that_is_not_one_is_refused(v1: V1, headers: dict[str, str]) -> None:
    target = "/v1/topics/logs/partitions/0/records"
    reply = v1.request("POST", target, b'{"records":[{"value":"a"}]}', {"content-type": JSON} | headers)
    assert reply.status == 400, reply


def test_a_sequence_needs_a_partition(v1: V1) -> None:
    reply = post(v1, {"records": [{"value": "a"}]}, **{"quiver-producer": "p", "quiver-sequence": "0"})
    assert reply.status == 400


# -- the wire --------------------------------------------------------------------------------------------------------


class Wire:
    def __init__(self, node: HttpNode) -> None:
        self.socket = socket.create_connection(("127.0.0.1", node.http_port), timeout=30)
        self.file = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def reply(self) -> Reply:
        status = int(self.file.readline().split()[1])
        headers = {}
        while (line := self.file.readline().decode("latin-1").strip()) != "":
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return checked(Reply(status, headers, self.file.read(int(headers.get("content-length", 0)))))

    def close(self) -> None:
        self.file.close()
        self.socket.close()


@pytest.fixture
def wire(furnished: HttpNode) -> Iterator[Wire]:
    made = Wire(furnished)
    yield made
    made.close()


def head(length: int | None, target: str = RECORDS, method: str = "POST") -> bytes:
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"{method} {target} HTTP/1.1\r\nhost: x\r\ncontent-type: {JSON}\r\n{size}\r\n\r\n".encode()


def test_a_body_that_is_announced_too_large_is_a_413_before_it_is_sent(v1: V1, wire: Wire) -> None:
    wire.send(head(8 * MIB + 1))
    reply = wire.reply()
    assert (reply.status, reply.error["code"]) == (413, "body_too_large")
    assert reply.headers["connection"] == "close"
    assert wire.file.read() == b""


def test_a_body_in_chunks_is_a_413_as_soon_as_it_is_too_large(v1: V1, wire: Wire) -> None:
    wire.send(head(None))
    chunk = b"%x\r\n" % MIB + b" " * MIB + b"\r\n"
    for _ in range(9):
        wire.send(chunk)
    assert wire.reply().status == 413


def test_a_head_that_is_too_long_is_a_431(v1: V1, wire: Wire) -> None:
    wire.send(b"GET /v1/topics HTTP/1.1\r\nx: " + b"y" * 100_000 + b"\r\n\r\n")
    assert wire.reply().status == 431


def test_the_classic_api_knows_only_400(v1: V1, furnished: HttpNode) -> None:
    for request in (
        head(8 * MIB + 1, "/producer/produce"),
        b"GET /topics HTTP/1.1\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
    ):
        wire = Wire(furnished)
        wire.send(request)
        assert wire.file.readline().split()[1] == b"400"
        wire.close()


def test_requests_one_behind_the_other_are_answered_in_order(v1: V1, wire: Wire) -> None:
    body = b'{"records":[{"value":1}]}'
    wire.send(
        b"GET /v1/health HTTP/1.1\r\n\r\n"
        + head(len(body))
        + body
        + b"GET /v1/topics/logs/partitions/0/records?wait_ms=300&offset=2 HTTP/1.1\r\n\r\n"
        + b"GET /topics HTTP/1.1\r\n\r\n"
        + b"GET http://elsewhere/v1/nope HTTP/1.1\r\n\r\n"
        + b"GET /v1/topics/logs HTTP/1.1\r\nconnection: close\r\n\r\n"
    )
    assert [wire.reply().status for _ in range(6)] == [200, 400, 200, 200, 404, 200]
    assert wire.file.read() == b"", "closed as asked for"


def test_who_has_said_its_last_is_not_made_to_wait(v1: V1, wire: Wire) -> None:
    wire.send(b"GET /v1/topics/logs/partitions/0/records?wait_ms=30000&offset=2 HTTP/1.1\r\n\r\n")
    wire.socket.shutdown(socket.SHUT_WR)
    began_s = time.monotonic()
    assert wire.reply().status == 200
    assert time.monotonic() - began_s < 10


def test_a_body_that_does_not_come_is_a_408(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = {"QUIVER_HTTP_BODY_TIMEOUT_S": "0.5", "QUIVER_HTTP_BODY_BYTES_MAX": "1000"}
    with HttpNode(tmp_path_factory.mktemp("strict"), settings) as node:
        for target, status in ((RECORDS, b"408"), ("/producer/produce", b"400")):
            wire = Wire(node)
            wire.send(head(10, target) + b"{")
            assert wire.file.readline().split()[1] == status
            wire.close()
        wire = Wire(node)
        wire.send(head(1001))
        assert wire.reply().status == 413
        wire.close()


def test_a_stop_does_not_wait_for_those_who_wait(tmp_path_factory: pytest.TempPathFactory) -> None:
    with HttpNode(tmp_path_factory.mktemp("stopped")) as node:
        with V1(node.http) as client:
            client.create("logs")
            wire = Wire(node)
            wire.send(b"GET /v1/health HTTP/1.1\r\n\r\n")
            assert wire.reply().status == 200
            wire.send(b"GET /v1/topics/logs/partitions/0/records?wait_ms=30000 HTTP/1.1\r\n\r\n")
            # What came later on another connection is answered: the node has begun with this one.
            assert client.fetch("logs").status == 200
        began_s = time.monotonic()
        assert node.terminate() == 0
        assert time.monotonic() - began_s < 25, "the wait would have had 30 s"
        reply = wire.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        wire.close()
