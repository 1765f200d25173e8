"""Which partition a record goes to: the named one, by key, or round-robin.

Rule: pure, and the same for every client: crc32c of the key modulo the number of partitions.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from crc32c import crc32c

from quiver.errors import InvalidRequestError, UnknownPartitionError


class Partitioner:
    """Round-robin counters by topic."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def choose(self, topic: str, count: int, partition: int | None, key: bytes | None) -> int:
        if partition is not None:
            return check_partition(topic, count, partition)
        if key is not None:
            return crc32c(key) % count
        chosen = self._next.get(topic, 0) % count
        self._next[topic] = chosen + 1
        return chosen

    def spread(
        self, topic: str, count: int, partition: int | None, batch: pa.RecordBatch
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(partition, its records in order): keyed records by key, a batch without keys as a whole."""
        keys = batch.column("key")
        if partition is not None or count == 1 or keys.null_count == len(keys):
            yield self.choose(topic, count, partition, None), batch
            return
        fallback = self.choose(topic, count, None, None)
        chosen = [fallback if key is None else crc32c(key) % count for key in keys.to_pylist()]
        for number in sorted(set(chosen)):
            rows = pa.array([row for row, of in enumerate(chosen) if of == number], pa.int64())
            yield number, batch.take(rows)


def check_partition(topic: str, count: int, partition: object) -> int:
    if not isinstance(partition, int) or isinstance(partition, bool):
        raise InvalidRequestError(f"a partition is an int, not {type(partition).__name__}")
    if not 0 <= partition < count:
        raise UnknownPartitionError(
            f"topic {topic} has partitions 0 to {count - 1}, not {partition}", topic=topic, partition=partition
        )
    return partition
