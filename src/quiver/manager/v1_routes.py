"""The v1 API as a table: which call a path and a method mean, what it takes and what it gives.

Rule: the door, /openapi.json and the tests read this table and nothing else. A call that is not in it does not exist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from quiver.manager import v1_shapes as shapes
from quiver.manager.v1_media import ARROW, JSON, NDJSON
from quiver.manager.v1_produce import EPOCH_HEADER, PRODUCER_HEADER, SEQUENCE_HEADER

_PARTITION: Final = "/v1/topics/{topic}/partitions/{partition}"
_GROUP: Final = "/v1/groups/{group}/topics/{topic}"
_OF_TOPIC: Final = (404, 503)
# What a body of records or an answer with records looks like, by media type.
RECORDS_IN: Final[Mapping[str, type[Struct] | None]] = {JSON: shapes.Produce, NDJSON: shapes.RecordIn, ARROW: None}
RECORDS_OUT: Final[Mapping[str, type[Struct] | None]] = {JSON: shapes.Fetched, NDJSON: shapes.RecordOut, ARROW: None}
PRODUCE_HEADERS: Final[Mapping[str, str]] = {
    PRODUCER_HEADER: "Name of the producer; its messages are counted under it",
    SEQUENCE_HEADER: "How many records this producer sent to this partition before: the same again is stored once",
    EPOCH_HEADER: "A higher one begins again at sequence 0 and shuts out the lower ones",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """`call` names the handler. `body` by media type, None for bytes that JSON schema cannot describe; a single JSON
    body is decoded by the door. `errors` are the statuses beside those that every call can have."""

    method: str
    path: str
    call: str
    summary: str
    answer: Mapping[str, type[Struct] | None]
    status: int = 200
    query: type[Struct] = shapes.NoQuery
    body: Mapping[str, type[Struct] | None] = dataclasses.field(default_factory=dict)
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    errors: tuple[int, ...] = ()
    for_primary: bool = False  # it changes metadata: whichever manager is asked, the primary does it

    @property
    def reads_json(self) -> type[Struct] | None:
        """What the door decodes for the call."""
        return self.body[JSON] if tuple(self.body) == (JSON,) else None


def _json(shape: type[Struct]) -> Mapping[str, type[Struct] | None]:
    return {JSON: shape}


ROUTES: Final = (
    Route("GET", "/v1/topics", "list_topics", "All topics", _json(shapes.Topics)),
    Route(
        "POST",
        "/v1/topics",
        "create_topic",
        "Make a topic",
        _json(shapes.Topic),
        status=201,
        body=_json(shapes.NewTopic),
        errors=(409, 413, 415, 503),
        for_primary=True,
    ),
    Route("GET", "/v1/topics/{topic}", "describe_topic", "One topic", _json(shapes.Topic), errors=(404,)),
    Route(
        "PATCH",
        "/v1/topics/{topic}",
        "alter_topic",
        "Give a topic more partitions or other settings",
        _json(shapes.Topic),
        body=_json(shapes.TopicChange),
        errors=(*_OF_TOPIC, 409, 413, 415),
        for_primary=True,
    ),
    Route(
        "DELETE",
        "/v1/topics/{topic}",
        "delete_topic",
        "Delete a topic and its records",
        {},
        status=204,
        errors=_OF_TOPIC,
        for_primary=True,
    ),
    Route(
        "POST",
        "/v1/topics/{topic}/records",
        "produce",
        "Store records; each goes to the partition it names, or that of its key, or all others to the next in turn",
        _json(shapes.Produced),
        body=RECORDS_IN,
        headers={PRODUCER_HEADER: PRODUCE_HEADERS[PRODUCER_HEADER]},
        errors=(*_OF_TOPIC, 409, 413, 415),
    ),
    Route(
        "POST",
        f"{_PARTITION}/records",
        "produce_to_partition",
        "Store records in one partition",
        _json(shapes.Produced),
        body=RECORDS_IN,
        headers=PRODUCE_HEADERS,
        errors=(*_OF_TOPIC, 409, 413, 415),
    ),
    Route(
        "GET",
        f"{_PARTITION}/records",
        "fetch",
        "Records from an offset on; waits for new ones if asked to",
        RECORDS_OUT,
        query=shapes.FetchQuery,
        errors=(*_OF_TOPIC, 406, 416),
    ),
    Route(
        "GET",
        "/v1/topics/{topic}/offsets",
        "offsets",
        "Where the partitions begin and end, and where a time is",
        _json(shapes.Offsets),
        query=shapes.OffsetsQuery,
        errors=_OF_TOPIC,
    ),
    Route("GET", "/v1/groups", "list_groups", "All groups", _json(shapes.Groups), errors=(503,)),
    Route(
        "GET",
        "/v1/groups/{group}",
        "describe_group",
        "One group: its members, where it is in each partition, and how much is left",
        _json(shapes.Group),
        errors=_OF_TOPIC,
    ),
    Route(
        "DELETE",
        "/v1/consumers/{consumer}",
        "unregister_consumer",
        "Forget a registered consumer: nothing is kept for it any more",
        {},
        status=204,
        errors=_OF_TOPIC,
        for_primary=True,
    ),
    Route(
        "GET",
        f"{_GROUP}/positions",
        "positions",
        "Where a group is in each partition, and how much is left",
        _json(shapes.Positions),
        errors=_OF_TOPIC,
    ),
    Route(
        "GET",
        f"{_GROUP}/partitions/{{partition}}/position",
        "position",
        "Where a group is in one partition",
        _json(shapes.Position),
        errors=_OF_TOPIC,
    ),
    Route(
        "PUT",
        f"{_GROUP}/partitions/{{partition}}/position",
        "commit",
        "Move a group; the answer is the position that holds",
        _json(shapes.Position),
        body=_json(shapes.PositionIn),
        errors=(*_OF_TOPIC, 409, 413, 415, 416),
    ),
    Route("GET", "/v1/brokers", "brokers", "All brokers", _json(shapes.Brokers)),
    Route(
        "DELETE",
        "/v1/brokers/{broker}",
        "remove_broker",
        "Move the replicas of a broker to others, then forget it",
        _json(shapes.Moving),
        status=202,
        errors=(503,),
        for_primary=True,
    ),
    Route(
        "POST",
        "/v1/rebalance",
        "rebalance",
        "Give every broker its share of replicas and leaders",
        _json(shapes.Moving),
        status=202,
        errors=(503,),
        for_primary=True,
    ),
    Route("GET", "/v1/moves", "moves", "Partitions on their way to other brokers", _json(shapes.Moving)),
    Route(
        "GET", "/v1/health", "health", "This manager, and all managers and brokers", _json(shapes.Health), errors=(503,)
    ),
)
