"""Joins single messages into batches: a thousand requests become a few.

Rule: one batch of a partition (and client name) is under way at a time; what arrives meanwhile forms the next. A
message is answered after its batch is committed. Messages with a sequence travel alone, so that the broker can tell
each apart.

Batches without a client name are numbered by the gateway itself, a producer like any other: when the leader changes
under one, it is sent again and stored once. The numbers of a batch whose outcome stays unknown are never used again;
what follows begins a new epoch. A batch under a client's name has no numbers of its own: it is not sent again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from crc32c import crc32c

from quiver.clock import Clock
from quiver.errors import OutOfOrderSequenceError, ProducerFencedError, RequestError
from quiver.manager.links import BrokerLink
from quiver.wire.batch_check import SCHEMA_ID_V1
from quiver.wire.frame import FLAG_CLIENT, FLAG_UNSEQUENCED
from quiver.wire.messages import Produce, ProduceReply

_BATCH_RECORDS_MAX: Final = 10_000
_BATCH_BYTES_MAX: Final = 1024 * 1024
_LANES_MAX: Final = 100_000


class Message(NamedTuple):
    value: bytes
    key: bytes | None
    stored: asyncio.Future[int]


class _Lane:
    """The gateway's numbers in one partition."""

    __slots__ = ("epoch", "sequence")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.sequence = 0


class Joiner:
    """`producer_id` names this gateway among all producers, never 0 and never used by another one."""

    def __init__(self, link_of: Callable[[str, int], BrokerLink], clock: Clock, producer_id: int) -> None:
        self._link_of = link_of
        self._clock = clock
        self._producer_id = producer_id
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._epochs = itertools.count()  # one for all lanes: none is ever given to a partition twice
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
        return await self._send((topic, partition, client), [(value, key)], FLAG_CLIENT, 0, sequence)

    async def _drain(self, target: tuple[str, int, int]) -> None:
        while messages := self._take(target):
            try:
                records = [(message.value, message.key) for message in messages]
                if target[2]:
                    base = await self._send(target, records, FLAG_CLIENT | FLAG_UNSEQUENCED, 0, 0)
                else:
                    base = await self._send_numbered((target[0], target[1]), records)
            except Exception as error:  # whatever it is: nobody may wait for ever
                for message in messages:
                    if not message.stored.done():
                        message.stored.set_exception(error)
                continue
            for row, message in enumerate(messages):
                if not message.stored.done():
                    message.stored.set_result(base + row)
        del self._waiting[target]

    async def _send_numbered(self, place: tuple[str, int], records: list[tuple[bytes, bytes | None]]) -> int:
        lane = self._lanes.get(place)
        if lane is None:
            if len(self._lanes) >= _LANES_MAX:
                del self._lanes[next(iter(self._lanes))]  # it begins a new epoch when it is used again
            lane = self._lanes[place] = _Lane(next(self._epochs))
        target = (*place, self._producer_id)
        try:
            try:
                base = await self._send(target, records, 0, lane.epoch, lane.sequence)
            except (OutOfOrderSequenceError, ProducerFencedError):
                # The partition does not know us, or no longer: another topic of that name, or too long ago.
                lane.epoch, lane.sequence = next(self._epochs), 0
                base = await self._send(target, records, 0, lane.epoch, lane.sequence)
        except RequestError:
            raise  # the broker said no: its numbers are those of the next batch
        except BaseException:
            self._lanes.pop(place, None)
            raise
        lane.sequence += len(records)
        return base

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
        self,
        target: tuple[str, int, int],
        records: list[tuple[bytes, bytes | None]],
        flags: int,
        epoch: int,
        sequence: int,
    ) -> int:
        # Arrow is loaded when the first message comes: a node that serves none stays small.
        from quiver.wire.records import batch_from_lists, encode_batch

        topic, partition, producer_id = target
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
            producer_id,
            epoch,
            sequence,
            flags,
        )
        reply, _ = await self._link_of(topic, partition).call(request, payload)
        assert isinstance(reply, ProduceReply)
        return reply.base_offset
