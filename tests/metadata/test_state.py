"""What each command does to the metadata, and in which words it is refused."""

from __future__ import annotations

import msgspec
import pytest

from quiver.errors import (
    InvalidRequestError,
    RequestError,
    TopicExistsError,
    UnknownGroupError,
    UnknownPartitionError,
    UnknownTopicError,
)
from quiver.metadata.commands import (
    AlterTopic,
    Command,
    CreateTopic,
    DeleteTopic,
    RegisterProducer,
    RemoveBroker,
    UnregisterConsumer,
)
from quiver.metadata.state import Broker, Consumer, Partition, Producer, Put, Remove, State, Topic
from tests.metadata.kit import broker, consume, create, image, produce


@pytest.fixture
def state() -> State:
    """Brokers 1 and 2, topic "logs" with two partitions, a producer and a consumer of it."""
    made = State()
    for command in (
        broker(1),
        broker(2),
        CreateTopic("logs", ["u0", "u1"], 2, 1000),
        produce("logs"),
        consume("logs", 1),
    ):
        made.apply(command)
    return made


def refused(state: State, command: Command, error: type[RequestError], message: str) -> None:
    """With this error and these words, and nothing is different afterwards."""
    before = image(state)
    with pytest.raises(error) as caught:
        state.apply(command)
    assert caught.value.message == message
    assert image(state) == before


def test_a_topic_gets_numbered_partitions_on_the_brokers() -> None:
    state = State()
    for broker_id in (1, 2, 3):
        state.apply(broker(broker_id))
    result, changes = state.apply(CreateTopic("logs", ["u0", "u1"], 2, 77))
    expected = Topic("logs", 2, 77, (Partition(1, "logs", 0, "u0", (1, 2)), Partition(2, "logs", 1, "u1", (2, 3))))
    assert result == expected
    assert changes == [Put(expected)]
    assert state.topics == {"logs": expected}
    assert state.topic("logs") is result


def test_a_topic_keeps_the_replica_ids_its_groups_begin_with() -> None:
    state = State()
    for broker_id in (1, 2, 3):
        state.apply(broker(broker_id, disk_id=10 + broker_id))
    topic = state.apply(create("logs", 2, 2)).result
    assert [partition.voters for partition in topic.partitions] == [
        (1 << 32 | 11, 2 << 32 | 12),
        (2 << 32 | 12, 3 << 32 | 13),
    ]
    state.apply(broker(2, disk_id=99))  # its disk was lost
    assert state.topic("logs") == topic, "who may take its place is decided by the group"
    assert state.apply(create("new", 1, 3)).result.partitions[0].voters[-1] == 2 << 32 | 99


def test_a_topic_goes_to_the_brokers_that_are_here_when_they_are_enough() -> None:
    state = State()
    for broker_id in (1, 2, 3, 4):
        state.apply(broker(broker_id, disk_id=7))

    def replicas(name: str, here: list[int]) -> set[int]:
        command = msgspec.structs.replace(create(name, 1, 3), brokers=here)
        return set(state.apply(command).result.partitions[0].replicas)

    assert replicas("a", [1, 2, 4]) == replicas("b", [4, 2, 1, 9]) == {1, 2, 4}
    assert len(replicas("c", [3, 4])) == 3
    assert len(replicas("d", [])) == 3


def test_a_broker_without_a_disk_id_is_in_no_group() -> None:
    state = State()
    state.apply(broker(1))
    alone = state.apply(create("alone")).result.partitions[0]
    assert (alone.replicas, alone.voters) == ((1,), ())
    state.apply(broker(2, disk_id=5))
    state.apply(broker(3, disk_id=6))
    assert state.apply(create("group")).result.partitions[0].replicas == (2, 3)


def test_an_existing_topic_is_refused(state: State) -> None:
    refused(state, create("logs", 5), TopicExistsError, "Topic already exists")


def test_a_topic_made_without_brokers_has_no_replicas() -> None:
    (topic, _) = State().apply(create("logs", 2))
    assert [partition.replicas for partition in topic.partitions] == [(), ()]


def test_a_deleted_topic_takes_its_producers_and_consumers_along(state: State) -> None:
    state.apply(create("other"))
    state.apply(produce("other"))
    topic = state.topic("logs")
    result, changes = state.apply(DeleteTopic("logs"))
    assert result == topic
    assert changes == [Remove(topic), Remove(Producer(1, "logs", None)), Remove(Consumer(1, "logs", 1))]
    assert list(state.topics) == ["other"]
    assert state.producers == {2: Producer(2, "other", None)}
    assert state.consumers == {}


def test_a_missing_topic_is_named_by_every_command_that_needs_it(state: State) -> None:
    message = "Topic none does not exist"
    refused(state, DeleteTopic("none"), UnknownTopicError, message)
    refused(state, consume("none"), UnknownTopicError, message)
    refused(state, produce("none"), UnknownTopicError, message)
    with pytest.raises(UnknownTopicError, match=message):
        state.topic("none")


def test_a_producer_is_registered_to_a_topic_or_to_one_partition(state: State) -> None:
    assert state.apply(produce("logs")) == (Producer(2, "logs", None), [Put(Producer(2, "logs", None))])
    assert state.apply(produce("logs", 1)) == (Producer(3, "logs", 1), [Put(Producer(3, "logs", 1))])
    assert state.producers[3] == Producer(3, "logs", 1)


def test_a_producer_makes_its_topic_when_it_is_missing(state: State) -> None:
    result, changes = state.apply(produce("new", 1, partitions=2))
    topic = state.topic("new")
    assert result == Producer(2, "new", 1)
    assert changes == [Put(topic), Put(result)]
    assert [(part.id, part.number) for part in topic.partitions] == [(3, 0), (4, 1)]


def test_a_producer_leaves_an_existing_topic_as_it_is(state: State) -> None:
    topic = state.topic("logs")
    _, changes = state.apply(produce("logs", partitions=9))
    assert changes == [Put(Producer(2, "logs", None))]
    assert state.topic("logs") is topic


def test_a_consumer_is_registered_to_a_topic_or_to_one_partition(state: State) -> None:
    assert state.apply(consume("logs")) == (Consumer(2, "logs", None), [Put(Consumer(2, "logs", None))])
    assert state.apply(consume("logs", 0)) == (Consumer(3, "logs", 0), [Put(Consumer(3, "logs", 0))])


@pytest.mark.parametrize("partition", [-1, 2, 2**40])
def test_a_partition_that_is_not_there_is_refused(state: State, partition: int) -> None:
    message = f"Partition {partition} does not exist in topic logs"
    refused(state, produce("logs", partition), UnknownPartitionError, message)
    refused(state, consume("logs", partition), UnknownPartitionError, message)


def test_a_producer_refused_for_its_partition_makes_no_topic(state: State) -> None:
    refused(state, produce("new", 2, partitions=2), UnknownPartitionError, "Partition 2 does not exist in topic new")


def test_a_producer_cannot_make_a_topic_of_another_name(state: State) -> None:
    command = RegisterProducer("new", None, create("elsewhere"), 0)
    refused(state, command, UnknownTopicError, "Topic new does not exist")


def test_a_broker_that_says_another_endpoint_has_moved(state: State) -> None:
    assert state.apply(broker(1, "10.0.0.1:9400")) == (Broker(1, "10.0.0.1:9400"), [Put(Broker(1, "10.0.0.1:9400"))])
    assert state.brokers == {1: Broker(1, "10.0.0.1:9400"), 2: Broker(2, "127.0.0.1:9002")}


def test_a_broker_without_partitions_can_go(state: State) -> None:
    state.apply(broker(3))
    assert state.apply(RemoveBroker(3)) == (Broker(3, "127.0.0.1:9003"), [Remove(Broker(3, "127.0.0.1:9003"))])
    assert sorted(state.brokers) == [1, 2]


def test_a_broker_that_is_needed_or_unknown_cannot_go(state: State) -> None:
    refused(state, RemoveBroker(9), InvalidRequestError, "Broker 9 does not exist")
    message = "Broker 2 holds 2 partitions and no other broker can take them"
    refused(state, RemoveBroker(2), InvalidRequestError, message)
    state.apply(DeleteTopic("logs"))
    state.apply(RemoveBroker(2))


def test_ids_are_not_given_again_after_a_deletion(state: State) -> None:
    state.apply(DeleteTopic("logs"))
    topic, _ = state.apply(create("logs", 2))
    assert [partition.id for partition in topic.partitions] == [3, 4]
    assert state.apply(produce("logs")).result.id == 2
    assert state.apply(consume("logs")).result.id == 2


def test_a_refused_registration_uses_no_id(state: State) -> None:
    for command in (produce("logs", 7), produce("none"), produce("none", 7, partitions=1)):
        with pytest.raises(RequestError):
            state.apply(command)
    for command in (consume("logs", 7), consume("none")):
        with pytest.raises(RequestError):
            state.apply(command)
    assert (state.apply(produce("logs")).result.id, state.apply(consume("logs")).result.id) == (2, 2)


def test_settings_are_set_unset_and_counted(state: State) -> None:
    made = state.apply(CreateTopic("jobs", ["u5"], 2, 5, [], {"cleanup": "consumed"})).result
    assert (made.settings, made.revision) == ({"cleanup": "consumed"}, 0)
    altered = state.apply(AlterTopic("jobs", {"retention.ms": 5, "cleanup": "delete"})).result
    assert (altered.settings, altered.revision) == ({"cleanup": "delete", "retention.ms": 5}, 1)
    back = state.apply(AlterTopic("jobs", {}, ["cleanup", "segment.bytes"], 3)).result
    assert (back.settings, back.revision, back.replication_factor) == ({"retention.ms": 5}, 2, 3)
    assert back.partitions == made.partitions


def test_settings_that_are_so_already_change_nothing(state: State) -> None:
    state.apply(AlterTopic("logs", {"retention.ms": 5}))
    same = state.apply(AlterTopic("logs", {"retention.ms": 5}, ["cleanup"], 2))
    assert same.changes == [] and same.result.revision == 1
    refused(state, AlterTopic("nope", {}), UnknownTopicError, "Topic nope does not exist")


def test_consumer_that_is_unregistered_is_gone_and_its_number_too() -> None:
    state = State()
    state.apply(broker(1))
    state.apply(create("logs"))
    first = state.apply(consume("logs")).result
    gone = state.apply(UnregisterConsumer(first.id))
    assert gone == (first, [Remove(first)]) and not state.consumers
    with pytest.raises(UnknownGroupError, match=f"Consumer {first.id} is not registered"):
        state.apply(UnregisterConsumer(first.id))
    assert state.apply(consume("logs")).result.id == first.id + 1
