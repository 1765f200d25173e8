"""Joins single messages into batches: a thousand requests become a few.

Rule: one batch of a partition (and client name) is under way at a time; what arrives meanwhile forms the next. A
message is answered after its batch is committed. Messages with a sequence travel alone, so that the broker can tell
each apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from crc32c import crc32c

from quiver.clock import Clock
from quiver.manager.links import BrokerLink
from quiver.wire.batch_check import SCHEMA_ID_V1
from quiver.wire.frame import FLAG_CLIENT, FLAG_UNSEQUENCED
from quiver.wire.messages import Produce, ProduceReply

_BATCH_RECORDS_MAX: Final = 10_000
_BATCH_BYTES_MAX: Final = 1024 * 1024


class Message(NamedTuple):
    value: bytes
    key: bytes | None
    stored: asyncio.Future[int]


class Joiner:
    def __init__(self, link_of: Callable[[str, int], BrokerLink], clock: Clock) -> None:
        self._link_of = link_of
        self._clock = clock
        self._waiting: dict[tuple[str, int, int], list[Message]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, topic: str, partition: int, client: int, value: bytes, key: bytes | None) -> Awaitable[int]:
        """The future offset of one message. `client` is the number of a client name, 0 for none."""
        message = Message(value, key, asyncio.get_running_loop().create_future())
        target = (topic, partition, client)
        waiting = self._waiting.get(target)
        if waiting is not None:
            waiting.append(message)  # a batch is under way: the next takes this one along
        else:
            self._waiting[target] = [message]
            task = asyncio.get_running_loop().create_task(self._drain(target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return message.stored

    async def send_one(
        self, topic: str, partition: int, client: int, sequence: int, value: bytes, key: bytes | None
    ) -> int:
        """A message that its client numbered: stored once, however often it is sent."""
        return await self._send((topic, partition, client), [(value, key)], FLAG_CLIENT, sequence)

    async def _drain(self, target: tuple[str, int, int]) -> None:
        while messages := self._take(target):
            try:
                flags = FLAG_CLIENT | FLAG_UNSEQUENCED if target[2] else 0
                base = await self._send(target, [(m.value, m.key) for m in messages], flags, 0)
            except Exception as error:  # whatever it is: nobody may wait for ever
                for message in messages:
                    if not message.stored.done():
                        message.stored.set_exception(error)
                continue
            for row, message in enumerate(messages):
                if not message.stored.done():
                    message.stored.set_result(base + row)
        del self._waiting[target]

    def _take(self, target: tuple[str, int, int]) -> list[Message]:
        waiting = self._waiting[target]
        size = 0
        for count, message in enumerate(waiting):
            size += len(message.value)
            if count and (size > _BATCH_BYTES_MAX or count >= _BATCH_RECORDS_MAX):
                self._waiting[target] = waiting[count:]
                return waiting[:count]
        self._waiting[target] = []
        return waiting

    async def _send(
        self, target: tuple[str, int, int], records: list[tuple[bytes, bytes | None]], flags: int, sequence: int
    ) -> int:
        # Arrow is loaded when the first message comes: a node that serves none stays small.
        from quiver.wire.records import batch_from_lists, encode_batch

        topic, partition, client = target
        now_us = self._clock.now_us()
        keys: Any = [key for _, key in records]
        if all(key is None for key in keys):
            keys = None
        batch = batch_from_lists([now_us], keys, [value for value, _ in records], None)
        payload = encode_batch(batch)
        request = Produce(
            topic,
            partition,
            len(records),
            now_us,
            now_us,
            crc32c(payload),
            SCHEMA_ID_V1,
            client,
            0,
            sequence,
            flags,
        )
        reply, _ = await self._link_of(topic, partition).call(request, payload)
        assert isinstance(reply, ProduceReply)
        return reply.base_offset
