"""Values that every room shares: records, their metadata, names and their rules.

Rule: no behaviour beyond checking and naming; nothing here imports another room.
"""

from __future__ import annotations

import datetime
import re
from typing import Final, NamedTuple

import msgspec

from quiver.errors import InvalidTopicError

TOPIC_NAME_BYTES_MAX: Final = 249
PARTITIONS_MAX: Final = 10_000

_TOPIC_NAME = re.compile(rf"[a-zA-Z0-9._-]{{1,{TOPIC_NAME_BYTES_MAX}}}")

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)

Headers = tuple[tuple[str, bytes], ...]


class Record(msgspec.Struct, frozen=True, gc=False):
    """One message as a consumer sees it. `timestamp` is microseconds since 1970 UTC."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()

    @property
    def datetime(self) -> datetime.datetime:
        return _EPOCH + datetime.timedelta(microseconds=self.timestamp)  # exact; a float of seconds is not


class RecordMetadata(msgspec.Struct, frozen=True, gc=False):
    """Where one record was stored."""

    topic: str
    partition: int
    offset: int


class BatchMetadata(msgspec.Struct, frozen=True, gc=False):
    """Where a run of records was stored: offsets `offset` up to `offset + count`, end exclusive."""

    topic: str
    partition: int
    offset: int
    count: int


class PartitionInfo(msgspec.Struct, frozen=True):
    """`leader` and `replicas` are broker ids."""

    id: int
    leader: int
    replicas: tuple[int, ...]


class TopicInfo(msgspec.Struct, frozen=True):
    """`settings` has what was set for the topic (docs/settings.md); all else is as the brokers have it."""

    name: str
    partitions: tuple[PartitionInfo, ...]
    settings: dict[str, bool | int | str] = {}
    replication_factor: int = 0  # how many replicas are wanted; 0: not known
    uid: str = ""  # tells it from a topic that had its name before


class NodeInfo(msgspec.Struct, frozen=True):
    id: int
    address: str


class ManagerInfo(msgspec.Struct, frozen=True):
    """`address` is for frames, `http` for HTTP. `state`, where it is told: primary, secondary, newcomer while it
    catches up, expected before it was there, leaving while it is removed."""

    id: int
    address: str
    http: str
    state: str = ""


class ReplicaStatus(msgspec.Struct, frozen=True):
    """How far behind the leader a replica is, as the leader sees it: `lag` counts entries."""

    broker: int
    voter: bool
    lag: int


class PartitionStatus(msgspec.Struct, frozen=True):
    """What a broker tells of one replica it holds. `state` is 'online', 'full', 'failed' or 'corrupt'.

    `leader` is a broker id, 0 when it is not known. Only the leader fills `replicas`, itself included.
    """

    topic: str
    partition: int
    state: str
    start_offset: int
    next_offset: int
    size_bytes: int
    segments: int
    detail: str = ""
    uid: str = ""
    leader: int = 0
    role: str = "leader"
    term: int = 0
    replicas: tuple[ReplicaStatus, ...] = ()


class PartitionMove(msgspec.Struct, frozen=True):
    """A partition on its way: `replicas` are the brokers that are to hold it, those of `leaving` still do."""

    topic: str
    partition: int
    replicas: tuple[int, ...]
    leaving: tuple[int, ...]


class MemberInfo(msgspec.Struct, frozen=True):
    """A member of a group, the topics it wants and the partitions it has."""

    id: str
    topics: tuple[str, ...]
    partitions: tuple[tuple[str, int], ...]


class GroupInfo(msgspec.Struct, frozen=True):
    """`members` are told of a group that was asked for by name."""

    name: str
    strategy: str
    generation: int
    member_count: int
    members: tuple[MemberInfo, ...] = ()


class GroupPosition(msgspec.Struct, frozen=True):
    """Where a group is in a partition: `offset` is the next one it reads, None when it has committed nothing. The log
    has `earliest` up to `latest`; `lag` is how many records the group has still to read."""

    topic: str
    partition: int
    offset: int | None
    earliest: int
    latest: int
    owner: str = ""

    @property
    def lag(self) -> int:
        return self.latest - max(self.earliest, self.offset or 0)

    @property
    def lost(self) -> int:
        """Records behind its position that were removed before it read them."""
        return 0 if self.offset is None else max(0, self.earliest - self.offset)


class GroupReset(msgspec.Struct, frozen=True):
    """A group is set from one place to another; `before` is None when it had none."""

    topic: str
    partition: int
    before: int | None
    after: int


def check_topic_name(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidTopicError(f"a topic name is a string, not {type(name).__name__}")
    if not _TOPIC_NAME.fullmatch(name) or name in (".", ".."):
        shown = name if len(name) <= 60 else name[:57] + "..."
        raise InvalidTopicError(
            f"topic name {shown!r} is not allowed: use 1 to {TOPIC_NAME_BYTES_MAX} of a-z A-Z 0-9 . _ - "
            "and not '.' or '..'"
        )
    return name


class HardState(NamedTuple):
    """What a replica must never forget. `voted_for` is a replica id, 0 for none."""

    term: int = 0
    voted_for: int = 0
