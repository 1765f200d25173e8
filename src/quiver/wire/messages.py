"""What can be asked and answered: one msgspec struct for each request and each reply.

Rule: fields are only ever added at the end, with a default, so that old and new nodes understand each other. Limits of
type and range stand here once and are checked by the decoder; what needs knowledge of the cluster is checked by the
handler.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from quiver.errors import InvalidRequestError, ProtocolError
from quiver.types import PARTITIONS_MAX, ManagerInfo, NodeInfo, PartitionStatus, TopicInfo
from quiver.wire.admin_messages import ADMIN_KINDS, ADMIN_REPLIES, AddPartitions, AlterTopic, RemoveBroker
from quiver.wire.fields import (
    POSITIONS_MAX,
    REPLICAS_MAX,
    BrokerId,
    ConsumerName,
    Name,
    Settings,
    Timestamp,
    Uid,
    UInt32,
    UInt64,
    Voters,
)
from quiver.wire.group_messages import GROUP_KINDS, GROUP_REPLIES, DeleteGroup, LeaveGroup
from quiver.wire.leaders import Led
from quiver.wire.peer_messages import PeerHello, PeerMessages, PeerPing
from quiver.wire.quorum_messages import (
    BeatReply,
    ForPrimary,
    FromPrimary,
    GetQuorum,
    ManagerBeat,
    QuorumReply,
    RelayedHttp,
    RelayHttp,
)

PROTOCOL_VERSION: Final = 1
HELLO_MAGIC: Final = "quiver"
HELLO_BYTES_MAX: Final = 4096
NODE_CLIENT: Final = "node:"  # how the name of a client begins that is itself a node of the cluster

OFFSET_EARLIEST: Final = -2
OFFSET_LATEST: Final = -1
OFFSET_AFTER: Final = -3


class Hello(Struct, array_like=True, frozen=True):
    magic: Annotated[str, Meta(max_length=16)]
    version_min: UInt32
    version_max: UInt32
    client: Annotated[str, Meta(max_length=255)] = ""


class HelloReply(Struct, array_like=True, frozen=True):
    """The version both sides will speak, and the limits a client must keep."""

    version: int
    node_id: int
    cluster_id: str
    message_bytes_max: int
    batch_bytes_max: int
    frames_in_flight_max: int


class GetMetadata(Struct, array_like=True, frozen=True):
    """`topics` None asks for all. `names` asks for the names of all, whatever `topics` says."""

    topics: list[Name] | None = None
    names: bool = False


class MetadataReply(Struct, array_like=True, frozen=True):
    """A topic that was asked for and is not in `topics` does not exist. `nodes` are brokers; `primary` is the manager
    that takes changes, 0 when that is not known."""

    cluster_id: str
    nodes: list[NodeInfo]
    topics: list[TopicInfo]
    managers: list[ManagerInfo] = []
    primary: int = 0
    names: list[str] = []


class CreateTopic(Struct, array_like=True, frozen=True):
    """`uids` and `voters` are said by a manager to a broker: the directory of each partition, and the replicas that
    make up its group. Without voters each partition is a group of one, here."""

    name: Name
    partitions: Annotated[int, Meta(ge=1, le=PARTITIONS_MAX)] = 1
    replication_factor: Annotated[int, Meta(ge=1, le=REPLICAS_MAX)] = 3
    uids: Annotated[list[Uid], Meta(max_length=PARTITIONS_MAX)] = []
    voters: Annotated[list[Voters], Meta(max_length=PARTITIONS_MAX)] = []
    settings: Settings = {}


class DeleteTopic(Struct, array_like=True, frozen=True):
    """`uid`, of one of its partitions, is said by a manager to a broker: it means that broker alone, and that topic
    alone. Another one that has the name by now stays."""

    name: Name
    uid: Annotated[str, Meta(max_length=64)] = ""


class HostTopic(Struct, array_like=True, frozen=True):
    """Said by a manager: what a broker is to have of a topic from now on. Saying it twice changes nothing.

    A broker has the partitions that name a replica of it in `voters`. One whose replica is not there yet makes it: with
    the id that is named, or as a newcomer under an id of its own when another is. What it has and is no longer named
    for, it deletes. `epochs` tell which of two such words about a partition is the newer one. Without voters each
    partition is a group of one, here. `revision` does for the settings what epochs do for partitions.
    """

    name: Name
    uids: Annotated[list[Uid], Meta(min_length=1, max_length=PARTITIONS_MAX)]
    voters: Annotated[list[Voters], Meta(max_length=PARTITIONS_MAX)]
    epochs: Annotated[list[UInt32], Meta(max_length=PARTITIONS_MAX)]
    settings: Settings = {}
    revision: UInt32 = 0


class Produce(Struct, array_like=True, frozen=True):
    """One Arrow batch for one partition; the batch is the payload.

    `sequence` counts the records this producer sent to this partition in this epoch before this batch, or the batches
    where a flag says so. Producer id 0 asks for no deduplication.
    """

    topic: Name
    partition: UInt32
    record_count: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    timestamp_min: Timestamp
    timestamp_max: Timestamp
    payload_crc: UInt32
    schema_id: UInt32
    producer_id: UInt64 = 0
    producer_epoch: UInt32 = 0
    sequence: UInt64 = 0
    flags: Annotated[int, Meta(ge=0, le=7)] = 0


class ProduceReply(Struct, array_like=True, frozen=True):
    """A duplicate gets the offset of the first time; -1 when the broker knows only that it is stored."""

    base_offset: int
    duplicate: bool = False


class Fetch(Struct, array_like=True, frozen=True):
    """Waits up to `wait_ms` until `bytes_min` bytes of frames from `offset` on are committed."""

    topic: Name
    partition: UInt32
    offset: UInt64
    bytes_max: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    bytes_min: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 1
    wait_ms: Annotated[int, Meta(ge=0, le=3_600_000)] = 0


class FetchReply(Struct, array_like=True, frozen=True):
    """The payload is whole frames; the first may begin below the offset that was asked for."""

    start_offset: int
    high_watermark: int


class ListOffset(Struct, array_like=True, frozen=True):
    """`timestamp` in microseconds, or OFFSET_EARLIEST or OFFSET_LATEST. OFFSET_AFTER asks where about `bytes_max`
    stored bytes from `offset` on end."""

    topic: Name
    partition: UInt32
    timestamp: Timestamp
    offset: UInt64 = 0
    bytes_max: UInt64 = 0


class ListOffsetReply(Struct, array_like=True, frozen=True):
    """For a timestamp: the first offset of the batch that holds the first record at or after it, else the end. For
    OFFSET_AFTER also how many bytes lie before it."""

    offset: int
    size_bytes: int = 0


class Position(Struct, array_like=True, frozen=True):
    """`offset` is the next one the consumer wants. Only `rewind` lets it move back.

    With `expected` the position moves only from there, else ConflictError; -1 stands for none committed yet. `epoch` is
    that of a group's member who has the partition: one that did not claim it last gets MemberFencedError. A `claim`
    makes the epoch known and moves nothing; `forget` removes the position.
    """

    consumer: ConsumerName
    offset: UInt64
    rewind: bool = False
    expected: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    epoch: UInt64 = 0
    act: Literal["move", "claim", "forget"] = "move"


class CommitPosition(Struct, array_like=True, frozen=True):
    topic: Name
    partition: UInt32
    position: Position


class CommitPositions(Struct, array_like=True, frozen=True):
    """Of several consumers in one partition; each is moved or refused for itself."""

    topic: Name
    partition: UInt32
    positions: Annotated[list[Position], Meta(min_length=1, max_length=POSITIONS_MAX)]


class CommitPositionsReply(Struct, array_like=True, frozen=True):
    """Why a position was refused, by its place in the request."""

    refused: dict[int, ErrorReply]


class GetPosition(Struct, array_like=True, frozen=True):
    topic: Name
    partition: UInt32
    consumer: ConsumerName


class PositionReply(Struct, array_like=True, frozen=True):
    """`offset` None: this consumer has committed nothing here. The log has start_offset up to high_watermark."""

    offset: int | None
    start_offset: int = 0
    high_watermark: int = 0


class GetStatus(Struct, array_like=True, frozen=True):
    topic: Name | None = None


class StatusReply(Struct, array_like=True, frozen=True):
    partitions: list[PartitionStatus]


class CountClient(Struct, array_like=True, frozen=True):
    """How many records each partition that this broker leads holds under the number of a client name."""

    client: UInt64


class CountReply(Struct, array_like=True, frozen=True):
    """`counts` are those of `led`, in the same order; `count` is their sum."""

    count: int
    led: list[Led] = []
    counts: list[int] = []
    broken: list[tuple[str, int]] = []


class Ping(Struct, array_like=True, frozen=True):
    """Is anybody there? Answered at once, before anything else that waits."""


class JoinCluster(Struct, array_like=True, frozen=True):
    """A broker tells the manager that it is there, at its start and then as a heartbeat.

    `cluster_id` is the cluster it was part of, empty for a new one. `disk_id` tells one disk from the next.
    """

    broker_id: BrokerId
    address: Annotated[str, Meta(min_length=1, max_length=300)]
    disk_id: UInt32
    cluster_id: Annotated[str, Meta(max_length=64)] = ""


class JoinReply(Struct, array_like=True, frozen=True):
    """All brokers, and the number of the last change of metadata: another number means that topics may differ."""

    cluster_id: str
    brokers: list[NodeInfo]
    transaction: int = 0
    managers: list[str] = []  # addresses


class Done(Struct, array_like=True, frozen=True):
    pass


class ErrorReply(Struct, array_like=True, frozen=True):
    code: str
    message: str
    facts: dict[str, Any]


HELLO_KIND: Final = 1
REQUESTS: Final[dict[int, type[Struct]]] = {
    HELLO_KIND: Hello,
    2: GetMetadata,
    3: CreateTopic,
    4: DeleteTopic,
    5: Ping,
    10: Produce,
    11: Fetch,
    12: ListOffset,
    13: CommitPosition,
    14: GetPosition,
    15: GetStatus,
    16: CountClient,
    17: CommitPositions,
    20: JoinCluster,
    21: PeerHello,
    22: PeerMessages,
    23: PeerPing,
    24: GetQuorum,
    25: ForPrimary,
    26: ManagerBeat,
    27: RelayHttp,
    30: HostTopic,
    **ADMIN_KINDS,
    **GROUP_KINDS,
}
REPLY_TO: Final[dict[type[Struct], type[Struct]]] = {
    Hello: HelloReply,
    GetMetadata: MetadataReply,
    CreateTopic: Done,
    DeleteTopic: Done,
    Ping: Done,
    Produce: ProduceReply,
    Fetch: FetchReply,
    ListOffset: ListOffsetReply,
    CommitPosition: PositionReply,
    CommitPositions: CommitPositionsReply,
    GetPosition: PositionReply,
    GetStatus: StatusReply,
    CountClient: CountReply,
    JoinCluster: JoinReply,
    PeerHello: Done,
    GetQuorum: QuorumReply,
    ForPrimary: FromPrimary,
    ManagerBeat: BeatReply,
    RelayHttp: RelayedHttp,
    HostTopic: Done,
    AddPartitions: Done,
    RemoveBroker: Done,
    AlterTopic: Done,
    **ADMIN_REPLIES,
    **GROUP_REPLIES,
    LeaveGroup: Done,
    DeleteGroup: Done,
}
KIND_OF: Final[dict[type[Struct], int]] = {request: kind for kind, request in REQUESTS.items()}

_encoder = msgspec.msgpack.Encoder()
_decoders = {kind: msgspec.msgpack.Decoder(request) for kind, request in REQUESTS.items()}
encode = _encoder.encode


def decode_request(kind: int, header: memoryview) -> Struct:
    """The typed request. Well-formed but wrong is the sender's mistake; bytes that are no msgpack are not ours."""
    decoder = _decoders.get(kind)
    if decoder is None:
        raise InvalidRequestError(f"unknown request kind {kind}")
    try:
        request: Struct = decoder.decode(header)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{REQUESTS[kind].__name__}: {_named(REQUESTS[kind], str(error))}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a request header that is not msgpack: {error}") from error
    return request


def _named(request: type[Struct], reason: str) -> str:
    """msgspec says where in the array the mistake is; people know the field by its name."""
    return re.sub(r"\$\[(\d+)\]", lambda found: f"$.{request.__struct_fields__[int(found[1])]}", reason, count=1)
