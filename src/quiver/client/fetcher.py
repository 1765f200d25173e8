"""Fetches one partition ahead of its reader.

Rule: a fetcher knows offsets and bytes, not records. Trouble that passes is waited out for as long as it takes; trouble
that does not is handed to the reader, who decides, and the fetcher rests until a seek.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from quiver.client.cluster import Cluster, backoff_s
from quiver.errors import CorruptLogError, OffsetOutOfRangeError, QuiverError, RequestTimeoutError
from quiver.net.connection import Connection
from quiver.wire.frame import FrameError, FrameHeader, walk_frames
from quiver.wire.messages import Fetch, FetchReply

logger = logging.getLogger("quiver.client")

FETCH_WAIT_MS: Final = 500
_REPLY_SLACK_S: Final = 10.0


class Chunk(NamedTuple):
    """A batch as it was stored; its first `skip` offsets are before the wanted one."""

    fetcher: Fetcher
    header: FrameHeader
    payload: memoryview
    skip: int


async def fetch_frames(
    cluster: Cluster, connection: Connection, request: Fetch
) -> list[tuple[FrameHeader, memoryview]]:
    """What one broker answers: (header, payload) of each batch that reaches beyond the wanted offset, checked. Entries
    without records stand between batches."""
    try:
        _, payload = await connection.call(request, FetchReply, timeout_s=request.wait_ms / 1000 + _REPLY_SLACK_S)
    except RequestTimeoutError:
        cluster.drop(connection)
        raise
    try:
        return [
            (header, data)
            for _, header, data in walk_frames(payload)
            if header.record_count and header.next_offset > request.offset
        ]
    except FrameError as error:
        raise CorruptLogError(f"damaged frame from {connection.address}: {error}") from error


class Fetcher:
    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        partition: int,
        *,
        start: str,
        bytes_max: int,
        deliver: Callable[[Fetcher, list[Chunk] | QuiverError], None],
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.lost_records = 0  # skipped because they were trimmed before they were read
        self._cluster = cluster
        self._start = start
        self._bytes_max = bytes_max
        self._deliver = deliver
        self._offset = 0
        self._buffered_bytes = 0
        self._room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, offset: int) -> None:
        self._offset = offset
        self._buffered_bytes = 0
        self._room.set()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"fetch {self.topic}-{self.partition}")

    @property
    def is_stopped(self) -> bool:
        return self._task is None

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def consumed(self, payload_bytes: int) -> None:
        """The reader has taken that much. Only from the loop's own thread."""
        self._buffered_bytes -= payload_bytes
        if self._buffered_bytes < self._bytes_max:
            self._room.set()

    async def _run(self) -> None:
        attempt = 0
        while True:
            await self._room.wait()
            try:
                chunks = await self._fetch()
                attempt = 0
            except OffsetOutOfRangeError as error:
                if not self._reset(error):
                    self._deliver(self, error)
                    return
                continue
            except QuiverError as error:
                if not error.retriable:
                    self._deliver(self, error)
                    return
                self._cluster.leader_failed(self.topic, self.partition, error)
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1
                continue
            if chunks:
                self._buffered_bytes += sum(len(chunk.payload) for chunk in chunks)
                if self._buffered_bytes >= self._bytes_max:
                    self._room.clear()
                self._deliver(self, chunks)

    async def _fetch(self) -> list[Chunk]:
        connection = await self._cluster.leader(self.topic, self.partition)
        request = Fetch(self.topic, self.partition, self._offset, self._bytes_max, 1, FETCH_WAIT_MS)
        chunks = []
        for header, data in await fetch_frames(self._cluster, connection, request):
            skip = max(0, self._offset - header.base_offset)
            chunks.append(Chunk(self, header, data, skip))
            self._offset = header.next_offset
        return chunks

    def _reset(self, error: OffsetOutOfRangeError) -> bool:
        """Follows the start policy when the log no longer has the wanted offset."""
        earliest, latest = error.facts.get("earliest"), error.facts.get("latest")
        if self._start not in ("earliest", "latest") or not isinstance(earliest, int) or not isinstance(latest, int):
            return False
        target = earliest if self._start == "earliest" else latest
        self.lost_records += max(0, target - self._offset)
        logger.warning("position_reset topic=%s partition=%d error=%r to=%d", self.topic, self.partition, error, target)
        self._offset = target
        return True
