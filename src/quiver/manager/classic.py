"""The classic HTTP API: what each call means. How bytes become parameters is decided in `http.py`.

Rule: the contract's names, texts and meanings, to the letter. A call that fails has changed nothing.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any, Final
from urllib.parse import urlsplit

from quiver.clock import Clock
from quiver.errors import (
    InvalidRequestError,
    MessageTooLargeError,
    OutOfOrderSequenceError,
    RequestError,
    UnavailableError,
)
from quiver.manager.consuming import Consuming
from quiver.manager.joiner import Joiner
from quiver.manager.moves import Moves
from quiver.manager.newcomers import Newcomers
from quiver.manager.params import Params
from quiver.manager.quorum import MetadataQuorum
from quiver.manager.registry import REPLICATION_FACTOR_DEFAULT, Registry
from quiver.manager.seen_rows import ConsumerSeen, ProducerSeen, SeenRows, time_text
from quiver.manager.standing import Standing
from quiver.metadata.manager_table import Manager
from quiver.metadata.state import Consumer, Producer, Topic
from quiver.topic_settings import check_key, message_bytes_of
from quiver.wire.messages import CountClient, CountReply
from quiver.wire.partitioning import partition_of_key

TOPIC: Final = ("topic", "topic_name", "name")
PARTITION: Final = ("partition_id", "partition")
CLIENT: Final = ("prod_client", "prod_name")
CLIENT_NAME_MAX: Final = 255


def client_number(name: str) -> int:
    """The producer id that stands for a client name: 62 bits of its hash, never 0."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") % (2**62 - 1) + 1


class ClassicApi:
    def __init__(
        self,
        quorum: MetadataQuorum,
        registry: Registry,
        moves: Moves,
        standing: Standing,
        clock: Clock,
        *,
        message_bytes_max: int,
    ) -> None:
        self._quorum = quorum
        self._registry = registry
        self._moves = moves
        self._message_bytes_max = message_bytes_max
        self._standing = standing
        self.newcomers: Newcomers | None = None  # an embedded node takes none
        # A new one at each start: what an earlier gateway numbered is not known any more. The v1 API uses it too.
        self.joiner = Joiner(registry.link_of, clock, secrets.randbelow(2**62) + 1)
        self._consuming = Consuming(registry.link_of)
        self._next_produce: dict[str, int] = {}
        self._producers_seen = SeenRows(ProducerSeen)
        self._consumers_seen = SeenRows(ConsumerSeen)

    # -- topics --------------------------------------------------------------------------------------------------

    async def list_topics(self, params: Params) -> dict[str, Any]:
        if not self._standing.is_primary:
            await self._registry.refresh()
        names = list(self._quorum.state.topics)
        return {"topics": names, "message": names}

    async def create_topic(self, params: Params) -> dict[str, Any]:
        topic = await self._registry.create_topic(
            params.text(*TOPIC),
            params.integer("partitions", default=1),
            params.integer("replication_factor", default=REPLICATION_FACTOR_DEFAULT),
        )
        return {
            "message": f"Topic {topic.name} created successfully",
            "topic_name": topic.name,
            "partitions": _numbers(topic),
        }

    async def list_partitions(self, params: Params) -> dict[str, Any]:
        return {"partitions": _numbers(await self._registry.known_topic(params.text(*TOPIC)))}

    async def delete_topic(self, name: str) -> None:
        self._consuming.forget(await self._registry.delete_topic(name))

    # -- registration --------------------------------------------------------------------------------------------

    async def register_producer(self, params: Params) -> dict[str, Any]:
        producer = await self._registry.register_producer(params.text(*TOPIC), params.optional_integer(*PARTITION))
        return {"producer_id": producer.id}

    async def register_consumer(self, params: Params) -> dict[str, Any]:
        consumer = await self._registry.register_consumer(params.text(*TOPIC), params.optional_integer(*PARTITION))
        return {"consumer_id": consumer.id}

    # -- produce -------------------------------------------------------------------------------------------------

    async def produce(self, params: Params) -> dict[str, Any]:
        asked = params.optional_integer(*PARTITION)
        topic = await self._registry.topic(params.text(*TOPIC), asked)
        producer = await self._registry.producer(params.integer("producer_id"), topic.name)
        value = params.text("message").encode()
        key = params.optional_text("key")
        key_bytes = None if key is None else key.encode()
        client = params.optional_text(*CLIENT)
        sequence = params.optional_integer("sequence")
        limit = message_bytes_of(topic.settings, self._message_bytes_max)
        if len(value) + len(key_bytes or b"") > limit:
            raise MessageTooLargeError(f"Message is larger than the limit of {limit} bytes")
        check_key(topic.name, topic.settings, key is not None)
        if client is not None and not 0 < len(client) <= CLIENT_NAME_MAX:
            raise InvalidRequestError(f"prod_client must have 1 to {CLIENT_NAME_MAX} characters")
        if sequence is not None and client is None:
            raise InvalidRequestError("sequence needs prod_client: numbers are counted for each client name")
        if sequence is not None and not 0 <= sequence < 2**62:
            raise InvalidRequestError("sequence counts from 0")
        partition = self._choose(topic, producer, asked, key_bytes, client, sequence)
        number = client_number(client) if client is not None else 0
        if sequence is None:
            offset = await self.joiner.add(topic.name, partition, number, value, key_bytes)
        else:
            offset = await self._send_numbered(topic.name, partition, number, sequence, value, key_bytes)
        return {"partition_id": partition, "offset": offset}

    async def _send_numbered(
        self, topic: str, partition: int, client: int, sequence: int, value: bytes, key: bytes | None
    ) -> int:
        try:
            return await self.joiner.send_one(topic, partition, client, sequence, value, key)
        except OutOfOrderSequenceError as error:
            expected = error.facts["expected"]
            raise RequestError(f"Sequence {sequence} is out of order: the expected sequence is {expected}") from error

    def _choose(
        self,
        topic: Topic,
        producer: Producer,
        asked: int | None,
        key: bytes | None,
        client: str | None,
        sequence: int | None,
    ) -> int:
        count = len(topic.partitions)
        if asked is not None and not 0 <= asked < count:
            raise RequestError(f"Partition {asked} does not exist in topic {topic.name}")
        if producer.partition is not None:
            if asked not in (None, producer.partition):
                raise RequestError(f"Producer {producer.id} is registered to partition {producer.partition} only")
            return producer.partition
        if asked is not None:
            return asked
        if key is not None:
            return partition_of_key(key, count)
        if sequence is not None and client is not None:
            # A retry must meet its first try, so the name decides and not whose turn it is.
            return partition_of_key(client.encode(), count)
        turn = self._next_produce.get(topic.name, 0) % count
        self._next_produce[topic.name] = turn + 1
        return turn

    async def client_size(self, params: Params) -> dict[str, Any]:
        request = CountClient(client_number(params.text(*CLIENT)))
        found = await self._registry.ask_leaders(request, CountReply, need_all=True)
        count = 0
        for reply in {id(one): one for one in found.values()}.values():
            for place, stored in zip(reply.led, reply.counts, strict=True):
                count += stored if found.get((place.topic, place.partition)) is reply else 0
        return {"count": count}

    # -- consume -------------------------------------------------------------------------------------------------

    async def consume(self, params: Params) -> dict[str, Any]:
        asked = params.optional_integer(*PARTITION)
        topic = await self._registry.topic(params.text(*TOPIC), asked)
        consumer = await self._registry.consumer(params.integer("consumer_id"), topic.name)
        after = params.optional_integer("after")
        if after is not None and not -1 <= after < 2**62:
            raise InvalidRequestError("after is an offset, or -1")
        found = await self._consuming.take(consumer, topic, asked, after)
        text = (found.value or b"").decode("utf-8", "replace")
        return {"message": text, "offset": found.offset, "partition_id": found.partition}

    async def size(self, params: Params) -> dict[str, Any]:
        asked = params.optional_integer(*PARTITION)
        topic = await self._registry.topic(params.text(*TOPIC), asked)
        consumer = await self._registry.consumer(params.integer("consumer_id"), topic.name)
        return {"size": await self._consuming.size(consumer, topic, asked)}

    async def messages_read(self, consumer: Consumer) -> int:
        """Over all its partitions."""
        return await self._consuming.messages_read(consumer, await self._registry.topic(consumer.topic))

    async def set_offset(self, params: Params) -> dict[str, Any]:
        consumer = await self._registry.consumer(params.integer("consumer_id"), params.optional_text(*TOPIC))
        offset, asked = params.integer("offset"), params.optional_integer(*PARTITION)
        topic = await self._registry.topic(consumer.topic, asked)
        await self._consuming.set_offset(consumer, topic, asked, offset)
        return {"message": f"Offset set to {offset}", "offset": offset}

    # -- the cluster ---------------------------------------------------------------------------------------------

    async def replicas(self, params: Params) -> dict[str, Any]:
        """Who reads and who writes. A manager that is alone does both."""
        managers, primary = self._quorum.state.managers, self._quorum.primary
        if primary not in managers:
            raise UnavailableError("no manager leads now")
        others = [_place(row) for row in managers.values() if row.id != primary]
        return {"replicas": others or [_place(managers[primary])], "primary": _place(managers[primary])}

    async def list_brokers(self, params: Params) -> dict[str, Any]:
        return {"brokers": self.broker_rows()}

    def broker_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "broker_id": broker.id,
                "endpoint": broker.endpoint,
                "status": self._registry.broker_state(broker.id),
                "last_heartbeat": time_text(self._registry.brokers.seen.get(broker.id)),
            }
            for broker in self._quorum.state.brokers.values()
        ]

    async def add_broker(self, params: Params) -> dict[str, Any]:
        endpoint = params.text("endpoint")
        for broker in self._quorum.state.brokers.values():
            if broker.endpoint == endpoint:
                return {"message": f"Broker {broker.id} is part of the cluster", "broker_id": broker.id}
        if self.newcomers is None:
            raise RequestError(
                f"An embedded node is its own and only broker; {endpoint} cannot join it. "
                f"'quiver up --brokers 2' makes a cluster that takes more"
            )
        broker_id = await self.newcomers.add(endpoint)
        return {"message": f"Broker {broker_id} is part of the cluster", "broker_id": broker_id}

    async def remove_broker(self, params: Params) -> dict[str, Any]:
        broker_id = params.integer("broker_id")
        if await self._moves.remove_broker(broker_id):
            message = f"Broker {broker_id} removed"
        else:
            message = f"Broker {broker_id} is being removed: its partitions move to other brokers"
        return {"message": message, "broker_id": broker_id}

    async def health(self, params: Params) -> dict[str, Any]:
        state, registry = self._quorum.state, self._registry
        return self.node_health() | {
            "producers": self._producers_seen.rows(state.producers, registry.producers_seen),
            "consumers": self._consumers_seen.rows(state.consumers, registry.consumers_seen),
        }

    def make_rows_ahead(self) -> bool:
        """Some rows of GET /health, of clients that are new. False when there are all of them."""
        state, registry = self._quorum.state, self._registry
        return self._consumers_seen.make_ahead(state.consumers, registry.consumers_seen) or (
            self._producers_seen.make_ahead(state.producers, registry.producers_seen)
        )

    def node_health(self) -> dict[str, Any]:
        """This manager, and all managers and brokers; without clients, of which there may be a hundred thousand."""
        quorum, standing, damage = self._quorum, self._standing, self._quorum.mending.damage
        return {
            "role": "primary" if standing.is_primary else "secondary",
            "term": quorum.term,
            "transaction": quorum.state.applied,
            "lag": standing.lag,
            "trouble": quorum.full or (damage.message if damage else None),
            "cut_off_since": time_text(standing.cut_off_since_us),
            "managers": [
                {"manager_id": row.id}
                | _place(row)
                | {
                    "role": standing.role_of(row.id),
                    "transaction": standing.stored.get(row.id),
                    "last_heartbeat": time_text(standing.seen.get(row.id)),
                }
                for row in quorum.state.managers.values()
            ],
            "brokers": self.broker_rows(),
        }


def _numbers(topic: Topic) -> list[int]:
    return [partition.number for partition in topic.partitions]


def _place(manager: Manager) -> dict[str, Any]:
    where = urlsplit(manager.http)
    return {"ip": where.hostname, "port": where.port}
