"""When the server is gone, silent, slow or says no: every future gets an outcome, and what follows still goes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from quiver import Admin, Producer
from quiver.client import cluster as cluster_module
from quiver.client import sender as sender_module
from quiver.config import MESSAGE_BYTES_MAX, MIB
from quiver.errors import (
    ClosedError,
    DeliveryTimeoutError,
    InvalidRequestError,
    MessageTooLargeError,
    RequestTimeoutError,
    UnknownPartitionError,
    UnknownTopicError,
)
from quiver.wire.messages import Produce
from tests.client.kit import LocalBroker, new_topic, stored, until
from tests.system.kit import producer as opened
from tests.system.proxy import Proxy, Step


@pytest.fixture
def proxy(broker: LocalBroker) -> Iterator[Proxy]:
    with Proxy(broker.address) as made:
        yield made


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[LocalBroker]:
    """One that may be stopped."""
    with LocalBroker(tmp_path) as made:
        yield made


# Delivery time-out


def test_unreachable_server_fails_the_record_as_not_stored_and_the_next_one_goes(own_broker: LocalBroker) -> None:
    topic = new_topic(own_broker.address)
    with Producer(own_broker.address, delivery_timeout=5.0) as producer:
        producer.send(topic, b"before").result(60)
        own_broker.stop()
        lost = [producer.send(topic, b"lost"), producer.send_many(topic, [b"lost too"])]
        for future in lost:
            with pytest.raises(DeliveryTimeoutError, match=rf"{topic}-0 within 5 s; it is not stored"):
                future.result(60)
        own_broker.start()
        producer.send(topic, b"after").result(60)
    assert stored(own_broker.address, topic) == [b"before", b"after"]


def test_missing_reply_fails_the_record_as_perhaps_stored_and_the_next_one_goes(
    servers: str, topic: str, proxy: Proxy
) -> None:
    with Producer(proxy.address, delivery_timeout=5.0) as producer:
        producer.send(topic, b"before").result(60)
        proxy.delay_s = 10.0
        with pytest.raises(DeliveryTimeoutError, match="may or may not be stored"):
            producer.send(topic, b"perhaps").result(60)  # the request itself would have 30 s
        proxy.delay_s = 0.0
        for number in range(5):
            producer.send(topic, b"after %d" % number).result(60)
    assert stored(servers, topic) == [b"before", b"perhaps", *(b"after %d" % number for number in range(5))]


def test_all_that_were_sent_behind_an_expired_batch_expire_with_it(servers: str, topic: str, proxy: Proxy) -> None:
    """To send them again under new sequences could store them twice."""
    with Producer(proxy.address, delivery_timeout=5.0) as producer:
        producer.send(topic, b"before").result(60)
        proxy.delay_s = 10.0
        first = producer.send_many(topic, [b"first"])
        time.sleep(0.4)
        young = [producer.send_many(topic, [b"young %d" % number]) for number in range(3)]
        until(lambda: proxy.count(Produce) == 5)
        for future in (first, *young):
            assert isinstance(future.exception(60), DeliveryTimeoutError)
        proxy.delay_s = 0.0
        producer.send(topic, b"after").result(60)
    values = stored(servers, topic)
    assert values == [b"before", b"first", b"young 0", b"young 1", b"young 2", b"after"]


@pytest.mark.parametrize("batch_bytes", [1000, 4 * MIB])
def test_silent_server_that_does_not_even_read_fails_records_in_time(
    servers: str, topic: str, proxy: Proxy, batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With large batches the socket's buffers fill and the sender waits to write, not to read."""
    monkeypatch.setattr(cluster_module, "_QUIET_S", 600.0)  # nobody notices: it is the time that ends it
    with Producer(proxy.address, delivery_timeout=4.0, batch_bytes=batch_bytes) as producer:
        producer.send(topic, b"before").result(60)
        proxy.silence()
        futures = [producer.send_many(topic, [b"x" * MESSAGE_BYTES_MAX] * 4) for _ in range(6)]
        assert isinstance(futures[0].exception(60), DeliveryTimeoutError)  # the request itself would have 30 s
        for future in futures:
            # One that was never sent goes over the next connection if it is still young enough.
            assert isinstance(future.exception(60), DeliveryTimeoutError | None)
        assert producer.send(topic, b"after").result(60).topic == topic
    values = stored(servers, topic)
    assert (values[0], values[-1]) == (b"before", b"after")


def test_silent_connection_is_replaced_and_nothing_is_lost_or_doubled(servers: str, topic: str, proxy: Proxy) -> None:
    with Producer(proxy.address, request_timeout=3.0) as producer:
        producer.send(topic, b"first").result(60)
        proxy.silence()
        futures = [producer.send_many(topic, [b"%d" % number]) for number in range(20)]
        for future in futures:
            future.result(60)
        assert proxy.connections == 2
    assert stored(servers, topic) == [b"first", *(b"%d" % number for number in range(20))]


# A refusal


def test_batch_that_the_broker_refuses_fails_alone(servers: str, topic: str) -> None:
    with Producer(servers, message_bytes_max=3 * MIB) as producer:
        futures = []
        for number in range(30):
            large = number % 10 == 5
            futures.append(producer.send_many(topic, [b"x" * 2 * MIB if large else b"%d" % number]))
        outcomes = [future.exception(60) for future in futures]
    refused = [number for number, outcome in enumerate(outcomes) if outcome is not None]
    assert refused == [5, 15, 25]
    assert all(isinstance(outcomes[number], MessageTooLargeError) for number in refused)
    assert stored(servers, topic) == [b"%d" % number for number in range(30) if number not in refused]


def test_batch_that_cannot_be_encoded_fails_alone(servers: str, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that `send` accepts is known to do that; if something does, it must not stop the partition."""
    real = sender_module.encode_batch

    def encode(records: pa.RecordBatch, compression: str | None) -> memoryview:
        if b"poison" in records.column("value").to_pylist():
            raise pa.ArrowInvalid("no way to write this")
        return real(records, compression)

    monkeypatch.setattr(sender_module, "encode_batch", encode)
    with Producer(servers) as producer:
        for value in (b"1", b"poison", b"2", b"3"):
            future = producer.send(topic, value, key=b"k")  # without a key a lone record is not encoded by Arrow
            if value == b"poison":
                with pytest.raises(InvalidRequestError, match="cannot be encoded"):
                    future.result(60)
            else:
                future.result(60)
    assert stored(servers, topic) == [b"1", b"2", b"3"]


def test_deleted_topic_fails_its_records_and_no_others(servers: str, topic: str) -> None:
    other = new_topic(servers)
    with Producer(servers) as producer, Admin(servers) as admin:
        producer.send(topic, b"1").result(60)
        producer.send(other, b"1").result(60)
        admin.delete_topic(topic)
        with pytest.raises(UnknownTopicError):
            producer.send(topic, b"2").result(60)
        producer.send(other, b"2").result(60)
        producer.flush(timeout=5)


def test_topic_made_again_with_fewer_partitions_is_learnt(servers: str) -> None:
    topic = new_topic(servers, 4)
    with Producer(servers) as producer, Admin(servers) as admin:
        for _ in range(4):
            producer.send(topic, b"old").result(60)
        admin.delete_topic(topic)
        admin.create_topic(topic, 1)
        outcomes = [producer.send(topic, b"new").exception(60) for _ in range(8)]
        assert all(outcome is None or isinstance(outcome, UnknownPartitionError) for outcome in outcomes)
        assert outcomes[-4:] == [None] * 4
    assert stored(servers, topic) == [b"new"] * outcomes.count(None)


def test_producer_that_the_broker_has_forgotten_begins_anew(servers: str, topic: str) -> None:
    with Producer(servers) as producer, Admin(servers) as admin:
        for number in range(5):
            producer.send(topic, b"old %d" % number).result(60)
        admin.delete_topic(topic)
        admin.create_topic(topic)
        futures = [producer.send_many(topic, [b"new %d" % number]) for number in range(8)]
        assert [future.result(60)[0].offset for future in futures] == list(range(8))
    assert stored(servers, topic) == [b"new %d" % number for number in range(8)]


# Restarts and close


def test_records_sent_while_the_server_is_down_are_stored_when_it_is_back(own_broker: LocalBroker) -> None:
    topic = new_topic(own_broker.address)
    with Producer(own_broker.address) as producer:
        producer.send(topic, b"first").result(60)
        for number in range(3):
            own_broker.stop()
            future = producer.send(topic, b"%d" % number)
            assert not future.done()
            own_broker.start()
            assert future.result(60).offset == number + 1
    assert stored(own_broker.address, topic) == [b"first", b"0", b"1", b"2"]


def test_close_gives_every_future_an_outcome_when_the_server_is_gone(own_broker: LocalBroker) -> None:
    topic = new_topic(own_broker.address)
    producer = Producer(own_broker.address)
    producer.send(topic, b"first").result(60)
    own_broker.stop()
    futures = [producer.send(topic, b"v"), producer.send_many(topic, [b"w"]), producer.send(topic, b"x", key=b"k")]
    with pytest.raises(RequestTimeoutError, match="not acknowledged"):
        producer.close(timeout=0.2)
    assert all(isinstance(future.exception(60), ClosedError) for future in futures)
    with pytest.raises(ClosedError):
        producer.send(topic, b"y")


def test_trouble_leaves_no_complaint_of_the_event_loop(
    servers: str, topic: str, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "asyncio"):
        with opened(proxy.address, request_timeout=1.0, delivery_timeout=1.5) as producer:
            producer.send(topic, b"first").result(60)
            proxy.silence()
            silent = [producer.send_many(topic, [b"%d" % number]) for number in range(20)]
            for future in silent:
                future.exception(60)  # lost or sent again, as the time-outs have it
            proxy.cut(Step.AFTER_REQUEST)
            for number in range(20):
                producer.send_many(topic, [b"%d" % number])
            proxy.silence()
        with opened(proxy.address) as producer:
            producer.send(topic, b"last").result(60)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
