"""When a batch leaves, and in which order: the pure part of the producer."""

from __future__ import annotations

import sys
import threading

from quiver.client.batcher import Batch, PartitionQueue
from quiver.client.delivery import Delivery

BYTES_MAX = 100
LINGER_S = 0.5


def queue() -> PartitionQueue:
    return PartitionQueue("t", 3, BYTES_MAX, LINGER_S)


def add(made: PartitionQueue, value: bytes, now_s: float = 0.0, size_bytes: int = 10) -> bool:
    """Adds a record; whether the sender should look."""
    return made.add(value, None, None, 0, size_bytes, now_s)[1]


def encoded(name: bytes = b"") -> Batch:
    batch = Batch(Delivery("t", 3), 0.0)
    batch.values = [name]
    return batch


def taken(made: PartitionQueue, in_flight: int = 0, flushing: bool = False, now_s: float = 0.0) -> list[bytes] | None:
    batch = made.take(in_flight, flushing, now_s)
    return None if batch is None else batch.values


def test_empty_queue_has_nothing_to_take() -> None:
    made = queue()
    assert taken(made) is None
    assert taken(made, flushing=True) is None
    assert made.oldest() is None
    assert made.linger_left_s(0.0) is None
    assert len(made) == 0


def test_single_record_leaves_at_once_when_nothing_is_in_flight() -> None:
    made = queue()
    assert add(made, b"a")
    assert taken(made, in_flight=0) == [b"a"]


def test_filling_batch_waits_for_company_while_another_is_in_flight() -> None:
    made = queue()
    add(made, b"a", now_s=1.0)
    assert taken(made, in_flight=1, now_s=1.0) is None
    add(made, b"b", now_s=1.2)
    assert made.linger_left_s(1.2) == LINGER_S - (1.2 - 1.0)
    assert taken(made, in_flight=1, now_s=1.49) is None
    assert taken(made, in_flight=1, now_s=1.5) == [b"a", b"b"]


def test_flush_takes_a_filling_batch_at_once() -> None:
    made = queue()
    add(made, b"a")
    assert taken(made, in_flight=4, flushing=True) == [b"a"]


def test_full_batch_leaves_although_others_are_in_flight() -> None:
    made = queue()
    for number in range(10):
        assert add(made, b"%d" % number) == (number == 0)
    assert taken(made, in_flight=1) is None, "exactly full is not yet over"
    assert add(made, b"next")
    assert taken(made, in_flight=4) == [b"%d" % number for number in range(10)]
    assert taken(made, in_flight=4) is None
    assert taken(made, in_flight=0) == [b"next"]


def test_record_larger_than_a_batch_travels_alone() -> None:
    made = queue()
    add(made, b"small")
    add(made, b"large", size_bytes=5 * BYTES_MAX)
    add(made, b"after")
    assert [taken(made), taken(made), taken(made)] == [[b"small"], [b"large"], [b"after"]]


def test_only_the_first_record_of_a_batch_wakes_the_sender() -> None:
    made = queue()
    assert [add(made, b"a"), add(made, b"b"), add(made, b"c", size_bytes=BYTES_MAX)] == [True, False, True]


def test_encoded_batch_keeps_its_place_behind_earlier_records() -> None:
    made = queue()
    add(made, b"a")
    made.add_encoded(encoded(b"table"))
    add(made, b"b")
    assert len(made) == 3
    assert [taken(made), taken(made), taken(made)] == [[b"a"], [b"table"], [b"b"]]


def test_batches_put_back_come_first_and_in_order() -> None:
    made = queue()
    add(made, b"later")
    made.put_back([encoded(b"1"), encoded(b"2")])
    made.put_back([encoded(b"0")])
    assert [taken(made) for _ in range(4)] == [[b"0"], [b"1"], [b"2"], [b"later"]]


def test_sent_are_those_that_have_a_sequence() -> None:
    made = queue()
    again = encoded(b"again")
    again.sequence = 7
    made.put_back([again])
    add(made, b"new")
    assert made.sent() == [again]


def test_oldest_is_what_would_be_taken() -> None:
    made = queue()
    add(made, b"a")
    oldest = made.oldest()
    assert oldest is not None and oldest.values == [b"a"]
    made.put_back([again := encoded()])
    assert made.oldest() is again


def test_rows_of_a_batch_are_numbered_by_their_futures() -> None:
    made = queue()
    futures = [made.add(b"v", None, None, 0, 10, 0.0)[0] for _ in range(3)]
    batch = made.take(0, False, 0.0)
    assert batch is not None
    batch.delivery.settle(40)
    assert [(f.result().topic, f.result().partition, f.result().offset) for f in futures] == [
        ("t", 3, 40),
        ("t", 3, 41),
        ("t", 3, 42),
    ]


def test_what_was_sent_can_be_listed_while_another_thread_adds() -> None:
    """The sender asks after a failure, on its own thread, while the application goes on sending."""
    made = queue()
    done = threading.Event()

    def add_many() -> None:
        while not done.is_set():
            made.add_encoded(encoded())
            if len(made) > 500:
                made.take(0, False, 0.0)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=add_many)
    thread.start()
    try:
        for _ in range(20_000):
            assert made.sent() == []
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval_s)
