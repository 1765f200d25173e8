"""The HTTP shell with a handler that the test holds: order, limits and the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quiver.manager import http_server
from quiver.manager.http import refuse
from quiver.manager.http_server import HttpAnswer, HttpRequest, HttpServer, listen
from tests.manager.kit import Answer, checked, until

GET = b"GET /%d HTTP/1.1\r\n\r\n"


class Handler:
    """Answers with the request's target, when it may."""

    def __init__(self) -> None:
        self.began: list[bytes] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.body_bytes = 0

    async def __call__(self, request: HttpRequest) -> HttpAnswer:
        self.began.append(request.target)
        await self.gate.wait()
        body: dict[str, Any] = {"status": "success", "target": request.target.decode(), "more": "x" * self.body_bytes}
        return HttpAnswer(200, json.dumps(body).encode())


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def answer(self) -> Answer:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
        return checked(int(head[0].split()[1]), headers, await self.reader.readexactly(int(headers["content-length"])))

    async def target(self) -> str:
        return str((await self.answer()).body["target"])

    async def is_closed(self) -> bool:
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


class Bench:
    def __init__(self, server: HttpServer, handler: Handler, port: int) -> None:
        self.server, self.handler = server, handler
        self._port = port
        self._clients: list[Client] = []

    async def client(self, data: bytes = b"") -> Client:
        made = Client(*await asyncio.open_connection("127.0.0.1", self._port))
        self._clients.append(made)
        made.writer.write(data)
        return made

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Bench]:
    handler = Handler()
    server = HttpServer(handler, refuse, 1000, 10.0)
    listener = listen("127.0.0.1", 0)
    bench = Bench(server, handler, listener.getsockname()[1])
    await server.start(listener)
    try:
        async with asyncio.timeout(60):
            yield bench
    finally:
        handler.gate.set()
        await server.stop()
        await bench.close()


def test_requests_of_a_connection_are_served_one_at_a_time_and_in_order() -> None:
    async def main() -> None:
        async with serving() as bench:
            bench.handler.gate.clear()
            client = await bench.client(b"".join(GET % number for number in range(100)))
            await until(lambda: bench.handler.began)
            assert bench.handler.began == [b"/0"]
            bench.handler.gate.set()
            assert [await client.target() for _ in range(100)] == [f"/{number}" for number in range(100)]

    asyncio.run(main())


def test_connections_do_not_wait_for_each_other() -> None:
    async def main() -> None:
        async with serving() as bench:
            bench.handler.gate.clear()
            clients = [await bench.client(GET % number) for number in range(50)]
            await until(lambda: len(bench.handler.began) == 50)
            bench.handler.gate.set()
            assert [await client.target() for client in clients] == [f"/{number}" for number in range(50)]

    asyncio.run(main())


def test_one_connection_more_than_fit_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CONNECTIONS_MAX", 3)

    async def main() -> None:
        async with serving() as bench:
            clients = [await bench.client(GET % number) for number in range(3)]
            assert [await client.target() for client in clients] == ["/0", "/1", "/2"]
            late = await bench.client()
            answer = await late.answer()
            assert answer.status == 503
            assert answer.message == "the server has its maximum of 3 connections"
            assert await late.is_closed()
            await clients[0].close()
            await until(lambda: len(bench.server._connections) == 2)
            again = await bench.client(GET % 7)
            assert await again.target() == "/7"

    asyncio.run(main())


def test_a_stop_answers_what_is_under_way_and_nothing_more() -> None:
    async def main() -> None:
        async with serving() as bench:
            bench.handler.gate.clear()
            busy = await bench.client(GET % 1 + GET % 2)
            idle = await bench.client()
            await until(lambda: len(bench.handler.began) == 1 and len(bench.server._connections) == 2)
            stop = asyncio.create_task(bench.server.stop())
            await asyncio.sleep(0)
            assert not stop.done()
            bench.handler.gate.set()
            await stop
            answer = await busy.answer()
            assert (answer.body["target"], answer.headers["connection"]) == ("/1", "close")
            assert await busy.is_closed()
            assert await idle.is_closed()
            assert bench.handler.began == [b"/1"]
            with pytest.raises(ConnectionRefusedError):
                await bench.client()

    asyncio.run(main())


def test_a_stop_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_STOP_TIMEOUT_S", 0.01)

    async def main() -> None:
        async with serving() as bench:
            bench.handler.gate.clear()
            stuck = await bench.client(GET % 1)
            await until(lambda: bench.handler.began)
            await bench.server.stop()
            assert await stuck.is_closed()

    asyncio.run(main())


def test_a_connection_that_stops_being_used_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(http_server, "_SWEEP_S", 0.01)

    async def main() -> None:
        async with serving() as bench:
            silent = await bench.client()
            used = await bench.client(GET % 1)
            bench.handler.gate.clear()
            waiting = await bench.client(GET % 2)
            assert await silent.is_closed()
            bench.handler.gate.set()
            assert await used.target() == "/1"
            assert await used.is_closed()
            assert await waiting.target() == "/2", "one that waits for its answer is not idle"

    asyncio.run(main())


def test_a_client_that_does_not_read_is_cut_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SLOW_READER_S", 0.05)
    monkeypatch.setattr(http_server, "_SWEEP_S", 0.01)

    async def main() -> None:
        async with serving() as bench:
            bench.handler.body_bytes = 1_000_000
            deaf = await bench.client(b"".join(GET % number for number in range(500)))
            deaf.reader._transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: bench.server._connections and bench.handler.began)
            await until(lambda: not bench.server._connections)
            assert len(bench.handler.began) < 500, "what it does not read is not made"
            bench.handler.body_bytes = 0
            other = await bench.client(GET % 1)
            assert await other.target() == "/1"

    asyncio.run(main())


def test_a_client_that_sends_faster_than_it_is_served_is_made_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "PIPELINE_MAX", 4)

    async def main() -> None:
        async with serving() as bench:
            bench.handler.gate.clear()
            padding = b" HTTP/1.1\r\nx: " + b"x" * 8000
            flood = [(GET % number).replace(b" HTTP/1.1", padding) for number in range(2000)]
            client = await bench.client(b"".join(flood))  # more than the sockets' buffers hold
            await until(lambda: bench.handler.began)
            (connection,) = bench.server._connections
            for _ in range(50):
                await asyncio.sleep(0.001)
            assert len(connection._waiting) < 500, "the rest stays where it comes from"
            bench.handler.gate.set()
            for number in range(2000):
                assert await client.target() == f"/{number}"

    asyncio.run(main())


def test_a_head_without_end_is_refused() -> None:
    async def main() -> None:
        async with serving() as bench:
            for data in (
                b"GET /" + b"a" * 1_000_000,
                b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200_000,
                b"GET / HTTP/1.1\r\na: " + b"b" * 1_000_000,
            ):
                client = await bench.client(data)
                answer = await client.answer()
                assert answer.status == 400
                assert "head" in answer.message

    asyncio.run(main())


def test_a_client_that_is_gone_before_its_answer_does_no_harm() -> None:
    async def main() -> None:
        async with serving() as bench:
            bench.handler.gate.clear()
            for number in range(10):
                client = await bench.client(GET % number + GET % number)
                await until(lambda want=number + 1: len(bench.handler.began) == want)
                # A reset; a mere end of talking would not mean that it does not listen.
                sock = client.writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.writer.transport.abort()
            await until(lambda: not bench.server._connections)
            bench.handler.gate.set()
            other = await bench.client(GET % 99)
            assert await other.target() == "/99"
            assert len(bench.handler.began) == 11, "what waited behind is not begun for nobody"

    asyncio.run(main())
