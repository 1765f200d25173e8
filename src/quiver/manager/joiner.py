"""Joins single messages and small batches into larger ones: a thousand requests become a few.

Rule: one batch of a partition (and client name) is under way at a time; what arrives meanwhile forms the next. A
message is answered after its batch is committed. What has a sequence travels alone, so that the broker can tell each
apart. Records that came together stay together: they are never split over two batches.

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

    @property
    def record_count(self) -> int:
        return 1

    @property
    def size_bytes(self) -> int:
        return len(self.value)


class Records(NamedTuple):
    """Records that came together, as an Arrow batch of the stored schema."""

    batch: Any
    size_bytes: int
    stored: asyncio.Future[int]

    @property
    def record_count(self) -> int:
        return int(self.batch.num_rows)


class _Packed(NamedTuple):
    """What is sent."""

    payload: Any
    record_count: int
    timestamp_min: int
    timestamp_max: int


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
        self._waiting: dict[tuple[str, int, int], list[Message | Records]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, topic: str, partition: int, client: int, value: bytes, key: bytes | None) -> Awaitable[int]:
        """The future offset of one message. `client` is the number of a client name, 0 for none."""
        message = Message(value, key, asyncio.get_running_loop().create_future())
        self._queue((topic, partition, client), message)
        return message.stored

    def add_records(self, topic: str, partition: int, client: int, batch: Any, size_bytes: int) -> Awaitable[int]:
        """The future offset of the first of these records; the others follow it. One broker's batch holds them all."""
        records = Records(batch, size_bytes, asyncio.get_running_loop().create_future())
        self._queue((topic, partition, client), records)
        return records.stored

    def _queue(self, target: tuple[str, int, int], message: Message | Records) -> None:
        waiting = self._waiting.get(target)
        if waiting is not None:
            waiting.append(message)  # a batch is under way: the next takes this one along
        else:
            self._waiting[target] = [message]
            task = asyncio.get_running_loop().create_task(self._drain(target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def send_one(
        self, topic: str, partition: int, client: int, sequence: int, value: bytes, key: bytes | None
    ) -> int:
        """A message that its client numbered: stored once, however often it is sent."""
        packed = self._pack_singles([(value, key)])
        return (await self._send((topic, partition, client), packed, FLAG_CLIENT, 0, sequence)).base_offset

    async def send_records(
        self, topic: str, partition: int, client: int, epoch: int, sequence: int, batch: Any
    ) -> ProduceReply:
        """Records that their client numbered, `sequence` being that of the first: stored once, all or none."""
        return await self._send((topic, partition, client), _pack_batch(batch), FLAG_CLIENT, epoch, sequence)

    async def _drain(self, target: tuple[str, int, int]) -> None:
        while messages := self._take(target):
            try:
                packed = self._pack(messages)
                if target[2]:
                    reply = await self._send(target, packed, FLAG_CLIENT | FLAG_UNSEQUENCED, 0, 0)
                    base = reply.base_offset
                else:
                    base = await self._send_numbered((target[0], target[1]), packed)
            except Exception as error:  # whatever it is: nobody may wait for ever
                for message in messages:
                    if not message.stored.done():
                        message.stored.set_exception(error)
                continue
            for message in messages:
                if not message.stored.done():
                    message.stored.set_result(base)
                base += message.record_count
        del self._waiting[target]

    async def _send_numbered(self, place: tuple[str, int], packed: _Packed) -> int:
        lane = self._lanes.get(place)
        if lane is None:
            if len(self._lanes) >= _LANES_MAX:
                del self._lanes[next(iter(self._lanes))]  # it begins a new epoch when it is used again
            lane = self._lanes[place] = _Lane(next(self._epochs))
        target = (*place, self._producer_id)
        try:
            try:
                reply = await self._send(target, packed, 0, lane.epoch, lane.sequence)
            except (OutOfOrderSequenceError, ProducerFencedError):
                # The partition does not know us, or no longer: another topic of that name, or too long ago.
                lane.epoch, lane.sequence = next(self._epochs), 0
                reply = await self._send(target, packed, 0, lane.epoch, lane.sequence)
        except RequestError:
            raise  # the broker said no: its numbers are those of the next batch
        except BaseException:
            self._lanes.pop(place, None)
            raise
        lane.sequence += packed.record_count
        return reply.base_offset

    def _take(self, target: tuple[str, int, int]) -> list[Message | Records]:
        waiting = self._waiting[target]
        size = records = 0
        for place, message in enumerate(waiting):
            size += message.size_bytes
            records += message.record_count
            if place and (size > _BATCH_BYTES_MAX or records > _BATCH_RECORDS_MAX):
                self._waiting[target] = waiting[place:]
                return waiting[:place]
        self._waiting[target] = []
        return waiting

    def _pack(self, messages: list[Message | Records]) -> _Packed:
        """All messages as one batch, in their order."""
        parts: list[Any] = []
        singles: list[tuple[bytes, bytes | None]] = []
        for message in messages:
            if isinstance(message, Message):
                singles.append((message.value, message.key))
                continue
            if singles:
                parts.append(_batch_of(singles, self._clock.now_us()))
                singles = []
            parts.append(message.batch)
        if not parts:
            return self._pack_singles(singles)
        if singles:
            parts.append(_batch_of(singles, self._clock.now_us()))
        return _pack_batch(*parts)

    def _pack_singles(self, records: list[tuple[bytes, bytes | None]]) -> _Packed:
        # Arrow is loaded when the first message comes: a node that serves none stays small.
        from quiver.wire.records import encode_batch

        now_us = self._clock.now_us()
        return _Packed(encode_batch(_batch_of(records, now_us)), len(records), now_us, now_us)

    async def _send(
        self, target: tuple[str, int, int], packed: _Packed, flags: int, epoch: int, sequence: int
    ) -> ProduceReply:
        topic, partition, producer_id = target
        request = Produce(
            topic,
            partition,
            packed.record_count,
            packed.timestamp_min,
            packed.timestamp_max,
            crc32c(packed.payload),
            SCHEMA_ID_V1,
            producer_id,
            epoch,
            sequence,
            flags,
        )
        reply, _ = await self._link_of(topic, partition).call(request, packed.payload)
        assert isinstance(reply, ProduceReply)
        return reply


def _batch_of(records: list[tuple[bytes, bytes | None]], now_us: int) -> Any:
    from quiver.wire.records import batch_from_lists

    keys = [key for _, key in records]
    has_keys = any(key is not None for key in keys)
    return batch_from_lists([now_us], keys if has_keys else None, [value for value, _ in records], None)


def _pack_batch(*parts: Any) -> _Packed:
    import pyarrow as pa

    from quiver.wire.records import encode_batch, timestamp_range

    batch = parts[0] if len(parts) == 1 else pa.concat_batches(parts)
    return _Packed(encode_batch(batch), batch.num_rows, *timestamp_range(batch))
