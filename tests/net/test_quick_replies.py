"""Requests that are answered without a task: what becomes ready in one turn leaves in one write."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from quiver.config import NetSettings
from quiver.net.answer import Answer
from quiver.net.server import Server, ServerConnection
from quiver.wire.messages import KIND_OF, GetPosition, PositionReply
from quiver.wire.packet import PacketReader
from tests.net.kit import HELLO, HELLO_REPLY, Puppet, Run, ask, encode_request


class Transport:
    """Keeps what is written, each write for itself."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.writes.append(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def get_extra_info(self, name: str) -> None: ...

    def set_write_buffer_limits(self, high: int) -> None: ...


class Kit:
    """A connection whose requests wait until the test answers them."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        server = Server(NetSettings(), HELLO_REPLY, Puppet(), {KIND_OF[GetPosition]: self.quick})
        self.transport: Any = Transport()
        self.connection = ServerConnection(server)
        self.connection.connection_made(self.transport)
        self.receive(encode_request(HELLO, 0))
        self.transport.writes.clear()

    def quick(self, request: Any, payload: memoryview, answer: Answer) -> bool:
        self.answers.append(answer)
        return True

    def receive(self, raw: bytes) -> None:
        self.connection.get_buffer(0)[: len(raw)] = raw
        self.connection.buffer_updated(len(raw))

    def ask(self, count: int) -> None:
        for number in range(count):
            self.receive(encode_request(ask("any", number), number))

    def answer(self, *numbers: int) -> None:
        for number in numbers:
            self.answers[number].set_result(PositionReply(number))

    def written(self) -> list[list[int]]:
        """The answers in each write."""
        return [[_offset(packet.header) for packet in _packets(write)] for write in self.transport.writes]


def _packets(raw: bytes) -> list[Any]:
    reader = PacketReader(10_000)
    reader.get_buffer()[: len(raw)] = raw
    return reader.received(len(raw))


def _offset(header: memoryview) -> int:
    found = msgspec.msgpack.decode(header, type=PositionReply).offset
    assert found is not None
    return found


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_lone_reply_is_written_in_the_turn_it_is_ready(run: Run) -> None:
    async def main() -> None:
        kit = Kit()
        kit.ask(1)
        kit.answer(0)
        assert kit.written() == [[0]], "it does not wait for the next turn"

    run(main())


def test_replies_of_one_turn_are_one_write(run: Run) -> None:
    async def main() -> None:
        kit = Kit()
        kit.ask(5)
        kit.answer(0, 1, 2, 3, 4)
        await turns(3)
        assert kit.written() == [[0, 1, 2, 3, 4]]

    run(main())


def test_replies_do_not_wait_for_requests_that_are_still_under_way(run: Run) -> None:
    async def main() -> None:
        kit = Kit()
        kit.ask(5)
        kit.answer(3, 1)
        await turns(3)
        assert kit.written() == [[3, 1]]
        kit.answer(0)
        await turns(3)
        kit.answer(2, 4)
        await turns(3)
        assert kit.written() == [[3, 1], [0], [2, 4]]

    run(main())


def test_close_writes_what_is_ready_first(run: Run) -> None:
    async def main() -> None:
        kit = Kit()
        kit.ask(3)
        kit.answer(0, 1)
        await turns(1)
        kit.connection.close("enough")
        await turns(3)
        assert kit.written() == [[0, 1]]
        kit.answer(2)
        await turns(3)
        assert kit.written() == [[0, 1]], "nothing is written to a closed connection"

    run(main())
