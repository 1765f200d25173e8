"""Topics made, listed, described and deleted; offsets and states told."""

from __future__ import annotations

import threading

import pytest

from quiver import Admin, Consumer, Producer
from quiver.errors import ClosedError, QuiverError, TopicExistsError, UnknownTopicError
from tests.client.kit import fill, new_topic, stored, until


def test_topic_is_there_from_creation_to_deletion(servers: str) -> None:
    with Admin(servers) as admin:
        info = admin.create_topic("life", 2)
        assert (info.name, [partition.id for partition in info.partitions]) == ("life", [0, 1])
        assert admin.describe_topic("life") == info
        assert "life" in admin.list_topics()
        with pytest.raises(TopicExistsError):
            admin.create_topic("life", 5)
        assert len(admin.describe_topic("life").partitions) == 2
        admin.delete_topic("life")
        assert "life" not in admin.list_topics()
        with pytest.raises(UnknownTopicError):
            admin.describe_topic("life")


def test_recreated_topic_is_empty(servers: str) -> None:
    topic = new_topic(servers)
    fill(servers, topic, 10)
    with Admin(servers) as admin:
        admin.delete_topic(topic)
        admin.create_topic(topic)
        assert admin.offsets(topic) == {0: (0, 0)}
    assert stored(servers, topic) == []


def test_offsets_are_where_each_partition_begins_and_ends(servers: str) -> None:
    topic = new_topic(servers, 3)
    with Producer(servers) as producer, Admin(servers) as admin:
        producer.send_many(topic, [b"v"] * 7, partition=1).result(10)
        producer.send(topic, b"v", partition=2).result(10)
        assert admin.offsets(topic) == {0: (0, 0), 1: (0, 7), 2: (0, 1)}


def test_state_and_size_of_partitions_are_told(servers: str) -> None:
    topic = new_topic(servers, 2)
    fill(servers, topic, 10)
    with Admin(servers) as admin:
        statuses = admin.partition_status(topic)
        assert [(status.partition, status.state) for status in statuses] == [(0, "online"), (1, "online")]
        assert sum(status.next_offset for status in statuses) == 10
        assert max(status.size_bytes for status in statuses) > 100
        assert {status.topic for status in admin.partition_status()} >= {topic}
        assert [node.address for node in admin.nodes()] == [servers]


def test_consumer_of_a_deleted_topic_is_told(servers: str) -> None:
    topic = new_topic(servers)
    fill(servers, topic, 3)
    with Consumer(servers, [topic]) as consumer, Admin(servers) as admin:
        assert len(consumer.poll(timeout=10)) == 3
        admin.delete_topic(topic)

        def told() -> bool:
            try:
                return bool(consumer.poll(timeout=0.1))
            except UnknownTopicError:
                return True

        assert until(told)


def test_admin_is_shared_between_threads(servers: str) -> None:
    errors: list[BaseException] = []
    with Admin(servers) as admin:

        def work(number: int) -> None:
            try:
                for turn in range(5):
                    name = f"shared-{number}-{turn}"
                    admin.create_topic(name)
                    admin.describe_topic(name)
                    admin.list_topics()
                    admin.delete_topic(name)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


def test_one_of_many_creators_wins(servers: str) -> None:
    outcomes: list[str] = []

    def create() -> None:
        with Admin(servers) as admin:
            try:
                admin.create_topic("contested")
                outcomes.append("made")
            except QuiverError as error:
                outcomes.append(error.code)

    threads = [threading.Thread(target=create) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["TopicExistsError"] * 4 + ["made"]


def test_closed_admin_refuses(servers: str) -> None:
    admin = Admin(servers)
    admin.list_topics()
    admin.close()
    admin.close()
    with pytest.raises(ClosedError):
        admin.list_topics()
