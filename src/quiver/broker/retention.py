"""What a partition's leader lets go: by time and size, or what everybody has read.

Rule: the leader decides, once, and says it to all replicas as an entry of the log. Where it is not known who reads,
nothing goes that somebody could still want.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from quiver.broker.partition_state import PartitionState, Trim
from quiver.errors import LogFailedError
from quiver.log.partition_log import PartitionLog
from quiver.topic_settings import COMPACT, CONSUMED, TopicRules
from quiver.wire.frame import Entry, Kind


def plan_trim(
    log: PartitionLog,
    state: PartitionState,
    rules: TopicRules,
    registered: Collection[str] | None,
    now_us: int,
    commit_end: int,
) -> Entry | None:
    """The entry that moves the log start; None when there is nothing to let go. Never past what is committed.

    `registered` are the consumers that count before they have a position here; None when that is not known.
    """
    read_to: int | None = None
    if rules.cleanup == COMPACT:
        return None
    if rules.cleanup == CONSUMED:
        read_to = read_by_all(state.positions, registered, state.start_offset)
        if read_to is None:
            return None
    try:
        cut = log.plan_retention(now_us, read_to)
    except OSError as error:
        raise LogFailedError(f"the age of a log cannot be read: {error}") from error
    if cut is None or cut.index > commit_end or cut.offset <= state.start_offset:
        return None
    return Entry.control(Kind.TRIM, msgspec.msgpack.encode(Trim(*cut)))


def read_by_all(positions: Mapping[str, int], registered: Collection[str] | None, start_offset: int) -> int | None:
    """Up to where everybody has read; None when nobody reads, or not all who do are known.

    Who is registered and has no position yet begins at the log start, wherever that is when it first reads."""
    if registered is None or not (positions or registered):
        return None
    waiting = any(name not in positions for name in registered)
    return start_offset if waiting else min(positions.values())
