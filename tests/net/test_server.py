"""Handshake, pipelining and answers of the server, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import random

import msgspec
import pytest

from quiver.config import NetSettings
from quiver.errors import (
    ConnectionLostError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    QuiverError,
    UnsupportedVersionError,
)
from quiver.net.connection import open_connection
from quiver.net.server import Server
from quiver.wire.messages import (
    HELLO_BYTES_MAX,
    HELLO_KIND,
    HELLO_MAGIC,
    PROTOCOL_VERSION,
    ErrorReply,
    Hello,
    HelloReply,
    PositionReply,
)
from quiver.wire.packet import FLAG_ERROR, FLAG_REPLY, encode_prefix
from tests.net.kit import (
    HELLO,
    HELLO_REPLY,
    TIMEOUT_S,
    Puppet,
    RawClient,
    Run,
    ask,
    connected,
    echo,
    encode_request,
    serving,
    started,
    until,
)

LARGE = random.Random(1).randbytes(3_000_000)


def test_handshake_tells_the_limits(run: Run) -> None:
    async def main() -> None:
        async with serving() as (_, address), connected(address) as connection:
            assert connection.limits == HELLO_REPLY

    run(main())


@pytest.mark.parametrize(("lowest", "highest"), [(0, 0), (PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 9), (9, 1)])
def test_client_of_other_versions_is_told_so(run: Run, lowest: int, highest: int) -> None:
    async def main() -> None:
        async with serving() as (_, address), await RawClient.open(address) as client:
            await client.send(encode_request(Hello(HELLO_MAGIC, lowest, highest), 77))
            packet = await client.packet()
            assert packet is not None and (packet.correlation, packet.flags) == (77, FLAG_REPLY | FLAG_ERROR)
            error = msgspec.msgpack.decode(packet.header, type=ErrorReply)
            assert error.code == "UnsupportedVersionError"
            assert f"versions {lowest} to {highest}" in error.message
            assert await client.packet() is None, "the server closes"

    run(main())


def test_version_in_the_middle_of_the_clients_range_is_spoken(run: Run) -> None:
    async def main() -> None:
        async with serving() as (_, address), await RawClient.open(address) as client:
            await client.send(encode_request(Hello(HELLO_MAGIC, 0, 99), 1))
            packet = await client.packet()
            assert packet is not None
            assert msgspec.msgpack.decode(packet.header, type=HelloReply).version == PROTOCOL_VERSION

    run(main())


def test_client_raises_what_the_server_says_at_the_handshake(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quiver.net.server.PROTOCOL_VERSION", PROTOCOL_VERSION + 1)

    async def main() -> None:
        async with serving() as (_, address):
            with pytest.raises(UnsupportedVersionError, match="speaks version 2, the client versions 1 to 1"):
                await open_connection(address, "test", timeout_s=TIMEOUT_S)

    run(main())


@pytest.mark.parametrize(
    "first",
    [
        encode_request(ask("echo", 1), 1),
        encode_request(Hello("kafka", 1, 1), 1),
        encode_prefix(HELLO_KIND, 0, 1, b"\xc1", 0),
        encode_prefix(200, 0, 1, b"", 0),
        encode_request(HELLO, 1, bytes(HELLO_BYTES_MAX)),
    ],
    ids=["a request", "other magic", "no msgpack", "unknown kind", "too long"],
)
def test_anything_but_a_hello_first_closes_the_connection(run: Run, first: bytes) -> None:
    async def main() -> None:
        async with serving() as (puppet, address), await RawClient.open(address) as client:
            await client.send(first)
            assert await client.packet() is None
            assert puppet.started == []

    run(main())


def test_second_hello_is_an_ordinary_wrong_request(run: Run) -> None:
    async def refuse(request: object, *_: object) -> None:
        raise InvalidRequestError(f"{type(request).__name__} here")

    async def main() -> None:
        async with serving(handler=refuse) as (_, address), connected(address) as connection:
            with pytest.raises(InvalidRequestError, match="Hello here"):
                await connection.call(HELLO, HelloReply, timeout_s=TIMEOUT_S)

    run(main())


def test_payloads_of_every_size_come_back_whole(run: Run) -> None:
    async def main() -> None:
        async with serving() as (_, address), connected(address) as connection:
            for size in (0, 1, 100, 65_000, 65_536, 70_000, 3_000_000):
                await echo(connection, size, LARGE[:size])

    run(main())


def test_replies_come_in_the_order_of_readiness_and_find_their_request(run: Run) -> None:
    async def main() -> None:
        async with serving() as (puppet, address), connected(address) as connection:
            waiting = {
                number: asyncio.ensure_future(connection.call(ask("wait", number), PositionReply, timeout_s=TIMEOUT_S))
                for number in range(100)
            }
            await until(lambda: len(puppet.started) == 100)
            assert puppet.started == list(range(100)), "requests are begun in the order they were sent"
            await echo(connection, 5000)
            for number in random.Random(3).sample(range(100), 100):
                puppet.release(number)
                reply, _ = await waiting[number]
                assert reply.offset == number
                assert sum(task.done() for task in waiting.values()) == 100 - len(puppet.waiting)

    run(main())


def test_many_requests_in_one_packet_burst_are_all_answered(run: Run) -> None:
    async def main() -> None:
        async with serving() as (_, address), await RawClient.open(address) as client:
            await client.hello()
            count = 5000
            sending = asyncio.ensure_future(
                client.send(b"".join(encode_request(ask("echo", number), number) for number in range(count)))
            )
            found = set()
            for _ in range(count):
                packet = await client.packet()
                assert packet is not None and packet.flags == FLAG_REPLY
                found.add((packet.correlation, msgspec.msgpack.decode(packet.header, type=PositionReply).offset))
            assert found == {(number, number) for number in range(count)}
            await sending

    run(main())


def test_typed_error_of_the_handler_reaches_the_client(run: Run) -> None:
    async def main() -> None:
        async with serving() as (puppet, address), connected(address) as connection:
            puppet.error = OffsetOutOfRangeError.of("logs", 1, 5, 10, 20)
            with pytest.raises(OffsetOutOfRangeError, match="valid offsets are 10 to 20") as caught:
                await connection.call(ask("fail", 1), PositionReply, timeout_s=TIMEOUT_S)
            assert caught.value.facts["earliest"] == 10
            await echo(connection)

    run(main())


@pytest.mark.parametrize("error", [ValueError("a secret"), OSError(5, "secret"), AssertionError(), RecursionError()])
def test_unexpected_error_of_the_handler_is_logged_and_told_without_details(
    run: Run, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving() as (puppet, address), connected(address) as connection:
            puppet.error = error
            with pytest.raises(QuiverError, match="internal error") as caught:
                await connection.call(ask("fail", 1), PositionReply, timeout_s=TIMEOUT_S)
            assert type(caught.value) is QuiverError and "secret" not in str(caught.value)
            await echo(connection)

    with caplog.at_level(logging.ERROR, "quiver.net"):
        run(main())
    (record,) = caplog.records
    assert record.getMessage().startswith("request_failed peer=") and record.exc_info is not None


def test_unknown_kind_gets_a_typed_error_and_the_connection_goes_on(run: Run) -> None:
    async def main() -> None:
        async with serving() as (_, address), await RawClient.open(address) as client:
            await client.hello()
            await client.send(encode_prefix(99, 0, 5, b"\x90", 3) + b"abc" + encode_request(ask("echo", 1), 6))
            packet = await client.packet()
            assert packet is not None and packet.correlation == 5
            assert msgspec.msgpack.decode(packet.header, type=ErrorReply).code == "InvalidRequestError"
            packet = await client.packet()
            assert packet is not None and (packet.correlation, packet.flags) == (6, FLAG_REPLY)

    run(main())


def test_stop_answers_what_is_under_way_and_then_closes(run: Run) -> None:
    async def main() -> None:
        puppet = Puppet()
        server = Server(NetSettings(), HELLO_REPLY, puppet)
        async with started(server) as address, connected(address) as connection:
            call = asyncio.ensure_future(connection.call(ask("wait", 4), PositionReply, (LARGE,), timeout_s=TIMEOUT_S))
            lost = connection.submit(ask("wait", 5))
            await until(lambda: len(puppet.started) == 2)
            stopping = asyncio.ensure_future(server.stop(0.3))
            await asyncio.sleep(0)
            with pytest.raises(ConnectionLostError):
                await open_connection(address, "test", timeout_s=TIMEOUT_S)
            puppet.release(4)
            reply, payload = await call
            assert (reply.offset, bytes(payload)) == (4, LARGE)
            with pytest.raises(ConnectionLostError):
                await lost
            await stopping
            assert not connection.is_open

    run(main())


def test_stop_does_not_wait_for_ever_for_a_peer_that_does_not_read(run: Run) -> None:
    async def main() -> None:
        puppet = Puppet()
        server = Server(NetSettings(), HELLO_REPLY, puppet)
        async with started(server) as address, await RawClient.open(address, receive_buffer_bytes=4096) as client:
            await client.hello()
            await client.send(encode_request(ask("large", 20_000), 1))
            await until(lambda: puppet.started)
            await server.stop(0.1)
            while (packet := await client.packet()) is not None:
                assert len(packet.payload) < 20_000 * 1024

    run(main())


def test_replies_still_in_the_buffer_are_delivered_before_stop_returns(run: Run) -> None:
    async def main() -> None:
        puppet = Puppet()
        server = Server(NetSettings(), HELLO_REPLY, puppet)
        async with started(server) as address, await RawClient.open(address, receive_buffer_bytes=4096) as client:
            await client.hello()
            await client.send(encode_request(ask("large", 10_000), 1))
            await until(lambda: puppet.started)
            stopping = asyncio.ensure_future(server.stop(10.0))
            packet = await client.packet()
            assert packet is not None and len(packet.payload) == 10_000 * 1024
            assert await client.packet() is None
            await stopping

    run(main())


def test_requests_of_a_lost_connection_are_cancelled(run: Run) -> None:
    async def main() -> None:
        async with serving() as (puppet, address):
            connection = await open_connection(address, "test", timeout_s=TIMEOUT_S)
            future = connection.submit(ask("wait", 1))
            await until(lambda: puppet.waiting)
            connection.close()
            await until(puppet.waiting[1].cancelled)
            with pytest.raises(ConnectionLostError):
                await future

    run(main())
