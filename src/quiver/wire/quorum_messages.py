"""What managers say to each other, beside Raft."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from quiver.wire.fields import BrokerId, UInt32, UInt64


class GetQuorum(Struct, array_like=True, frozen=True):
    """Which quorum of managers do you belong to?"""


class QuorumReply(Struct, array_like=True, frozen=True):
    """`voters`: the replicas the quorum began with, empty when this manager belongs to none yet. `primary`: the manager
    that leads, 0 when it does not know. `members`: the replicas that the quorum has now, none while that changes;
    `removed`: the managers that may not be among them."""

    manager_id: int
    replica_id: int
    cluster_id: str = ""
    voters: list[int] = []
    primary: int = 0
    term: int = 0
    members: list[int] = []
    removed: list[int] = []


class ForPrimary(Struct, array_like=True, frozen=True):
    """A request that one manager hands to the one that leads; its payload travels with it. Whoever does not lead
    refuses it, so that it never goes in a circle."""

    cluster_id: Annotated[str, Meta(max_length=64)]
    kind: UInt32
    request: bytes


class FromPrimary(Struct, array_like=True, frozen=True):
    """`index`: the last transaction of the primary. Who handed the request over waits for it before it answers."""

    reply: bytes
    index: int = 0


class ManagerBeat(Struct, array_like=True, frozen=True):
    """A manager tells the primary that it is there, how far its database is, and who called it since the last beat.
    `since_us`, by the primary's clock: what was seen before is known."""

    manager_id: BrokerId
    address: Annotated[str, Meta(max_length=300)]
    http: Annotated[str, Meta(max_length=300)]
    replica_id: UInt64
    stored: UInt64
    since_us: UInt64 = 0
    producers: dict[int, int] = {}
    consumers: dict[int, int] = {}


class BeatReply(Struct, array_like=True, frozen=True):
    """`index` is the last transaction that was acknowledged when the beat came. When who was last seen."""

    index: int
    now_us: int
    managers: dict[int, int] = {}
    stored: dict[int, int] = {}  # how far the database of each manager is
    producers: dict[int, int] = {}
    consumers: dict[int, int] = {}


class RelayHttp(Struct, array_like=True, frozen=True):
    """An HTTP request that changes metadata, for the primary; the payload is its body."""

    method: Annotated[str, Meta(max_length=16)]
    target: bytes
    headers: list[tuple[bytes, bytes]] = []


class RelayedHttp(Struct, array_like=True, frozen=True):
    status: int
    content_type: str
    headers: list[tuple[str, str]] = []
