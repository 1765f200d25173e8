"""Requests to a whole broker: what is stored, what is refused, and what waits."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
from typing import Any

import pytest
from crc32c import crc32c

from quiver.errors import (
    ConflictError,
    InvalidBatchError,
    InvalidRequestError,
    InvalidTopicError,
    LogFailedError,
    MessageTooLargeError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    ProducerFencedError,
    RequestError,
    ShuttingDownError,
    UnknownPartitionError,
    UnknownTopicError,
)
from quiver.testing.faulty_disk import FaultyDisk
from quiver.wire.frame import FLAG_CLIENT, FLAG_UNSEQUENCED, walk_frames
from quiver.wire.messages import (
    CommitPositions,
    CommitPositionsReply,
    CountClient,
    CountReply,
    Fetch,
    GetMetadata,
    ListOffset,
    ListOffsetReply,
    MetadataReply,
    Position,
    PositionReply,
    ProduceReply,
)
from quiver.wire.records import COMPRESSIONS, decode_batch
from tests.broker.server_kit import SETTINGS, Client, GatedDisk, broker, connected, run, running, until, with_log
from tests.net.kit import HELLO
from tests.wire.kit import make_batch, make_payload

SMALL = dataclasses.replace(SETTINGS, message_bytes_max=10_000, batch_bytes_max=50_000, fetch_bytes_max=4000)


# -- produce ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_consumers_get_the_bytes_that_producers_sent(compression: str | None) -> None:
    async def main() -> None:
        async with broker(FaultyDisk(0)) as client:
            await client.create()
            sent = [make_payload(count, compression, first=count) for count in (1, 7, 1000)]
            offsets = [
                (await client.produce(payload, n)).base_offset for payload, n in zip(sent, (1, 7, 1000), strict=True)
            ]
            assert offsets == [0, 1, 8]
            assert await client.fetch() == sent
            reply, raw = await client.fetch_raw(Fetch("logs", 0, 3, 10**6))
            assert (reply.start_offset, reply.high_watermark) == (0, 1008)
            (_, first, payload), *_ = walk_frames(raw)
            assert (first.base_offset, first.record_count, first.timestamp_min, first.timestamp_max) == (1, 7, 10, 20)
            assert decode_batch(payload).equals(make_batch(7, first=7))

    run(main())


PAYLOAD = make_payload(3)
BAD_BATCHES: dict[str, tuple[dict[str, Any], type[RequestError]]] = {
    "wrong checksum": ({"payload_crc": crc32c(PAYLOAD) ^ 1}, InvalidBatchError),
    "checksum of nothing": ({"payload_crc": 0}, InvalidBatchError),
    "wrong count": ({"record_count": 4}, InvalidBatchError),
    "huge count": ({"record_count": 2**31 - 1}, InvalidBatchError),
    "unknown schema": ({"schema_id": 2}, InvalidBatchError),
    "no records": ({"record_count": 0}, InvalidRequestError),
    "no batch": ({"payload": b""}, InvalidBatchError),
    "garbage": ({"payload": b"garbage" * 30}, InvalidBatchError),
    "cut short": ({"payload": PAYLOAD[:-8]}, InvalidBatchError),
    "unknown partition": ({"partition": 1}, UnknownPartitionError),
    "unknown topic": ({"topic": "nowhere"}, UnknownTopicError),
    "path as topic": ({"topic": "../x"}, InvalidTopicError),
    "gap": ({"producer_id": 5, "sequence": 9}, OutOfOrderSequenceError),
    "too large": ({"payload": make_payload(5000), "count": 5000}, MessageTooLargeError),
    "too large message": ({"payload": make_payload(500), "count": 1}, MessageTooLargeError),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_bad_batch_gets_a_typed_error_and_nothing_is_stored(name: str) -> None:
    changes, expected = BAD_BATCHES[name]

    async def main() -> None:
        disk = FaultyDisk(0)
        async with broker(disk, SMALL) as client:
            await client.create()
            before = disk.operations
            with pytest.raises(expected) as caught:
                await client.produce(**{"payload": PAYLOAD, **changes})
            assert type(caught.value) is expected
            assert disk.operations == before
            (status,) = await client.status()
            assert (status.next_offset, status.size_bytes, status.state) == (0, 0, "online")
            await client.produce()

    run(main())


def test_limits_are_told_with_the_refusal() -> None:
    async def main() -> None:
        async with broker(FaultyDisk(0), SMALL) as client:
            await client.create()
            payload = make_payload(5000)
            with pytest.raises(MessageTooLargeError) as caught:
                await client.produce(payload, 5000)
            assert caught.value.facts == {"size": len(payload), "limit": 50_000}
            assert client.connection.limits.batch_bytes_max == 50_000
            assert client.connection.limits.message_bytes_max == 10_000

    run(main())


def test_retry_is_stored_once_and_old_epochs_are_fenced() -> None:
    async def main() -> None:
        async with broker(FaultyDisk(0)) as client:
            await client.create()
            assert await client.produce(producer_id=5) == ProduceReply(0)
            assert await client.produce(producer_id=5) == ProduceReply(0, duplicate=True)
            assert await client.produce(producer_id=5, sequence=3) == ProduceReply(3)
            assert await client.produce(producer_id=5, producer_epoch=1) == ProduceReply(6)
            with pytest.raises(ProducerFencedError):
                await client.produce(producer_id=5, sequence=6)
            assert len(await client.fetch()) == 3

    run(main())


def test_client_that_numbers_its_messages_gets_the_first_offset_however_old() -> None:
    async def main() -> None:
        async with broker(FaultyDisk(0)) as client:
            await client.create()
            for sequence in range(20):
                await client.produce(count=1, producer_id=5, sequence=sequence, flags=FLAG_CLIENT)
            for sequence in range(20):
                reply = await client.produce(count=1, producer_id=5, sequence=sequence, flags=FLAG_CLIENT)
                assert reply == ProduceReply(sequence, duplicate=True)
            await client.produce(producer_id=6, flags=FLAG_CLIENT | FLAG_UNSEQUENCED)
            counts = [(await client.ask(CountClient(number), CountReply)).count for number in (5, 6, 7)]
            assert counts == [20, 3, 0]

    run(main())


# -- offsets, positions, descriptions --------------------------------------------------------------------------------


def test_offsets_are_found_by_name_and_by_time() -> None:
    async def main() -> None:
        async with broker(FaultyDisk(0)) as client:
            await client.create()
            for moment in (100, 200, 300):
                await client.produce(timestamp_min=moment - 10, timestamp_max=moment)
            for timestamp, offset in (
                (-2, 0),
                (-1, 9),
                (0, 0),
                (101, 3),
                (250, 6),
                (301, 9),
                (2**63 - 1, 9),
                (-(2**63), 0),
            ):
                assert (await client.ask(ListOffset("logs", 0, timestamp), ListOffsetReply)).offset == offset

    run(main())


def test_of_positions_that_come_together_each_is_moved_or_refused_for_itself() -> None:
    async def main() -> None:
        disk = FaultyDisk(0)
        async with broker(disk) as client:
            await client.create()
            await client.produce(count=9)
            await client.commit("b", 2)
            moves = [Position("a", 5), Position("b", 3, expected=1), Position("c", 10), Position("d", 9, expected=-1)]
            refused = (await client.ask(CommitPositions("logs", 0, moves), CommitPositionsReply)).refused
            assert {place: (error.code, error.facts.get("current")) for place, error in refused.items()} == {
                1: ("ConflictError", 2),
                2: ("OffsetOutOfRangeError", None),
            }
            with pytest.raises(UnknownPartitionError):
                await client.ask(CommitPositions("logs", 7, moves), CommitPositionsReply)
        disk.crash()
        async with broker(disk) as client:
            assert [await client.position(name) for name in "abcd"] == [5, 2, None, 9]

    run(main())


def test_positions_are_kept_by_consumer_and_do_not_move_back() -> None:
    async def main() -> None:
        disk = FaultyDisk(0)
        async with broker(disk) as client:
            await client.create()
            await client.produce(count=9)
            assert await client.position("a") is None
            assert [await client.commit("a", offset) for offset in (5, 3)] == [5, 5]
            assert await client.commit("a", 2, rewind=True) == 2
            with pytest.raises(OffsetOutOfRangeError):
                await client.commit("a", 10)
            with pytest.raises(ConflictError) as caught:
                await client.commit("a", 4, expected=3)
            assert caught.value.facts == {"current": 2}
            assert await client.commit("b", 9, expected=-1) == 9
        disk.crash()
        async with broker(disk) as client:
            assert [await client.position(name) for name in ("a", "b", "c")] == [2, 9, None]

    run(main())


def test_metadata_names_each_asked_topic_once() -> None:
    async def main() -> None:
        async with broker(FaultyDisk(0)) as client:
            await client.create("a", 3)
            await client.create("b")
            reply = await client.ask(GetMetadata(["a"] * 10_000 + ["nowhere", "../x"]), MetadataReply)
            assert [(topic.name, len(topic.partitions)) for topic in reply.topics] == [("a", 3)]
            assert reply.nodes[0].address == client.connection.address
            assert await client.topics() == {"a": 3, "b": 1}
            assert (await client.ask(GetMetadata([]), MetadataReply)).topics == []

    run(main())


async def every_request(client: Client, topic: str, partition: int) -> list[Any]:
    requests = [
        client.produce(topic=topic, partition=partition),
        client.fetch(topic=topic, partition=partition),
        client.end(topic, partition),
    ]
    return await asyncio.gather(*requests, return_exceptions=True)


@pytest.mark.parametrize(
    ("topic", "partition", "expected"),
    [
        ("nowhere", 0, UnknownTopicError),
        ("../x", 0, InvalidTopicError),
        ("logs", 2, UnknownPartitionError),
        ("logs", 2**32 - 1, UnknownPartitionError),
    ],
)
def test_unknown_places_are_told_by_every_request(topic: str, partition: int, expected: type[Exception]) -> None:
    async def main() -> None:
        async with broker(FaultyDisk(0)) as client:
            await client.create("logs", 2)
            assert {type(error) for error in await every_request(client, topic, partition)} == {expected}
            if topic != "logs":
                for request in (client.status(topic), client.position("group", topic)):
                    with pytest.raises(expected):
                        await request

    run(main())


# -- retention and the end -------------------------------------------------------------------------------------------


def test_retention_goes_on_beside_a_failed_partition() -> None:
    async def main() -> None:
        disk = FaultyDisk(0)
        settings = dataclasses.replace(
            with_log(segment_bytes_max=2000, retention_bytes=4000), retention_check_s=0.005, data_dir="data"
        )
        async with broker(disk, settings) as client:
            await client.create("logs", 2)
            for _ in range(12):
                await client.produce(partition=0)
            uids = [status.uid for status in await client.status()]
            disk.fail("datasync", errno.EIO, path=f"{uids[0]}/")
            with pytest.raises(LogFailedError):
                while True:  # retention may meet the error before we do
                    await client.produce(partition=0)
            for _ in range(12):
                await client.produce(partition=1)
            deadline_s = asyncio.get_running_loop().time() + 5
            while (await client.status())[1].start_offset == 0:
                assert asyncio.get_running_loop().time() < deadline_s, "retention has stopped for all"
            states = [status.state for status in await client.status()]
            assert states == ["failed", "online"]
            start = (await client.status())[1].start_offset
            with pytest.raises(OffsetOutOfRangeError) as caught:
                await client.fetch(0, partition=1)
            assert caught.value.facts["earliest"] >= start

    run(main())


def test_stop_answers_what_is_under_way() -> None:
    async def main() -> None:
        disk = GatedDisk()
        async with running(disk) as node, connected(node) as client:
            await client.create()
            disk.close_gate("datasync", ".seg")
            producing = [asyncio.ensure_future(client.produce(make_payload(3, first=n))) for n in range(5)]
            waiting = asyncio.ensure_future(client.fetch(0, wait_ms=60_000))
            await until(disk.waiting.is_set)
            stopping = asyncio.ensure_future(node.stop())
            await asyncio.sleep(0)
            with pytest.raises(ShuttingDownError):
                await client.status()
            assert not any(task.done() for task in producing)
            disk.open_gate()
            assert [(await task).base_offset for task in producing] == [0, 3, 6, 9, 12]
            await asyncio.wait([waiting])
            assert waiting.exception() is not None or len(waiting.result()) > 0
            await stopping
            assert not client.connection.is_open
        disk.crash()
        async with broker(disk) as client:
            assert await client.fetch() == [make_payload(3, first=n) for n in range(5)]

    run(main())


def test_request_of_another_part_of_the_node_is_handed_to_it() -> None:
    async def count(request: CountClient, payload: memoryview, flow: object) -> Any:
        return CountReply(request.client * 2), ()

    async def main() -> None:
        async with broker(FaultyDisk(0), others={CountClient: count}) as client:
            assert (await client.ask(CountClient(21), CountReply)).count == 42
            with pytest.raises(InvalidRequestError, match="Hello is not a request a broker serves"):
                await client.ask(HELLO, PositionReply)

    run(main())
