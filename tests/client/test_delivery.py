"""Futures of records: settled once, waited for by threads and tasks, and safe from what callbacks do."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from quiver.client.delivery import BatchesFuture, Delivery, DeliveryFuture, RecordFuture
from quiver.errors import DeliveryTimeoutError, RequestTimeoutError
from quiver.types import BatchMetadata, RecordMetadata


def settle_soon(delivery: Delivery, base_offset: int, error: DeliveryTimeoutError | None = None) -> threading.Timer:
    timer = threading.Timer(0.02, delivery.settle, (base_offset, error))
    timer.start()
    return timer


def test_result_names_the_record_by_batch_and_row() -> None:
    delivery = Delivery("t", 2)
    future = RecordFuture(delivery, 5)
    assert not future.done()
    delivery.settle(100)
    assert future.done()
    assert future.result() == RecordMetadata("t", 2, 105)
    assert future.exception() is None


def test_offset_that_the_broker_does_not_know_is_minus_one_for_every_record() -> None:
    delivery = Delivery("t", 0)
    delivery.settle(-1)
    assert [RecordFuture(delivery, row).result().offset for row in range(3)] == [-1, -1, -1]


def test_thread_waits_until_another_settles() -> None:
    delivery = Delivery("t", 0)
    timer = settle_soon(delivery, 7)
    assert RecordFuture(delivery, 0).result(10).offset == 7
    timer.join()


def test_many_threads_wait_for_one_batch() -> None:
    delivery = Delivery("t", 0)
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda row=row: found.append(RecordFuture(delivery, row).result(10).offset))
        for row in range(8)
    ]
    for thread in threads:
        thread.start()
    delivery.settle(10)
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(10, 18))


def test_error_is_raised_to_every_record_of_the_batch() -> None:
    delivery = Delivery("t", 0)
    error = DeliveryTimeoutError("too late")
    delivery.settle(-1, error)
    for row in range(3):
        future = RecordFuture(delivery, row)
        assert future.exception() is error
        with pytest.raises(DeliveryTimeoutError, match="too late"):
            future.result()


def test_result_that_does_not_come_in_time_raises_and_can_be_asked_again() -> None:
    delivery = Delivery("t", 0)
    future = RecordFuture(delivery, 0)
    with pytest.raises(RequestTimeoutError, match=r"within 0\.01 s"):
        future.result(0.01)
    with pytest.raises(RequestTimeoutError):
        future.exception(0)
    delivery.settle(3)
    assert future.result(0).offset == 3


def test_timeout_is_for_all_batches_together() -> None:
    # Each is settled within the time-out after the one before it, but the last comes long after it is over.
    deliveries = [Delivery("t", number) for number in range(20)]
    timers = [threading.Timer(0.2 * (number + 1), deliveries[number].settle, (0,)) for number in range(20)]
    for timer in timers:
        timer.start()
    try:
        with pytest.raises(RequestTimeoutError):
            BatchesFuture(deliveries, [1] * 20).result(0.5)
    finally:
        for timer in timers:
            timer.cancel()
            timer.join()


def test_future_of_many_batches_tells_where_each_run_went() -> None:
    deliveries = [Delivery("t", 0), Delivery("t", 1)]
    future = BatchesFuture(deliveries, [3, 4])
    deliveries[1].settle(20)
    assert not future.done()
    deliveries[0].settle(10)
    assert future.result(0) == [BatchMetadata("t", 0, 10, 3), BatchMetadata("t", 1, 20, 4)]


def test_one_failed_batch_fails_the_whole_call() -> None:
    deliveries = [Delivery("t", 0), Delivery("t", 1)]
    deliveries[0].settle(10)
    deliveries[1].settle(-1, DeliveryTimeoutError("too late"))
    with pytest.raises(DeliveryTimeoutError):
        BatchesFuture(deliveries, [1, 1]).result(0)


def test_future_of_nothing_is_done() -> None:
    future = BatchesFuture([], [])
    called: list[object] = []
    future.add_done_callback(called.append)
    assert future.done()
    assert future.result(0) == []
    assert called == [future]


def test_callback_is_called_once_with_the_future_when_all_is_settled() -> None:
    deliveries = [Delivery("t", 0), Delivery("t", 1)]
    future = BatchesFuture(deliveries, [1, 1])
    called: list[object] = []
    future.add_done_callback(called.append)
    deliveries[0].settle(0)
    assert called == []
    deliveries[1].settle(0)
    assert called == [future]
    future.add_done_callback(called.append)
    assert called == [future, future]


def test_callbacks_are_called_in_the_order_they_were_added() -> None:
    delivery = Delivery("t", 0)
    called: list[int] = []
    for number in range(3):
        RecordFuture(delivery, number).add_done_callback(lambda _, number=number: called.append(number))
    delivery.settle(0)
    assert called == [0, 1, 2]


def test_callback_that_raises_is_logged_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    delivery = Delivery("t", 0)
    called: list[object] = []

    def bad(_: DeliveryFuture[RecordMetadata]) -> None:
        raise ValueError("broken callback")

    RecordFuture(delivery, 0).add_done_callback(bad)
    RecordFuture(delivery, 1).add_done_callback(called.append)
    with caplog.at_level(logging.ERROR, "quiver.client"):
        delivery.settle(0)
    assert len(called) == 1
    assert "broken callback" in caplog.text


def test_task_awaits_what_another_thread_settles() -> None:
    delivery = Delivery("t", 0)

    async def main() -> int:
        timer = settle_soon(delivery, 9)
        try:
            async with asyncio.timeout(10):
                return (await RecordFuture(delivery, 1)).offset
        finally:
            timer.join()

    assert asyncio.run(main()) == 10


def test_task_awaits_what_is_settled_already() -> None:
    delivery = Delivery("t", 0)
    delivery.settle(4)

    async def main() -> int:
        return (await RecordFuture(delivery, 0)).offset

    assert asyncio.run(main()) == 4


def test_awaiting_raises_the_error() -> None:
    delivery = Delivery("t", 0)

    async def main() -> None:
        timer = settle_soon(delivery, -1, DeliveryTimeoutError("too late"))
        try:
            await RecordFuture(delivery, 0)
        finally:
            timer.join()

    with pytest.raises(DeliveryTimeoutError):
        asyncio.run(main())


def test_many_tasks_await_one_batch() -> None:
    delivery = Delivery("t", 0)

    async def wait(row: int) -> int:
        return (await RecordFuture(delivery, row)).offset

    async def main() -> list[int]:
        timer = settle_soon(delivery, 0)
        try:
            return await asyncio.gather(*(wait(row) for row in range(5)))
        finally:
            timer.join()

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]


def test_task_that_gives_up_does_not_disturb_the_delivery() -> None:
    delivery = Delivery("t", 0)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await RecordFuture(delivery, 0)

    asyncio.run(main())
    delivery.settle(1)  # the loop that waited is closed by now
    assert RecordFuture(delivery, 0).result(0).offset == 1
