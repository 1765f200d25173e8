"""What a consumer hands out: every record once and in order, however it is asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from quiver import Consumer, Producer, Record
from quiver.config import MIB
from quiver.errors import ClosedError, ConcurrentUseError
from quiver.wire.rows import TABLE_SCHEMA
from tests.client.kit import LocalBroker, fill, numbers, poll_numbers, until
from tests.system.proxy import Proxy

MakeTopic = Callable[[int], str]


# Polling


def test_poll_gives_at_most_what_is_asked_for_and_goes_on(servers: str, topic: str) -> None:
    fill(servers, topic, 100)
    with Consumer(servers, [topic]) as consumer:
        found: list[int] = []
        for max_records in (1, 3, 7, 10, 25, 54):
            found += poll_numbers(consumer, max_records)
        assert found == list(range(100))
        assert consumer.poll(timeout=0) == []


def test_poll_waits_for_the_first_record(servers: str, topic: str) -> None:
    with Consumer(servers, [topic]) as consumer:
        began_s = time.monotonic()
        assert consumer.poll(timeout=0.2) == []
        assert time.monotonic() - began_s >= 0.2
        timer = threading.Timer(0.1, fill, (servers, topic, 1))
        timer.start()
        assert numbers(consumer.poll(timeout=10)) == [0]
        timer.join()


def test_records_are_whole_and_in_place(servers: str, topic: str) -> None:
    with Producer(servers) as producer:
        producer.send(topic, b"v", key=b"k", timestamp=5, headers={"h": b"x"}).result(10)
    with Consumer(servers, [topic]) as consumer:
        assert consumer.poll(timeout=10) == [Record(topic, 0, 0, 5, b"k", b"v", (("h", b"x"),))]


def test_all_partitions_of_all_topics_are_read_in_their_order(servers: str, make_topic: MakeTopic) -> None:
    topics = [make_topic(3), make_topic(2)]
    with Producer(servers, batch_bytes=200) as producer:
        for number in range(300):
            for topic in topics:
                producer.send(topic, b"%d" % number, key=b"%d" % (number % 11))
    with Consumer(servers, topics) as consumer:
        found: list[Record] = []
        while len(found) < 600:
            found += consumer.poll(37, timeout=10)
    for topic in topics:
        for partition in range(3):
            offsets = [r.offset for r in found if (r.topic, r.partition) == (topic, partition)]
            assert offsets == list(range(len(offsets)))
        assert sorted(int(r.value or b"") for r in found if r.topic == topic) == list(range(300))


def test_only_the_wanted_partitions_are_read(servers: str, make_topic: MakeTopic) -> None:
    topic = make_topic(4)
    with Producer(servers) as producer:
        for partition in range(4):
            producer.send(topic, b"%d" % partition, partition=partition).result(10)
    with Consumer(servers, [topic], partitions={topic: [1, 3]}) as consumer:
        assert sorted(poll_numbers(consumer, 2)) == [1, 3]
        assert consumer.poll(timeout=0.1) == []


def test_topic_and_partition_named_twice_are_read_once(servers: str, topic: str) -> None:
    fill(servers, topic, 20)
    with Consumer(servers, [topic, topic], partitions={topic: [0, 0]}) as consumer:
        assert poll_numbers(consumer, 20) == list(range(20))
        assert consumer.poll(timeout=0.2) == []


def test_two_consumers_do_not_disturb_each_other(servers: str, topic: str) -> None:
    fill(servers, topic, 60)
    with Consumer(servers, [topic], group="a") as first, Consumer(servers, [topic], group="b") as second:
        found = [poll_numbers(first, 25), poll_numbers(second, 40), poll_numbers(first, 35), poll_numbers(second, 20)]
        first.commit()
        assert first.committed(topic, 0) == 60
        assert second.committed(topic, 0) is None
    assert found[0] + found[2] == found[1] + found[3] == list(range(60))


# Arrow


def test_poll_arrow_gives_columns(servers: str, topic: str) -> None:
    with Producer(servers) as producer:
        producer.send(topic, b"v", key=b"k", timestamp=5, headers={"h": b"x"})
        producer.send(topic, None)
    with Consumer(servers, [topic]) as consumer:
        tables = []
        while sum(table.num_rows for table in tables) < 2:
            tables.append(consumer.poll_arrow(timeout=10))
        table = pa.concat_tables(tables)
    assert table.schema == TABLE_SCHEMA
    assert table["topic"].to_pylist() == [topic, topic]
    assert table["offset"].to_pylist() == [0, 1]
    assert table["key"].to_pylist() == [b"k", None]
    assert table["value"].to_pylist() == [b"v", None]
    assert table["headers"].to_pylist() == [[("h", b"x")], None]
    assert table["timestamp"][0].value == 5


def test_poll_arrow_without_records_is_an_empty_table_of_the_same_schema(servers: str, topic: str) -> None:
    with Consumer(servers, [topic]) as consumer:
        table = consumer.poll_arrow(timeout=0.05)
    assert (table.num_rows, table.schema) == (0, TABLE_SCHEMA)


def test_poll_and_poll_arrow_and_iteration_can_be_mixed(servers: str, topic: str) -> None:
    fill(servers, topic, 1000, batch=30)
    found: list[int] = []
    with Consumer(servers, [topic], idle_timeout=10) as consumer:
        turn = 0
        while len(found) < 1000:
            turn += 1
            if turn % 3 == 0:
                table = consumer.poll_arrow(timeout=10)
                assert table.schema == TABLE_SCHEMA
                found += [int(value) for value in table["value"].to_pylist()]
                assert table["offset"].to_pylist() == found[-table.num_rows :]
            elif turn % 3 == 1:
                found += numbers(consumer.poll(7, timeout=10))
            else:
                for record in consumer:
                    found.append(int(record.value or b""))
                    if len(found) % 11 == 0 or len(found) == 1000:
                        break
            assert consumer.position(topic, 0) == len(found)
    assert found == list(range(1000))


def test_rest_of_a_batch_taken_as_a_table_keeps_its_columns(servers: str, topic: str) -> None:
    with Producer(servers) as producer:
        table = pa.table(
            {
                "value": [b"%d" % number for number in range(5)],
                "key": [None, b"a", None, b"b", b""],
                "headers": pa.array(
                    [None, [("x", b"1")], [], [("y", b"2"), ("y", b"3")], None], pa.map_(pa.string(), pa.binary())
                ),
                "timestamp": pa.array(range(5), pa.timestamp("us", "UTC")),
            }
        )
        producer.send_many(topic, table).result(10)
    with Consumer(servers, [topic]) as consumer:
        consumer.poll(1, timeout=10)
        rest = consumer.poll_arrow(timeout=10)
    assert rest.schema == TABLE_SCHEMA
    assert rest["key"].to_pylist() == [b"a", None, b"b", b""]
    assert rest["headers"].to_pylist() == [[("x", b"1")], None, [("y", b"2"), ("y", b"3")], None]
    assert [stamp.value for stamp in rest["timestamp"]] == [1, 2, 3, 4]


# Iteration


def test_iteration_ends_when_nothing_came_for_the_idle_time(servers: str, topic: str) -> None:
    fill(servers, topic, 30)
    with Consumer(servers, [topic], idle_timeout=1.0) as consumer:
        assert numbers(list(consumer)) == list(range(30))
        fill(servers, topic, 5, first=30)
        assert numbers(list(consumer)) == list(range(30, 35))


def test_break_in_the_middle_loses_nothing(servers: str, topic: str) -> None:
    fill(servers, topic, 40, batch=40)
    with Consumer(servers, [topic], idle_timeout=10) as consumer:
        for record in consumer:
            if record.offset == 4:
                break
        assert numbers(consumer.poll(5, timeout=10)) == [5, 6, 7, 8, 9]
        for record in consumer:
            if record.offset == 19:
                break
        assert poll_numbers(consumer, 20) == list(range(20, 40))


def test_iterator_that_is_kept_goes_on_where_others_stopped(servers: str, topic: str) -> None:
    fill(servers, topic, 40, batch=20)
    with Consumer(servers, [topic], idle_timeout=2.0) as consumer:
        first = iter(consumer)
        found = [next(first).offset, next(first).offset]
        found += [record.offset for record in consumer.poll(3, timeout=10)]
        found += [next(first).offset, next(iter(consumer)).offset]
        assert consumer.position(topic, 0) == 7
        found += [record.offset for record in first]
    assert found == list(range(40))


def test_seek_in_the_loop_takes_effect_with_the_next_record(servers: str, topic: str) -> None:
    fill(servers, topic, 40, batch=40)
    found = []
    with Consumer(servers, [topic], idle_timeout=1.0) as consumer:
        for record in consumer:
            found.append(record.offset)
            if found == [0, 1, 2]:
                consumer.seek(topic, 0, 38)
    assert found == [0, 1, 2, 38, 39]


def test_error_in_the_loop_counts_the_record_as_read_and_no_other(servers: str, topic: str) -> None:
    fill(servers, topic, 10, batch=10)
    with Consumer(servers, [topic], group="g", idle_timeout=10) as consumer:
        with pytest.raises(ZeroDivisionError):
            for record in consumer:
                _ = 1 // (3 - record.offset)
        assert consumer.position(topic, 0) == 4


def test_close_from_another_thread_ends_iteration(servers: str, topic: str) -> None:
    fill(servers, topic, 3)
    found: list[Record] = []
    consumer = Consumer(servers, [topic])

    def close() -> None:
        until(lambda: len(found) == 3)
        consumer.close()

    closing = threading.Thread(target=close)
    closing.start()
    for record in consumer:
        found.append(record)
    assert numbers(found) == [0, 1, 2]
    closing.join()


def test_close_in_the_loop_ends_it(servers: str, topic: str) -> None:
    fill(servers, topic, 10, batch=10)
    found = []
    with Consumer(servers, [topic], idle_timeout=5) as consumer:
        for record in consumer:
            found.append(record.offset)
            if record.offset == 2:
                consumer.close()
    assert found == [0, 1, 2]


def test_closed_consumer_refuses_and_close_twice_is_harmless(servers: str, topic: str) -> None:
    consumer = Consumer(servers, [topic], group="g")
    consumer.poll(timeout=0)
    consumer.close()
    consumer.close()
    for use in (
        consumer.poll,
        consumer.poll_arrow,
        consumer.commit,
        lambda: list(consumer),
        lambda: consumer.seek(topic, 0, 0),
        lambda: consumer.position(topic, 0),
        lambda: consumer.committed(topic, 0),
    ):
        with pytest.raises(ClosedError):
            use()


def test_close_from_another_thread_ends_a_waiting_poll(servers: str, topic: str) -> None:
    consumer = Consumer(servers, [topic])
    consumer.poll(timeout=0)
    timer = threading.Timer(0.2, consumer.close)
    timer.start()
    with pytest.raises(ClosedError):
        consumer.poll(timeout=20)
    timer.join()


def is_free(consumer: Consumer) -> bool:
    if consumer._using.acquire(blocking=False):
        consumer._using.release()
        return True
    return False


def test_two_threads_at_once_are_told_apart(servers: str, topic: str) -> None:
    with Consumer(servers, [topic], group="g") as consumer:
        consumer.poll(timeout=0)
        waiting = threading.Thread(target=consumer.poll, kwargs={"timeout": 3})
        waiting.start()
        until(lambda: not is_free(consumer))
        for use in (
            lambda: consumer.poll(timeout=0),
            lambda: consumer.poll_arrow(timeout=0),
            lambda: next(iter(consumer)),
            consumer.commit,
            lambda: consumer.seek(topic, 0, 0),
        ):
            with pytest.raises(ConcurrentUseError):
                use()
        fill(servers, topic, 1)
        waiting.join()
        assert consumer.position(topic, 0) == 1, "one after the other is allowed"


# Prefetch


@pytest.fixture
def proxy(broker: LocalBroker) -> Iterator[Proxy]:
    with Proxy(broker.address) as made:
        yield made


def test_no_more_than_the_prefetch_size_is_taken_ahead(servers: str, proxy: Proxy, make_topic: MakeTopic) -> None:
    topic = make_topic(2)
    with Producer(servers) as producer:
        producer.send_many(topic, pa.table({"value": [b"x" * 10_000] * 3000})).result(20)
    with Consumer(proxy.address, [topic], prefetch_bytes=2 * MIB, fetch_bytes=MIB) as consumer:
        assert len(consumer.poll(1, timeout=10)) == 1
        until(lambda: proxy.bytes_to_client > MIB)
        before = -1
        while before != proxy.bytes_to_client:
            before = proxy.bytes_to_client
            time.sleep(0.3)
        assert MIB < proxy.bytes_to_client < 3 * MIB, "it stops when the reader does"
        count = 1
        while count < 3000:
            count += len(consumer.poll(500, timeout=10))
        assert proxy.bytes_to_client > 30_000_000


def test_batch_larger_than_the_prefetch_size_is_read(servers: str, topic: str) -> None:
    with Producer(servers, batch_bytes=8 * MIB) as producer:
        producer.send_many(topic, [b"x" * MIB] * 10).result(20)
    with Consumer(servers, [topic], prefetch_bytes=1, fetch_bytes=1) as consumer:
        count = 0
        while count < 10:
            records = consumer.poll(timeout=10)
            assert records
            count += len(records)
