"""Where a consumer stands: start, seek, commit, and what happens when the log no longer has the place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from quiver import Admin, Consumer, Producer, Record
from quiver.config import LogSettings
from quiver.errors import (
    InvalidRequestError,
    NoCommittedPositionError,
    OffsetOutOfRangeError,
    UnknownTopicError,
)
from tests.client.kit import LocalBroker, fill, new_topic, poll_numbers, until

MakeTopic = Callable[[int], str]


def first_offset(consumer: Consumer) -> int:
    (record,) = consumer.poll(1, timeout=10)
    return record.offset


# Start


def test_earliest_reads_all_and_latest_only_what_comes(servers: str, topic: str) -> None:
    fill(servers, topic, 10)
    with (
        Consumer(servers, [topic], start="earliest") as earliest,
        Consumer(servers, [topic], start="latest") as latest,
    ):
        until(lambda: latest.poll(timeout=0.1) == [] and latest.position(topic, 0) == 10)
        fill(servers, topic, 5, first=10)
        assert poll_numbers(latest, 5) == list(range(10, 15))
        assert poll_numbers(earliest, 15) == list(range(15))


@pytest.mark.parametrize("offset", [0, 3, 19, 20])
def test_start_at_an_offset_is_exact_inside_a_batch(servers: str, topic: str, offset: int) -> None:
    fill(servers, topic, 20, batch=20)
    with Consumer(servers, [topic], start=offset) as consumer:
        fill(servers, topic, 5, first=20)
        assert poll_numbers(consumer, 25 - offset) == list(range(offset, 25))


def test_start_offset_that_is_not_in_the_log_is_refused_with_the_range(servers: str, topic: str) -> None:
    fill(servers, topic, 20)
    with Consumer(servers, [topic], start=21) as consumer:
        for _ in range(2):
            with pytest.raises(OffsetOutOfRangeError, match="valid offsets are 0 to 20") as caught:
                consumer.poll(timeout=0)
            assert (caught.value.facts["earliest"], caught.value.facts["latest"]) == (0, 20)


def test_committed_start_needs_a_position(servers: str, topic: str) -> None:
    with Consumer(servers, [topic], group="g", start="committed") as consumer, pytest.raises(NoCommittedPositionError):
        consumer.poll(timeout=0)
    with pytest.raises(InvalidRequestError, match="needs a group"):
        Consumer(servers, [topic], start="committed")


@pytest.mark.parametrize("start", ["earliest", "latest", "committed", 0, 15])
def test_group_goes_on_where_it_committed_whatever_start_says(servers: str, topic: str, start: str | int) -> None:
    fill(servers, topic, 20)
    with Consumer(servers, [topic], group="g") as consumer:
        poll_numbers(consumer, 7)
        consumer.commit()
        poll_numbers(consumer, 5)
    with Consumer(servers, [topic], group="g", start=start) as consumer:
        assert first_offset(consumer) == 7
    with Consumer(servers, [topic], group="other") as consumer:
        assert first_offset(consumer) == 0


def test_topic_that_does_not_exist_is_reported_and_can_be_made(servers: str) -> None:
    with Consumer(servers, ["not-yet"]) as consumer, Admin(servers) as admin:
        with pytest.raises(UnknownTopicError, match="not-yet does not exist"):
            consumer.poll(timeout=0)
        admin.create_topic("not-yet")
        fill(servers, "not-yet", 1)
        assert first_offset(consumer) == 0


# Seek


@pytest.mark.parametrize("offset", [0, 1, 7, 10, 29, 30])
def test_seek_goes_to_the_very_record(servers: str, topic: str, offset: int) -> None:
    fill(servers, topic, 30, batch=7)
    with Consumer(servers, [topic]) as consumer:
        assert poll_numbers(consumer, 15) == list(range(15))
        consumer.seek(topic, 0, offset)
        assert consumer.position(topic, 0) == offset
        fill(servers, topic, 2, first=30)
        assert poll_numbers(consumer, 32 - offset) == list(range(offset, 32))


def test_seek_of_one_partition_leaves_the_others(servers: str, make_topic: MakeTopic) -> None:
    topic = make_topic(2)
    with Producer(servers) as producer:
        for partition in range(2):
            producer.send_many(topic, [b"%d" % number for number in range(10)], partition=partition).result(10)
    with Consumer(servers, [topic]) as consumer:
        found: list[Record] = []
        while len(found) < 20:
            found += consumer.poll(timeout=10)
        consumer.seek(topic, 1, 8)
        found = []
        while len(found) < 2:
            found += consumer.poll(timeout=10)
        assert [(record.partition, record.offset) for record in found] == [(1, 8), (1, 9)]
        assert consumer.position(topic, 0) == 10


@pytest.mark.parametrize("offset", [-1, 31, 2**62, 2**70, -(2**70)])
def test_seek_out_of_range_is_refused_and_changes_nothing(servers: str, topic: str, offset: int) -> None:
    fill(servers, topic, 30)
    with Consumer(servers, [topic]) as consumer:
        poll_numbers(consumer, 5)
        with pytest.raises(OffsetOutOfRangeError, match="valid offsets are 0 to 30") as caught:
            consumer.seek(topic, 0, offset)
        assert (caught.value.facts["earliest"], caught.value.facts["latest"]) == (0, 30)
        assert consumer.position(topic, 0) == 5
        assert poll_numbers(consumer, 25) == list(range(5, 30))


def test_seek_by_time_finds_the_first_record_at_or_after_it(servers: str, topic: str) -> None:
    """Offsets 0..29 in batches of 10 with times 100, 110, 120 ..."""
    with Producer(servers) as producer:
        for start in range(0, 30, 10):
            stamps = pa.array([100 + 10 * number for number in range(start, start + 10)], pa.timestamp("us", "UTC"))
            producer.send_many(topic, pa.table({"timestamp": stamps, "value": [b"v"] * 10})).result(10)
    with Consumer(servers, [topic]) as consumer, Admin(servers) as admin:
        for timestamp, expected in [(0, 0), (100, 0), (101, 1), (110, 1), (195, 10), (200, 10), (245, 15), (390, 29)]:
            consumer.seek_to_time(topic, 0, timestamp)
            assert first_offset(consumer) == expected, timestamp
            assert admin.offset_at(topic, 0, timestamp) == expected
        consumer.seek_to_time(topic, 0, 391)
        assert consumer.position(topic, 0) == 30
        assert consumer.poll(timeout=0.05) == []
        for wrong in (-1, "1", 1.5, None, True, 2**63):
            with pytest.raises(InvalidRequestError):
                consumer.seek_to_time(topic, 0, wrong)  # type: ignore[arg-type]


def test_seek_by_time_follows_times_that_are_not_in_order(servers: str, topic: str) -> None:
    with Producer(servers) as producer:
        for stamps in ([50, 10, 70], [20, 30], [60, 90]):
            column = pa.array(stamps, pa.timestamp("us", "UTC"))
            producer.send_many(topic, pa.table({"timestamp": column, "value": [b"v"] * len(stamps)})).result(10)
    with Admin(servers) as admin:
        found = [admin.offset_at(topic, 0, timestamp) for timestamp in (0, 50, 51, 71, 91)]
    assert found == [0, 0, 2, 6, 7]


# Commit


def test_commit_covers_what_was_handed_out_and_nothing_beyond(servers: str, topic: str) -> None:
    fill(servers, topic, 50, batch=50)
    with Consumer(servers, [topic], group="g", idle_timeout=10) as consumer:
        for record in consumer:
            if record.offset == 9:
                consumer.commit()
                break
        assert consumer.committed(topic, 0) == 10
        consumer.poll(5, timeout=10)
        assert consumer.committed(topic, 0) == 10
        consumer.commit()
        assert consumer.committed(topic, 0) == 15
        while consumer.poll_arrow(timeout=0.1).num_rows:
            pass
        consumer.commit()
        assert consumer.committed(topic, 0) == 50


def test_commits_between_batches_are_nothing_to_who_reads_all(servers: str, topic: str) -> None:
    with Consumer(servers, [topic], group="g") as committing, Producer(servers) as producer:
        for number in range(5):
            producer.send(topic, b"%d" % number).result(10)
            assert len(committing.poll(1, timeout=10)) == 1
            committing.commit()
    with Consumer(servers, [topic]) as consumer:
        assert poll_numbers(consumer, 5) == list(range(5))
    with Consumer(servers, [topic]) as consumer:
        assert consumer.poll_arrow(timeout=10).column("offset").to_pylist()[0] == 0


def test_position_does_not_move_by_fetching_ahead(servers: str, topic: str) -> None:
    fill(servers, topic, 10)
    with Consumer(servers, [topic], group="g") as consumer:
        poll_numbers(consumer, 1)
        fill(servers, topic, 90, first=10)
        until(lambda: len(consumer._engine.backlog._chunks) >= 9)  # all of it is here by now
        assert consumer.position(topic, 0) == 1
        consumer.commit()
        assert consumer.committed(topic, 0) == 1


def test_commit_does_not_move_back_without_a_seek(servers: str, topic: str) -> None:
    fill(servers, topic, 30)
    everything = {topic: [0]}
    with (
        Consumer(servers, [topic], group="g", partitions=everything) as ahead,
        Consumer(servers, [topic], group="g", partitions=everything) as behind,
    ):
        poll_numbers(ahead, 20)
        poll_numbers(behind, 10)
        ahead.commit()
        behind.commit()
        assert ahead.committed(topic, 0) == behind.committed(topic, 0) == 20
        behind.seek(topic, 0, 5)
        behind.commit()
        assert ahead.committed(topic, 0) == 5
        poll_numbers(behind, 3)
        behind.commit()
        assert ahead.committed(topic, 0) == 8


def test_commits_outlast_a_restart_of_the_server(tmp_path: Path) -> None:
    with LocalBroker(tmp_path) as broker:
        topic = new_topic(broker.address, 2)
        fill(broker.address, topic, 40)
        with Consumer(broker.address, [topic], group="g") as consumer:
            poll_numbers(consumer, 40)
            consumer.commit()
            broker.stop()
            broker.start()
            positions = [consumer.committed(topic, partition) for partition in range(2)]
            assert sum(position or 0 for position in positions) == 40
            fill(broker.address, topic, 10, first=40)
            assert sorted(poll_numbers(consumer, 10)) == list(range(40, 50))


def test_commit_without_a_group_is_refused(servers: str, topic: str) -> None:
    with Consumer(servers, [topic]) as consumer:
        for use in (consumer.commit, lambda: consumer.committed(topic, 0)):
            with pytest.raises(InvalidRequestError, match="group"):
                use()


def test_position_of_what_is_not_read_is_none(servers: str, topic: str) -> None:
    with Consumer(servers, [topic]) as consumer:
        assert consumer.position(topic, 7) is None
        assert consumer.position("other", 0) is None


# Retention


@pytest.fixture
def shrinking(tmp_path: Path) -> Iterator[LocalBroker]:
    """A broker that keeps the last few kilobytes of each partition."""
    log = LogSettings(segment_bytes_max=4_000, index_interval_bytes=1_000, retention_bytes=8_000)
    with LocalBroker(tmp_path, log=log, retention_check_s=0.05) as made:
        yield made


def shrink(broker: LocalBroker, topic: str, count: int) -> None:
    """Writes more than is kept and waits until what stood there before is gone."""
    with Admin(broker.address) as admin:
        end = admin.offsets(topic)[0][1]
        fill(broker.address, topic, count)
        until(lambda: admin.offsets(topic)[0][0] > end)


def test_position_that_fell_off_the_log_raises_the_valid_range_until_a_seek(shrinking: LocalBroker) -> None:
    topic = new_topic(shrinking.address)
    fill(shrinking.address, topic, 10)
    with Consumer(shrinking.address, [topic], group="g") as consumer:
        poll_numbers(consumer, 5)
        consumer.commit()
    shrink(shrinking, topic, 1000)
    with Consumer(shrinking.address, [topic], group="g", start="committed") as consumer:
        for ask in (consumer.poll, consumer.poll_arrow, lambda: next(iter(consumer)), consumer.poll):
            with pytest.raises(OffsetOutOfRangeError) as caught:
                ask()
        facts = caught.value.facts
        assert facts["offset"] == 5
        assert facts["earliest"] > 5
        assert facts["latest"] == 1010
        consumer.seek(topic, 0, facts["latest"] - 3)
        assert poll_numbers(consumer, 3) == [997, 998, 999]


def test_error_that_nobody_saw_is_forgotten_by_a_seek(shrinking: LocalBroker) -> None:
    topic = new_topic(shrinking.address)
    fill(shrinking.address, topic, 10)
    with Consumer(shrinking.address, [topic], group="g") as consumer:
        poll_numbers(consumer, 5)
        consumer.commit()
    shrink(shrinking, topic, 1000)
    with Consumer(shrinking.address, [topic], group="g", start="committed") as consumer:
        assert consumer.position(topic, 0) == 5
        until(lambda: consumer._engine.backlog._failed)
        consumer.seek(topic, 0, 1005)
        assert poll_numbers(consumer, 5) == [995, 996, 997, 998, 999]


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_start_policy_recovers_and_counts_what_was_lost(shrinking: LocalBroker, start: str) -> None:
    topic = new_topic(shrinking.address)
    fill(shrinking.address, topic, 10)
    with Consumer(shrinking.address, [topic], group="g") as consumer:
        poll_numbers(consumer, 5)
        consumer.commit()
        assert consumer.lost_records == 0
    shrink(shrinking, topic, 1000)
    with Admin(shrinking.address) as admin:
        earliest = admin.offsets(topic)[0][0]
        _, (position,) = admin.describe_group("g")
        assert position.earliest >= earliest and position.lost == position.earliest - 5
        assert position.lag == 1010 - position.earliest, "what is gone is not left to read"
    with Consumer(shrinking.address, [topic], group="g", start=start) as consumer:
        if start == "latest":
            until(lambda: consumer.poll(timeout=0.1) == [] and consumer.lost_records > 0)
            fill(shrinking.address, topic, 1, first=1000)
        records = consumer.poll(1, timeout=10)
        assert records[0].offset == 5 + consumer.lost_records
        assert records[0].offset > 5
        if start == "latest":
            assert records[0].offset == 1010
