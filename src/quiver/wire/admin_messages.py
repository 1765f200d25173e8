"""Requests that change topics and where their partitions are, and what a broker asks a manager about them."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from quiver.types import PARTITIONS_MAX, ManagerInfo, PartitionMove
from quiver.wire.fields import REPLICAS_MAX, BrokerId, Name, Settings, Uid, UInt32


class SetReplicas(Struct, array_like=True, frozen=True):
    """Said by a manager to the leader of a partition: these brokers are to hold it, the first one is to lead.

    The leader goes there one step of membership at a time. Asked again, it tells how far it is.
    """

    topic: Name
    partition: UInt32
    uid: Uid
    epoch: UInt32
    brokers: Annotated[list[BrokerId], Meta(min_length=1, max_length=REPLICAS_MAX)]


class ReplicasReply(Struct, array_like=True, frozen=True):
    """The brokers that vote and those that learn. `done`: it is as ordered, and that is committed."""

    voters: list[int]
    learners: list[int]
    done: bool


class AddPartitions(Struct, array_like=True, frozen=True):
    """The topic is to have so many partitions. It can only get more."""

    name: Name
    partitions: Annotated[int, Meta(ge=1, le=PARTITIONS_MAX)]


class RemoveBroker(Struct, array_like=True, frozen=True):
    """Its replicas go to others, then it is forgotten. The reply comes when that has begun."""

    broker_id: BrokerId


class Rebalance(Struct, array_like=True, frozen=True):
    """Every broker is to get its share of replicas and leaders. The reply comes when that has begun."""


class GetMoves(Struct, array_like=True, frozen=True):
    pass


class MovesReply(Struct, array_like=True, frozen=True):
    """The partitions that are on their way to other brokers, and the brokers that are being removed."""

    moves: list[PartitionMove]
    draining: list[int]


class AlterTopic(Struct, array_like=True, frozen=True):
    """Sets some settings of a topic, and gives others back to their defaults."""

    name: Name
    settings: Settings = {}
    unset: Annotated[list[Name], Meta(max_length=100)] = []


class GetConsumers(Struct, array_like=True, frozen=True):
    """Who is registered to read a topic? Asked by a broker; a manager tells all that was acknowledged."""

    topic: Name


class ConsumersReply(Struct, array_like=True, frozen=True):
    """Numbers of registered consumers: those of all partitions, and those of one. `groups` have members that read the
    topic. `last`: the highest number that was given to anybody; one up to it that is not here is gone."""

    everywhere: list[int]
    by_partition: dict[int, list[int]] = {}
    groups: list[str] = []
    last: int = 0


class AddManager(Struct, array_like=True, frozen=True):
    """A manager that is not there yet may join the quorum. It will be at that address."""

    manager_id: BrokerId
    address: Annotated[str, Meta(min_length=1, max_length=300)]


class RemoveManager(Struct, array_like=True, frozen=True):
    """It is to leave the quorum. The reply comes when that has begun, and the managers are asked for to see it done."""

    manager_id: BrokerId


class GetManagers(Struct, array_like=True, frozen=True):
    pass


class ManagersReply(Struct, array_like=True, frozen=True):
    """Everybody who is one, is to be one, or is about to leave."""

    managers: list[ManagerInfo]


class TakeIn(Struct, array_like=True, frozen=True):
    """Said by a manager to a broker that waits to be added: join that cluster, these are its managers. Without
    managers it only asks who is there. A broker that has joined answers the same and does nothing."""

    cluster_id: Annotated[str, Meta(max_length=64)]
    managers: Annotated[list[Annotated[str, Meta(min_length=1, max_length=300)]], Meta(max_length=100)] = []


class TakenIn(Struct, array_like=True, frozen=True):
    """Who it is and where it is reached. `cluster_id`: the cluster it is part of, empty when it waits or joins."""

    broker_id: int
    address: str
    cluster_id: str = ""


MANAGER_KINDS: Final[dict[int, type[Struct]]] = {52: AddManager, 53: RemoveManager, 54: GetManagers}
ADMIN_KINDS: Final[dict[int, type[Struct]]] = {
    31: SetReplicas,
    32: AddPartitions,
    33: RemoveBroker,
    34: Rebalance,
    35: GetMoves,
    50: AlterTopic,
    51: GetConsumers,
    **MANAGER_KINDS,
    55: TakeIn,
}
# Of those that are answered with more than that it is done.
ADMIN_REPLIES: Final[dict[type[Struct], type[Struct]]] = {
    SetReplicas: ReplicasReply,
    Rebalance: MovesReply,
    GetMoves: MovesReply,
    GetConsumers: ConsumersReply,
    **dict.fromkeys(MANAGER_KINDS.values(), ManagersReply),
    TakeIn: TakenIn,
}
