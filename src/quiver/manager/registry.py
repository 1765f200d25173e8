"""The metadata as the rest of the manager uses it: topics made and removed, who may do what, who was seen when.

Rule: topics change first in the quorum, then on the brokers; a crash in between is put right on the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Final

from quiver.clock import Clock
from quiver.errors import (
    InvalidRequestError,
    RequestError,
    TopicExistsError,
    UnavailableError,
    UnknownTopicError,
)
from quiver.manager.links import BrokerLink
from quiver.manager.quorum import MetadataQuorum
from quiver.metadata import commands
from quiver.metadata.state import Broker, Consumer, Producer, Topic, check_partition
from quiver.types import PARTITIONS_MAX, PartitionStatus, check_topic_name
from quiver.wire.messages import CreateTopic, DeleteTopic, GetStatus, StatusReply

REPLICATION_FACTOR_DEFAULT: Final = 3
REPLICATION_FACTOR_MAX: Final = 100


class Registry:
    def __init__(self, quorum: MetadataQuorum, clock: Clock) -> None:
        self._quorum = quorum
        self._clock = clock
        self._links: dict[int, BrokerLink] = {}
        # One change of topics at a time: a name is not given again before its old files are gone.
        self._changing = asyncio.Lock()
        self._hosted: set[str] = set()  # topics that the brokers have, by the uid of their first partition
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
        self._hosted.update(uids[0] for uids in hosted.values())
        for topic in list(state.topics.values()):
            if topic.name not in hosted:
                await self._host(topic)  # a crash came between the quorum and the broker
        for name, uids in hosted.items():
            if name not in state.topics:
                # Never delete data on a guess: what a broker holds and no log has deleted is a topic.
                command = commands.CreateTopic(name, uids, REPLICATION_FACTOR_DEFAULT, self._clock.now_us())
                await self._quorum.propose(command)

    def broker_state(self, broker_id: int) -> str:
        return "active" if broker_id in self.brokers_seen else "inactive"

    @property
    def attached(self) -> list[int]:
        return list(self._links)

    async def broker_status(self, broker_id: int) -> list[PartitionStatus]:
        reply, _ = await self._links[broker_id].call(GetStatus())
        assert isinstance(reply, StatusReply)
        self.brokers_seen[broker_id] = self._clock.now_us()
        return reply.partitions

    def link_of(self, topic: str, partition: int) -> BrokerLink:
        """The leader of a partition."""
        replicas = self._quorum.state.topic(topic).partitions[partition].replicas
        link = self._links.get(replicas[0]) if replicas else None
        if link is None:
            raise UnavailableError(f"no broker that holds partition {partition} of topic {topic} is here now")
        return link

    def links(self) -> list[BrokerLink]:
        return list(self._links.values())

    # -- topics --------------------------------------------------------------------------------------------------

    async def topic(self, name: str) -> Topic:
        """A topic that its brokers have. One that is just being made is waited for; one whose files could not be made
        is tried again."""
        topic = self._quorum.state.topic(name)
        if topic.partitions[0].uid in self._hosted:
            return topic
        async with self._changing:
            topic = self._quorum.state.topic(name)
            await self._host(topic)
            return topic

    async def create_topic(self, name: str, partitions: int, replication_factor: int) -> Topic:
        command = self._creation(name, partitions, replication_factor)
        if name in self._quorum.state.topics:
            raise TopicExistsError("Topic already exists", topic=name)
        async with self._changing:
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
        if uids[0] in self._hosted:
            return
        for link in self._links.values():
            with contextlib.suppress(TopicExistsError):  # said twice: the broker has it
                await link.call(CreateTopic(topic.name, len(uids), topic.replication_factor, uids))
        self._hosted.add(uids[0])

    async def delete_topic(self, name: str) -> Topic:
        self._quorum.state.topic(name)  # refused without a trace in the log
        async with self._changing:
            topic: Topic = await self._quorum.propose(commands.DeleteTopic(name))
            self._hosted.discard(topic.partitions[0].uid)
            for link in self._links.values():
                with contextlib.suppress(UnknownTopicError):
                    await link.call(DeleteTopic(name))
        state = self._quorum.state
        self.producers_seen = {known: seen for known, seen in self.producers_seen.items() if known in state.producers}
        self.consumers_seen = {known: seen for known, seen in self.consumers_seen.items() if known in state.consumers}
        return topic

    # -- who may do what -----------------------------------------------------------------------------------------

    async def register_producer(self, topic: str, partition: int | None) -> Producer:
        known = self._quorum.state.topics.get(topic)
        if known is not None:
            check_partition(topic, len(known.partitions), partition)  # refused without a trace in the log
            producer = await self._propose_producer(topic, partition, None)
        else:
            create = self._creation(topic, 1, REPLICATION_FACTOR_DEFAULT)
            check_partition(topic, len(create.uids), partition)
            async with self._changing:
                producer = await self._propose_producer(topic, partition, create)
                await self._host(self._quorum.state.topic(topic))
        self.producers_seen[producer.id] = self._clock.now_us()
        return producer

    async def _propose_producer(
        self, topic: str, partition: int | None, create: commands.CreateTopic | None
    ) -> Producer:
        command = commands.RegisterProducer(topic, partition, create, self._clock.now_us())
        producer: Producer = await self._quorum.propose(command)
        return producer

    async def register_consumer(self, topic: str, partition: int | None) -> Consumer:
        known = self._quorum.state.topic(topic)
        check_partition(topic, len(known.partitions), partition)  # refused without a trace in the log
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
            where = "" if topic is None else f" to topic {topic}"
            raise RequestError(f"Consumer {consumer_id} is not registered{where}")
        self.consumers_seen[consumer_id] = self._clock.now_us()
        return consumer
