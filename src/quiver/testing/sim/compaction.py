"""What compaction may take from a simulated topic, and what it must leave.

Rule: judged by what was committed, as the ledger saw it, never by what a replica says.
"""

from __future__ import annotations

from typing import Any

from quiver.log.compaction import Order
from quiver.testing.sim.ledger import Group, Ledger
from quiver.testing.sim.world import Violation
from quiver.wire.batch_check import SCHEMA_ID_COMPACTED
from quiver.wire.frame import FrameHeader, Kind
from quiver.wire.rows import rows_of


def offsets_in(header: FrameHeader, payload: Any) -> list[int]:
    """Of the records that a frame has."""
    if header.schema_id == SCHEMA_ID_COMPACTED:
        return list(rows_of(header, payload).offsets)
    return list(range(header.base_offset, header.next_offset))


def gone_after(ledger: Ledger, group: Group, order: Order) -> set[int]:
    """The offsets of records that an order removes."""
    latest: dict[bytes, int] = {}
    gone: set[int] = set()
    for header, _ in group.entries[: max(0, order.index - 1)]:
        if header.kind != Kind.DATA:
            continue
        keys = ledger.keys.get((header.producer_id, header.producer_epoch, header.sequence), [])
        for offset, (key, is_deleted) in enumerate(keys, header.base_offset):
            if key in latest:
                gone.add(latest[key])
            latest[key] = offset
            if is_deleted and header.index < order.drop_end and header.timestamp_min < order.drop_before_us:
                gone.add(offset)
    return gone


def check_left(ledger: Ledger, uid: str, order: Order, who: str, header: FrameHeader, payload: Any) -> None:
    """A replica that has carried out an order has what it leaves, and nothing else."""
    if header.kind != Kind.DATA:
        return
    group = ledger.group(uid)
    known = group.gone.get(order)
    if known is None:
        known = group.gone[order] = gone_after(ledger, group, order)
    expected = [offset for offset in range(header.base_offset, header.next_offset) if offset not in known]
    if (found := offsets_in(header, payload)) != expected:
        raise Violation("compaction", f"{who} has {found} of entry {header.index} of {uid}, not {expected}")
