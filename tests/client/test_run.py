"""`Consumer.run`: every record to the handler, topics in parallel, until silence, a stop or an error."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from quiver import Admin, Consumer, Producer
from quiver.types import Record
from tests.client.kit import LocalBroker

TOPICS = ("alpha", "beta", "gamma")


@pytest.fixture
def private_broker(tmp_path: Path) -> Iterator[LocalBroker]:
    with LocalBroker(tmp_path) as made:
        yield made


def fill(servers: str, count: int) -> None:
    with Admin(servers) as admin:
        for topic in TOPICS:
            admin.create_topic(topic, 2)
    with Producer(servers) as producer:
        for topic in TOPICS:
            producer.send_many(topic, [b"%d" % number for number in range(count)], partition=1).result()


def test_every_record_of_every_topic_is_handled_in_order_until_silence(private_broker: LocalBroker) -> None:
    fill(private_broker.address, 250)
    seen: dict[str, list[bytes]] = defaultdict(list)
    with Consumer(private_broker.address, TOPICS, group="g") as consumer:

        def keep(record: Record) -> None:
            seen[record.topic].append(record.value or b"")

        assert consumer.run(keep, timeout=0.5, poll_time=0.05) == 750
        assert consumer.poll(timeout=0.1) == [], "what was handled is not polled again"
        assert [consumer.committed(topic, 1) for topic in TOPICS] == [250] * 3
    assert seen == {topic: [b"%d" % number for number in range(250)] for topic in TOPICS}


def test_topics_are_handled_in_parallel(private_broker: LocalBroker) -> None:
    fill(private_broker.address, 1)
    # Each handler waits for the two others: one thread for all would wait for ever.
    together = threading.Barrier(len(TOPICS))
    with Consumer(private_broker.address, TOPICS) as consumer:
        assert consumer.run(lambda record: together.wait(30), timeout=0.3, poll_time=0.05) == len(TOPICS)


def test_a_handlers_error_ends_the_run_and_its_records_come_again(private_broker: LocalBroker) -> None:
    fill(private_broker.address, 30)
    seen: list[Record] = []

    def fail_at_ten(record: Record) -> None:
        if record.offset == 10 and record.topic == "alpha":
            raise ZeroDivisionError("on purpose")
        seen.append(record)

    with Consumer(private_broker.address, ["alpha"], group="g") as consumer, pytest.raises(ZeroDivisionError):
        consumer.run(fail_at_ten, poll_time=0.05)
    again: list[int] = []
    with Consumer(private_broker.address, ["alpha"], group="g") as consumer:
        consumer.run(lambda record: again.append(record.offset), timeout=0.3, poll_time=0.05)
    assert again == list(range(30)), "nothing of the look that failed was stored as read"


def test_stop_from_a_handler_ends_the_run(private_broker: LocalBroker) -> None:
    fill(private_broker.address, 5)
    with Consumer(private_broker.address, ["alpha"]) as consumer:
        assert consumer.run(lambda record: consumer.stop(), poll_time=0.05) == 5


def test_a_run_begins_where_the_consumer_is(private_broker: LocalBroker) -> None:
    fill(private_broker.address, 20)
    offsets: list[int] = []
    with Consumer(private_broker.address, ["alpha"]) as consumer:
        assert len(consumer.poll(max_records=7, timeout=5)) == 7
        consumer.run(lambda record: offsets.append(record.offset), timeout=0.3, poll_time=0.05)
    assert offsets == list(range(7, 20))


def test_an_outage_is_waited_out(private_broker: LocalBroker) -> None:
    fill(private_broker.address, 5)
    handled: list[int] = []
    with Consumer(private_broker.address, ["alpha"], group="g") as consumer:

        def restart_once(record: Record) -> None:
            handled.append(record.offset)
            if len(handled) == 1:
                private_broker.stop()
                private_broker.start()

        consumer.run(restart_once, timeout=1.5, poll_time=0.05, poll_time_after_error=0.1)
        assert consumer.committed("alpha", 1) == 5
    assert handled == list(range(5))
