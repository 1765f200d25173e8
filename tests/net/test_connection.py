"""The client's end: every request ends in exactly one of reply, typed error, lost or timed out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from quiver.errors import ConnectionLostError, ProtocolError, QuiverError, RequestTimeoutError
from quiver.net.connection import open_connection, reply_of
from quiver.wire.messages import HELLO_KIND, ErrorReply, PositionReply, encode
from quiver.wire.packet import FLAG_ERROR, FLAG_REPLY, PREFIX_BYTES, encode_prefix
from tests.net.kit import HELLO_REPLY, TIMEOUT_S, Run, ask, connected, echo, serving, until

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
KIND = 14
HELLO_ANSWER = encode_prefix(HELLO_KIND, FLAG_REPLY, 1, encode(HELLO_REPLY), 0)


@contextlib.asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[str]:
    """A server that does exactly what the script says with each connection."""
    tasks: set[asyncio.Task[None]] = set()

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await script(reader, writer)
            writer.close()
        except asyncio.CancelledError:
            writer.transport.abort()

    server = await asyncio.start_server(play, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def shake_hands(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_packet(reader)
    writer.write(HELLO_ANSWER)


async def read_packet(reader: asyncio.StreamReader) -> int:
    """Takes in one request, returns its correlation id."""
    prefix = await reader.readexactly(PREFIX_BYTES)
    await reader.readexactly(int.from_bytes(prefix[:4], "little"))
    return int.from_bytes(prefix[8:16], "little")


def position(correlation: int, offset: int, flags: int = FLAG_REPLY) -> bytes:
    return encode_prefix(KIND, flags, correlation, encode(PositionReply(offset)), 0)


def test_all_waiting_requests_fail_when_the_server_dies(run: Run) -> None:
    async def main() -> None:
        async def die_after_three(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await shake_hands(reader, writer)
            for _ in range(3):
                await read_packet(reader)
            writer.transport.abort()

        async with scripted(die_after_three) as address:
            connection = await open_connection(address, "test", timeout_s=TIMEOUT_S)
            calls = [connection.call(ask("echo", n), PositionReply, timeout_s=TIMEOUT_S) for n in range(3)]
            found = await asyncio.gather(*calls, connection.submit(ask("echo", 9)), return_exceptions=True)
            assert {type(outcome) for outcome in found} == {ConnectionLostError}
            assert all(address in str(outcome) for outcome in found)
            with pytest.raises(ConnectionLostError, match="is closed"):
                await connection.call(ask("echo", 4), PositionReply, timeout_s=TIMEOUT_S)

    run(main())


def test_late_reply_is_dropped_and_the_connection_goes_on(run: Run) -> None:
    async def main() -> None:
        async with serving() as (puppet, address), connected(address) as connection:
            with pytest.raises(RequestTimeoutError, match=f"no reply from {address} to GetPosition within 0.01 s"):
                await connection.call(ask("wait", 1), PositionReply, timeout_s=0.01)
            await until(lambda: puppet.waiting)
            puppet.release(1)
            await echo(connection, 2)
            await echo(connection, 3)

    run(main())


def test_reply_nobody_waits_for_is_dropped(run: Run) -> None:
    async def main() -> None:
        async def chatter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await shake_hands(reader, writer)
            correlation = await read_packet(reader)
            writer.write(position(999, 5) + position(0, 5) + position(correlation, 6, flags=0))
            writer.write(position(correlation, 7) + position(correlation, 8))
            await reader.read()

        async with scripted(chatter) as address, connected(address) as connection:
            reply, _ = await connection.call(ask("echo", 1), PositionReply, timeout_s=TIMEOUT_S)
            assert reply.offset == 7, "what is no reply, or not to this request, does not count"

    run(main())


def test_cancelled_request_leaves_the_others_alone(run: Run) -> None:
    async def main() -> None:
        async with serving() as (puppet, address), connected(address) as connection:
            first, second = (connection.submit(ask("wait", number)) for number in (1, 2))
            await until(lambda: len(puppet.waiting) == 2)
            first.cancel()
            puppet.release()
            assert reply_of(await second, PositionReply).offset == 2

    run(main())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
        b"\x15\x03\x03\x00\x02\x02\x46" + bytes(40),
        encode_prefix(HELLO_KIND, FLAG_REPLY, 1, b"\xc1", 0),
        encode_prefix(HELLO_KIND, FLAG_REPLY, 1, b"\x96\x01\x02\xa2\xff\xfe\x01\x01\x01", 0),
        encode_prefix(HELLO_KIND, FLAG_REPLY, 1, b"\x91" * 100_000, 0),
        encode_prefix(HELLO_KIND, FLAG_REPLY | FLAG_ERROR, 1, b"\x91\x05", 0),
        encode_prefix(HELLO_KIND, FLAG_REPLY | FLAG_ERROR, 0, b"\xc1\xc1", 0),
        encode_prefix(KIND, FLAG_REPLY, 1, b"", 2**31),
    ],
    ids=["http", "tls", "no msgpack", "no utf-8", "deep", "bad error", "bad refusal", "endless"],
)
def test_server_that_speaks_something_else_is_a_protocol_error(run: Run, answer: bytes) -> None:
    async def main() -> None:
        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_packet(reader)
            writer.write(answer)
            await reader.read()

        async with scripted(speak) as address:
            with pytest.raises(ProtocolError):
                await open_connection(address, "test", timeout_s=TIMEOUT_S)

    run(main())


def test_bad_error_reply_fails_the_requests_and_closes(run: Run) -> None:
    async def main() -> None:
        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await shake_hands(reader, writer)
            correlation = await read_packet(reader)
            writer.write(encode_prefix(KIND, FLAG_REPLY | FLAG_ERROR, correlation, b"\x93\x01\x02\x03", 0))
            await reader.read()

        async with scripted(speak) as address, connected(address) as connection:
            with pytest.raises(ProtocolError):
                await connection.call(ask("echo", 1), PositionReply, timeout_s=TIMEOUT_S)
            assert not connection.is_open

    run(main())


def test_refusal_that_comes_before_the_hello_is_what_the_caller_sees(run: Run) -> None:
    async def main() -> None:
        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            error = encode(ErrorReply("OverloadedError", "full", {"limit": 3}))
            writer.write(encode_prefix(HELLO_KIND, FLAG_REPLY | FLAG_ERROR, 0, error, 0))

        async with scripted(refuse) as address:
            for _ in range(30):
                with pytest.raises(QuiverError, match="full") as caught:
                    await open_connection(address, "test", timeout_s=TIMEOUT_S)
                assert (caught.value.code, caught.value.facts) == ("OverloadedError", {"limit": 3})

    run(main())


def test_silent_server_times_out_at_the_handshake(run: Run) -> None:
    async def main() -> None:
        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        async with scripted(say_nothing) as address:
            with pytest.raises(RequestTimeoutError, match="no reply"):
                await open_connection(address, "test", timeout_s=0.02)

    run(main())


def test_nobody_listening_is_a_lost_connection(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        async def main() -> None:
            with pytest.raises(ConnectionLostError, match=f"cannot connect to {address}"):
                await open_connection(address, "test", timeout_s=TIMEOUT_S)

        run(main())


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 70 + ".org"])
def test_host_that_cannot_be_found_is_a_lost_connection(run: Run, host: str) -> None:
    async def main() -> None:
        with pytest.raises(ConnectionLostError, match="cannot connect to"):
            await open_connection(f"{host}:9400", "test", timeout_s=TIMEOUT_S)

    run(main())


def test_sender_waits_while_the_peer_takes_in_nothing(run: Run) -> None:
    async def main() -> None:
        reading = asyncio.Event()

        async def read_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await shake_hands(reader, writer)
            await reading.wait()
            while await reader.read(1 << 20):
                pass

        async with scripted(read_late) as address, connected(address) as connection:
            futures = [connection.submit(ask("echo", number), (bytes(1 << 20),)) for number in range(40)]
            waiting = asyncio.ensure_future(connection.until_writable())
            await asyncio.sleep(0)
            assert not waiting.done()
            reading.set()
            await waiting
            connection.close()
            found = await asyncio.gather(*futures, return_exceptions=True)
            assert {type(outcome) for outcome in found} == {ConnectionLostError}

    run(main())


def test_sender_that_waits_is_woken_when_the_connection_is_lost(run: Run) -> None:
    async def main() -> None:
        dying = asyncio.Event()

        async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await shake_hands(reader, writer)
            await dying.wait()
            writer.transport.abort()

        async with scripted(die) as address, connected(address) as connection:
            futures = [connection.submit(ask("echo", number), (bytes(1 << 20),)) for number in range(40)]
            waiting = asyncio.ensure_future(connection.until_writable())
            await asyncio.sleep(0)
            dying.set()
            await waiting
            found = await asyncio.gather(*futures, return_exceptions=True)
            assert {type(outcome) for outcome in found} == {ConnectionLostError}

    run(main())
