"""Single records for consumers that take one at a time, out of batches that are decoded once.

Rule: a cache of immutable bytes: what was committed at an offset never changes, so nothing here is ever stale. A
partition is known by its uid: a deleted topic's name may come again with other messages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from quiver.errors import UnavailableError
from quiver.manager.links import BrokerLink
from quiver.metadata.state import Topic
from quiver.wire.frame import walk_frames
from quiver.wire.messages import Fetch

_CACHE_BYTES_MAX: Final = 32 * 1024 * 1024
_RUNS_PER_PARTITION_MAX: Final = 16


class _Run(NamedTuple):
    base_offset: int
    values: list[bytes | None]
    size_bytes: int


class RecordReader:
    def __init__(self, link_of: Callable[[str, int], BrokerLink]) -> None:
        self._link_of = link_of
        self._runs: OrderedDict[str, list[_Run]] = OrderedDict()  # by uid, least recently used first
        self._size_bytes = 0

    async def value_at(self, topic: Topic, partition: int, offset: int) -> bytes | None:
        """The value of a committed record. Raises what the broker says when there is none."""
        uid = topic.partitions[partition].uid
        found = self.kept(uid, offset)
        if found:
            return found[0]
        run = await self._fetch(topic.name, partition, offset)
        self._keep(uid, run)
        return run.values[offset - run.base_offset]

    def kept(self, uid: str, offset: int) -> tuple[bytes | None, ...]:
        """The value if it is here; otherwise nothing."""
        for run in self._runs.get(uid, ()):
            if run.base_offset <= offset < run.base_offset + len(run.values):
                self._runs.move_to_end(uid)
                return (run.values[offset - run.base_offset],)
        return ()

    def forget(self, topic: Topic) -> None:
        """The topic is gone: what is kept of it only takes room."""
        for partition in topic.partitions:
            self._size_bytes -= sum(run.size_bytes for run in self._runs.pop(partition.uid, ()))

    async def _fetch(self, topic: str, partition: int, offset: int) -> _Run:
        from quiver.wire.records import decode_batch

        _, payload = await self._link_of(topic, partition).call(Fetch(topic, partition, offset, 1))
        for _, header, data in walk_frames(memoryview(b"".join(payload))):
            if header.base_offset <= offset < header.next_offset:
                return _Run(header.base_offset, decode_batch(data).column("value").to_pylist(), len(data))
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
