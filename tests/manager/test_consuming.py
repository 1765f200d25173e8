"""Consumers of single messages: what is remembered of a position is a guess that the broker confirms or refuses."""

from __future__ import annotations

import asyncio

import pytest
from crc32c import crc32c
from msgspec import Struct

from quiver.errors import ConflictError, RequestError, RequestTimeoutError
from quiver.manager.consuming import Consuming
from quiver.manager.links import Buffer, Reply
from quiver.metadata.state import Consumer, Partition, Topic
from quiver.wire.batch_check import SCHEMA_ID_V1
from quiver.wire.frame import Entry, Kind, encode_frame, stamp
from quiver.wire.messages import (
    CommitPositions,
    CommitPositionsReply,
    ErrorReply,
    Fetch,
    FetchReply,
    GetPosition,
    Position,
    PositionReply,
)
from quiver.wire.records import batch_from_lists, encode_batch

TOPIC = Topic("logs", 1, 0, (Partition(1, "logs", 0, "uid", (1,)),))
CONSUMER = Consumer(7, "logs", None)


class Broker:
    """One partition with messages m0, m1, … in a single batch, and the position of one consumer."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.position: int | None = None
        self.calls: list[str] = []
        self.lose_reply = False
        self.asks_twice = False

    async def call(self, request: Struct, payload: Buffer = b"") -> Reply:
        self.calls.append(type(request).__name__)
        if isinstance(request, GetPosition):
            return PositionReply(self.position, 0, self.count), ()
        if isinstance(request, CommitPositions):
            refused = {}
            for place, position in enumerate(request.positions):
                try:
                    self._commit(position)
                except ConflictError as error:
                    if self.asks_twice and self.position == position.offset:
                        continue
                    refused[place] = ErrorReply(error.code, error.message, error.facts)
            if self.lose_reply:
                raise RequestTimeoutError("no answer")
            return CommitPositionsReply(refused), ()
        assert isinstance(request, Fetch)
        values = [f"m{number}".encode() for number in range(self.count)]
        batch = encode_batch(batch_from_lists([0] * self.count, None, values, None))
        entry = Entry(Kind.DATA, batch, crc32c(batch), self.count, 0, 0, SCHEMA_ID_V1)
        return FetchReply(0, self.count), (encode_frame(stamp(entry, 1, 1, 0), batch),)

    def _commit(self, position: Position) -> None:
        if position.expected is not None and position.expected != (-1 if self.position is None else self.position):
            raise ConflictError("moved", current=self.position)
        self.position = position.offset


def consuming(broker: Broker) -> Consuming:
    return Consuming(lambda topic, partition: broker)


def offsets(made: Consuming, times: int, after: int | None = None) -> list[int]:
    async def main() -> list[int]:
        return [(await made.take(CONSUMER, TOPIC, None, after)).offset for _ in range(times)]

    return asyncio.run(main())


def test_the_position_is_asked_for_once_and_moved_for_every_message() -> None:
    broker = Broker(5)
    assert offsets(consuming(broker), 5) == [0, 1, 2, 3, 4]
    assert broker.calls == ["GetPosition", "Fetch", *["CommitPositions"] * 5]
    assert broker.position == 5


def test_a_consumer_that_another_manager_served_goes_on_where_that_one_left_it() -> None:
    broker = Broker(9)
    first, second = consuming(broker), consuming(broker)
    assert offsets(first, 2) == [0, 1]
    assert offsets(second, 3) == [2, 3, 4]
    assert offsets(first, 2) == [5, 6]
    broker.position = 1  # set back by whoever
    assert offsets(second, 2) == [1, 2]


def test_after_brings_back_what_was_lost_also_when_the_position_is_remembered() -> None:
    broker = Broker(5)
    made = consuming(broker)
    assert offsets(made, 3) == [0, 1, 2]
    assert offsets(made, 2, 1) == [2, 2]
    assert broker.position == 3
    assert offsets(made, 1, 2) == [3]


def test_a_client_that_has_seen_more_than_is_remembered_does_not_get_it_again() -> None:
    """A link that had to ask twice takes a position that is where it wanted it for its own doing."""
    broker = Broker(5)
    first, second = consuming(broker), consuming(broker)
    assert offsets(first, 1, -1) == [0]
    assert offsets(second, 1, 0) == [1]
    broker.asks_twice = True
    assert offsets(first, 1, 1) == [2]


def test_a_move_whose_outcome_is_unknown_is_not_remembered() -> None:
    broker = Broker(5)
    made = consuming(broker)
    offsets(made, 1)
    broker.lose_reply = True
    with pytest.raises(RequestTimeoutError):
        offsets(made, 1)
    broker.lose_reply = False
    assert offsets(made, 1, 0) == [1], "moved, but not handed out"


def test_the_end_is_the_brokers_word() -> None:
    broker = Broker(2)
    made = consuming(broker)
    offsets(made, 2)
    with pytest.raises(RequestError, match="No new message is published to logs"):
        offsets(made, 1)
    broker.count = 3
    assert offsets(made, 1) == [2]
