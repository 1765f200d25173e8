"""The metadata as the rest of the manager uses it: topics made and removed, who may do what, who was seen when.

Rule: topics change first in the quorum, then on the brokers; a crash in between is put right on the next start.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, TypeVar

from msgspec import Struct

from quiver.clock import Clock
from quiver.errors import (
    InvalidRequestError,
    RequestError,
    TopicExistsError,
    UnavailableError,
)
from quiver.manager.brokers import Brokers
from quiver.manager.links import LEADER_SEARCH_S, BrokerLink, LeaderLink
from quiver.manager.quorum import MetadataQuorum
from quiver.manager.sightings import SeenTimes
from quiver.metadata import commands
from quiver.metadata.state import Broker, Consumer, Producer, Topic, check_partition
from quiver.topic_settings import REPLICATION_FACTOR, REPLICATION_FACTOR_MAX, Value, check_names, check_settings
from quiver.types import PARTITIONS_MAX, check_topic_name
from quiver.wire.admin_messages import ConsumersReply
from quiver.wire.fields import REGISTERED
from quiver.wire.leaders import ByLeader, OfLeader, by_leader, missed
from quiver.wire.messages import CommitPosition, Position

logger = logging.getLogger("quiver.manager")

REPLICATION_FACTOR_DEFAULT: Final = 3
_ASK_AGAIN_S: Final = 0.2


R = TypeVar("R", bound=OfLeader)


class Others(Protocol):
    """The other managers of the quorum."""

    async def catch_up(self) -> None:
        """Returns when all that any manager acknowledged before is known here."""
        ...

    async def host(self, topic: str) -> bool:
        """Lets the primary see to it that brokers have the topic. False: this manager is the primary."""
        ...


class Registry:
    """`silence_s`: a broker that was not heard of for so long counts as inactive."""

    def __init__(self, quorum: MetadataQuorum, clock: Clock, silence_s: float = math.inf) -> None:
        self._quorum = quorum
        self._clock = clock
        # One change of topics at a time: a name is not given again before its old files are gone.
        self.changing = asyncio.Lock()
        self.brokers = Brokers(clock, silence_s)
        self.producers_seen = SeenTimes()
        self.consumers_seen = SeenTimes()
        self.others: Others | None = None  # of a manager that is not alone

    async def refresh(self) -> None:
        """Before something is said not to be: what was acknowledged elsewhere is seen here."""
        if self.others is not None:
            await self.others.catch_up()

    # -- brokers -------------------------------------------------------------------------------------------------

    async def attach_broker(self, broker: Broker, link: BrokerLink) -> None:
        """Takes the broker of this node in and brings its topics and ours together."""
        self.brokers.attach(broker.id, link)
        await self.register_broker(broker)
        hosted: dict[str, list[str]] = {}
        for status in await self.brokers.status(broker.id):
            hosted.setdefault(status.topic, []).append(status.uid)
        for topic in list(self._quorum.state.topics.values()):
            if len(hosted.get(topic.name, ())) == len(topic.partitions) and not topic.revision:
                self.brokers.note_hosted(topic)
            elif broker.id in self.brokers.concerned(topic):
                await self.brokers.host(topic)  # a crash came between the quorum and the broker
        for name, uids in hosted.items():
            await self.adopt(broker.id, name, uids)

    async def register_broker(self, broker: Broker) -> None:
        known = self._quorum.state.brokers.get(broker.id)
        if known is None or (known.endpoint, known.disk_id) != (broker.endpoint, broker.disk_id):
            now_us = self._clock.now_us()
            await self._quorum.propose(commands.RegisterBroker(broker.id, broker.endpoint, now_us, broker.disk_id))

    async def adopt(self, broker_id: int, name: str, uids: list[str]) -> None:
        """Never delete data on a guess: what a broker holds and no log has deleted is a topic."""
        if name not in self._quorum.state.topics:
            await self._quorum.propose(commands.CreateTopic(name, uids, 1, self._clock.now_us(), [broker_id]))
            self.brokers.note_hosted(self._quorum.state.topic(name))

    @property
    def is_embedded(self) -> bool:
        """The only broker is on this node; such a one says nothing of its disk."""
        return not any(broker.disk_id for broker in self._quorum.state.brokers.values())

    def broker_state(self, broker_id: int) -> str:
        """As it stands in the database; one that is removed when its replicas are elsewhere is draining."""
        if not self.brokers.is_active(broker_id):
            return "inactive"
        return self._quorum.state.brokers[broker_id].phase or "active"

    def link_of(self, topic: str, partition: int) -> BrokerLink:
        """The leader of a partition."""
        found = self._quorum.state.topic(topic).partitions[partition]
        if found.voters:
            return LeaderLink(self.brokers, found)
        link = self.brokers.link(found.replicas[0]) if found.replicas else None
        if link is None:
            raise UnavailableError(f"no broker that holds partition {partition} of topic {topic} is here now")
        return link

    async def ask_leaders(self, request: Struct, reply: type[R], *, need_all: bool = False) -> ByLeader[R]:
        """The answer of who leads it, for each partition that there is. One whose leader went away is waited for; one
        that is out of order is not in it, or an error if all are needed."""
        deadline_s = self._clock.monotonic_s() + LEADER_SEARCH_S
        while True:
            topics = self._quorum.state.topics.values()
            wanted = {(one.topic, one.number): len(one.holders) for topic in topics for one in topic.partitions}
            replies = await self.brokers.ask_all(request, reply)
            lacking = missed(wanted, replies)
            if not lacking:
                found = {place: told for place, told in by_leader(replies).items() if place in wanted}
                broken = [place for place in wanted if place not in found]
                if need_all and broken:
                    topic, number = broken[0]
                    raise UnavailableError(f"partition {number} of topic {topic} is out of order on most brokers")
                return found
            if self._clock.monotonic_s() > deadline_s:
                topic, number = lacking[0]
                raise UnavailableError(f"no broker that leads partition {number} of topic {topic} is here now")
            await asyncio.sleep(_ASK_AGAIN_S)

    # -- topics --------------------------------------------------------------------------------------------------

    async def topic(self, name: str, partition: int | None = None) -> Topic:
        """A topic that its brokers have. One that is just being made is waited for; one whose files could not be made
        is tried again. `partition`: one that is asked for, and may have been added since."""
        topic = await self.known_topic(name, partition)
        if self.brokers.is_hosted(topic):
            return topic
        if self.others is not None and await self.others.host(name):
            self.brokers.note_hosted(topic)
            return topic
        async with self.changing:
            topic = self._quorum.state.topic(name)
            await self.brokers.host(topic)
            return topic

    async def known_topic(self, name: str, partition: int | None = None) -> Topic:
        known = self._quorum.state.topics.get(name)
        if known is None or (partition is not None and partition >= len(known.partitions)):
            await self.refresh()
        return self._quorum.state.topic(name)

    async def create_topic(
        self, name: str, partitions: int, replication_factor: int, settings: Mapping[str, object] | None = None
    ) -> Topic:
        """`settings` may name the replication factor, too; then that counts."""
        told = check_settings(settings or {})
        factor = int(told.pop(REPLICATION_FACTOR, replication_factor))
        command = self._creation(name, partitions, factor, told)
        if name in self._quorum.state.topics:
            raise TopicExistsError("Topic already exists", topic=name)
        async with self.changing:
            topic: Topic = await self._quorum.propose(command)
            await self.brokers.host(topic)
            return topic

    async def add_partitions(self, name: str, partitions: int) -> Topic:
        """So many in all; the same number again changes nothing."""
        count = self.check_growth(name, partitions)
        if partitions == count:
            return await self.topic(name)
        async with self.changing:
            uids = [uuid.uuid4().hex for _ in range(partitions - count)]
            command = commands.AddPartitions(name, count, uids, self.brokers.active)
            topic: Topic = await self._quorum.propose(command)
            await self.brokers.host_again(topic)
            return topic

    def check_growth(self, name: str, partitions: int) -> int:
        """How many it has. Raises when it cannot have so many."""
        count = len(self._quorum.state.topic(name).partitions)
        if partitions > PARTITIONS_MAX:
            raise InvalidRequestError(f"partitions must be between 1 and {PARTITIONS_MAX}, not {partitions}")
        if partitions < count:
            raise InvalidRequestError(f"Topic {name} has {count} partitions; their number can only grow")
        return count

    async def alter_topic(self, name: str, settings: Mapping[str, object], unset: Sequence[object] = ()) -> Topic:
        """Sets and unsets settings; brokers that are here act on them when this returns, others when they are back."""
        told, back = check_settings(settings), check_names(unset)
        if both := sorted(told.keys() & set(back)):
            raise InvalidRequestError(f"{both[0]} cannot be set and unset at once")
        factor = told.pop(REPLICATION_FACTOR, None)
        if factor is not None and factor != self._quorum.state.topic(name).replication_factor and self.is_embedded:
            raise InvalidRequestError("this node is a cluster of its own: it has one replica of everything")
        await self.topic(name)
        async with self.changing:
            command = commands.AlterTopic(name, told, back, None if factor is None else int(factor))
            topic: Topic = await self._quorum.propose(command)
            await self.brokers.tell([topic])
            return topic

    def _creation(
        self, name: str, partitions: int, replication_factor: int, settings: dict[str, Value] | None = None
    ) -> commands.CreateTopic:
        check_topic_name(name)
        if not 1 <= partitions <= PARTITIONS_MAX:
            raise InvalidRequestError(f"partitions must be between 1 and {PARTITIONS_MAX}, not {partitions}")
        if not 1 <= replication_factor <= REPLICATION_FACTOR_MAX:
            raise InvalidRequestError(f"replication_factor must be between 1 and {REPLICATION_FACTOR_MAX}")
        if not self._quorum.state.brokers:
            raise UnavailableError("no broker has joined yet")
        uids = [uuid.uuid4().hex for _ in range(partitions)]
        return commands.CreateTopic(
            name, uids, replication_factor, self._clock.now_us(), self.brokers.active, settings or {}
        )

    async def delete_topic(self, name: str) -> Topic:
        self._quorum.state.topic(name)  # refused without a trace in the log
        async with self.changing:
            topic: Topic = await self._quorum.propose(commands.DeleteTopic(name))
            await self.brokers.unhost(topic)
        state = self._quorum.state
        self.producers_seen.keep(state.producers)
        self.consumers_seen.keep(state.consumers)
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
            async with self.changing:
                producer = await self._propose_producer(topic, partition, create)
                await self.brokers.host(self._quorum.state.topic(topic))
        self.producers_seen.note(producer.id, self._clock.now_us())
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
        self.consumers_seen.note(consumer.id, self._clock.now_us())
        return consumer

    async def consumers_of(self, topic: str) -> ConsumersReply:
        """All that were acknowledged when this was asked; only the primary can say that."""
        await self._quorum.confirm()
        self._quorum.state.topic(topic)
        found = [consumer for consumer in self._quorum.state.consumers.values() if consumer.topic == topic]
        by_partition: dict[int, list[int]] = {}
        for consumer in found:
            if consumer.partition is not None:
                by_partition.setdefault(consumer.partition, []).append(consumer.id)
        everywhere = [one.id for one in found if one.partition is None]
        groups = [group.name for group in self._quorum.state.groups.values() if topic in group.topics]
        return ConsumersReply(everywhere, by_partition, groups, self._quorum.state.counters.consumer - 1)

    async def unregister_consumer(self, consumer_id: int) -> None:
        """It is not waited for any more, and may not read any more. Raises UnknownGroupError."""
        consumer: Consumer = await self._quorum.propose(commands.UnregisterConsumer(consumer_id))
        self.consumers_seen.keep(self._quorum.state.consumers)
        numbers = range(len(self._quorum.state.topic(consumer.topic).partitions))
        forgotten = await asyncio.gather(
            *(self._forget(consumer, number) for number in numbers), return_exceptions=True
        )
        for error in forgotten:
            if isinstance(error, UnavailableError):  # it stands for nobody, and goes when space is reclaimed
                logger.warning("position_left consumer=%d error=%r", consumer_id, error.message)
            elif error is not None:
                raise error

    async def _forget(self, consumer: Consumer, number: int) -> None:
        gone = Position(f"{REGISTERED}{consumer.id}", 0, act="forget")
        await self.link_of(consumer.topic, number).call(CommitPosition(consumer.topic, number, gone))

    def note_seen(self, producers: Mapping[int, int], consumers: Mapping[int, int]) -> None:
        """Who called another manager, and when."""
        self.producers_seen.merge(producers)
        self.consumers_seen.merge(consumers)

    async def producer(self, producer_id: int, topic: str) -> Producer:
        if producer_id not in self._quorum.state.producers:
            await self.refresh()
        producer = self._quorum.state.producers.get(producer_id)
        if producer is None or producer.topic != topic:
            raise RequestError(f"Producer {producer_id} is not registered to topic {topic}")
        self.producers_seen.note(producer_id, self._clock.now_us())
        return producer

    async def consumer(self, consumer_id: int, topic: str | None) -> Consumer:
        if consumer_id not in self._quorum.state.consumers:
            await self.refresh()
        consumer = self._quorum.state.consumers.get(consumer_id)
        if consumer is None or topic not in (None, consumer.topic):
            where = "" if topic is None else f" to topic {topic}"
            raise RequestError(f"Consumer {consumer_id} is not registered{where}")
        self.consumers_seen.note(consumer_id, self._clock.now_us())
        return consumer
