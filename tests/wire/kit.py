"""Batches for tests: with and without keys, headers and nulls, told apart by their values."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from quiver.wire.records import batch_from_lists, encode_batch
from quiver.wire.rows import Rows


def make_batch(rows: int, *, nulls: bool = True, headers: bool = True, first: int = 0) -> pa.RecordBatch:
    """`nulls` makes every third key and every fifth value null, `headers` gives every second record some."""
    numbers = range(first, first + rows)
    keys = [None if nulls and number % 3 == 0 else b"key %d" % number for number in numbers]
    values = [None if nulls and number % 5 == 4 else b"value %d" % number * (number % 4) for number in numbers]
    pairs: list[Any] = [[("name", b"%d" % number), ("empty", b"")] if number % 2 else None for number in numbers]
    timestamps = [1_700_000_000_000_000 + number for number in numbers]
    return batch_from_lists(timestamps, keys, values, pairs if headers else None)


def make_payload(rows: int, compression: str | None = None, **options: Any) -> bytes:
    return bytes(encode_batch(make_batch(rows, **options), compression))


def metadata_end(payload: bytes) -> int:
    """Where the flatbuffer metadata of an IPC message ends and the columns begin."""
    return 8 + int.from_bytes(payload[4:8], "little")


def dense(base_offset: int, batch: pa.RecordBatch) -> Rows:
    """The batch as it was produced, at that offset."""
    return Rows(range(base_offset, base_offset + batch.num_rows), batch)
