"""The changes that can be made to metadata, as they stand in the log.

Rule: a command carries everything that applying it needs: the time, fresh uids. Applying is then the same everywhere.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from quiver.metadata.groups import Change


class CreateTopic(Struct, frozen=True, tag="create_topic"):
    """`uids` names the directory of each partition. `brokers` are those that are here now: they hold the topic when
    they are enough for its replicas; without them all that are known may."""

    name: str
    uids: list[str]
    replication_factor: int
    now_us: int
    brokers: list[int] = []
    settings: dict[str, bool | int | str] = {}


class DeleteTopic(Struct, frozen=True, tag="delete_topic"):
    name: str


class RegisterProducer(Struct, frozen=True, tag="register_producer"):
    """`create` makes the topic when it is missing."""

    topic: str
    partition: int | None
    create: CreateTopic | None
    now_us: int


class RegisterConsumer(Struct, frozen=True, tag="register_consumer"):
    topic: str
    partition: int | None
    now_us: int


class UnregisterConsumer(Struct, frozen=True, tag="unregister_consumer"):
    consumer_id: int


class RegisterBroker(Struct, frozen=True, tag="register_broker"):
    """A broker says where it listens and which disk it has; the same again changes these. 0: a node of its own, whose
    partitions have no group."""

    broker_id: int
    endpoint: str
    now_us: int
    disk_id: int = 0


class RemoveBroker(Struct, frozen=True, tag="remove_broker"):
    broker_id: int


class RegisterManager(Struct, frozen=True, tag="register_manager"):
    """A manager says where it listens, for frames and for HTTP, and which replica of the metadata it has."""

    manager_id: int
    address: str
    http: str
    replica_id: int
    now_us: int


class AddManager(Struct, frozen=True, tag="add_manager"):
    """A manager that is not there yet may become one of the quorum; it will be at that address."""

    manager_id: int
    address: str


class RemoveManager(Struct, frozen=True, tag="remove_manager"):
    """It is to leave the quorum, and does not come back before it is added again."""

    manager_id: int


class DrainBroker(Struct, frozen=True, tag="drain_broker"):
    """Its replicas are to go elsewhere, and it gets no new ones; then it is removed."""

    broker_id: int


class AddPartitions(Struct, frozen=True, tag="add_partitions"):
    """`uids` of the new partitions; `first` is the number of the first one. `brokers` as for a new topic."""

    topic: str
    first: int
    uids: list[str]
    brokers: list[int] = []


class AlterTopic(Struct, frozen=True, tag="alter_topic"):
    """Sets and unsets settings; `replication_factor` None leaves that as it is."""

    topic: str
    settings: dict[str, bool | int | str]
    unset: list[str] = []
    replication_factor: int | None = None


class Place(Struct, frozen=True):
    """One partition is to be on these brokers, the first is to lead. Planned when it was at `epoch`."""

    topic: str
    number: int
    uid: str
    epoch: int
    replicas: list[int]


class PlaceReplicas(Struct, frozen=True, tag="place_replicas"):
    """What was planned for another epoch is left out: the partition was placed again since."""

    places: list[Place]


class Settled(Struct, frozen=True):
    """The group of a partition is on its brokers and on no other, as it was placed at `epoch`."""

    topic: str
    number: int
    uid: str
    epoch: int


class SettleReplicas(Struct, frozen=True, tag="settle_replicas"):
    settled: list[Settled]


class ChangeGroup(Struct, frozen=True, tag="change_group"):
    """Members come and go and let go of partitions. `strategy` is of a group that has no members yet."""

    group: str
    change: Change
    strategy: str


class DeleteGroup(Struct, frozen=True, tag="delete_group"):
    group: str


class FenceGroup(Struct, frozen=True, tag="fence_group"):
    """Somebody sets the positions of a group without members, under an epoch of its own."""

    group: str


Command = (
    CreateTopic
    | DeleteTopic
    | RegisterProducer
    | RegisterConsumer
    | UnregisterConsumer
    | RegisterBroker
    | RemoveBroker
    | RegisterManager
    | AddManager
    | RemoveManager
    | DrainBroker
    | AddPartitions
    | AlterTopic
    | PlaceReplicas
    | SettleReplicas
    | ChangeGroup
    | DeleteGroup
    | FenceGroup
)

_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
encode_command = msgspec.msgpack.Encoder().encode


def decode_command(payload: Any) -> Command:
    return _decoder.decode(payload)
