"""The metadata as the rest of the manager uses it: topics made and removed, who may do what, who was seen when.

Rule: topics change first in the quorum, then on the brokers; a crash in between is put right on the next start.
"""

from __future__ import annotations

import contextlib
import uuid
from typing import Final

from quiver.clock import Clock
from quiver.errors import InvalidRequestError, RequestError, TopicExistsError, UnknownTopicError
from quiver.manager.links import BrokerLink
from quiver.manager.quorum import MetadataQuorum
from quiver.metadata import commands
from quiver.metadata.state import Broker, Consumer, Producer, Topic
from quiver.types import PARTITIONS_MAX, PartitionStatus, check_topic_name
from quiver.wire.messages import CreateTopic, DeleteTopic, GetStatus, StatusReply

REPLICATION_FACTOR_DEFAULT: Final = 3
REPLICATION_FACTOR_MAX: Final = 100


class Registry:
    def __init__(self, quorum: MetadataQuorum, clock: Clock) -> None:
        self._quorum = quorum
        self._clock = clock
        self._links: dict[int, BrokerLink] = {}
        self.producers_seen: dict[int, int] = {}
        self.consumers_seen: dict[int, int] = {}
        self.brokers_seen: dict[int, int] = {}

    # -- brokers -------------------------------------------------------------------------------------------------

    async def attach_broker(self, broker: Broker, link: BrokerLink) -> None:
        """Takes a broker in and brings its topics and ours together."""
        self._links[broker.id] = link
        state = self._quorum.state
        if state.brokers.get(broker.id) != broker:
            await self._quorum.propose(commands.RegisterBroker(broker.id, broker.endpoint, self._clock.now_us()))
        self.brokers_seen[broker.id] = self._clock.now_us()
        hosted: dict[str, list[str]] = {}
        for status in await self.broker_status(broker.id):
            hosted.setdefault(status.topic, []).append(status.uid)
        for topic in list(state.topics.values()):
            if topic.name not in hosted:
                await self._host(topic)  # a crash came between the quorum and the broker
        for name, uids in hosted.items():
            if name not in state.topics:
                # Never delete data on a guess: what a broker holds and no log has deleted is a topic.
                command = commands.CreateTopic(name, uids, REPLICATION_FACTOR_DEFAULT, self._clock.now_us())
                await self._quorum.propose(command)

    async def broker_status(self, broker_id: int) -> list[PartitionStatus]:
        reply, _ = await self._links[broker_id].call(GetStatus())
        assert isinstance(reply, StatusReply)
        self.brokers_seen[broker_id] = self._clock.now_us()
        return reply.partitions

    def link_of(self, topic: str, partition: int) -> BrokerLink:
        """The leader of a partition."""
        return self._links[self._quorum.state.topic(topic).partitions[partition].replicas[0]]

    def links(self) -> list[BrokerLink]:
        return list(self._links.values())

    # -- topics --------------------------------------------------------------------------------------------------

    async def create_topic(self, name: str, partitions: int, replication_factor: int) -> Topic:
        command = self._creation(name, partitions, replication_factor)
        if name in self._quorum.state.topics:
            raise TopicExistsError("Topic already exists", topic=name)
        topic: Topic = await self._quorum.propose(command)
        await self._host(topic)
        return topic

    def _creation(self, name: str, partitions: int, replication_factor: int) -> commands.CreateTopic:
        check_topic_name(name)
        if not 1 <= partitions <= PARTITIONS_MAX:
            raise InvalidRequestError(f"partitions must be between 1 and {PARTITIONS_MAX}, not {partitions}")
        if not 1 <= replication_factor <= REPLICATION_FACTOR_MAX:
            raise InvalidRequestError(f"replication_factor must be between 1 and {REPLICATION_FACTOR_MAX}")
        uids = [uuid.uuid4().hex for _ in range(partitions)]
        return commands.CreateTopic(name, uids, replication_factor, self._clock.now_us())

    async def _host(self, topic: Topic) -> None:
        uids = [partition.uid for partition in topic.partitions]
        for link in self._links.values():
            with contextlib.suppress(TopicExistsError):  # said twice: the broker has it
                await link.call(CreateTopic(topic.name, len(uids), topic.replication_factor, uids))

    async def delete_topic(self, name: str) -> None:
        await self._quorum.propose(commands.DeleteTopic(name))
        for link in self._links.values():
            with contextlib.suppress(UnknownTopicError):
                await link.call(DeleteTopic(name))

    # -- who may do what -----------------------------------------------------------------------------------------

    async def register_producer(self, topic: str, partition: int | None) -> Producer:
        state = self._quorum.state
        create = None if topic in state.topics else self._creation(topic, 1, REPLICATION_FACTOR_DEFAULT)
        command = commands.RegisterProducer(topic, partition, create, self._clock.now_us())
        producer: Producer = await self._quorum.propose(command)
        if create is not None:
            await self._host(state.topic(topic))
        self.producers_seen[producer.id] = self._clock.now_us()
        return producer

    async def register_consumer(self, topic: str, partition: int | None) -> Consumer:
        self._quorum.state.topic(topic)  # refused without a trace in the log
        consumer: Consumer = await self._quorum.propose(
            commands.RegisterConsumer(topic, partition, self._clock.now_us())
        )
        self.consumers_seen[consumer.id] = self._clock.now_us()
        return consumer

    def producer(self, producer_id: int, topic: str) -> Producer:
        producer = self._quorum.state.producers.get(producer_id)
        if producer is None or producer.topic != topic:
            raise RequestError(f"Producer {producer_id} is not registered to topic {topic}")
        self.producers_seen[producer_id] = self._clock.now_us()
        return producer

    def consumer(self, consumer_id: int, topic: str | None) -> Consumer:
        consumer = self._quorum.state.consumers.get(consumer_id)
        if consumer is None or topic not in (None, consumer.topic):
            raise RequestError(f"Consumer {consumer_id} is not registered to topic {topic}")
        self.consumers_seen[consumer_id] = self._clock.now_us()
        return consumer
