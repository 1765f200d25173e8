"""Ranges of a partition on three real brokers, of which any may be asked and any may die."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from quiver import Admin, Producer
from quiver.client import fetcher
from quiver.client.range_reader import RangeReader
from quiver.errors import OffsetOutOfRangeError, UnknownTopicError
from quiver.testing.cluster import QuiverCluster
from tests.system.kit import until

pytestmark = [pytest.mark.system, pytest.mark.slow]

COUNT = 12_000  # 12 MB in batches of 100: several answers


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuiverCluster]:
    with QuiverCluster(tmp_path_factory.mktemp("cluster"), 3) as made:
        yield made


def values(number: int) -> bytes:
    return b"%06d" % number + b"." * 994


def fill(cluster: QuiverCluster) -> str:
    topic = cluster.new_topic()
    with Producer(cluster.servers) as producer:
        for start in range(0, COUNT, 100):
            producer.send_many(topic, [values(number) for number in range(start, start + 100)]).result(30)

    def all_have_it() -> bool:
        with Admin(cluster.servers) as admin:
            told = admin.replica_status(topic).values()
            return [one.next_offset for statuses in told for one in statuses] == [COUNT] * 3

    until(all_have_it)
    return topic


def numbers(reader: RangeReader) -> list[int]:
    found = []
    with reader:
        for offsets, batch in reader:
            rows = [int(value[:6]) for value in batch.column("value").to_pylist()]
            assert rows == list(offsets)
            found += rows
    return found


def test_what_cannot_be_read_is_told(cluster: QuiverCluster) -> None:
    topic = cluster.new_topic()
    with Producer(cluster.servers) as producer:
        producer.send(topic, b"x").result(30)
    assert list(RangeReader(cluster.servers, topic, 0, 1, 1)) == []
    with pytest.raises(UnknownTopicError, match="was deleted and made again"):
        numbers(RangeReader(cluster.servers, topic, 0, 0, 1, uid="0" * 32))
    with pytest.raises(UnknownTopicError, match="does not exist"):
        numbers(RangeReader(cluster.servers, "nowhere", 0, 0, 1))
    with pytest.raises(OffsetOutOfRangeError):
        numbers(RangeReader(cluster.servers, topic, 0, 5, 6))


def test_time_that_the_caller_takes_does_not_count(cluster: QuiverCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next answer was asked for before the pause. It comes too late then, and is asked for again."""
    topic = fill(cluster)
    monkeypatch.setattr(fetcher, "_REPLY_SLACK_S", 1.0)
    with RangeReader(cluster.servers, topic, 0, 0, COUNT, patience=4.0) as reader:
        found = []
        for offsets, _ in reader:
            if not found:
                time.sleep(5.0)  # longer than a reply may take, and than the patience
            found += offsets
    assert found == list(range(COUNT))


def test_range_is_read_from_any_replica_though_brokers_die(cluster: QuiverCluster) -> None:
    """The last one here: it leaves one broker."""
    topic = fill(cluster)
    for turn in range(3):
        reader = RangeReader(cluster.servers, topic, 0, 150, 1234, turn=turn)
        assert numbers(reader) == list(range(150, 1234))
    with Admin(cluster.servers) as admin:
        info = admin.describe_topic(topic)
    leader, replicas = info.partitions[0].leader, info.partitions[0].replicas

    # The leader dies while it is read from: another goes on.
    servers = cluster.servers
    with RangeReader(servers, topic, 0, 0, COUNT, uid=info.uid, turn=replicas.index(leader)) as reader:
        rows = 0
        for offsets, batch in reader:
            if not rows:
                cluster.kill_broker(leader)
            assert offsets[0] == rows
            rows += batch.num_rows
    assert rows == COUNT

    # One follower alone: nobody leads, and what is committed can be read all the same.
    last = next(number for number in replicas if number != leader)
    cluster.kill_broker(next(number for number in replicas if number not in (leader, last)))
    assert numbers(RangeReader(servers, topic, 0, 5000, 5010)) == list(range(5000, 5010))
