"""Which partition each row of a task goes to: the one that the row names, by its key, or the one whose turn it is.

Rule: pure, and a function of the rows and their order alone. A task that runs again sends the same parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from quiver.errors import UnknownPartitionError
from quiver.wire.partitioning import partition_of_key


def route(first: pa.Table, others: Iterable[pa.Table], turn: int, count: int) -> Iterator[tuple[int, pa.Table]]:
    """(partition, rows) of each batch to send. Rows of a piece that name no partition and have no key stay together,
    and go to the partition whose turn it is."""
    for number, piece in enumerate(itertools.chain([first], others)):
        rows = piece.drop_columns("partition") if "partition" in piece.column_names else piece
        targets = _targets(piece, (turn + number) % count, count)
        if isinstance(targets, int):
            yield targets, rows
        else:
            yield from _split(rows, targets)


def _targets(piece: pa.Table, turn: int, count: int) -> int | pa.Array:
    """A partition for each row, or one for all."""
    named = _named(piece, count)
    keys = piece["key"].combine_chunks() if "key" in piece.column_names and count > 1 else None
    if named is not None and named.null_count == 0:
        return named
    if keys is None or keys.null_count == len(keys):
        return turn if named is None else named.fill_null(turn)
    by_key = pa.array([turn if key is None else partition_of_key(key, count) for key in _bytes(keys)], pa.int64())
    return by_key if named is None else pc.coalesce(named, by_key)


def _bytes(keys: pa.Array) -> list[bytes | None]:
    found: list[bytes | None] = keys.cast(pa.binary()).to_pylist()
    return found


def _named(piece: pa.Table, count: int) -> pa.Array | None:
    if "partition" not in piece.column_names:
        return None
    named = piece["partition"].combine_chunks().cast(pa.int64())
    if named.null_count == len(named):
        return None
    found = pc.min_max(named).as_py()
    wrong = found["min"] if found["min"] < 0 else found["max"]
    if not 0 <= wrong < count:
        raise UnknownPartitionError(f"the column partition says {wrong}; the topic has partitions 0 to {count - 1}")
    return named


def _split(rows: pa.Table, targets: pa.Array) -> Iterator[tuple[int, pa.Table]]:
    # Stable: rows of one partition keep their order.
    order = pc.sort_indices(targets)
    ends = pc.value_counts(targets.take(order))
    placed = rows.take(order)
    at = 0
    for entry in ends.to_pylist():
        yield entry["values"], placed.slice(at, entry["counts"]).combine_chunks()
        at += entry["counts"]
