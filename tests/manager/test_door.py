"""The HTTP port itself, byte by byte: limits, slow and broken bodies, and bytes that are no HTTP at all."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.manager.kit import Api, HttpNode, fresh, state_of
from tests.manager.wire_kit import Wire, chunk, head, post
from tests.system.kit import WAIT_S

pytestmark = pytest.mark.system

MIB = 1024 * 1024
BODY_BYTES_MAX = 8 * MIB


@pytest.fixture
def wire(node: HttpNode) -> Iterator[Wire]:
    with closing(Wire(node.http)) as made:
        yield made


# -- the size of a message ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("character", ["x", "ü", "🏹", "\x01"], ids=["ascii", "two bytes", "four bytes", "escaped"])
def test_a_message_of_exactly_the_limit_works(api: Api, character: str) -> None:
    """Bytes count, not characters and not how JSON wrote them."""
    topic = fresh()
    producer, consumer = api.producer(topic), api.consumer(topic)
    message = character * (MIB // len(character.encode()))
    assert len(message.encode()) == MIB
    api.produce(topic, producer, message)
    api.produce(topic, producer, message, prod_client="c", sequence=0)
    fields = {"topic": topic, "producer_id": producer, "message": message + "x"}
    limit = "Message is larger than the limit of 1048576 bytes"
    assert api.refusal("POST", "/producer/produce", **fields) == limit
    assert api.refusal("POST", "/producer/produce", **fields, prod_client="c", sequence=1) == limit
    assert api.size(topic, consumer) == 2
    assert api.consume_all(topic, consumer) == [message, message]


def test_a_key_counts_in_bytes_too(api: Api) -> None:
    topic = fresh()
    producer, consumer = api.producer(topic), api.consumer(topic)
    key = "🏹" * 1000
    api.produce(topic, producer, "x" * (MIB - 4000), key=key)
    fields = {"topic": topic, "producer_id": producer, "message": "x" * (MIB - 3999), "key": key}
    assert "1048576" in api.refusal("POST", "/producer/produce", **fields)
    assert api.size(topic, consumer) == 1


def test_many_of_the_largest_messages_at_once_are_all_stored(api: Api, node: HttpNode) -> None:
    topic = fresh()
    producer, consumer = api.producer(topic), api.consumer(topic)
    wires = [Wire(node.http) for _ in range(4)]
    for number, wire in enumerate(wires):
        wire.send(post("/producer/produce", topic=topic, producer_id=producer, message=str(number) * MIB))
    assert sorted(wire.answer().body["offset"] for wire in wires) == [0, 1, 2, 3]
    for wire in wires:
        wire.close()
    assert sorted(message[:2] for message in api.consume_all(topic, consumer)) == ["00", "11", "22", "33"]


# -- the size of a body ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [BODY_BYTES_MAX + 1, 10**10, 2**63 - 1])
def test_a_body_that_is_announced_too_large_is_refused_before_it_is_sent(wire: Wire, length: int) -> None:
    wire.send(head("POST", "/producer/produce", f"Content-Length: {length}"), b'{"topic": ')
    answer = wire.answer()
    assert answer.status == 400
    assert answer.message == f"the body is larger than the limit of {BODY_BYTES_MAX} bytes"


def test_a_body_that_waits_for_leave_is_refused_without_it(wire: Wire) -> None:
    wire.send(head("POST", "/topics", f"Content-Length: {BODY_BYTES_MAX + 1}", "Expect: 100-continue"))
    assert wire.answer().status == 400


def test_a_body_in_chunks_is_refused_as_soon_as_it_is_too_large(wire: Wire) -> None:
    wire.send(head("POST", "/producer/produce", "Transfer-Encoding: chunked"))
    part = chunk(b"x" * MIB)
    wire.send(*[part] * 8, chunk(b"x"))
    # It goes on for ever, as far as anybody knows.
    answer = wire.answer()
    assert answer.status == 400
    assert "limit" in answer.message


def test_a_body_of_exactly_the_limit_is_read(api: Api) -> None:
    body = b'{"topic_name": "never made"}'
    answer = api.request("POST", "/topics", body=body + b" " * (BODY_BYTES_MAX - len(body)))
    assert answer.status == 400
    assert "topic name" in answer.message, "read and understood; the name is what is wrong"


def test_a_refused_body_is_answered_though_it_keeps_coming_and_ends_the_connection(wire: Wire) -> None:
    wire.send(head("POST", "/topics", f"Content-Length: {BODY_BYTES_MAX + 1}"), b"x" * 1000)
    assert wire.answer().status == 400
    assert wire.is_closed()


# -- how a body comes --------------------------------------------------------------------------------------------


def test_a_body_in_chunks_is_a_body(api: Api, wire: Wire) -> None:
    topic = fresh()
    body = json.dumps({"topic_name": topic, "partitions": 2}).encode()
    for method, path in (("POST", "/topics"), ("GET", "/topics/partitions")):
        wire.send(head(method, path, "Transfer-Encoding: chunked"))
        wire.send(*(chunk(body[at : at + 1]) for at in range(len(body))), b"0\r\n\r\n")
        assert wire.answer().body["partitions"] == [0, 1]


def test_a_request_that_comes_byte_by_byte_is_served(wire: Wire) -> None:
    wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    request = post("/topics", topic_name=fresh())
    wire.send(*(request[at : at + 1] for at in range(len(request))))
    assert wire.answer().status == 200


def test_requests_one_behind_the_other_are_answered_in_order(api: Api, wire: Wire) -> None:
    topic = fresh()
    producer = api.producer(topic)
    requests = [
        post("/producer/produce", topic=topic, producer_id=producer, message=f"m{number}") for number in range(50)
    ]
    wire.send(b"".join(requests))
    assert [wire.answer().body["offset"] for _ in requests] == list(range(50))
    assert api.consume_all(topic, api.consumer(topic)) == [f"m{number}" for number in range(50)]


def test_a_body_that_waits_for_leave_gets_it(wire: Wire) -> None:
    body = json.dumps({"topic_name": fresh()}).encode()
    wire.send(head("POST", "/topics", f"Content-Length: {len(body)}", "Expect: 100-continue"))
    assert wire.line() == b"HTTP/1.1 100 Continue\r\n"
    wire.line()
    wire.send(body)
    assert wire.answer().status == 200


def test_an_old_client_is_served_and_its_connection_closed(wire: Wire) -> None:
    wire.send(b"GET /topics HTTP/1.0\r\n\r\n")
    assert wire.answer().status == 200
    assert wire.is_closed()


def test_a_client_that_hangs_up_in_the_middle_changes_nothing(api: Api, node: HttpNode) -> None:
    topic = fresh()
    producer = api.producer(topic)
    request = post("/producer/produce", topic=topic, producer_id=producer, message="half")
    register = post("/producer/register", topic=fresh())
    before = state_of(api)
    for whole in (request, register):
        for end in (10, len(whole) // 2, len(whole) - 1):
            with closing(Wire(node.http)) as wire:
                wire.send(whole[:end])
    assert state_of(api) == before


def test_what_came_before_the_nonsense_is_answered_first(api: Api, node: HttpNode) -> None:
    """Else the client would take the refusal for the answer to a message that was stored."""
    topic = fresh()
    producer = api.producer(topic)
    good = [post("/producer/produce", topic=topic, producer_id=producer, message=f"m{number}") for number in range(5)]
    for nonsense in (b"nonsense\r\n\r\n", head("POST", "/topics", f"Content-Length: {BODY_BYTES_MAX + 1}")):
        with closing(Wire(node.http)) as wire:
            wire.send(b"".join(good) + nonsense)
            assert [wire.answer().status for _ in good] == [200] * 5
            assert wire.answer().status == 400
            assert wire.is_closed()
    assert api.size(topic, api.consumer(topic)) == 10


def test_a_last_request_is_answered_whatever_follows_it(api: Api, node: HttpNode) -> None:
    """Old clients send an empty line behind a body."""
    body = json.dumps({"topic": fresh()}).encode()
    request = head("POST", "/producer/register", "Connection: close", f"Content-Length: {len(body)}") + body
    for rest in (b"", b"\r\n", b"more", request):
        with closing(Wire(node.http)) as wire:
            wire.send(request + rest)
            assert "producer_id" in wire.answer().body
            assert wire.is_closed()


def test_a_client_that_stops_talking_still_hears_its_answers(api: Api, node: HttpNode) -> None:
    topic = fresh()
    producer = api.producer(topic)
    with closing(Wire(node.http)) as wire:
        for number in range(3):
            wire.send(post("/producer/produce", topic=topic, producer_id=producer, message=f"m{number}"))
        wire.socket.shutdown(socket.SHUT_WR)
        assert [wire.answer().body["offset"] for _ in range(3)] == [0, 1, 2]
        assert wire.is_closed()


def test_a_strangers_upgrade_is_no_upgrade(wire: Wire) -> None:
    wire.send(head("GET", "/topics", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"))
    assert wire.answer().status == 200


# -- bytes that are no HTTP --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),  # TLS
        b"\x00" * 100,
        b"get /topics HTTP/1.1\r\n\r\n",
        b"GET /topics HTTP/9.9\r\n\r\n",
        b"GET /topics FTP/1.1\r\n\r\n",
        b"GET /top\xffics HTTP/1.1\r\n\r\n",
        b"GET /topics?name=\xc3\xa9 HTTP/1.1\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
        b"GET /topics HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /topics HTTP/1.1\r\na\x00b: c\r\n\r\n",
        b"POST /topics HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /topics HTTP/1.1\r\nContent-Length: 1e3\r\n\r\n",
        b"POST /topics HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST /topics HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /topics HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /topics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /topics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{}{}{}{}\r\n",
        b"CONNECT quiver:80 HTTP/1.1\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /topics?a=" + b"a" * 500_000 + b" HTTP/1.1\r\n\r\n",
    ],
    ids=lambda request: repr(request)[2:30],
)
def test_what_is_no_http_is_refused_in_the_same_form(wire: Wire, request_bytes: bytes) -> None:
    wire.send(request_bytes)
    answer = wire.answer()
    assert answer.status == 400
    assert wire.is_closed()


@pytest.mark.parametrize(
    "headers",
    [
        *([], ["Host: ["], ["Host: "], ["Host: \xff"], ["Host: a/b?c#d"], ["Host: [::1]:x"], ["Host: " + "x" * 10_000]),
        ["Cookie: " + "x" * 60_000],
        [f"X-{number}: {number}" for number in range(1000)],
        ["Content-Type: text/plain; charset=utf-16"],
        ["Accept: text/html", "Accept-Encoding: gzip", "Origin: http://evil"],
        ["X-Forwarded-For: \xff", "Forwarded: for="],
    ],
    ids=lambda headers: ascii(headers)[:30],
)
def test_headers_that_nobody_asked_for_do_no_harm(wire: Wire, headers: list[str]) -> None:
    """Also where something goes wrong: the answer must not trip over them."""
    for method, path, status in (("GET", "/topics", 200), ("GET", "/nope", 404), ("PUT", "/topics", 405)):
        lines = [f"{method} {path} HTTP/1.1", *headers]
        wire.send("\r\n".join([*lines, "", ""]).encode("latin-1"))
        assert wire.answer().status == status


def test_connections_that_say_nothing_keep_nobody_out(node: HttpNode, api: Api) -> None:
    silent = [Wire(node.http) for _ in range(100)]
    for wire in silent[50:]:
        wire.send(b"POST /topics HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
    with Api(node.http) as late:
        late.create(fresh())
    for wire in silent:
        wire.close()


# -- limits are settings -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpNode]:
    settings = {
        "QUIVER_MESSAGE_BYTES_MAX": "1000",
        "QUIVER_HTTP_BODY_BYTES_MAX": "20000",
        "QUIVER_HTTP_BODY_TIMEOUT_S": "0.2",
    }
    with HttpNode(tmp_path_factory.mktemp("strict"), settings) as node:
        yield node


def test_the_limits_are_those_that_were_set(strict: HttpNode) -> None:
    with Api(strict.http) as api:
        topic = fresh()
        producer = api.producer(topic)
        api.produce(topic, producer, "x" * 1000)
        fields = {"topic": topic, "producer_id": producer}
        for size, limit in ((1001, 1000), (19_000, 1000), (20_000, 20_000)):
            assert f"limit of {limit} bytes" in api.refusal("POST", "/producer/produce", **fields, message="x" * size)
        assert api.size(topic, api.consumer(topic)) == 1


@pytest.mark.parametrize("start", [b"", b'{"topic_name": "slow"'])
@pytest.mark.parametrize("header", ["Content-Length: 100", "Transfer-Encoding: chunked"])
def test_a_body_that_does_not_come_is_not_waited_for_for_ever(strict: HttpNode, start: bytes, header: str) -> None:
    with closing(Wire(strict.http)) as wire:
        wire.send(head("POST", "/topics", header))
        if start:
            wire.send(chunk(start) if header.startswith("Transfer") else start)
        answer = wire.answer()
    assert answer.status == 400
    assert answer.message == "the body did not arrive within 0.2 s"
    with Api(strict.http) as api:
        assert "slow" not in api.get("/topics")["topics"]


def test_a_body_that_trickles_is_not_waited_for_either(strict: HttpNode) -> None:
    with closing(Wire(strict.http)) as wire:
        wire.send(head("POST", "/topics", "Content-Length: 10000"))
        wire.socket.settimeout(0.02)
        sent = 0
        while sent < 10_000:
            wire.send(b" ")
            sent += 1
            try:
                if wire.socket.recv(1, socket.MSG_PEEK):
                    break
            except TimeoutError:
                continue
        wire.socket.settimeout(WAIT_S)
        assert "did not arrive" in wire.answer().message
    assert sent < 10_000
