"""Single records for consumers that take one at a time, out of batches that are decoded once.

Rule: a cache of immutable bytes: what was committed at an offset never changes, so nothing here is ever stale.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from quiver.manager.links import BrokerLink
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
        self._runs: OrderedDict[tuple[str, int], list[_Run]] = OrderedDict()  # least recently used first
        self._size_bytes = 0

    async def value_at(self, topic: str, partition: int, offset: int) -> bytes | None:
        """The value of a committed record. Raises what the broker says when there is none."""
        runs = self._runs.get((topic, partition), ())
        for run in runs:
            if run.base_offset <= offset < run.base_offset + len(run.values):
                self._runs.move_to_end((topic, partition))
                return run.values[offset - run.base_offset]
        run = await self._fetch(topic, partition, offset)
        return run.values[offset - run.base_offset]

    def forget(self, topic: str) -> None:
        """The topic is gone; another of that name may come."""
        for target in [target for target in self._runs if target[0] == topic]:
            self._size_bytes -= sum(run.size_bytes for run in self._runs.pop(target))

    async def _fetch(self, topic: str, partition: int, offset: int) -> _Run:
        from quiver.wire.records import decode_batch

        _, payload = await self._link_of(topic, partition).call(Fetch(topic, partition, offset, 1))
        for _, header, data in walk_frames(memoryview(b"".join(payload))):
            if header.base_offset <= offset < header.next_offset:
                run = _Run(header.base_offset, decode_batch(data).column("value").to_pylist(), len(data))
                self._keep(topic, partition, run)
                return run
        raise AssertionError(f"the broker sent no frame with offset {offset}")

    def _keep(self, topic: str, partition: int, run: _Run) -> None:
        runs = self._runs.setdefault((topic, partition), [])
        self._runs.move_to_end((topic, partition))
        runs.insert(0, run)
        self._size_bytes += run.size_bytes
        if len(runs) > _RUNS_PER_PARTITION_MAX:
            self._size_bytes -= runs.pop().size_bytes
        while self._size_bytes > _CACHE_BYTES_MAX and len(self._runs) > 1:
            _, dropped = self._runs.popitem(last=False)
            self._size_bytes -= sum(old.size_bytes for old in dropped)
