"""Reads a range of one partition that is known to be committed, from any broker that holds it.

Every replica has such a range or will have it, so readers are spread over them. A broker that is away, behind, damaged
or has given the partition away is passed over for the next one; the reader goes on where it was.

Rule: all of the range or an error. Trouble that passes is waited out for `patience` seconds without progress.
"""

from __future__ import annotations

import asyncio
import os
import queue
from bisect import bisect_left
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Self

from quiver.client.cluster import Cluster, backoff_s
from quiver.client.fetcher import fetch_frames
from quiver.client.loop_thread import shared_loop
from quiver.config import MIB
from quiver.errors import OffsetOutOfRangeError, QuiverError, RequestTimeoutError, UnknownTopicError
from quiver.wire.frame import FrameHeader
from quiver.wire.messages import Fetch
from quiver.wire.rows import Rows, rows_of

FETCH_BYTES_MAX: Final = 4 * MIB
_FETCH_BYTES_MIN: Final = 64 * 1024
_AHEAD_MAX: Final = 2  # answers that wait for the reader while the next one is fetched
_WAIT_MS: Final = 200  # how long a broker may wait for what it does not know of yet
_RECORD_BYTES: Final = 1024  # taken for the size of a record before the first is seen

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
        self._answers: queue.SimpleQueue[_Frames | QuiverError | None] = queue.SimpleQueue()
        self._io = shared_loop()

        async def begin() -> tuple[Cluster, asyncio.Semaphore, asyncio.Task[None]]:
            self._cluster = Cluster(servers, client_id or f"reader-{os.getpid()}", patience)
            self._room = asyncio.Semaphore(_AHEAD_MAX)
            return self._cluster, self._room, asyncio.create_task(self._run(), name=f"range {topic}-{partition}")

        self._cluster, self._room, self._task = self._io.call(begin())

    # -- from the reader's thread --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Rows]:
        """The records of each stored batch that has any, without what lies outside the range."""
        while (answer := self._answers.get()) is not None:
            if isinstance(answer, QuiverError):
                raise answer
            for header, payload in answer:
                rows = rows_of(header, payload).since(self._start)
                if header.next_offset > self._end:
                    rows = rows.slice(0, bisect_left(rows.offsets, self._end))
                if rows.offsets:
                    yield rows
            self._io.loop.call_soon_threadsafe(self._room.release)

    def close(self) -> None:
        async def end() -> None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._cluster.close()

        self._io.call(end())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- on the loop ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self._offset < self._end:
                await self._room.acquire()
                self._answers.put(await self._fetch())
            self._answers.put(None)
        except QuiverError as error:
            self._answers.put(error)
        except Exception as error:
            self._answers.put(QuiverError(f"internal error of the client: {error}"))  # a bug must not hang the reader

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
        # A broker may know more than is wanted: a batch that begins beyond the end is not ours.
        frames = [(header, data) for header, data in frames if header.base_offset < self._end]
        if frames:
            records = frames[-1][0].next_offset - frames[0][0].base_offset
            self._record_bytes = 1.25 * sum(len(data) for _, data in frames) / records + 1
            self._offset = frames[-1][0].next_offset
        return frames
