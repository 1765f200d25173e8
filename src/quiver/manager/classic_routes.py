"""The classic API as a table: path, method, what a call takes under which names, and what its success carries.

Rule: the door and /openapi.json read this table. What the calls mean is decided in `classic.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Final, Literal, NamedTuple

from quiver.manager.classic import CLIENT, PARTITION, TOPIC

Type = Literal["string", "integer", "array", "object", "string or null"]


class Field(NamedTuple):
    """`names`: the first is the contract's, the others are understood too."""

    names: tuple[str, ...]
    type: Type = "string"
    required: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class ClassicRoute:
    method: str
    path: str
    call: str
    summary: str
    takes: tuple[Field, ...] = ()
    gives: tuple[tuple[str, Type], ...] = ()
    for_primary: bool = False  # it changes metadata: whichever manager is asked, the primary does it


_TOPIC: Final = Field(TOPIC)
_TOPIC_NAME: Final = Field(("topic_name", "topic", "name"))
_PARTITION: Final = Field(PARTITION, "integer", False)
_CONSUMER: Final = Field(("consumer_id",), "integer")
_PARTITIONS: Final[tuple[tuple[str, Type], ...]] = (("partitions", "array"),)

CLASSIC_ROUTES: Final = (
    ClassicRoute("GET", "/topics", "list_topics", "All topics", (), (("topics", "array"), ("message", "array"))),
    ClassicRoute(
        "POST",
        "/topics",
        "create_topic",
        "Make a topic",
        (_TOPIC_NAME, Field(("partitions",), "integer", False), Field(("replication_factor",), "integer", False)),
        (("message", "string"), ("topic_name", "string"), *_PARTITIONS),
        for_primary=True,
    ),
    ClassicRoute("GET", "/topics/partitions", "list_partitions", "Its partitions", (_TOPIC_NAME,), _PARTITIONS),
    ClassicRoute("GET", "/topics/partition", "list_partitions", "The same", (_TOPIC_NAME,), _PARTITIONS),
    ClassicRoute(
        "POST",
        "/producer/register",
        "register_producer",
        "A new producer; makes the topic when it is missing",
        (_TOPIC, _PARTITION),
        (("producer_id", "integer"),),
        for_primary=True,
    ),
    ClassicRoute(
        "POST",
        "/consumer/register",
        "register_consumer",
        "A new consumer; starts at the oldest message kept",
        (_TOPIC, _PARTITION),
        (("consumer_id", "integer"),),
        for_primary=True,
    ),
    ClassicRoute(
        "POST",
        "/producer/produce",
        "produce",
        "Store a message",
        (
            _TOPIC,
            Field(("producer_id",), "integer"),
            Field(("message",)),
            _PARTITION,
            Field(("key",), "string", False),
            Field(CLIENT, "string", False),
            Field(("sequence",), "integer", False),
        ),
        (("partition_id", "integer"), ("offset", "integer")),
    ),
    ClassicRoute(
        "GET",
        "/consumer/consume",
        "consume",
        "The next message; the consumer's position moves past it",
        (_TOPIC, _CONSUMER, _PARTITION, Field(("after",), "integer", False)),
        (("message", "string"), ("offset", "integer"), ("partition_id", "integer")),
    ),
    ClassicRoute(
        "POST",
        "/consumer/set_offset",
        "set_offset",
        "The next consume returns the first message after this offset",
        (_CONSUMER, Field(("offset",), "integer"), Field(TOPIC, "string", False), _PARTITION),
        (("message", "string"), ("offset", "integer")),
    ),
    ClassicRoute(
        "GET", "/size", "size", "Messages still to read", (_TOPIC, _CONSUMER, _PARTITION), (("size", "integer"),)
    ),
    ClassicRoute(
        "GET", "/producer/client_size", "client_size", "Messages of a client", (Field(CLIENT),), (("count", "integer"),)
    ),
    ClassicRoute("GET", "/replicas", "replicas", "Managers", (), (("replicas", "array"), ("primary", "object"))),
    ClassicRoute("GET", "/brokers", "list_brokers", "All brokers", (), (("brokers", "array"),)),
    ClassicRoute(
        "POST",
        "/brokers",
        "add_broker",
        "Add a broker",
        (Field(("endpoint",)),),
        (("message", "string"), ("broker_id", "integer")),
        for_primary=True,
    ),
    ClassicRoute(
        "DELETE",
        "/brokers/{broker_id}",
        "remove_broker",
        "Drain and remove a broker",
        (Field(("broker_id",), "integer"),),
        (("message", "string"), ("broker_id", "integer")),
        for_primary=True,
    ),
    ClassicRoute(
        "GET",
        "/health",
        "health",
        "This manager, and when each manager, broker, producer and consumer was last seen",
        (),
        (
            ("role", "string"),
            ("term", "integer"),
            ("transaction", "integer"),
            ("lag", "integer"),
            ("cut_off_since", "string or null"),
            ("trouble", "string or null"),
            ("managers", "array"),
            ("brokers", "array"),
            ("producers", "array"),
            ("consumers", "array"),
        ),
    ),
)
