"""The load of the http section: connections that are kept open, each with an id and one request at a time.

`python http_load.py PORT produce|consume TOPIC REQUESTS` prints one JSON line. It knows only the classic calls and so
treats every queue alike; it is a process of its own, since sharing one with a server would take that server's time.

Rule: an answer counts when it is whole and a success; what came is checked after the clock has stopped.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import uvloop
from measure import make_values, percentile_ms

CONNECTIONS = 64
MESSAGE_BYTES = 100
WARM_UP_REQUESTS = 8  # on each connection: threads, pools and prepared statements of the server are there after these
TIMEOUT_S = 120.0

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._received = bytearray()
        self._left: list[bytes] = []
        self._bodies: list[bytes] = []
        self._seconds: list[float] = []
        self._done: asyncio.Future[None] | None = None

    async def exchange(self, requests: Sequence[bytes]) -> tuple[list[bytes], list[float]]:
        """Sends one after the other; (body, seconds) of each answer."""
        self._left, self._bodies, self._seconds = list(reversed(requests)), [], []
        self._done = asyncio.get_running_loop().create_future()
        self._send()
        await self._done
        return self._bodies, self._seconds

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def _send(self) -> None:
        self._sent_s = time.perf_counter()
        self._transport.write(self._left.pop())

    def data_received(self, data: bytes) -> None:
        self._received += data
        body = whole_body(self._received)
        if body is None:
            return
        self._seconds.append(time.perf_counter() - self._sent_s)
        self._bodies.append(body)
        if not self._received.startswith(b"HTTP/1.1 200 "):
            self._fail(RuntimeError(f"the server refused: {body.decode()}"))
            return
        self._received.clear()
        if self._left:
            self._send()
        elif self._done is not None:
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error or ConnectionError("the server closed a connection that it should keep"))

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


def whole_body(received: bytearray) -> bytes | None:
    """The body of the one answer that `received` holds; None while a part is missing."""
    head_end = received.find(b"\r\n\r\n")
    if head_end < 0:
        return None
    length = _LENGTH.search(received, 0, head_end)
    if length is None:
        raise RuntimeError("an answer without Content-Length")
    body = received[head_end + 4 :]
    return bytes(body) if len(body) >= int(length[1]) else None


def post(path: str, **fields: Any) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def get(path: str, **fields: Any) -> bytes:
    query = "&".join(f"{name}={value}" for name, value in fields.items())
    return f"GET {path}?{query} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


class Load:
    def __init__(self, connections: Sequence[Connection], topic: str) -> None:
        self._connections = connections
        self._topic = topic

    async def produce(self, count: int) -> dict[str, float]:
        """`count` messages on each connection."""
        ids = await self._register("producer")
        warm_up = self._messages(ids, WARM_UP_REQUESTS)
        requests = self._messages(ids, count)
        await self._all(warm_up)
        found, bodies = await self._timed(requests)
        offsets = {json.loads(body)["offset"] for some in bodies for body in some}
        stored = await self._size() - len(ids) * WARM_UP_REQUESTS
        if not len(offsets) == stored == len(ids) * count:
            raise RuntimeError(f"{len(ids) * count} produced, {len(offsets)} offsets given, {stored} stored")
        return found

    async def consume(self, count: int) -> dict[str, float]:
        """`count` messages for each connection's own consumer, out of messages that were produced before."""
        producers = await self._register("producer")
        needed = WARM_UP_REQUESTS + count
        await self._all(self._messages(producers, -(-needed // len(producers))))
        requests = [
            get("/consumer/consume", topic=self._topic, consumer_id=i) for i in await self._register("consumer")
        ]
        await self._all([[request] * WARM_UP_REQUESTS for request in requests])
        found, bodies = await self._timed([[request] * count for request in requests])
        read = {tuple(json.loads(body)["message"] for body in some) for some in bodies}
        if len(read) != 1 or len(set(*read)) != count:
            raise RuntimeError("the consumers did not read the same messages, each of them once")
        return found

    async def _register(self, kind: str) -> list[int]:
        answers, _ = await self._all([[post(f"/{kind}/register", topic=self._topic)] for _ in self._connections])
        return [json.loads(body)[f"{kind}_id"] for (body,) in answers]

    def _messages(self, producers: Sequence[int], count: int) -> list[list[bytes]]:
        texts = (value.hex() for value in make_values(len(producers) * count, MESSAGE_BYTES // 2))
        return [
            [post("/producer/produce", topic=self._topic, producer_id=i, message=next(texts)) for _ in range(count)]
            for i in producers
        ]

    async def _size(self) -> int:
        first = self._connections[0]
        (body,), _ = await first.exchange([post("/consumer/register", topic=self._topic)])
        consumer = json.loads(body)["consumer_id"]
        (body,), _ = await first.exchange([get("/size", topic=self._topic, consumer_id=consumer)])
        return json.loads(body)["size"]

    async def _timed(self, requests: list[list[bytes]]) -> tuple[dict[str, float], list[list[bytes]]]:
        began_s = time.perf_counter()
        bodies, seconds = await self._all(requests)
        took_s = time.perf_counter() - began_s
        found = {"seconds": took_s, "requests": len(seconds)}
        return found | {f"p{percent}_ms": percentile_ms(seconds, percent) for percent in (50, 99)}, bodies

    async def _all(self, requests: list[list[bytes]]) -> tuple[list[list[bytes]], list[float]]:
        """(bodies by connection, seconds of all) when every connection has its answers."""
        pairs = zip(self._connections, requests, strict=True)
        answers = await asyncio.gather(*(connection.exchange(mine) for connection, mine in pairs))
        return [bodies for bodies, _ in answers], [second for _, seconds in answers for second in seconds]


async def run(port: int, call: str, topic: str, requests: int) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    connections = [
        connection
        for _, connection in [await loop.create_connection(Connection, "127.0.0.1", port) for _ in range(CONNECTIONS)]
    ]
    load = Load(connections, topic)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await (load.produce if call == "produce" else load.consume)(requests // CONNECTIONS)
    finally:
        for connection in connections:
            connection.close()


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])))))
