"""Single messages become batches, and everyone who waits is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import Struct

from quiver.errors import (
    ConnectionLostError,
    DiskFullError,
    InvalidBatchError,
    OutOfOrderSequenceError,
    RequestTimeoutError,
)
from quiver.manager.joiner import Joiner
from quiver.wire.frame import FLAG_CLIENT, FLAG_UNSEQUENCED
from quiver.wire.messages import Produce, ProduceReply
from quiver.wire.records import batch_from_lists, decode_batch
from tests.broker.kit import SimulatedClock, settle


class Broker:
    """Takes batches one by one when the test lets it."""

    def __init__(self, *, held: bool = True) -> None:
        self.batches: list[tuple[Produce, list[Any]]] = []
        self.errors: list[Exception | None] = []  # what the next calls raise
        self._gate = asyncio.Semaphore(0 if held else 10**6)
        self._next_offset = 0

    async def call(self, request: Struct, payload: Any = b"") -> tuple[Struct, Sequence[Any]]:
        assert isinstance(request, Produce)
        await self._gate.acquire()
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        self.batches.append((request, decode_batch(memoryview(payload)).to_pylist()))
        self._next_offset += request.record_count
        return ProduceReply(self._next_offset - request.record_count), ()

    def release(self, count: int = 1) -> None:
        for _ in range(count):
            self._gate.release()

    def values(self) -> list[list[bytes]]:
        return [[record["value"] for record in records] for _, records in self.batches]


GATEWAY = 99


def joiner_on(broker: Broker) -> Joiner:
    return Joiner(lambda topic, partition: broker, SimulatedClock(), GATEWAY)


def numbers(broker: Broker) -> list[tuple[int, int, int]]:
    """Epoch, sequence and size of each batch that the broker took."""
    return [(request.producer_epoch, request.sequence, request.record_count) for request, _ in broker.batches]


async def add(joiner: Joiner, value: bytes, client: int = 0, key: bytes | None = None) -> int:
    return await joiner.add("logs", 0, client, value, key)


def test_messages_that_come_meanwhile_form_the_next_batch() -> None:
    async def main() -> None:
        broker = Broker()
        joiner = joiner_on(broker)
        sends = [asyncio.create_task(add(joiner, b"%d" % number)) for number in range(100)]
        await settle()
        assert not any(send.done() for send in sends), "answered after its batch is committed, not before"
        broker.release(10)
        assert await asyncio.gather(*sends) == list(range(100))
        assert broker.values() == [[b"%d" % number for number in range(100)]]
        late = asyncio.create_task(add(joiner, b"late"))
        await settle()
        assert await late == 100

    asyncio.run(main())


def test_one_batch_of_a_partition_is_under_way_at_a_time() -> None:
    async def main() -> None:
        broker = Broker()
        joiner = joiner_on(broker)
        first = asyncio.create_task(add(joiner, b"first"))
        await settle()
        rest = [asyncio.create_task(add(joiner, b"%d" % number)) for number in range(5)]
        await settle()
        broker.release()
        await first
        await settle()
        assert broker.values() == [[b"first"]]
        assert not any(send.done() for send in rest)
        broker.release()
        assert await asyncio.gather(*rest) == [1, 2, 3, 4, 5]
        assert len(broker.batches) == 2

    asyncio.run(main())


def test_a_failed_batch_is_told_to_all_of_it_and_the_next_goes_on() -> None:
    async def main() -> None:
        broker = Broker()
        broker.errors = [DiskFullError("full")]
        joiner = joiner_on(broker)
        first = asyncio.create_task(add(joiner, b"first"))
        await settle()
        rest = [asyncio.create_task(add(joiner, b"%d" % number)) for number in range(3)]
        await settle()
        broker.release(2)
        with pytest.raises(DiskFullError):
            await first
        assert await asyncio.gather(*rest) == [0, 1, 2]

    asyncio.run(main())


def test_an_error_that_nobody_foresaw_leaves_nobody_waiting() -> None:
    async def main() -> None:
        broker = Broker(held=False)
        broker.errors = [ZeroDivisionError(), None]
        joiner = joiner_on(broker)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(add(joiner, b"a"), 30)
        assert await asyncio.wait_for(add(joiner, b"b"), 30) == 0

    asyncio.run(main())


def test_a_client_that_went_away_takes_no_other_message_along() -> None:
    async def main() -> None:
        broker = Broker()
        joiner = joiner_on(broker)
        sends = [asyncio.create_task(add(joiner, b"%d" % number)) for number in range(3)]
        await settle()
        sends[1].cancel()
        broker.release(2)
        assert [await sends[0], await sends[2]] == [0, 2], "its message was on the way and is stored"

    asyncio.run(main())


def test_client_names_travel_apart_and_are_marked() -> None:
    async def main() -> None:
        broker = Broker(held=False)
        joiner = joiner_on(broker)
        await asyncio.gather(add(joiner, b"a", 7), add(joiner, b"b"), add(joiner, b"c", 7), add(joiner, b"d", 8))
        found = {
            (request.producer_id, request.flags): [record["value"] for record in records]
            for request, records in broker.batches
        }
        assert found == {
            (7, FLAG_CLIENT | FLAG_UNSEQUENCED): [b"a", b"c"],
            (GATEWAY, 0): [b"b"],
            (8, FLAG_CLIENT | FLAG_UNSEQUENCED): [b"d"],
        }

    asyncio.run(main())


def test_a_numbered_message_travels_alone() -> None:
    async def main() -> None:
        broker = Broker(held=False)
        joiner = joiner_on(broker)
        sends = [joiner.send_one("logs", 0, 7, number, b"%d" % number, b"k") for number in range(3)]
        assert await asyncio.gather(*sends) == [0, 1, 2]
        assert [(request.sequence, request.record_count, request.flags) for request, _ in broker.batches] == [
            (0, 1, FLAG_CLIENT),
            (1, 1, FLAG_CLIENT),
            (2, 1, FLAG_CLIENT),
        ]
        assert [records[0]["key"] for _, records in broker.batches] == [b"k", b"k", b"k"]

    asyncio.run(main())


def test_a_batch_is_cut_where_it_would_grow_too_large() -> None:
    async def main() -> None:
        broker = Broker()
        joiner = joiner_on(broker)
        first = asyncio.create_task(add(joiner, b"x"))
        await settle()
        sizes = [500_000, 500_000, 500_000, 1024 * 1024, 1, 1]
        rest = [asyncio.create_task(add(joiner, bytes(size))) for size in sizes]
        await settle()
        broker.release(20)
        assert await first == 0
        assert await asyncio.gather(*rest) == [1, 2, 3, 4, 5, 6]
        assert [[len(value) for value in batch] for batch in broker.values()] == [
            [1],
            [500_000, 500_000],
            [500_000],
            [1024 * 1024],
            [1, 1],
        ]

    asyncio.run(main())


def test_batches_without_a_name_are_numbered_by_the_gateway() -> None:
    async def main() -> None:
        broker = Broker(held=False)
        joiner = joiner_on(broker)
        await asyncio.gather(*(add(joiner, b"%d" % number) for number in range(3)))
        await add(joiner, b"3")
        await joiner.add("logs", 1, 0, b"other", None)
        assert numbers(broker) == [(0, 0, 3), (0, 3, 1), (1, 0, 1)]
        assert all(request.producer_id == GATEWAY for request, _ in broker.batches)

    asyncio.run(main())


@pytest.mark.parametrize("error", [ConnectionLostError("lost"), RequestTimeoutError("late"), DiskFullError("full")])
def test_after_an_outcome_that_stays_unknown_a_new_epoch_begins(error: Exception) -> None:
    """Under the old numbers the next batch would be taken for the lost one, or the lost one could slip in behind it."""

    async def main() -> None:
        broker = Broker(held=False)
        broker.errors = [None, error]
        joiner = joiner_on(broker)
        await add(joiner, b"a")
        with pytest.raises(type(error)):
            await add(joiner, b"b")
        await add(joiner, b"c")
        assert numbers(broker) == [(0, 0, 1), (1, 0, 1)]

    asyncio.run(main())


def test_a_batch_that_was_refused_leaves_its_numbers_to_the_next() -> None:
    async def main() -> None:
        broker = Broker(held=False)
        broker.errors = [None, InvalidBatchError("no")]
        joiner = joiner_on(broker)
        await add(joiner, b"a")
        with pytest.raises(InvalidBatchError):
            await add(joiner, b"b")
        await add(joiner, b"c")
        assert numbers(broker) == [(0, 0, 1), (0, 1, 1)]

    asyncio.run(main())


def test_a_partition_that_does_not_know_the_gateway_gets_a_new_epoch_and_the_batch() -> None:
    """As after a topic was deleted and made again under the same name."""

    async def main() -> None:
        broker = Broker(held=False)
        broker.errors = [None, OutOfOrderSequenceError("gap", expected=0, got=1), None]
        joiner = joiner_on(broker)
        await add(joiner, b"a")
        await add(joiner, b"b")
        await add(joiner, b"c")
        assert numbers(broker) == [(0, 0, 1), (1, 0, 1), (1, 1, 1)]
        assert broker.values() == [[b"a"], [b"b"], [b"c"]]

    asyncio.run(main())


def batch(*values: bytes, timestamp: int = 5) -> Any:
    return batch_from_lists([timestamp] * len(values), None, list(values), None)


async def add_records(joiner: Joiner, *values: bytes, size_bytes: int = 100, client: int = 0) -> int:
    return await joiner.add_records("logs", 0, client, batch(*values), size_bytes)


def test_records_that_came_together_share_a_batch_with_others_and_stay_together() -> None:
    async def main() -> None:
        broker = Broker()
        joiner = joiner_on(broker)
        first = asyncio.create_task(add(joiner, b"first"))
        await settle()
        rest = [
            asyncio.create_task(add(joiner, b"one")),
            asyncio.create_task(add_records(joiner, b"a", b"b", b"c")),
            asyncio.create_task(add(joiner, b"two", key=b"k")),
            asyncio.create_task(add_records(joiner, b"d")),
        ]
        await settle()
        broker.release(2)
        assert await asyncio.gather(first, *rest) == [0, 1, 2, 5, 6]
        assert broker.values() == [[b"first"], [b"one", b"a", b"b", b"c", b"two", b"d"]]
        request, records = broker.batches[1]
        assert (request.record_count, request.timestamp_min) == (6, 5)
        assert [record["key"] for record in records] == [None, None, None, None, b"k", None]

    asyncio.run(main())


def test_records_are_never_split_over_two_batches() -> None:
    async def main() -> None:
        broker = Broker(held=False)
        joiner = joiner_on(broker)
        sends = [add_records(joiner, b"%d" % number, b"x", size_bytes=600_000) for number in range(4)]
        assert await asyncio.gather(*sends) == [0, 2, 4, 6]
        assert [len(values) for values in broker.values()] == [2, 2, 2, 2]

    asyncio.run(main())


def test_numbered_records_travel_alone_with_their_clients_numbers() -> None:
    async def main() -> None:
        broker = Broker(held=False)
        joiner = joiner_on(broker)
        reply = await joiner.send_records("logs", 0, 7, 3, 40, batch(b"a", b"b"))
        assert reply == ProduceReply(0)
        (request, _) = broker.batches[0]
        assert (request.producer_id, request.producer_epoch, request.sequence, request.flags) == (7, 3, 40, FLAG_CLIENT)

    asyncio.run(main())
