"""What travels over the v1 API: one msgspec struct for each body, answer and set of query parameters.

Rule: types, ranges and limits stand here once. The decoder checks them and /openapi.json tells them. A name that is
not known is a mistake and is refused: a misspelt option that is ignored costs its user an evening.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from quiver.manager.registry import REPLICATION_FACTOR_DEFAULT
from quiver.topic_settings import NAMES as SETTING_NAMES
from quiver.topic_settings import REPLICATION_FACTOR_MAX
from quiver.types import PARTITIONS_MAX, TOPIC_NAME_BYTES_MAX

RECORDS_MAX: Final = 100_000  # in one request or answer
FETCH_RECORDS_DEFAULT: Final = 500  # JSON and NDJSON; Arrow is limited by bytes
FETCH_BYTES_MAX: Final = 8 * 1024 * 1024
FETCH_WAIT_MS_MAX: Final = 30_000
TOPIC_NAME_PATTERN: Final = "^[a-zA-Z0-9._-]+$"

Offset = Annotated[int, Meta(ge=0, le=2**62)]
PartitionNumber = Annotated[int, Meta(ge=0, le=PARTITIONS_MAX - 1)]
Time = Annotated[int, Meta(ge=-(2**62), le=2**62, description="Microseconds since 1970, UTC")]
TimeIn = Time | Annotated[datetime.datetime, Meta(tz=True, description="RFC 3339, with its offset from UTC")]
TopicName = Annotated[
    str, Meta(min_length=1, max_length=TOPIC_NAME_BYTES_MAX, pattern=TOPIC_NAME_PATTERN, examples=["logs"])
]
Text = Annotated[str, Meta(description="Text, stored as UTF-8")]
Base64 = Annotated[bytes, Meta(description="Any bytes, as base64")]


class Body(Struct, frozen=True, forbid_unknown_fields=True):
    """Something a client sends."""


class Answer(Struct, frozen=True):
    """Something a client gets. Fields may be added."""


# -- records ---------------------------------------------------------------------------------------------------------


class HeaderIn(Body, frozen=True):
    """One of value and value_base64."""

    name: Annotated[str, Meta(max_length=1000)]
    value: Text | UnsetType = UNSET
    value_base64: Base64 | UnsetType = UNSET


class RecordIn(Body, frozen=True):
    """One of value and value_base64 is needed; both may be null. Without partition the key chooses it."""

    value: Text | UnsetType | None = UNSET
    value_base64: Base64 | UnsetType | None = UNSET
    key: Text | None = None
    key_base64: Base64 | None = None
    partition: PartitionNumber | None = None
    timestamp: TimeIn | None = None
    headers: dict[str, str] | list[HeaderIn] | None = None


class Produce(Body, frozen=True):
    records: Annotated[list[RecordIn], Meta(min_length=1, extra_json_schema={"maxItems": RECORDS_MAX})]


class Stored(Answer, frozen=True):
    """`count` records were stored from `offset` on. null: stored so long ago that the offset is not kept any more."""

    partition: int
    offset: int | None
    count: int


class Produced(Answer, frozen=True):
    """The records of one partition have the offsets of its runs, in the order of the request. `duplicate`: this
    sequence was stored before, by an earlier try."""

    topic: str
    count: int
    offsets: list[Stored]
    duplicate: bool = False


class HeaderOut(Answer, frozen=True):
    """value where it is UTF-8, else value_base64."""

    name: str
    value: str | UnsetType | None = UNSET
    value_base64: bytes | UnsetType = UNSET


class RecordOut(Answer, frozen=True):
    """key and value where they are UTF-8 (or null), else key_base64 and value_base64."""

    partition: int
    offset: int
    timestamp: Time
    key: str | UnsetType | None = UNSET
    key_base64: bytes | UnsetType = UNSET
    value: str | UnsetType | None = UNSET
    value_base64: bytes | UnsetType = UNSET
    headers: list[HeaderOut] | UnsetType = UNSET


class Fetched(Answer, frozen=True):
    """Fetch from `next_offset` next. The partition holds start_offset up to high_watermark, end exclusive."""

    topic: str
    partition: int
    start_offset: int
    high_watermark: int
    next_offset: int
    records: list[RecordOut]


class FetchQuery(Body, frozen=True):
    offset: Annotated[
        str,
        Meta(pattern="^(earliest|latest|[0-9]{1,18})$", description="The first offset wanted, or earliest, or latest"),
    ] = "earliest"
    max_records: (
        Annotated[int, Meta(ge=1, le=RECORDS_MAX, description="Default 500; for Arrow as many as max_bytes allows")]
        | None
    ) = None
    max_bytes: Annotated[int, Meta(ge=1, le=FETCH_BYTES_MAX, description="At least one stored batch is read")] = (
        1024 * 1024
    )
    wait_ms: Annotated[
        int, Meta(ge=0, le=FETCH_WAIT_MS_MAX, description="How long to wait when there is nothing new")
    ] = 0
    encoding: Annotated[
        Literal["auto", "base64"], Meta(description="base64: keys, values and headers all as base64")
    ] = "auto"


# -- offsets and positions -------------------------------------------------------------------------------------------


class OffsetsQuery(Body, frozen=True):
    partition: Annotated[int, Meta(ge=0, le=PARTITIONS_MAX - 1, description="Of this one only")] | None = None
    timestamp: Time | None = None


class PartitionOffsets(Answer, frozen=True):
    """`at_timestamp`: where to begin to miss nothing from that time on."""

    partition: int
    earliest: int
    latest: int
    at_timestamp: int | UnsetType = UNSET


class Offsets(Answer, frozen=True):
    topic: str
    partitions: list[PartitionOffsets]


class PositionIn(Body, frozen=True):
    """`offset` is the next one wanted. It moves back only with `rewind`; with `expected` only from there (-1: from
    none), else 409."""

    offset: Offset
    expected: Annotated[int, Meta(ge=-1, le=2**62)] | None = None
    rewind: bool = False


class Position(Answer, frozen=True):
    """null: this group has committed nothing here."""

    group: str
    topic: str
    partition: int
    offset: int | None


class PartitionPosition(Answer, frozen=True):
    """`lag` counts the records that the group has still to read."""

    partition: int
    offset: int | None
    earliest: int
    latest: int
    lag: int


class Positions(Answer, frozen=True):
    group: str
    topic: str
    partitions: list[PartitionPosition]


class GroupRow(Answer, frozen=True):
    name: str
    members: Annotated[int, Meta(description="0: it has positions and nobody reads for it now")]
    assignment: Annotated[str, Meta(description="How members share partitions; empty when it never had any")]


class Groups(Answer, frozen=True):
    groups: list[GroupRow]


class MemberPartition(Answer, frozen=True):
    topic: str
    partition: int


class GroupMember(Answer, frozen=True):
    id: str
    topics: list[str]
    partitions: list[MemberPartition]


class GroupPartition(Answer, frozen=True):
    """`offset` is the next one that the group reads, null when it has committed nothing; `member` reads it now. `lost`
    counts the records behind `offset` that were removed before the group read them."""

    topic: str
    partition: int
    offset: int | None
    earliest: int
    latest: int
    lag: int
    lost: int
    member: str | None


class Group(Answer, frozen=True):
    """`lag` counts the records that the group has still to read, in all partitions of its topics."""

    name: str
    assignment: str
    generation: int
    lag: int
    members: list[GroupMember]
    partitions: list[GroupPartition]


# -- administration --------------------------------------------------------------------------------------------------


class NewTopic(Body, frozen=True):
    name: TopicName
    partitions: Annotated[int, Meta(ge=1, le=PARTITIONS_MAX)] = 1
    replication_factor: Annotated[int, Meta(ge=1, le=REPLICATION_FACTOR_MAX)] = REPLICATION_FACTOR_DEFAULT
    settings: Annotated[dict[str, bool | int | str], Meta(description=f"By name: {', '.join(SETTING_NAMES)}")] = {}


class TopicChange(Body, frozen=True):
    """So many partitions in all; their number can only grow. Settings that are null are as if never set."""

    partitions: Annotated[int, Meta(ge=1, le=PARTITIONS_MAX)] | None = None
    settings: dict[str, bool | int | str | None] = {}


class TopicRow(Answer, frozen=True):
    name: str
    partitions: int
    replication_factor: int


class Topics(Answer, frozen=True):
    topics: list[TopicRow]


class PartitionRow(Answer, frozen=True):
    """`leader` and `replicas` are broker ids; leader 0: not known."""

    partition: int
    leader: int
    replicas: list[int]


class Topic(Answer, frozen=True):
    name: str
    replication_factor: int
    created: Time
    partitions: list[PartitionRow]
    settings: Annotated[dict[str, bool | int | str], Meta(description="What was set; all else is as usual")] = {}


class Broker(Answer, frozen=True):
    broker_id: int
    endpoint: str
    status: Annotated[str, Meta(description="active, inactive, or draining while its replicas move to others")]
    last_heartbeat: str | None


class Brokers(Answer, frozen=True):
    brokers: list[Broker]


class Move(Answer, frozen=True):
    """The brokers that are to hold a partition, and those that leave it."""

    topic: str
    partition: int
    replicas: list[int]
    leaving: list[int]


class Moving(Answer, frozen=True):
    """The partitions that are on their way, and the brokers that are being removed."""

    moves: list[Move]
    draining: list[int]


class Health(Answer, frozen=True):
    """`status` is ok, or unavailable (with a 503) when no broker is here, or this manager is cut off from the others
    since then. `lag`: transactions not yet in its SQL database. `trouble`: why this manager's disk takes no changes."""

    status: Literal["ok", "unavailable"]
    role: str
    term: int
    transaction: int
    lag: int
    cut_off_since: str | None
    trouble: str | None
    managers: list[dict[str, Any]]
    brokers: list[Broker]


class ErrorFacts(Answer, frozen=True):
    """Depending on the code there are facts beside these, as `earliest`, `latest`, `expected` or `current`."""

    code: str
    message: str
    retriable: bool


class Error(Answer, frozen=True):
    error: ErrorFacts


class NoQuery(Body, frozen=True):
    """Takes no query parameters."""
