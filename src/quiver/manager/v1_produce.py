"""Batches over HTTP: who sends them, where they go, and what is answered.

Rule: answered after commit. A request with a sequence is one batch of one partition, stored whole and once; a request
without may go to several partitions, and is told what was stored where when one of them fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from quiver.clock import Clock
from quiver.errors import InvalidRequestError, OutOfOrderSequenceError, ProducerFencedError, QuiverError
from quiver.manager.classic import CLIENT_NAME_MAX, client_number
from quiver.manager.http_server import HttpAnswer
from quiver.manager.joiner import Joiner
from quiver.manager.registry import Registry
from quiver.manager.v1_call import Call, answer
from quiver.manager.v1_media import RECORD_MEDIA, content_type
from quiver.manager.v1_shapes import Produced, Stored
from quiver.metadata.state import Topic
from quiver.topic_settings import message_bytes_of
from quiver.wire.partitioning import partition_of_key

PRODUCER_HEADER: Final = "Quiver-Producer"
EPOCH_HEADER: Final = "Quiver-Epoch"
SEQUENCE_HEADER: Final = "Quiver-Sequence"
_PART_BYTES_MAX: Final = 1024 * 1024  # what joins others' records is cut into parts of about this size
_EPOCH_MAX: Final = 2**32 - 1
_SEQUENCE_MAX: Final = 2**62


class _Sender(NamedTuple):
    """`client` is the number of a client's name, 0 for none. `sequence` None: not numbered."""

    client: int
    epoch: int
    sequence: int | None


class Producing:
    def __init__(
        self, registry: Registry, joiner: Joiner, clock: Clock, message_bytes_max: int, body_bytes_max: int
    ) -> None:
        self._registry = registry
        self._joiner = joiner
        self._clock = clock
        self._message_bytes_max = message_bytes_max
        self._body_bytes_max = body_bytes_max
        self._turns: dict[str, int] = {}

    async def to_topic(self, call: Call) -> HttpAnswer:
        topic = await self._registry.topic(call.path["topic"])
        return await self._produce(call, topic, None)

    async def to_partition(self, call: Call) -> HttpAnswer:
        return await self._produce(call, *await call.place(self._registry))

    async def _produce(self, call: Call, topic: Topic, partition: int | None) -> HttpAnswer:
        media = content_type(call.request.headers, RECORD_MEDIA)
        sender = _sender(call.request.headers)
        if sender.sequence is not None and partition is None:
            raise InvalidRequestError(f"{SEQUENCE_HEADER} counts in one partition: name it in the path")
        # Arrow is loaded with the first request: a node that serves none stays small.
        from quiver.manager.v1_records import Limits, batches_of

        message_bytes_max = message_bytes_of(topic.settings, self._message_bytes_max)
        limits = Limits(message_bytes_max, self._body_bytes_max, len(topic.partitions), topic)
        choose = _Chooser(self._turn(topic), limits.partitions)
        found = await batches_of(media, call.request.body, limits, self._clock.now_us(), choose, partition)
        if choose.used:
            self._turns[topic.name] = choose.turn + 1
        if sender.sequence is not None:
            return await self._send_numbered(topic, sender, sender.sequence, found)
        return await self._send(topic, sender, found)

    def _turn(self, topic: Topic) -> int:
        return self._turns.get(topic.name, 0) % len(topic.partitions)

    async def _send_numbered(
        self, topic: Topic, sender: _Sender, sequence: int, found: Mapping[int, list[Any]]
    ) -> HttpAnswer:
        ((partition, (batch,)),) = found.items()
        try:
            reply = await self._joiner.send_records(topic.name, partition, sender.client, sender.epoch, sequence, batch)
        except OutOfOrderSequenceError as error:
            expected = error.facts["expected"]
            message = f"sequence {sequence} is out of order: the expected sequence is {expected}"
            raise OutOfOrderSequenceError(message, **error.facts) from error
        except ProducerFencedError as error:
            message = f"a producer of this name has written with a higher epoch than {sender.epoch}"
            raise ProducerFencedError(message) from error
        offset = reply.base_offset if reply.base_offset >= 0 else None
        count = batch.num_rows
        return answer(Produced(topic.name, count, [Stored(partition, offset, count)], reply.duplicate))

    async def _send(self, topic: Topic, sender: _Sender, found: Mapping[int, list[Any]]) -> HttpAnswer:
        from quiver.wire.records import split_batch

        places: list[tuple[int, int]] = []
        waits = []
        for partition, batches in sorted(found.items()):
            for part, size in (piece for batch in batches for piece in split_batch(batch, _PART_BYTES_MAX)):
                places.append((partition, part.num_rows))
                waits.append(self._joiner.add_records(topic.name, partition, sender.client, part, size))
        results = await asyncio.gather(*waits, return_exceptions=True)
        stored: list[Stored] = []
        failures: list[BaseException] = []
        for (partition, count), result in zip(places, results, strict=True):
            if isinstance(result, BaseException):
                failures.append(result)
            else:
                _note(stored, Stored(partition, result, count))
        if failures:
            raise _with_stored(failures[0], stored)
        return answer(Produced(topic.name, sum(run.count for run in stored), stored))


class _Chooser:
    """The partition of a record that names none: by its key; without one, all of a request go where it is the turn."""

    __slots__ = ("_partitions", "turn", "used")

    def __init__(self, turn: int, partitions: int) -> None:
        self.turn = turn
        self._partitions = partitions
        self.used = False

    def __call__(self, key: bytes | None) -> int:
        if key is not None:
            return partition_of_key(key, self._partitions)
        self.used = True
        return self.turn


def _note(stored: list[Stored], run: Stored) -> None:
    """Runs that touch are told as one."""
    last = stored[-1] if stored else None
    if last and last.offset is not None and (last.partition, last.offset + last.count) == (run.partition, run.offset):
        stored[-1] = Stored(last.partition, last.offset, last.count + run.count)
    else:
        stored.append(run)


def _with_stored(error: BaseException, stored: list[Stored]) -> BaseException:
    """What failed, with what did not: the client must not send that again."""
    if not isinstance(error, QuiverError):
        return error
    told = type(error)(error.message, **error.facts)
    runs = [{"partition": run.partition, "offset": run.offset, "count": run.count} for run in stored]
    told.facts = error.facts | {"stored": runs}
    return told


def _sender(headers: Mapping[bytes, bytes]) -> _Sender:
    name = _header(headers, PRODUCER_HEADER)
    epoch = _number(headers, EPOCH_HEADER, _EPOCH_MAX)
    sequence = _number(headers, SEQUENCE_HEADER, _SEQUENCE_MAX)
    if name is None:
        if epoch is not None or sequence is not None:
            raise InvalidRequestError(f"{SEQUENCE_HEADER} and {EPOCH_HEADER} need {PRODUCER_HEADER}")
        return _Sender(0, 0, None)
    if not 0 < len(name) <= CLIENT_NAME_MAX:
        raise InvalidRequestError(f"{PRODUCER_HEADER} must have 1 to {CLIENT_NAME_MAX} characters")
    if sequence is None and epoch is not None:
        raise InvalidRequestError(f"{EPOCH_HEADER} needs {SEQUENCE_HEADER}")
    return _Sender(client_number(name), epoch or 0, sequence)


def _header(headers: Mapping[bytes, bytes], name: str) -> str | None:
    raw = headers.get(name.lower().encode())
    try:
        return None if raw is None else raw.strip().decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{name} is not valid UTF-8") from error


def _number(headers: Mapping[bytes, bytes], name: str, most: int) -> int | None:
    text = _header(headers, name)
    if text is None:
        return None
    if text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most:
        return int(text)
    raise InvalidRequestError(f"{name} must be an integer from 0 to {most}")
