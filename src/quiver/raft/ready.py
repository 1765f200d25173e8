"""What the core asks of its caller."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

from quiver.raft.messages import AnyMessage, Append, Snapshot
from quiver.types import HardState


class Role(enum.Enum):
    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre-candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"


class Truncate(NamedTuple):
    """Remove the entries from `index` on."""

    index: int  # type: ignore[assignment]  # our word; tuple.index is never called


class Extend(NamedTuple):
    """Append those entries of `append.body` that have this index or a higher one."""

    append: Append
    first: int


class Own(NamedTuple):
    """Append an empty entry: a new leader's first, with which it learns what is committed (§8)."""

    index: int  # type: ignore[assignment]  # our word; tuple.index is never called
    term: int


class Install(NamedTuple):
    """Forget the log and begin after the snapshot."""

    snapshot: Snapshot


LogWork = Truncate | Extend | Own | Install


@dataclasses.dataclass(slots=True)
class Ready:
    hard_state: HardState | None
    work: list[LogWork]
    messages: list[AnyMessage]
    reads: list[tuple[Any, int]]  # (context, index): answer once applied up to there
    lost_reads: list[Any]  # not the leader any more: ask again elsewhere
