"""Keyed records in a log, what a reader makes of them, and compaction without threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

from crc32c import crc32c

from quiver.log.compaction import Findings, Order, compact
from quiver.log.disk import Disk
from quiver.log.partition_log import PartitionLog
from quiver.types import Record
from quiver.wire.batch_check import SCHEMA_ID_V1
from quiver.wire.frame import Entry, Kind, walk_frames
from quiver.wire.records import batch_from_lists, encode_batch, timestamp_range
from quiver.wire.rows import rows_of, to_records


class Said(NamedTuple):
    """A record to be stored; a value of None says 'deleted'."""

    key: bytes | None
    value: bytes | None
    timestamp: int = 0


def keyed(said: Sequence[Said], compression: str | None = None) -> Entry:
    keys, values, stamps = ([getattr(one, name) for one in said] for name in ("key", "value", "timestamp"))
    batch = batch_from_lists(stamps, keys, values, None)
    payload = encode_batch(batch, compression)
    return Entry(Kind.DATA, payload, crc32c(payload), len(said), *timestamp_range(batch), SCHEMA_ID_V1)


class InlineExecutor(Executor):
    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self._before = before

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            self._before()
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def put_order(log: PartitionLog, drop_end: int = 0, drop_before_us: int = 0) -> Order:
    """An order at the end of the log."""
    index = log.append(1, Entry.control(Kind.COMPACT, b""), 0.0).index
    log.flush()
    return Order(index, drop_end, drop_before_us)


def carry_out(
    log: PartitionLog, disk: Disk, order: Order, before_each: Callable[[], object] = lambda: None
) -> Findings | None:
    return asyncio.run(compact(log, disk, order, InlineExecutor(before_each), lambda: True))


def records_in(log: PartitionLog, bytes_max: int = 10**6) -> list[Record]:
    """As a consumer reads them."""
    found: list[Record] = []
    offset = log.base_offset
    while chunk := log.read(offset, bytes_max):
        for _, header, payload in walk_frames(chunk):
            if header.record_count:
                found += to_records("logs", 0, rows_of(header, payload).since(offset))
                offset = header.next_offset
    return found


def table_of(records: Sequence[Record]) -> dict[bytes | None, bytes]:
    """What somebody has who read all of it: the last value of each key that is not deleted."""
    table = {record.key: record.value for record in records}
    return {key: value for key, value in table.items() if value is not None}


def expected_after(records: Sequence[Record], order: Order, end: int, drop_offset: int) -> list[Record]:
    """What is to stay of these records, of which those below offset `end` are before the order, and those below
    `drop_offset` before its `drop_end`."""
    latest = {record.key: record.offset for record in records if record.offset < end}
    kept = []
    for record in records:
        is_last = record.key is None or record.offset >= end or latest[record.key] == record.offset
        is_due = record.value is None and record.offset < drop_offset and record.timestamp < order.drop_before_us
        if is_last and (not is_due or record.key is None):
            kept.append(record)
    return kept
