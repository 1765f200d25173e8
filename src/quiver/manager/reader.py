"""Single records for consumers that take one at a time, out of batches that are decoded once.

Rule: a cache of immutable bytes: what was committed at an offset never changes, so nothing here is ever stale; at most
compaction has taken it away since. A partition is known by its uid: a deleted topic's name may come again with other
messages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from quiver.errors import UnavailableError
from quiver.manager.links import BrokerLink
from quiver.metadata.state import Topic
from quiver.wire.frame import walk_frames
from quiver.wire.messages import Fetch

_CACHE_BYTES_MAX: Final = 32 * 1024 * 1024
_RUNS_PER_PARTITION_MAX: Final = 16


class _Run(NamedTuple):
    """The records of one frame, which covers offsets up to `end`."""

    base_offset: int
    end: int
    offsets: Sequence[int]
    values: list[bytes | None]
    size_bytes: int

    def next_at(self, offset: int) -> Found | None:
        at = bisect_left(self.offsets, offset)
        return Found(self.offsets[at], self.values[at]) if at < len(self.offsets) else None


class Found(NamedTuple):
    offset: int
    value: bytes | None


class RecordReader:
    def __init__(self, link_of: Callable[[str, int], BrokerLink]) -> None:
        self._link_of = link_of
        self._runs: OrderedDict[str, list[_Run]] = OrderedDict()  # by uid, least recently used first
        self._size_bytes = 0

    async def next_at(self, topic: Topic, partition: int, offset: int, end: int) -> Found | None:
        """The first committed record from `offset` on; None when compaction left none below `end`. Raises what the
        broker says where it cannot be read."""
        uid = topic.partitions[partition].uid
        found = self.kept(uid, offset)
        while found is None and offset < end:
            run = await self._fetch(topic.name, partition, offset)
            self._keep(uid, run)
            found, offset = run.next_at(offset), run.end
        return found

    def kept(self, uid: str, offset: int) -> Found | None:
        """The same, if it is here in the frame of that offset."""
        for run in self._runs.get(uid, ()):
            if run.base_offset <= offset < run.end:
                self._runs.move_to_end(uid)
                return run.next_at(offset)
        return None

    def forget(self, topic: Topic) -> None:
        """The topic is gone: what is kept of it only takes room."""
        for partition in topic.partitions:
            self._size_bytes -= sum(run.size_bytes for run in self._runs.pop(partition.uid, ()))

    async def _fetch(self, topic: str, partition: int, offset: int) -> _Run:
        from quiver.wire.rows import rows_of

        _, payload = await self._link_of(topic, partition).call(Fetch(topic, partition, offset, 1))
        for _, header, data in walk_frames(memoryview(b"".join(payload))):
            if header.base_offset <= offset < header.next_offset:
                rows = rows_of(header, data)
                values = rows.batch.column("value").to_pylist()
                return _Run(header.base_offset, header.next_offset, rows.offsets, values, len(data))
        # A broker that was just asked as the leader and is behind it.
        raise UnavailableError(f"offset {offset} of partition {partition} of topic {topic} cannot be read just now")

    def _keep(self, uid: str, run: _Run) -> None:
        runs = self._runs.setdefault(uid, [])
        self._runs.move_to_end(uid)
        runs.insert(0, run)
        self._size_bytes += run.size_bytes
        if len(runs) > _RUNS_PER_PARTITION_MAX:
            self._size_bytes -= runs.pop().size_bytes
        while self._size_bytes > _CACHE_BYTES_MAX and (len(self._runs) > 1 or len(runs) > 1):
            oldest = next(iter(self._runs))
            self._size_bytes -= self._runs[oldest].pop().size_bytes
            if not self._runs[oldest]:
                del self._runs[oldest]
