"""A replica's place in its group, and whose log it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from quiver.config import RaftSettings
from quiver.errors import CorruptLogError, QuiverError
from quiver.log.checkpoint import Checkpoint
from quiver.replication.append_sender import Transport
from quiver.replication.group import broker_of
from quiver.wire.frame import FrameHeader


class Owner(Protocol):
    """Whose log this is. Told of everything that happens to the log's tail."""

    def entry_appended(self, header: FrameHeader, payload: Any) -> None: ...

    def entries_removed(self, first: int, error: QuiverError) -> None: ...

    def leadership_lost(self) -> None: ...

    def log_replaced(self, checkpoint: Checkpoint) -> None: ...


class Seat(NamedTuple):
    """The place of a replica in its group."""

    uid: str
    me: int
    voters: tuple[int, ...]  # of the group when it was made
    named: tuple[int, ...] = ()  # whose brokers have it now, as far as was told: where a newcomer asks to be taken in
    prefers_to_lead: bool = False
    admits: tuple[int, ...] = ()  # brokers that are let in though they have no replica yet

    def to_ask(self, voters: tuple[int, ...]) -> set[int]:
        """The brokers that may know the leader: `voters` are the group's, as far as its log says."""
        return {broker_of(replica) for replica in (*self.voters, *self.named, *voters)}


class RaftSetup(NamedTuple):
    """What makes a partition one of several replicas."""

    seat: Seat
    directory: str
    settings: RaftSettings
    transport: Transport
    on_damage: Callable[[CorruptLogError], None]
    begins_anew: bool = False  # by what it does about damage; an owner that is never compacted need not
