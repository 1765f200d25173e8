"""Reads a range of one partition that is known to be committed, from any broker that holds it.

Every replica has such a range or will have it, so readers are spread over them. A broker that is away, behind, damaged
or has given the partition away is passed over for the next one; the reader goes on where it was.

There is no thread beside the reader's own: it runs the event loop while it waits. The next answer is asked for before
the records of the last one are handed out, and meanwhile comes as far as the socket takes it.

Rule: all of the range or an error. Trouble that passes is waited out for `patience` seconds without progress; the time
that the caller takes for what it got does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from bisect import bisect_left
from collections.abc import Coroutine, Iterator
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import pyarrow as pa

from quiver.client.cluster import Cluster, backoff_s
from quiver.client.fetcher import fetch_frames
from quiver.config import MIB
from quiver.errors import OffsetOutOfRangeError, QuiverError, RequestTimeoutError, UnknownTopicError
from quiver.wire.frame import FrameHeader
from quiver.wire.messages import Fetch
from quiver.wire.rows import Rows, rows_of

FETCH_BYTES_MAX: Final = 4 * MIB
_FETCH_BYTES_MIN: Final = 64 * 1024
_WAIT_MS: Final = 200  # how long a broker may wait for what it does not know of yet
_RECORD_BYTES: Final = 1024  # taken for the size of a record before the first is seen

_TURNS_TO_SEND: Final = 2  # of the loop: one makes the request, the next one writes it

T = TypeVar("T")
_Frames = list[tuple[FrameHeader, memoryview]]


class RangeReader:
    """Records `start` up to `end`, end exclusive. `uid`, where given, is the topic's that is meant; `turn` says which
    replica is asked first."""

    def __init__(
        self,
        servers: str,
        topic: str,
        partition: int,
        start: int,
        end: int,
        *,
        uid: str = "",
        turn: int = 0,
        patience: float = 120.0,
        client_id: str = "",
    ) -> None:
        self._topic = topic
        self._partition = partition
        self._start = start
        self._offset = start  # the next one to fetch
        self._end = end
        self._uid = uid
        self._turn = turn
        self._patience_s = patience
        self._record_bytes = float(_RECORD_BYTES)
        self._cluster = Cluster(servers, client_id or f"reader-{os.getpid()}", patience, memory=_memory)
        self._asked: asyncio.Task[_Frames] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __iter__(self) -> Iterator[Rows]:
        """The records of each stored batch that has any, without what lies outside the range."""
        while self._offset < self._end or self._asked is not None:
            for header, payload in self._run(self._next()):
                rows = rows_of(header, payload).since(self._start)
                if header.next_offset > self._end:
                    rows = rows.slice(0, bisect_left(rows.offsets, self._end))
                if rows.offsets:
                    yield rows

    def close(self) -> None:
        if self._loop is not None:
            self._run(self._end_all())
            self._loop.close()
            self._loop = None

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        # Not uvloop, nor asyncio.Runner: what they do about signals takes 0.4 ms of each run.
        self._loop = self._loop or asyncio.SelectorEventLoop()
        return self._loop.run_until_complete(work)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- on the loop ---------------------------------------------------------------------------------------------

    async def _end_all(self) -> None:
        if self._asked is not None:
            self._asked.cancel()
            await asyncio.gather(self._asked, return_exceptions=True)
        await self._cluster.close()

    async def _next(self) -> _Frames:
        asked, self._asked = self._asked, None
        frames: _Frames = []
        if asked is not None:
            with contextlib.suppress(QuiverError):  # it is asked again, and then told
                frames = await asked
        frames = frames or await self._fetch()
        if self._offset < self._end:
            self._asked = asyncio.create_task(self._ask())
            for _ in range(_TURNS_TO_SEND):
                await asyncio.sleep(0)
        return frames

    async def _fetch(self) -> _Frames:
        """The next answer with records, from whoever has one."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._patience_s
        failures = 0  # in a row
        while True:
            holders = await self._holders()
            try:
                if frames := await self._ask():
                    return frames
                self._turn += 1  # it does not know yet what is committed; another does
            except OffsetOutOfRangeError:
                raise  # the beginning of the log is the same everywhere
            except QuiverError as error:
                failures += 1
                self._turn = self._next_turn(error, holders)
                self._cluster.forget_topic(self._topic)
                if not error.retriable and failures >= 2 * len(holders):
                    raise
                if failures % len(holders) == 0:
                    await asyncio.sleep(backoff_s(failures // len(holders)))
            if loop.time() >= deadline_s:
                what = f"{self._topic}-{self._partition} from offset {self._offset} to {self._end}"
                raise RequestTimeoutError(f"no broker gave {what} within {self._patience_s:g} s")

    async def _holders(self) -> tuple[int, ...]:
        info = await self._cluster.retrying(lambda: self._cluster.topic(self._topic))
        if self._uid and info.uid and info.uid != self._uid:
            raise UnknownTopicError(f"topic {self._topic} was deleted and made again", topic=self._topic)
        held = [partition.replicas for partition in info.partitions if partition.id == self._partition]
        return held[0] if held and held[0] else (0,)

    def _next_turn(self, error: QuiverError, holders: tuple[int, ...]) -> int:
        """Who is behind says who leads; that one has it all."""
        leader = error.facts.get("leader")
        return holders.index(leader) if leader in holders else self._turn + 1

    async def _ask(self) -> _Frames:
        connection = await self._cluster.replica(self._topic, self._partition, self._turn)
        wanted = int((self._end - self._offset) * self._record_bytes)
        bytes_max = max(_FETCH_BYTES_MIN, min(FETCH_BYTES_MAX, wanted))
        request = Fetch(self._topic, self._partition, self._offset, bytes_max, 1, _WAIT_MS)
        frames = await fetch_frames(self._cluster, connection, request)
        while frames and frames[-1][0].base_offset >= self._end:  # a broker may know more than is wanted
            frames.pop()
        if frames:
            records = frames[-1][0].next_offset - frames[0][0].base_offset
            self._record_bytes = 1.25 * sum(len(data) for _, data in frames) / records + 1
            self._offset = frames[-1][0].next_offset
        return frames


def _memory(size: int) -> memoryview:
    """Not set to zero first, as a bytearray is: what is received fills it."""
    return memoryview(pa.allocate_buffer(size)).cast("B")
