"""The asyncio twins: the same promises, shorter, and what only asyncio can get wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from quiver import aio
from quiver.errors import (
    BufferFullError,
    ClosedError,
    DeliveryTimeoutError,
    InvalidRequestError,
    InvalidTopicError,
    MessageTooLargeError,
    OffsetOutOfRangeError,
    RequestTimeoutError,
    TopicExistsError,
    UnknownTopicError,
)
from quiver.testing.history import History
from quiver.types import RecordMetadata
from quiver.wire.messages import Produce
from quiver.wire.rows import TABLE_SCHEMA
from tests.client.kit import LocalBroker, fill, numbers, read_all, stored
from tests.system.proxy import Proxy, Step

MakeTopic = Callable[[int], str]


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await main()

    asyncio.run(bounded())


# Producing


def test_send_and_send_many_are_acknowledged(servers: str, topic: str) -> None:
    async def main() -> None:
        async with aio.Producer(servers) as producer:
            where = await (await producer.send(topic, b"0", key=b"k", timestamp=3, headers={"h": b"x"}))
            assert where == RecordMetadata(topic, 0, 0)
            runs = await (await producer.send_many(topic, [b"1", b"2"]))
            assert [(found.offset, found.count) for found in runs] == [(1, 2)]
            await producer.send(topic, b"3")
            await producer.flush()

    run(main)
    records = read_all(servers, topic)
    assert numbers(records) == [0, 1, 2, 3]
    assert (records[0].key, records[0].timestamp, records[0].headers) == (b"k", 3, (("h", b"x"),))


def test_many_tasks_share_a_producer(servers: str, make_topic: MakeTopic) -> None:
    topic = make_topic(2)
    history = History()

    async def main() -> None:
        async with aio.Producer(servers, batch_bytes=1000, compression="lz4") as producer:

            async def send(number: int) -> None:
                log = history.producer(f"task {number}")
                for count in range(50):
                    value = b"%d/%d" % (number, count)
                    log.sent(value)
                    log.acknowledged(value, await (await producer.send(topic, value, partition=count % 2)))

            await asyncio.gather(*(send(number) for number in range(10)))

    run(main)
    reader = history.reader("c")
    for record in read_all(servers, topic):
        reader.saw(record)
    assert history.judge() == []
    assert history.acknowledged_count == 500


def test_full_buffer_waits_without_blocking_the_loop_and_then_raises(broker: LocalBroker, topic: str) -> None:
    async def main() -> None:
        settings = {"batch_bytes": 1000, "buffer_bytes": 5000, "block_timeout": 0.3}
        with Proxy(broker.address) as proxy:
            async with aio.Producer(proxy.address, **settings) as producer:
                await (await producer.send(topic, b"first"))
                proxy.delay_s = 0.1
                for _ in range(40):
                    await producer.send(topic, b"x" * 400)  # waits for room several times
                proxy.delay_s = 1.0
                ticks = 0

                async def tick() -> None:
                    nonlocal ticks
                    while True:
                        ticks += 1
                        await asyncio.sleep(0.01)

                ticker = asyncio.create_task(tick())
                with pytest.raises(BufferFullError):
                    for _ in range(100):
                        await producer.send(topic, b"y" * 400)
                assert ticks > 10
                ticker.cancel()
                proxy.delay_s = 0.0
                await producer.flush()
                await (await producer.send(topic, b"after"))

    run(main)


def test_delivery_timeout_fails_the_record_and_the_next_goes(broker: LocalBroker, topic: str) -> None:
    async def main() -> None:
        with Proxy(broker.address) as proxy:
            async with aio.Producer(proxy.address, delivery_timeout=5.0) as producer:
                await (await producer.send(topic, b"before"))
                proxy.delay_s = 10.0
                with pytest.raises(DeliveryTimeoutError):
                    await (await producer.send(topic, b"perhaps"))
                proxy.delay_s = 0.0
                await (await producer.send(topic, b"after"))

    run(main)
    assert stored(broker.address, topic) == [b"before", b"perhaps", b"after"]


@pytest.mark.parametrize("step", Step)
def test_cut_connections_store_once(broker: LocalBroker, topic: str, step: Step) -> None:
    async def main() -> None:
        with Proxy(broker.address) as proxy:
            for skip in (1, 4):
                proxy.cut(step, Produce, skip)
            async with aio.Producer(proxy.address) as producer:
                futures = [await producer.send_many(topic, [b"%d" % number]) for number in range(20)]
                await asyncio.gather(*(asyncio.wait_for(_wait(future), 20) for future in futures))
            assert proxy.cuts_left == 0

    async def _wait(future: Any) -> None:
        await future

    run(main)
    assert stored(broker.address, topic) == [b"%d" % number for number in range(20)]


def test_close_fails_what_is_not_acknowledged(broker: LocalBroker, topic: str) -> None:
    async def main() -> None:
        with Proxy(broker.address) as proxy:
            producer = aio.Producer(proxy.address)
            await (await producer.send(topic, b"first"))
            proxy.silence()
            future = await producer.send(topic, b"v")
            with pytest.raises(RequestTimeoutError):
                await producer.close(timeout=0.2)
            with pytest.raises(ClosedError):
                await future
            with pytest.raises(ClosedError):
                await producer.send(topic, b"w")
            await producer.close()

    run(main)


def test_wrong_input_is_refused_and_the_client_goes_on(servers: str, topic: str) -> None:
    async def main() -> None:
        async with aio.Producer(servers) as producer, aio.Admin(servers) as admin:
            uses: list[tuple[type[Exception], Any]] = [
                (InvalidTopicError, lambda: producer.send("../x", b"v")),
                (UnknownTopicError, lambda: producer.send("nowhere", b"v")),
                (InvalidRequestError, lambda: producer.send(topic, "text")),  # type: ignore[arg-type]
                (InvalidRequestError, lambda: producer.send_many(topic, ["text"])),
                (MessageTooLargeError, lambda: producer.send(topic, b"x" * 2_000_000)),
                (InvalidTopicError, lambda: admin.create_topic("")),
                (TopicExistsError, lambda: admin.create_topic(topic)),
            ]
            for error, use in uses:
                with pytest.raises(error):
                    await use()
            await (await producer.send(topic, b"good"))

    run(main)
    assert stored(servers, topic) == [b"good"]


# Consuming


def test_poll_poll_arrow_and_iteration_can_be_mixed(servers: str, topic: str) -> None:
    fill(servers, topic, 500, batch=30)

    async def main() -> None:
        found: list[int] = []
        async with aio.Consumer(servers, [topic], idle_timeout=5) as consumer:
            turn = 0
            while len(found) < 500:
                turn += 1
                if turn % 3 == 0:
                    table = await consumer.poll_arrow(timeout=5)
                    assert table.schema == TABLE_SCHEMA
                    found += [int(value) for value in table["value"].to_pylist()]
                elif turn % 3 == 1:
                    found += numbers(await consumer.poll(7, timeout=5))
                else:
                    async for record in consumer:
                        found.append(int(record.value or b""))
                        if len(found) % 11 == 0 or len(found) == 500:
                            break
                assert await consumer.position(topic, 0) == len(found)
        assert found == list(range(500))

    run(main)


def test_break_in_the_middle_loses_nothing_and_keeps_the_order(servers: str, topic: str) -> None:
    """An async generator is not closed by the `break` but some time later."""
    fill(servers, topic, 40, batch=40)

    async def main() -> None:
        async with aio.Consumer(servers, [topic]) as consumer:
            async for record in consumer:
                if record.offset == 4:
                    break
            assert numbers(await consumer.poll(5)) == [5, 6, 7, 8, 9]
            await asyncio.sleep(0.05)
            assert numbers(await consumer.poll(5)) == [10, 11, 12, 13, 14]

    run(main)


def test_seek_commit_and_resume(servers: str, topic: str) -> None:
    fill(servers, topic, 30, batch=30)

    async def main() -> None:
        async with aio.Consumer(servers, [topic], group="g") as consumer:
            async for record in consumer:
                if record.offset == 3:
                    await consumer.seek(topic, 0, 20)
                if record.offset == 22:
                    break
            await consumer.commit()
            assert await consumer.committed(topic, 0) == 23
            with pytest.raises(OffsetOutOfRangeError):
                await consumer.seek(topic, 0, 31)
            await consumer.seek_to_time(topic, 0, 0)
            assert numbers(await consumer.poll(1)) == [0]
        async with aio.Consumer(servers, [topic], group="g", start="committed") as consumer:
            assert numbers(await consumer.poll(2)) == [23, 24]

    run(main)


def test_iteration_ends_by_idle_time_and_by_close(servers: str, topic: str) -> None:
    fill(servers, topic, 5)

    async def main() -> None:
        async with aio.Consumer(servers, [topic], idle_timeout=1.0) as consumer:
            assert [record.offset async for record in consumer] == [0, 1, 2, 3, 4]
        endless = aio.Consumer(servers, [topic])
        found = []
        closing: list[asyncio.Future[None]] = []
        async for record in endless:
            found.append(record.offset)
            if len(found) == 5:
                asyncio.get_running_loop().call_later(
                    0.2, lambda: closing.append(asyncio.ensure_future(endless.close()))
                )
        assert found == [0, 1, 2, 3, 4]
        await closing[0]
        for use in (endless.poll, endless.poll_arrow, endless.commit):
            with pytest.raises(ClosedError):
                await use()

    run(main)


def test_close_ends_a_waiting_poll(servers: str, topic: str) -> None:
    async def main() -> None:
        consumer = aio.Consumer(servers, [topic])
        await consumer.poll(timeout=0)
        asyncio.get_running_loop().call_later(0.1, lambda: asyncio.ensure_future(consumer.close()))
        with pytest.raises(ClosedError):
            await consumer.poll(timeout=1_000_000)

    run(main)


def test_cancelled_poll_loses_nothing(servers: str, topic: str) -> None:
    async def main() -> None:
        async with aio.Consumer(servers, [topic]) as consumer:
            for _ in range(5):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await consumer.poll(timeout=10)
            await asyncio.to_thread(fill, servers, topic, 5)
            found: list[int] = []
            while len(found) < 5:
                found += numbers(await consumer.poll(2, timeout=5))
            assert found == [0, 1, 2, 3, 4]

    run(main)


# Administration


def test_admin_does_all_that_the_synchronous_one_does(servers: str) -> None:
    async def main() -> None:
        async with aio.Admin(servers) as admin:
            info = await admin.create_topic("aio-admin", 3)
            assert len(info.partitions) == 3
            assert "aio-admin" in await admin.list_topics()
            assert await admin.describe_topic("aio-admin") == info
            assert await admin.offsets("aio-admin") == {0: (0, 0), 1: (0, 0), 2: (0, 0)}
            assert await admin.offset_at("aio-admin", 0, 0) == 0
            assert [status.state for status in await admin.partition_status("aio-admin")] == ["online"] * 3
            assert len(await admin.nodes()) == 1
            await admin.delete_topic("aio-admin")
            with pytest.raises(UnknownTopicError):
                await admin.describe_topic("aio-admin")

    run(main)
