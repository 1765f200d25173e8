"""How a producer behaves under load: batching, back-pressure, flushing, and many threads on one producer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quiver import Producer
from quiver.errors import BufferFullError, ClosedError, RequestTimeoutError
from quiver.testing.history import History
from quiver.types import RecordMetadata
from quiver.wire.messages import Produce
from tests.client.kit import LocalBroker, read_all, stored, until
from tests.system.kit import producer as opened
from tests.system.proxy import Proxy

MakeTopic = Callable[[int], str]


@pytest.fixture
def proxy(broker: LocalBroker) -> Iterator[Proxy]:
    with Proxy(broker.address) as made:
        yield made


class Background:
    """Runs a function in a thread; `join` gives back what it raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._error: BaseException | None = None
        self._function = function
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self._error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> BaseException | None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self._error


# Batching


def test_single_record_is_sent_without_lingering(servers: str, topic: str) -> None:
    with Producer(servers, linger_ms=1_000_000) as producer:
        producer.send(topic, b"v").result(60)


def test_records_that_come_while_one_is_in_flight_travel_together(proxy: Proxy, topic: str) -> None:
    with Producer(proxy.address, linger_ms=10_000) as producer:
        proxy.delay_s = 0.3
        futures = [producer.send(topic, b"first")]
        until(lambda: proxy.count(Produce) == 1)
        futures += [producer.send(topic, b"%d" % number) for number in range(99)]
        for future in futures:
            future.result(10)
    assert proxy.count(Produce) == 2


def test_linger_ends_the_wait_while_a_reply_is_slow(proxy: Proxy, topic: str) -> None:
    with Producer(proxy.address, linger_ms=20) as producer:
        producer.send(topic, b"first").result(10)
        proxy.delay_s = 1.0
        second = producer.send(topic, b"second")
        until(lambda: proxy.count(Produce) == 2)
        third = producer.send(topic, b"third")
        until(lambda: proxy.count(Produce) == 3)
        assert not second.done() and not third.done()


def test_small_batch_size_makes_many_requests_and_large_makes_few(proxy: Proxy, topic: str) -> None:
    counts = []
    for batch_bytes in (500, 100_000):
        before = proxy.count(Produce)
        with Producer(proxy.address, batch_bytes=batch_bytes) as producer:
            for _ in range(1000):
                producer.send(topic, b"x" * 68)
        counts.append(proxy.count(Produce) - before)
    assert counts[0] >= 200
    assert counts[1] <= 20


def test_no_more_than_five_batches_are_in_flight(proxy: Proxy, topic: str) -> None:
    with Producer(proxy.address) as producer:
        producer.send(topic, b"first").result(10)
        proxy.delay_s = 1.0
        futures = [producer.send_many(topic, [b"%d" % number]) for number in range(12)]
        until(lambda: proxy.count(Produce) == 6)
        time.sleep(0.1)
        assert proxy.count(Produce) == 6
        proxy.delay_s = 0.0
        for future in futures:
            future.result(10)


# Back-pressure


def test_full_buffer_blocks_until_there_is_room_and_nothing_is_lost(proxy: Proxy, servers: str, topic: str) -> None:
    with Producer(proxy.address, batch_bytes=5_000, buffer_bytes=20_000) as producer:
        producer.send(topic, b"first").result(10)
        proxy.delay_s = 0.05
        began_s = time.monotonic()
        for number in range(600):
            producer.send(topic, b"%04d" % number + b"x" * 96)
        blocked_s = time.monotonic() - began_s
        proxy.delay_s = 0.0
    assert blocked_s > 0.2, "80 kB through a buffer of 20 kB must have waited"
    assert [value[:4] for value in stored(servers, topic)[1:] if value] == [b"%04d" % number for number in range(600)]


@pytest.mark.parametrize("many", [False, True])
def test_buffer_that_stays_full_raises_and_keeps_what_it_accepted(
    proxy: Proxy, servers: str, topic: str, many: bool
) -> None:
    with Producer(proxy.address, batch_bytes=1_000, buffer_bytes=10_000, block_timeout=0.2) as producer:
        producer.send(topic, b"first").result(10)
        proxy.delay_s = 1.0
        accepted = []
        with pytest.raises(BufferFullError, match="not accepted"):
            while len(accepted) < 1000:
                value = b"%04d" % len(accepted) + b"x" * 96
                accepted.append((producer.send_many(topic, [value]) if many else producer.send(topic, value), value))
        assert 5 < len(accepted) < 150
        proxy.delay_s = 0.0
        for future, _ in accepted:
            future.result(20)
        producer.send(topic, b"after").result(10)
    assert stored(servers, topic) == [b"first", *(value for _, value in accepted), b"after"]


def test_send_many_that_is_cut_short_says_how_many_records_it_accepted(proxy: Proxy, servers: str, topic: str) -> None:
    values = [b"%04d" % number + b"x" * 96 for number in range(500)]
    with Producer(proxy.address, batch_bytes=1_000, buffer_bytes=10_000, block_timeout=0.2) as producer:
        producer.send(topic, b"first").result(10)
        proxy.delay_s = 1.0
        with pytest.raises(BufferFullError, match=r"only \d+ records were accepted") as caught:
            producer.send_many(topic, values)
        with pytest.raises(BufferFullError, match="this record was not accepted") as refused:
            producer.send(topic, b"one more")
        proxy.delay_s = 0.0
        producer.flush(20)
    accepted = caught.value.facts["accepted"]
    assert 0 < accepted < len(values)
    assert refused.value.facts == {"accepted": 0}
    assert stored(servers, topic) == [b"first", *values[:accepted]]


def test_record_larger_than_what_is_left_of_the_buffer_still_goes(servers: str, topic: str) -> None:
    with Producer(servers, batch_bytes=1_000, buffer_bytes=2_000) as producer:
        futures = [producer.send(topic, b"x" * 100_000) for _ in range(20)]
        assert [future.result(10).offset for future in futures] == list(range(20))


def test_threads_that_wait_for_room_are_freed_by_close(proxy: Proxy, topic: str) -> None:
    producer = Producer(proxy.address, batch_bytes=1_000, buffer_bytes=5_000, block_timeout=60)
    producer.send(topic, b"first").result(10)
    proxy.silence()
    futures = []

    def send_until_closed() -> None:
        while True:
            futures.append(producer.send(topic, b"x" * 500))

    sending = Background(send_until_closed)
    until(lambda: len(futures) > 5)
    with pytest.raises(RequestTimeoutError):
        producer.close(timeout=0.2)
    assert isinstance(sending.join(), ClosedError)
    for future in futures:
        assert isinstance(future.exception(5), ClosedError), "no future may be left without an outcome"


# Flush


def test_flush_returns_when_all_is_acknowledged(proxy: Proxy, topic: str) -> None:
    proxy.delay_s = 0.1
    with Producer(proxy.address, linger_ms=60_000, batch_bytes=1000) as producer:
        futures = [producer.send(topic, b"x" * 100) for _ in range(50)]
        producer.flush()
        assert all(future.done() for future in futures)
        producer.flush()


def test_flush_that_takes_too_long_says_so_and_can_be_repeated(proxy: Proxy, topic: str) -> None:
    with Producer(proxy.address) as producer:
        producer.send(topic, b"first").result(10)
        proxy.delay_s = 1.0
        future = producer.send(topic, b"v")
        with pytest.raises(RequestTimeoutError, match="not acknowledged yet"):
            producer.flush(timeout=0.05)
        producer.flush(timeout=10)
        assert future.done()


def test_flush_ends_although_others_go_on_sending(servers: str, topic: str) -> None:
    done = threading.Event()
    with Producer(servers) as producer:

        def send_on() -> None:
            while not done.is_set():
                producer.send(topic, b"noise")

        threads = [Background(send_on) for _ in range(2)]
        try:
            for _ in range(5):
                future = producer.send(topic, b"mine")
                producer.flush(timeout=30)
                assert future.done()
        finally:
            done.set()
            errors = [thread.join() for thread in threads]
    assert errors == [None, None]


# Threads


def test_threads_that_share_a_producer_store_all_once_and_in_their_order(servers: str, make_topic: MakeTopic) -> None:
    topic = make_topic(3)
    history = History()
    with Producer(servers, batch_bytes=2000) as producer:

        def send(number: int) -> None:
            log = history.producer(f"thread {number}")
            futures = []
            for count in range(400):
                value = b"%d/%d" % (number, count)
                log.sent(value)
                if count % 10 == 9:
                    many = producer.send_many(topic, [value], partition=count % 3)
                    futures.append((value, lambda many=many: many.result(20)[0]))
                else:
                    single = producer.send(topic, value, partition=count % 3)
                    futures.append((value, lambda single=single: single.result(20)))
            for value, result in futures:
                where = result()
                log.acknowledged(value, RecordMetadata(where.topic, where.partition, where.offset))

        threads = [Background(lambda number=number: send(number)) for number in range(6)]
        assert [thread.join() for thread in threads] == [None] * 6
    reader = history.reader("c")
    for record in read_all(servers, topic):
        reader.saw(record)
    assert history.judge() == []
    assert history.acknowledged_count == 6 * 400


def test_close_while_threads_send_leaves_no_future_without_an_outcome(servers: str, topic: str) -> None:
    for _ in range(10):
        producer = Producer(servers)
        producer.send(topic, b"first").result(10)
        futures = []

        def send_until_closed(producer: Producer = producer, futures: list[Any] = futures) -> None:
            while True:
                futures.append(producer.send(topic, b"v"))

        threads = [Background(send_until_closed) for _ in range(2)]
        until(lambda futures=futures: len(futures) > 50)
        producer.close()
        assert all(isinstance(thread.join(), ClosedError) for thread in threads)
        assert [future.exception(5) for future in futures] == [None] * len(futures)


# Callbacks


def test_callbacks_that_raise_do_not_stop_the_producer(servers: str, topic: str) -> None:
    called = []

    def bad(future: object) -> None:
        called.append(future)
        raise ValueError("broken callback")

    with opened(servers) as producer:
        for number in range(3):
            future = producer.send(topic, b"%d" % number)
            future.add_done_callback(bad)
            future.result(5)
        producer.flush(timeout=30)
        until(lambda: len(called) == 3)
    assert stored(servers, topic) == [b"0", b"1", b"2"]


def test_callback_may_send_the_next_record(servers: str, topic: str) -> None:
    finished = threading.Event()
    with Producer(servers) as producer:

        def next_one(future: Any) -> None:
            offset = future.result(0).offset
            if offset == 20:
                finished.set()
            else:
                producer.send(topic, b"%d" % (offset + 1)).add_done_callback(next_one)

        producer.send(topic, b"0").add_done_callback(next_one)
        assert finished.wait(10)
    assert stored(servers, topic) == [b"%d" % number for number in range(21)]
