"""How a manager reaches a broker on this node or another, and the broker that leads a partition, whoever that is.

Rule: what may have been done is done again only when the broker can tell that it is the same: a batch with a sequence,
a position that names the one it expects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Protocol

from msgspec import Struct

from quiver.errors import (
    ConflictError,
    ConnectionLostError,
    NotLeaderError,
    RequestTimeoutError,
    ShuttingDownError,
    UnavailableError,
)
from quiver.metadata.state import Partition
from quiver.wire.frame import FLAG_UNSEQUENCED
from quiver.wire.messages import (
    CommitPosition,
    CommitPositions,
    CommitPositionsReply,
    Position,
    PositionReply,
    Produce,
)

Buffer = bytes | bytearray | memoryview
Reply = tuple[Struct, Sequence[Buffer]]

# How long a request looks for the leader. An election takes a second or two; whoever waits longer is told.
LEADER_SEARCH_S: Final = 10.0
_PAUSE_S_MIN: Final = 0.02
_PAUSE_S_MAX: Final = 0.2

# Another broker may lead by now, also when the disk of the one asked is full or has failed: it says that it does not
# lead. One that tells of its disk is the only one, and no other need be asked.
_LOOK_ELSEWHERE: Final = (NotLeaderError, ConnectionLostError, RequestTimeoutError, ShuttingDownError)


class BrokerLink(Protocol):
    async def call(self, request: Struct, payload: Buffer = ...) -> Reply:
        """The broker's typed reply and payload. Raises what the broker answered, or that it is out of reach."""
        ...


class Leaders(Protocol):
    """Who leads what, as far as it is known."""

    def to_ask(self, partition: Partition, not_this: int) -> tuple[int, BrokerLink] | None:
        """The broker to ask and its id; another one than `not_this` when there is a choice. None: nobody is here."""
        ...

    def learn_leader(self, partition: Partition, broker_id: int) -> None: ...


class LeaderLink:
    """One partition, wherever its leader is."""

    def __init__(self, leaders: Leaders, partition: Partition) -> None:
        self._leaders = leaders
        self._partition = partition

    async def call(self, request: Struct, payload: Buffer = b"") -> Reply:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + LEADER_SEARCH_S
        pause_s = _PAUSE_S_MIN
        unsure = False  # an earlier try may have been done
        asked = 0
        while True:
            error = UnavailableError(
                f"no broker that holds partition {self._partition.number} of topic {self._partition.topic} is here now"
            )
            try:
                found = self._leaders.to_ask(self._partition, asked)
                if found is not None:
                    asked, link = found
                    reply, found_payload = await link.call(request, payload)
                    if unsure and isinstance(request, CommitPositions) and isinstance(reply, CommitPositionsReply):
                        reply = _without_done(request, reply)
                    return reply, found_payload
            except ConflictError as conflict:
                if unsure and isinstance(request, CommitPosition) and _is_done(request.position, conflict.facts):
                    return PositionReply(request.position.offset), ()
                raise
            except _LOOK_ELSEWHERE as failure:
                error = failure
                unsure = unsure or failure.facts.get("done") is not False
                if unsure and not _may_be_repeated(request):
                    raise
                if isinstance(failure, NotLeaderError):
                    leader = failure.facts.get("leader", 0)
                    self._leaders.learn_leader(self._partition, leader)
                    asked = 0 if leader else asked
            if loop.time() + pause_s > deadline_s:
                raise error
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _PAUSE_S_MAX)


def _may_be_repeated(request: Struct) -> bool:
    if isinstance(request, Produce):
        return request.producer_id != 0 and not request.flags & FLAG_UNSEQUENCED
    return True


def _is_done(position: Position, facts: dict[str, Any]) -> bool:
    """It is where this request would have put it: an earlier try did."""
    return position.expected is not None and bool(facts.get("current") == position.offset)


def _without_done(request: CommitPositions, reply: CommitPositionsReply) -> CommitPositionsReply:
    return CommitPositionsReply(
        {
            place: error
            for place, error in reply.refused.items()
            if error.code != ConflictError.__name__ or not _is_done(request.positions[place], error.facts)
        }
    )
