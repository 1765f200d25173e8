"""What brokers say to each other: the messages of their Raft groups, over one connection for each pair."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from quiver.wire.fields import BrokerId, Name, UInt32


class PeerHello(Struct, array_like=True, frozen=True):
    """A broker makes this connection its link to another one. After the reply both sides send `Peer*` one-way."""

    broker_id: BrokerId
    cluster_id: Annotated[str, Meta(max_length=64)]


class PeerMessages(Struct, array_like=True, frozen=True):
    """Raft messages of any number of groups: (partition uid, encoded message, bytes of its frames in the payload)."""

    messages: list[tuple[Name, bytes, UInt32]]


class PeerPing(Struct, array_like=True, frozen=True):
    """Nothing to say, but here."""
