"""The metadata state machine: a command in, a result and changed rows out.

Rule: `apply` either refuses with a RequestError and changes nothing, or changes the state and says every row that is
now different. The same commands in the same order give the same state, ids included; ids are never used twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from quiver.errors import InvalidRequestError, TopicExistsError, UnknownPartitionError, UnknownTopicError
from quiver.metadata.commands import (
    Command,
    CreateTopic,
    DeleteTopic,
    RegisterBroker,
    RegisterConsumer,
    RegisterManager,
    RegisterProducer,
    RemoveBroker,
)
from quiver.metadata.placement import plan_placement


class Partition(msgspec.Struct, frozen=True):
    id: int
    topic: str
    number: int
    uid: str
    replicas: tuple[int, ...]  # broker ids, the one that should lead first
    voters: tuple[int, ...] = ()  # the replica ids its group began with; empty: a group of one on its only broker


class Topic(msgspec.Struct, frozen=True):
    name: str
    replication_factor: int
    created_us: int
    partitions: tuple[Partition, ...]


class Producer(msgspec.Struct, frozen=True):
    id: int
    topic: str
    partition: int | None  # None: any partition of the topic


class Consumer(msgspec.Struct, frozen=True):
    id: int
    topic: str
    partition: int | None


class Broker(msgspec.Struct, frozen=True):
    id: int
    endpoint: str
    disk_id: int = 0


class Manager(msgspec.Struct, frozen=True):
    id: int
    address: str
    http: str
    replica_id: int


Entity = Topic | Producer | Consumer | Broker | Manager


class Put(NamedTuple):
    """This entity is new or different."""

    entity: Entity


class Remove(NamedTuple):
    """This entity is gone."""

    entity: Entity


class Applied(NamedTuple):
    result: Any
    changes: list[Put | Remove]


class Counters(msgspec.Struct):
    """The next id of each kind."""

    partition: int = 1
    producer: int = 1
    consumer: int = 1


class State:
    __slots__ = ("applied", "brokers", "consumers", "counters", "managers", "producers", "topics")

    def __init__(self) -> None:
        self.applied = 0  # the id of the last transaction in here
        self.counters = Counters()
        self.topics: dict[str, Topic] = {}
        self.producers: dict[int, Producer] = {}
        self.consumers: dict[int, Consumer] = {}
        self.brokers: dict[int, Broker] = {}
        self.managers: dict[int, Manager] = {}

    def apply(self, command: Command) -> Applied:
        match command:
            case CreateTopic():
                return self._create_topic(command)
            case DeleteTopic():
                return self._delete_topic(command)
            case RegisterProducer():
                return self._register_producer(command)
            case RegisterConsumer():
                return self._register_consumer(command)
            case RegisterBroker():
                broker = Broker(command.broker_id, command.endpoint, command.disk_id)
                self.brokers[broker.id] = broker
                return Applied(broker, [Put(broker)])
            case RemoveBroker():
                return self._remove_broker(command)
            case RegisterManager():
                manager = Manager(command.manager_id, command.address, command.http, command.replica_id)
                self.managers[manager.id] = manager
                return Applied(manager, [Put(manager)])

    def topic(self, name: str) -> Topic:
        found = self.topics.get(name)
        if found is None:
            raise UnknownTopicError(f"Topic {name} does not exist", topic=name)
        return found

    def _create_topic(self, command: CreateTopic) -> Applied:
        if command.name in self.topics:
            raise TopicExistsError("Topic already exists", topic=command.name)
        load: dict[int, int] = {}
        for topic in self.topics.values():
            for partition in topic.partitions:
                for leader in partition.replicas[:1]:
                    load[leader] = load.get(leader, 0) + 1
        brokers = self._candidates(command)
        places = plan_placement(brokers, load, len(command.uids), command.replication_factor)
        first = self.counters.partition
        partitions = tuple(
            Partition(first + number, command.name, number, uid, replicas, self._voters(replicas))
            for number, (uid, replicas) in enumerate(zip(command.uids, places, strict=True))
        )
        self.counters.partition += len(partitions)
        topic = Topic(command.name, command.replication_factor, command.now_us, partitions)
        self.topics[topic.name] = topic
        return Applied(topic, [Put(topic)])

    def _candidates(self, command: CreateTopic) -> list[int]:
        """The brokers that may hold a new topic. One without a disk id cannot be in a group with others."""
        known = [broker.id for broker in self.brokers.values() if broker.disk_id] or list(self.brokers)
        here = [broker_id for broker_id in known if broker_id in command.brokers]
        return here if len(here) >= min(command.replication_factor, len(known)) else known

    def _voters(self, replicas: tuple[int, ...]) -> tuple[int, ...]:
        disks = [self.brokers[broker_id].disk_id for broker_id in replicas]
        return tuple(map(replica_id, replicas, disks)) if all(disks) else ()

    def _delete_topic(self, command: DeleteTopic) -> Applied:
        topic = self.topic(command.name)
        del self.topics[topic.name]
        changes: list[Put | Remove] = [Remove(topic)]
        for registered in (self.producers, self.consumers):
            for gone in [entity for entity in registered.values() if entity.topic == topic.name]:
                del registered[gone.id]
                changes.append(Remove(gone))
        return Applied(topic, changes)

    def _register_producer(self, command: RegisterProducer) -> Applied:
        changes: list[Put | Remove] = []
        create = command.create
        if command.topic not in self.topics and create is not None and create.name == command.topic:
            check_partition(command.topic, len(create.uids), command.partition)
            changes += self._create_topic(create).changes
        check_partition(command.topic, len(self.topic(command.topic).partitions), command.partition)
        producer = Producer(self.counters.producer, command.topic, command.partition)
        self.counters.producer += 1
        self.producers[producer.id] = producer
        return Applied(producer, [*changes, Put(producer)])

    def _register_consumer(self, command: RegisterConsumer) -> Applied:
        check_partition(command.topic, len(self.topic(command.topic).partitions), command.partition)
        consumer = Consumer(self.counters.consumer, command.topic, command.partition)
        self.counters.consumer += 1
        self.consumers[consumer.id] = consumer
        return Applied(consumer, [Put(consumer)])

    def _remove_broker(self, command: RemoveBroker) -> Applied:
        broker = self.brokers.get(command.broker_id)
        if broker is None:
            raise InvalidRequestError(f"Broker {command.broker_id} does not exist")
        holds = sum(broker.id in p.replicas for topic in self.topics.values() for p in topic.partitions)
        if holds:
            raise InvalidRequestError(f"Broker {broker.id} holds {holds} partitions and no other broker can take them")
        del self.brokers[broker.id]
        return Applied(broker, [Remove(broker)])


def replica_id(broker_id: int, disk_id: int) -> int:
    """Names a replica in its group. A broker with another disk has forgotten what it promised and is another one."""
    return broker_id << 32 | disk_id


def check_partition(topic: str, count: int, partition: int | None) -> None:
    if partition is not None and not 0 <= partition < count:
        raise UnknownPartitionError(
            f"Partition {partition} does not exist in topic {topic}", topic=topic, partition=partition
        )
