"""The consuming engine and its asyncio face.

Rule: a position moves when records are handed to the application, never when they are fetched. `commit` stores these
positions; only after a `seek` may a stored position move back.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa

from quiver.client.backlog import Backlog, TopicPartition
from quiver.client.cluster import Cluster
from quiver.client.fetcher import Chunk, Fetcher
from quiver.client.partitioner import check_partition
from quiver.client.topic_watch import REFRESH_S, TopicWatch
from quiver.config import MIB
from quiver.errors import (
    ClosedError,
    ForkedError,
    InvalidRequestError,
    NoCommittedPositionError,
    OffsetOutOfRangeError,
    QuiverError,
    UnknownPartitionError,
)
from quiver.types import Record, TopicInfo, check_topic_name
from quiver.wire.frame import walk_frames
from quiver.wire.messages import (
    CONSUMER_NAME_MAX,
    OFFSET_EARLIEST,
    OFFSET_LATEST,
    CommitPosition,
    Fetch,
    FetchReply,
    GetPosition,
    ListOffset,
    ListOffsetReply,
    Position,
    PositionReply,
)
from quiver.wire.records import TABLE_SCHEMA, decode_batch

STARTS: Final = ("earliest", "latest", "committed")
_FETCH_BYTES_MIN: Final = 64 * 1024


class ConsumerEngine:
    """What both faces share. `notify` is called on the loop when there may be something to take."""

    def __init__(
        self,
        servers: str,
        topics: Sequence[str],
        notify: Callable[[], None],
        *,
        group: str | None = None,
        start: str | int = "earliest",
        partitions: dict[str, list[int]] | None = None,
        fetch_bytes: int = 4 * MIB,
        prefetch_bytes: int = 32 * MIB,
        request_timeout: float = 30.0,
        client_id: str = "",
        metadata_refresh: float = REFRESH_S,
    ) -> None:
        if isinstance(topics, (str, bytes)) or not isinstance(topics, Iterable):
            raise InvalidRequestError("topics is a list of topic names")
        # Once each: two fetchers of one partition would hand out every record twice.
        self._topics = list(dict.fromkeys(check_topic_name(topic) for topic in topics))
        self._wanted = partitions or {}
        if not self._topics or not isinstance(self._wanted, dict) or not self._wanted.keys() <= set(self._topics):
            raise InvalidRequestError("topics is a list of topic names; partitions has numbers for some of them")
        is_offset = isinstance(start, int) and not isinstance(start, bool) and start >= 0
        if start not in STARTS and not is_offset:
            raise InvalidRequestError(f"start is one of {STARTS} or an offset of 0 or more, not {start!r}")
        if group is not None and not (isinstance(group, str) and 0 < len(group) <= CONSUMER_NAME_MAX):
            raise InvalidRequestError(f"group is a name of 1 to {CONSUMER_NAME_MAX} characters")
        if start == "committed" and group is None:
            raise InvalidRequestError("start='committed' needs a group")
        self._cluster = Cluster(servers, client_id or f"consumer-{os.getpid()}", request_timeout)
        self._notify = notify
        self._group = group
        self._start = start
        self._fetch_bytes = fetch_bytes
        self._prefetch_bytes = prefetch_bytes
        self._fetchers: dict[TopicPartition, Fetcher] = {}
        followed = [topic for topic in self._topics if topic not in self._wanted]
        self._watch = TopicWatch(self._cluster, metadata_refresh, lambda: followed, self._seen) if followed else None
        self.backlog = Backlog(self._taken)
        self._committed: dict[TopicPartition, int] = {}
        self._rewound: set[TopicPartition] = set()
        self._started = False
        self._closed = False
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()

    def check_usable(self) -> None:
        if self._closed:
            raise ClosedError("the consumer is closed")
        if self._pid != os.getpid():
            raise ForkedError("this consumer was made before a fork; make a new one in the child process")

    # -- on the loop ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Finds the partitions and where to begin, then fetches ahead. Called once, before anything is taken."""
        if self._started:
            return
        found: list[TopicPartition] = []
        for topic in self._topics:
            info = await self._cluster.retrying(lambda name=topic: self._cluster.topic(name))  # type: ignore[misc]
            numbers = self._wanted.get(topic)
            if numbers is None:
                numbers = list(range(len(info.partitions)))
            count = len(info.partitions)
            found += dict.fromkeys((topic, check_partition(topic, count, number)) for number in numbers)
        positions = await asyncio.gather(*(self._first_offset(*pair) for pair in found))
        # Two chunks of each partition may be held: one being read, one being fetched.
        share = max(_FETCH_BYTES_MIN, min(self._fetch_bytes, self._prefetch_bytes // (2 * max(1, len(found)))))
        for (topic, number), offset in zip(found, positions, strict=True):
            self._fetch(topic, number, offset, share)
        self._started = True
        if self._watch is not None:
            self._watch.start()

    def _fetch(self, topic: str, number: int, offset: int, share: int) -> None:
        policy = self._start if isinstance(self._start, str) else "none"
        fetcher = Fetcher(self._cluster, topic, number, start=policy, bytes_max=share, deliver=self._delivered)
        self._fetchers[topic, number] = fetcher
        self.backlog.begin(fetcher, offset)
        fetcher.start(offset)

    async def _seen(self, topic: TopicInfo) -> None:
        """Reads partitions that were not there at the start: from their first record on, whatever `start` says."""
        for number in range(len(topic.partitions)):
            if (topic.name, number) not in self._fetchers and not self._closed:
                offset = await self._committed_offset(topic.name, number)
                if offset is None:
                    offset = await self.edge(topic.name, number, OFFSET_EARLIEST)
                self._fetch(topic.name, number, offset, _FETCH_BYTES_MIN)

    async def _first_offset(self, topic: str, partition: int) -> int:
        committed = await self._committed_offset(topic, partition)
        if committed is not None:
            return committed
        if self._start == "committed":
            raise NoCommittedPositionError(f"group {self._group} has no position in {topic}-{partition}")
        if isinstance(self._start, int):
            return await self._checked_offset(topic, partition, self._start)
        return await self.edge(topic, partition, OFFSET_EARLIEST if self._start == "earliest" else OFFSET_LATEST)

    async def _committed_offset(self, topic: str, partition: int) -> int | None:
        if self._group is None:
            return None
        reply = await self._cluster.ask(topic, partition, GetPosition(topic, partition, self._group), PositionReply)
        if reply.offset is not None:
            self._committed[topic, partition] = reply.offset
        return reply.offset

    async def edge(self, topic: str, partition: int, which: int) -> int:
        request = ListOffset(topic, partition, which)
        return (await self._cluster.ask(topic, partition, request, ListOffsetReply)).offset

    async def _checked_offset(self, topic: str, partition: int, offset: int) -> int:
        earliest = await self.edge(topic, partition, OFFSET_EARLIEST)
        latest = await self.edge(topic, partition, OFFSET_LATEST)
        if not earliest <= offset <= latest:
            raise OffsetOutOfRangeError.of(topic, partition, offset, earliest, latest)
        return offset

    def _delivered(self, fetcher: Fetcher, what: list[Chunk] | QuiverError) -> None:
        self.backlog.deliver(fetcher, what)
        self._notify()

    def _taken(self, fetcher: Fetcher, payload_bytes: int) -> None:
        self._loop.call_soon_threadsafe(fetcher.consumed, payload_bytes)

    def _fetcher(self, topic: str, partition: int) -> Fetcher:
        check_topic_name(topic)
        if not isinstance(partition, int) or isinstance(partition, bool):
            raise InvalidRequestError(f"a partition is an int, not {type(partition).__name__}")
        fetcher = self._fetchers.get((topic, partition))
        if fetcher is None:
            raise UnknownPartitionError(f"this consumer does not read {topic}-{partition}")
        return fetcher

    async def seek(self, topic: str, partition: int, offset: int) -> None:
        if not isinstance(offset, int) or isinstance(offset, bool):
            raise InvalidRequestError(f"an offset is an int, not {type(offset).__name__}")
        fetcher = self._fetcher(topic, partition)
        await self._checked_offset(topic, partition, offset)
        await fetcher.stop()
        self.backlog.forget(fetcher, offset)
        self._rewound.add((topic, partition))
        fetcher.start(offset)

    async def offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        """The offset of the first record at or after that time; the end of the log when there is none."""
        self._fetcher(topic, partition)
        return await offset_at(self._cluster, topic, partition, timestamp)

    async def commit(self) -> None:
        if self._group is None:
            raise InvalidRequestError("only a consumer with a group can commit: Consumer(..., group='name')")
        moved = {pair: offset for pair, offset in self.positions.items() if self._committed.get(pair) != offset}
        await asyncio.gather(*(self._commit(pair, offset) for pair, offset in moved.items()))

    async def _commit(self, pair: TopicPartition, offset: int) -> None:
        assert self._group is not None
        request = CommitPosition(*pair, Position(self._group, offset, pair in self._rewound))
        await self._cluster.ask(*pair, request, PositionReply)
        self._committed[pair] = offset
        self._rewound.discard(pair)

    async def committed(self, topic: str, partition: int) -> int | None:
        if self._group is None:
            raise InvalidRequestError("only a consumer with a group has committed positions")
        check_partition(topic, len((await self._cluster.topic(topic)).partitions), partition)
        request = GetPosition(topic, partition, self._group)
        return (await self._cluster.ask(topic, partition, request, PositionReply)).offset

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._watch is not None:
                await self._watch.stop()
            for fetcher in self._fetchers.values():
                await fetcher.stop()
            await self._cluster.close()
            self.backlog.clear()
            self._notify()

    # -- from the reader's thread --------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def positions(self) -> dict[TopicPartition, int]:
        return dict(self.backlog.positions)

    @property
    def lost_records(self) -> int:
        return sum(fetcher.lost_records for fetcher in self._fetchers.values())


def check_count(max_records: object) -> None:
    if not isinstance(max_records, int) or isinstance(max_records, bool) or max_records < 1:
        raise InvalidRequestError(f"max_records is an int of 1 or more, not {max_records!r}")


async def offset_at(cluster: Cluster, topic: str, partition: int, timestamp: int) -> int:
    """Brokers know batches; the record inside the batch is found here."""
    if not isinstance(timestamp, int) or isinstance(timestamp, bool) or not 0 <= timestamp < 2**63:
        raise InvalidRequestError("a timestamp is an int of microseconds since 1970 UTC")
    found = await cluster.ask(topic, partition, ListOffset(topic, partition, timestamp), ListOffsetReply)

    async def fetch() -> memoryview:
        connection = await cluster.leader(topic, partition)
        request = Fetch(topic, partition, found.offset, 1)
        return (await connection.call(request, FetchReply, timeout_s=cluster.request_timeout_s))[1]

    for _, header, payload in walk_frames(await cluster.retrying(fetch)):
        if header.next_offset > found.offset and header.record_count:
            stamps = decode_batch(payload).column("timestamp").view(pa.int64()).to_pylist()
            for row, stamp in enumerate(stamps):
                if stamp >= timestamp and header.base_offset + row >= found.offset:
                    return header.base_offset + row
    return found.offset


class AsyncConsumer:
    """Reads topics from asyncio: `async for record in consumer`, `await consumer.poll()`."""

    def __init__(
        self, servers: str, topics: Sequence[str], *, idle_timeout: float | None = None, **settings: Any
    ) -> None:
        self._something = asyncio.Event()
        self._make = functools.partial(ConsumerEngine, servers, topics, self._something.set, **settings)
        self._idle_timeout_s = idle_timeout
        self._engine: ConsumerEngine | None = None
        self._start_lock = asyncio.Lock()

    async def _ready(self) -> ConsumerEngine:
        if self._engine is None:
            self._engine = self._make()
        self._engine.check_usable()
        async with self._start_lock:
            await self._engine.start()
        return self._engine

    async def _until(self, deadline_s: float | None) -> bool:
        """Waits until there may be something to take."""
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._something.wait()
            return True
        except TimeoutError:
            return False

    async def poll(self, max_records: int = 500, timeout: float = 1.0) -> list[Record]:
        check_count(max_records)
        engine = await self._ready()
        deadline_s = asyncio.get_running_loop().time() + timeout
        while True:
            self._something.clear()
            if (records := engine.backlog.take(max_records)) or not await self._until(deadline_s):
                return records
            engine.check_usable()

    async def poll_arrow(self, timeout: float = 1.0) -> pa.Table:
        engine = await self._ready()
        deadline_s = asyncio.get_running_loop().time() + timeout
        while True:
            self._something.clear()
            if (table := engine.backlog.take_table()) is not None:
                return table
            if not await self._until(deadline_s):
                return TABLE_SCHEMA.empty_table()
            engine.check_usable()

    async def __aiter__(self) -> AsyncIterator[Record]:
        """Records as they come; ends after `idle_timeout` without one, or when the consumer is closed."""
        engine = await self._ready()
        idle_s = self._idle_timeout_s
        while not engine.is_closed:
            self._something.clear()
            if engine.backlog.prepare():
                for record in engine.backlog.walk():
                    yield record
            elif not await self._until(None if idle_s is None else asyncio.get_running_loop().time() + idle_s):
                return

    async def commit(self) -> None:
        """Stores the positions of what was handed out, durably, before it returns."""
        await (await self._ready()).commit()

    async def committed(self, topic: str, partition: int) -> int | None:
        return await (await self._ready()).committed(topic, partition)

    async def seek(self, topic: str, partition: int, offset: int) -> None:
        await (await self._ready()).seek(topic, partition, offset)

    async def seek_to_time(self, topic: str, partition: int, timestamp: int) -> None:
        engine = await self._ready()
        await engine.seek(topic, partition, await engine.offset_at(topic, partition, timestamp))

    async def position(self, topic: str, partition: int) -> int | None:
        return (await self._ready()).positions.get((topic, partition))

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()

    async def __aenter__(self) -> Self:
        await self._ready()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
