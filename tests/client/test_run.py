"""`Consumer.run`: every record to the handler, topics in parallel, until a stop or an error. Silence: `test_runner`."""

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


def run_to(last: int, consumer: Consumer, offsets: list[int]) -> None:
    """Runs until that offset, and keeps all that it sees."""

    def keep(record: Record) -> None:
        offsets.append(record.offset)
        if record.offset == last:
            consumer.stop()

    consumer.run(keep, poll_time=0.05)


def test_every_record_of_every_topic_is_handled_in_order(private_broker: LocalBroker) -> None:
    fill(private_broker.address, 250)
    seen: dict[str, list[bytes]] = defaultdict(list)
    with Consumer(private_broker.address, TOPICS, group="g") as consumer:

        def keep(record: Record) -> None:
            seen[record.topic].append(record.value or b"")
            if sum(map(len, seen.values())) == 750:
                consumer.stop()

        assert consumer.run(keep, poll_time=0.05) == 750
        assert consumer.poll(timeout=0.1) == [], "what was handled is not polled again"
        assert [consumer.committed(topic, 1) for topic in TOPICS] == [250] * 3
    assert seen == {topic: [b"%d" % number for number in range(250)] for topic in TOPICS}


def test_topics_are_handled_in_parallel(private_broker: LocalBroker) -> None:
    fill(private_broker.address, 1)
    # Each handler waits for the two others: one thread for all would wait for ever.
    together = threading.Barrier(len(TOPICS))
    with Consumer(private_broker.address, TOPICS) as consumer:

        def wait(record: Record) -> None:
            together.wait(60)
            consumer.stop()

        assert consumer.run(wait, poll_time=0.05) == len(TOPICS)


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
        run_to(29, consumer, again)
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
        run_to(19, consumer, offsets)
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
            if record.offset == 4:
                consumer.stop()

        consumer.run(restart_once, poll_time=0.05, poll_time_after_error=0.1)
        assert consumer.committed("alpha", 1) == 5
    assert handled == list(range(5))
