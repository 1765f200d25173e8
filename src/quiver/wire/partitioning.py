"""The one rule by which a key chooses its partition, the same for every client and gateway."""

from __future__ import annotations

from crc32c import crc32c


def partition_of_key(key: bytes, partitions: int) -> int:
    return crc32c(key) % partitions
