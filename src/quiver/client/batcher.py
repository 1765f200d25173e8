"""Collects records into batches, one queue for each partition.

Rule: pure. When a batch leaves is decided here from facts handed in: full batches at once; a filling one when nothing
is in flight (a single message waits for nobody), when it has lingered, or when a flush was asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa

from quiver.client.delivery import Delivery, RecordFuture
from quiver.errors import InvalidRequestError
from quiver.types import Headers
from quiver.wire.records import batch_from_lists

# What a record costs beside its bytes: offsets, timestamp, Python's list slots. Used for batch size and back-pressure.
RECORD_OVERHEAD_BYTES: Final = 32
# Records of a list that are turned into Arrow at once, so that a list of a billion needs little memory beside it.
_LIST_CHUNK: Final = 100_000


class Batch:
    """Records on their way to one partition. `values` is a list while it fills; `payload` is set once encoded."""

    __slots__ = (
        "created_s",
        "delivery",
        "epoch",
        "headers",
        "keys",
        "payload",
        "payload_crc",
        "record_count",
        "sequence",
        "size_bytes",
        "timestamp_max",
        "timestamp_min",
        "timestamps",
        "values",
    )

    def __init__(self, delivery: Delivery, created_s: float) -> None:
        self.delivery = delivery
        self.created_s = created_s
        self.record_count = 0
        self.size_bytes = 0
        self.values: list[bytes | None] = []
        self.keys: list[bytes | None] = []
        self.headers: list[Headers | None] = []
        self.timestamps: list[int] = []
        self.payload: memoryview | None = None
        self.payload_crc = 0
        self.timestamp_min = 0
        self.timestamp_max = 0
        self.sequence: int | None = None  # given when first sent, kept for every retry
        self.epoch = 0

    def add(self, value: bytes | None, key: bytes | None, headers: Headers | None, timestamp: int) -> RecordFuture:
        row = self.record_count
        self.record_count = row + 1
        self.values.append(value)
        self.keys.append(key)
        self.headers.append(headers)
        self.timestamps.append(timestamp)
        return RecordFuture(self.delivery, row)


class PartitionQueue:
    """Batches that wait to be sent to one partition, oldest first; the last one may still be filling."""

    __slots__ = ("_bytes_max", "_filling", "_linger_s", "_partition", "_topic", "_waiting")

    def __init__(self, topic: str, partition: int, bytes_max: int, linger_s: float) -> None:
        self._topic = topic
        self._partition = partition
        self._bytes_max = bytes_max
        self._linger_s = linger_s
        self._waiting: deque[Batch] = deque()
        self._filling: Batch | None = None

    def __len__(self) -> int:
        return len(self._waiting) + (self._filling is not None)

    def add(
        self,
        value: bytes | None,
        key: bytes | None,
        headers: Headers | None,
        timestamp: int,
        size_bytes: int,
        now_s: float,
    ) -> tuple[RecordFuture, bool]:
        """Adds a record; True when the sender should look: a batch began or became full."""
        batch = self._filling
        notable = False
        if batch is not None and batch.size_bytes + size_bytes > self._bytes_max:
            self._waiting.append(batch)
            batch = None
        if batch is None:
            batch = self._filling = Batch(Delivery(self._topic, self._partition), now_s)
            notable = True
        batch.size_bytes += size_bytes
        return batch.add(value, key, headers, timestamp), notable

    def add_encoded(self, batch: Batch) -> None:
        """Adds a batch that is ready, behind what is there."""
        if self._filling is not None:
            self._waiting.append(self._filling)
            self._filling = None
        self._waiting.append(batch)

    def put_back(self, batches: list[Batch]) -> None:
        """Returns batches that must be sent again, in order, before everything else."""
        self._waiting.extendleft(reversed(batches))

    def sent(self) -> list[Batch]:
        """Batches that were sent before and wait to be sent again."""
        # Copied in one step: another thread may be adding, and a deque that changes cannot be walked.
        return [batch for batch in list(self._waiting) if batch.sequence is not None]

    def take(self, in_flight: int, flushing: bool, now_s: float) -> Batch | None:
        if self._waiting:
            return self._waiting.popleft()
        batch = self._filling
        if batch is None or not (in_flight == 0 or flushing or now_s - batch.created_s >= self._linger_s):
            return None
        self._filling = None
        return batch

    def oldest(self) -> Batch | None:
        return self._waiting[0] if self._waiting else self._filling

    def linger_left_s(self, now_s: float) -> float | None:
        """How long until a filling batch has lingered; None when there is none."""
        return None if self._filling is None else max(0.0, self._filling.created_s + self._linger_s - now_s)


def batches_of_list(records: Any, keys: Any, now_us: int) -> Iterator[pa.RecordBatch]:
    """What `send_many` was given, in Arrow; bytes only."""
    if isinstance(records, (str, bytes, bytearray)) or not isinstance(records, Sequence):
        raise InvalidRequestError(f"send_many takes a list of bytes or an Arrow table, not {type(records).__name__}")
    if keys is not None and not (isinstance(keys, Sequence) and len(keys) == len(records)):
        raise InvalidRequestError(f"keys is a list of {len(records)} keys, one for each record")
    for start in range(0, len(records), _LIST_CHUNK):
        part = records[start : start + _LIST_CHUNK]
        part_keys = None if keys is None else keys[start : start + _LIST_CHUNK]
        if str in {*map(type, part), *map(type, part_keys or ())}:
            # Arrow would encode it in silence; `send` refuses it.
            raise InvalidRequestError("send_many takes bytes, not str; encode it first: value.encode()")
        try:
            yield batch_from_lists([now_us], part_keys, part, None)
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as error:
            raise InvalidRequestError(f"send_many takes bytes: {error}") from error
