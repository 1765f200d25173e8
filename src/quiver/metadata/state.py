"""The metadata state machine: a command in, a result and changed rows out.

Rule: `apply` either refuses with a RequestError and changes nothing, or changes the state and says every row that is
now different. The same commands in the same order give the same state, ids included; ids are never used twice.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from quiver.errors import (
    BrokerRemovedError,
    ConflictError,
    InvalidRequestError,
    TopicExistsError,
    UnknownGroupError,
    UnknownPartitionError,
    UnknownTopicError,
)
from quiver.metadata import commands
from quiver.metadata.group_table import GroupTable
from quiver.metadata.groups import Group
from quiver.metadata.manager_table import Manager, ManagerTable
from quiver.metadata.placement import plan_placement

DRAINING: Final = "draining"
REMOVED: Final = "removed"
_NAMED: Final = ("brokers", "consumers", "producers", "removed", "topics")


class Partition(msgspec.Struct, frozen=True):
    """`replicas` is where it should be. While it is `moving` its group may not be there yet, and the brokers that are
    `leaving` still hold it; once it is settled they may delete it."""

    id: int
    topic: str
    number: int
    uid: str
    replicas: tuple[int, ...]  # broker ids, the one that should lead first
    # The replica ids its group began with, or once it was placed again one of disk 0 for each broker that holds it:
    # nobody has that id, and who has no replica yet makes a newcomer. Empty: a group of one on its only broker.
    voters: tuple[int, ...] = ()
    epoch: int = 0  # counts what was said of it since its topic was made
    leaving: tuple[int, ...] = ()
    moving: bool = False

    @property
    def holders(self) -> tuple[int, ...]:
        """The brokers that have it or are about to. Without a group only the first, whoever else was planned for it."""
        return self.replicas + self.leaving if self.voters else self.replicas[:1]


class Topic(msgspec.Struct, frozen=True):
    """`settings` has what was set, by name; `revision` counts how often that changed."""

    name: str
    replication_factor: int
    created_us: int
    partitions: tuple[Partition, ...]
    settings: dict[str, bool | int | str] = {}
    revision: int = 0


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
    phase: str = ""  # draining: its replicas go elsewhere; removed: it is not part of the cluster any more


Entity = Topic | Producer | Consumer | Broker | Manager | Group


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
    ownership: int = 1  # the epoch of the next partition that is given to a member of a group


class State:
    __slots__ = (*("_leads", "applied", "counters", "groups", "managers"), *_NAMED)

    def __init__(self) -> None:
        self.applied = 0  # the id of the last transaction in here
        self.counters = Counters()
        self.topics: dict[str, Topic] = {}
        self.producers: dict[int, Producer] = {}
        self.consumers: dict[int, Consumer] = {}
        self.brokers: dict[int, Broker] = {}
        self.managers = ManagerTable()
        self.groups = GroupTable()
        self.removed: dict[int, Broker] = {}  # they do not come back with the disk they had
        self._leads: dict[int, int] | None = None  # what each broker leads, of all topics; None: to be counted

    def apply(self, command: commands.Command) -> Applied:
        match command:
            case commands.CreateTopic():
                return self._create_topic(command)
            case commands.DeleteTopic():
                return self._delete_topic(command)
            case commands.RegisterProducer():
                return self._register_producer(command)
            case commands.RegisterConsumer():
                return self._register_consumer(command)
            case commands.UnregisterConsumer():
                if command.consumer_id not in self.consumers:
                    raise UnknownGroupError(f"Consumer {command.consumer_id} is not registered")
                consumer = self.consumers.pop(command.consumer_id)
                return Applied(consumer, [Remove(consumer)])
            case commands.RegisterBroker():
                return self._register_broker(command)
            case commands.RemoveBroker():
                return self._remove_broker(command)
            case commands.RegisterManager() | commands.AddManager() | commands.RemoveManager():
                return Applied(manager := self.managers.change(command), [Put(manager)])
            case commands.DrainBroker():
                return self._put_broker(msgspec.structs.replace(self.broker(command.broker_id), phase=DRAINING))
            case commands.AddPartitions():
                return self._add_partitions(command)
            case commands.AlterTopic():
                return self._alter_topic(command)
            case commands.PlaceReplicas():
                return self._place_replicas(command)
            case commands.SettleReplicas():
                return self._settle_replicas(command)
            case commands.ChangeGroup():
                group, differs = self.groups.change(command, self._count, self.counters)
                return Applied(group, [Put(group)] if differs else [])
            case commands.DeleteGroup():
                return Applied(group := self.groups.delete(command.group), [Remove(group)])
            case commands.FenceGroup():
                return Applied(self.groups.fence(command.group, self.counters), [])

    def _count(self, topic: str) -> int:
        return len(self.topics[topic].partitions) if topic in self.topics else 0

    def _share_again(self, topic: str) -> list[Put | Remove]:
        """The partitions of a topic are others than before: groups that read it share them anew."""
        return [Put(group) for group in self.groups.share_again(topic, self._count, self.counters)]

    def topic(self, name: str) -> Topic:
        found = self.topics.get(name)
        if found is None:
            raise UnknownTopicError(f"Topic {name} does not exist", topic=name)
        return found

    def broker(self, broker_id: int) -> Broker:
        found = self.brokers.get(broker_id)
        if found is None:
            raise InvalidRequestError(f"Broker {broker_id} does not exist")
        return found

    def check_may_join(self, broker_id: int, disk_id: int) -> None:
        """What it had was moved elsewhere or given up: with that on its disk it is not what it was."""
        if broker_id in self.removed and self.removed[broker_id].disk_id == disk_id:
            raise BrokerRemovedError(
                f"Broker {broker_id} was removed from this cluster; it may join again with an empty data directory"
            )

    def _register_broker(self, command: commands.RegisterBroker) -> Applied:
        self.check_may_join(command.broker_id, command.disk_id)
        known = self.brokers.get(command.broker_id)
        self.removed.pop(command.broker_id, None)
        phase = known.phase if known else ""
        return self._put_broker(Broker(command.broker_id, command.endpoint, command.disk_id, phase))

    def _put_broker(self, broker: Broker) -> Applied:
        self.brokers[broker.id] = broker
        return Applied(broker, [Put(broker)])

    def _create_topic(self, command: commands.CreateTopic) -> Applied:
        if command.name in self.topics:
            raise TopicExistsError("Topic already exists", topic=command.name)
        partitions = self._new_partitions(command.name, 0, command.uids, command.replication_factor, command.brokers)
        return self._put(Topic(command.name, command.replication_factor, command.now_us, partitions, command.settings))

    def _alter_topic(self, command: commands.AlterTopic) -> Applied:
        topic = self.topic(command.topic)
        kept = {name: value for name, value in topic.settings.items() if name not in command.unset}
        altered = msgspec.structs.replace(
            topic,
            settings=dict(sorted((kept | command.settings).items())),
            replication_factor=command.replication_factor or topic.replication_factor,
        )
        if altered == topic:
            return Applied(topic, [])
        return self._put(msgspec.structs.replace(altered, revision=topic.revision + 1))

    def _add_partitions(self, command: commands.AddPartitions) -> Applied:
        topic = self.topic(command.topic)
        if command.first != len(topic.partitions):
            raise ConflictError(f"Topic {topic.name} has {len(topic.partitions)} partitions by now")
        new = self._new_partitions(
            topic.name, command.first, command.uids, topic.replication_factor, command.brokers, epoch=1
        )
        return self._put(msgspec.structs.replace(topic, partitions=topic.partitions + new))

    def _put(self, topic: Topic) -> Applied:
        self._replace_topic(topic.name, topic)
        return Applied(topic, [Put(topic), *self._share_again(topic.name)])

    def _replace_topic(self, name: str, topic: Topic | None) -> None:
        """Every change of topics is made here, so that leaders need not be counted anew for each new topic."""
        old = self.topics.get(name)
        if self._leads is not None:
            _count_leaders(self._leads, old, -1)
            _count_leaders(self._leads, topic, 1)
        if topic is None:
            del self.topics[name]
        else:
            self.topics[name] = topic

    def _new_partitions(
        self, topic: str, first: int, uids: list[str], factor: int, here: list[int], epoch: int = 0
    ) -> tuple[Partition, ...]:
        if self._leads is None:
            self._leads = {}
            for other in self.topics.values():
                _count_leaders(self._leads, other, 1)
        places = plan_placement(self._candidates(factor, here), self._leads, len(uids), factor)
        first_id = self.counters.partition
        self.counters.partition += len(uids)
        return tuple(
            Partition(first_id + at, topic, first + at, uid, replicas, self._voters(replicas), epoch)
            for at, (uid, replicas) in enumerate(zip(uids, places, strict=True))
        )

    def _candidates(self, factor: int, here: list[int]) -> list[int]:
        """The brokers that may hold something new. One without a disk id cannot be in a group with others."""
        staying = [broker for broker in self.brokers.values() if broker.phase != DRAINING]
        known = [broker.id for broker in staying if broker.disk_id] or list(self.brokers)
        found = [broker_id for broker_id in known if broker_id in here]
        return found if len(found) >= min(factor, len(known)) else known

    def _place_replicas(self, command: commands.PlaceReplicas) -> Applied:
        for place in command.places:
            if not place.replicas or len(set(place.replicas)) < len(place.replicas):
                raise InvalidRequestError(f"{place.topic}-{place.number} needs a broker, and no broker twice")
            if not all(self.broker(broker_id).disk_id for broker_id in place.replicas):
                raise InvalidRequestError(f"{place.topic}-{place.number} cannot be on a node of its own")
        found = [(self._at(place), tuple(place.replicas)) for place in command.places]
        return self._put_partitions(
            [_placed(old, replicas) for old, replicas in found if old is not None and old.voters]
        )

    def _settle_replicas(self, command: commands.SettleReplicas) -> Applied:
        found = [self._at(settled) for settled in command.settled]
        return self._put_partitions([_settled(old) for old in found if old is not None and old.moving])

    def _put_partitions(self, new: list[Partition]) -> Applied:
        changed: dict[str, list[Partition]] = {}
        for partition in new:
            of_topic = changed.setdefault(partition.topic, list(self.topics[partition.topic].partitions))
            of_topic[partition.number] = partition
        for name, partitions in changed.items():
            self._replace_topic(name, msgspec.structs.replace(self.topics[name], partitions=tuple(partitions)))
        topics = [self.topics[name] for name in changed]
        return Applied(topics, [Put(topic) for topic in topics])

    def _at(self, place: commands.Place | commands.Settled) -> Partition | None:
        """That partition, if nothing was said of it since."""
        topic = self.topics.get(place.topic)
        if topic is None or not 0 <= place.number < len(topic.partitions):
            return None
        found = topic.partitions[place.number]
        return found if (found.uid, found.epoch) == (place.uid, place.epoch) else None

    def _voters(self, replicas: tuple[int, ...]) -> tuple[int, ...]:
        disks = [self.brokers[broker_id].disk_id for broker_id in replicas]
        return tuple(map(replica_id, replicas, disks)) if all(disks) else ()

    def _delete_topic(self, command: commands.DeleteTopic) -> Applied:
        topic = self.topic(command.name)
        self._replace_topic(topic.name, None)
        changes: list[Put | Remove] = [Remove(topic)]
        for registered in (self.producers, self.consumers):
            for gone in [entity for entity in registered.values() if entity.topic == topic.name]:
                del registered[gone.id]
                changes.append(Remove(gone))
        return Applied(topic, [*changes, *self._share_again(topic.name)])

    def _register_producer(self, command: commands.RegisterProducer) -> Applied:
        changes: list[Put | Remove] = []
        create = command.create
        if command.topic not in self.topics and create is not None and create.name == command.topic:
            check_partition(command.topic, len(create.uids), command.partition)
            changes += self._create_topic(create).changes
        check_partition(command.topic, len(self.topic(command.topic).partitions), command.partition)
        producer = Producer(self.counters.producer, command.topic, command.partition)
        self.producers[producer.id], self.counters.producer = producer, producer.id + 1
        return Applied(producer, [*changes, Put(producer)])

    def _register_consumer(self, command: commands.RegisterConsumer) -> Applied:
        check_partition(command.topic, len(self.topic(command.topic).partitions), command.partition)
        consumer = Consumer(self.counters.consumer, command.topic, command.partition)
        self.consumers[consumer.id], self.counters.consumer = consumer, consumer.id + 1
        return Applied(consumer, [Put(consumer)])

    def _remove_broker(self, command: commands.RemoveBroker) -> Applied:
        broker = self.broker(command.broker_id)
        if holds := self.held_by(broker.id):
            raise InvalidRequestError(f"Broker {broker.id} holds {holds} partitions and no other broker can take them")
        del self.brokers[broker.id]
        if not broker.disk_id:
            return Applied(broker, [Remove(broker)])
        removed = self.removed[broker.id] = msgspec.structs.replace(broker, phase=REMOVED)
        return Applied(removed, [Put(removed)])

    def held_by(self, broker_id: int) -> int:
        """How many partitions a broker has, or is to have."""
        return sum(
            broker_id in partition.replicas or broker_id in partition.leaving
            for topic in self.topics.values()
            for partition in topic.partitions
        )


def replica_id(broker_id: int, disk_id: int) -> int:
    """Names a replica in its group. A broker with another disk has forgotten what it promised and is another one."""
    return broker_id << 32 | disk_id


def _count_leaders(leads: dict[int, int], topic: Topic | None, step: int) -> None:
    for partition in topic.partitions if topic is not None else ():
        for leader in partition.replicas[:1]:
            leads[leader] = leads.get(leader, 0) + step


def _placed(old: Partition, replicas: tuple[int, ...]) -> Partition:
    held = dict.fromkeys(old.replicas + old.leaving)
    leaving = tuple(broker_id for broker_id in held if broker_id not in replicas)
    voters = tuple(replica_id(broker_id, 0) for broker_id in replicas + leaving)
    return Partition(old.id, old.topic, old.number, old.uid, replicas, voters, old.epoch + 1, leaving, True)


def _settled(old: Partition) -> Partition:
    """In another epoch: brokers are told anew, and those that have left may delete it."""
    voters = tuple(replica_id(broker_id, 0) for broker_id in old.replicas)
    return Partition(old.id, old.topic, old.number, old.uid, old.replicas, voters, old.epoch + 1)


def check_partition(topic: str, count: int, partition: int | None) -> None:
    if partition is not None and not 0 <= partition < count:
        raise UnknownPartitionError(
            f"Partition {partition} does not exist in topic {topic}", topic=topic, partition=partition
        )
