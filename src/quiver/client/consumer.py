"""The consuming engine that both faces share.

With a group it reads what the group gives it, else the partitions it was asked for or all. What a group takes away is
let go of when the reader comes back for more: then it is done with what it had.

Rule: a position moves when records are handed to the application, never when they are fetched. `commit` stores these
positions; only after a `seek` may a stored position move back.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from quiver.client.backlog import Backlog, TopicPartition
from quiver.client.cluster import Cluster
from quiver.client.fetcher import Chunk, Fetcher
from quiver.client.group_member import GroupMember
from quiver.client.offset_lookup import offset_at
from quiver.client.partitioner import check_partition
from quiver.client.positions import Positions
from quiver.client.topic_watch import REFRESH_S, TopicWatch
from quiver.config import MIB
from quiver.errors import (
    ClosedError,
    ForkedError,
    InvalidRequestError,
    MemberFencedError,
    NoCommittedPositionError,
    OffsetOutOfRangeError,
    QuiverError,
    UnavailableError,
    UnknownPartitionError,
)
from quiver.types import TopicInfo, check_topic_name
from quiver.wire.fields import CONSUMER_NAME_MAX
from quiver.wire.messages import (
    OFFSET_EARLIEST,
    OFFSET_LATEST,
    ListOffset,
    ListOffsetReply,
)

STICKY: Final = "sticky"
STARTS: Final = ("earliest", "latest", "committed")
_FETCH_BYTES_MIN: Final = 64 * 1024


class Taken(NamedTuple):
    """What the group takes away: `revoked` in order, so that positions may still be stored; `lost` is another's;
    `unread` was given and asked back before it was read."""

    revoked: dict[TopicPartition, int]
    lost: dict[TopicPartition, int]
    unread: dict[TopicPartition, int]


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
        session_timeout: float = 10.0,
        assignment: str = STICKY,
        commit_interval: float | None = None,
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
        client = client_id or f"consumer-{os.getpid()}"
        self._cluster = Cluster(servers, client, request_timeout)
        self._notify = notify
        self._group = group
        self._start = start
        self._fetch_bytes = fetch_bytes
        self._prefetch_bytes = prefetch_bytes
        self._fetchers: dict[TopicPartition, Fetcher] = {}
        self.backlog = Backlog(self._taken)
        self.stored = Positions(self._cluster, group, self.backlog, commit_interval)
        self._member: GroupMember | None = None
        if group is not None and not self._wanted:
            settings = {"session_s": session_timeout, "strategy": assignment, "client": client}
            self._member = GroupMember(self._cluster, group, self._topics, self._interrupt, **settings)  # type: ignore[arg-type]
        self._owned: dict[TopicPartition, int] = {}  # what is read for the group, with the epoch of each
        self._settling = 0  # the version of the membership that is being followed
        self._counts: dict[str, int] = {}  # partitions of each topic when this consumer began
        self._lost_records = 0  # of partitions that are not read any more
        followed = [topic for topic in self._topics if topic not in self._wanted and self._member is None]
        self._watch = TopicWatch(self._cluster, metadata_refresh, lambda: followed, self._seen) if followed else None
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

    async def start(self) -> bool:
        """Finds the partitions and where to begin, then fetches ahead; in a group it only joins, and the reader has to
        settle what it is given. Called before anything is taken. False: it was started before."""
        if self._started:
            return False
        found: list[TopicPartition] = []
        for topic in self._topics:
            info = await self._cluster.retrying(lambda name=topic: self._cluster.topic(name))  # type: ignore[misc]
            self._counts[topic] = count = len(info.partitions)
            numbers = self._wanted.get(topic, list(range(count)))
            found += dict.fromkeys((topic, check_partition(topic, count, number)) for number in numbers)
        if self._member is not None:
            await self._member.join()
        else:
            await self._read(dict.fromkeys(found, 0))
        self._started = True
        self.stored.start()
        if self._watch is not None:
            self._watch.start()
        return True

    async def _read(self, partitions: dict[TopicPartition, int]) -> None:
        """Begins to fetch partitions. All or none: what cannot be begun now is begun the next time."""
        finding = [asyncio.create_task(self._first_offset(*pair, epoch)) for pair, epoch in partitions.items()]
        try:
            offsets = await asyncio.gather(*finding)
        except (Exception, asyncio.CancelledError):
            # Where one fails the others end too: they would go on beside those of the next time.
            for task in finding:
                task.cancel()
            await asyncio.gather(*finding, return_exceptions=True)
            raise
        # Two chunks of each partition may be held: one being read, one being fetched.
        count = max(1, len(partitions) + len(self._fetchers))
        share = max(_FETCH_BYTES_MIN, min(self._fetch_bytes, self._prefetch_bytes // (2 * count)))
        for (topic, number), offset in zip(partitions, offsets, strict=True):
            self._fetch(topic, number, offset, share)

    def _fetch(self, topic: str, number: int, offset: int, share: int) -> None:
        policy = self._start if isinstance(self._start, str) else "none"
        fetcher = Fetcher(self._cluster, topic, number, start=policy, bytes_max=share, deliver=self._delivered)
        self._fetchers[topic, number] = fetcher
        self.backlog.begin(fetcher, offset)
        fetcher.start(offset)

    async def _seen(self, topic: TopicInfo) -> None:
        """Reads partitions that were not there at the start."""
        for number in range(len(topic.partitions)):
            if (topic.name, number) not in self._fetchers and not self._closed:
                offset = await self._first_offset(topic.name, number, 0)
                self._fetch(topic.name, number, offset, _FETCH_BYTES_MIN)

    async def _first_offset(self, topic: str, partition: int, epoch: int) -> int:
        await self._cluster.retrying(lambda: self._find(topic, partition))
        committed = await self.stored.claim(topic, partition, epoch)
        if committed is not None:
            return committed
        if partition >= self._counts[topic]:
            # It was made since: from its first record on, whatever `start` says.
            return await self.edge(topic, partition, OFFSET_EARLIEST)
        if self._start == "committed":
            raise NoCommittedPositionError(f"group {self._group} has no position in {topic}-{partition}")
        if self._start == "earliest":
            return await self.edge(topic, partition, OFFSET_EARLIEST)
        if isinstance(self._start, int):
            offset = await self._checked_offset(topic, partition, self._start)
        else:
            offset = await self.edge(topic, partition, OFFSET_LATEST)
        if epoch:
            # Else whoever has it next would begin at another place than here.
            await self.stored.pin((topic, partition), offset, epoch)
        return offset

    async def _find(self, topic: str, partition: int) -> None:
        """The group may give what the node that was asked has not heard of yet."""
        if partition >= len((await self._cluster.topic(topic)).partitions):
            self._cluster.forget_topic(topic)
            raise UnavailableError(f"{topic}-{partition} is not known everywhere yet")

    # -- what the group gives and takes ----------------------------------------------------------------------------

    def _interrupt(self) -> None:
        self.backlog.interrupted = True
        self._notify()

    @property
    def is_unsettled(self) -> bool:
        """The group has something else in mind than what is read. The reader settles it before it takes more: it begins
        to revoke, finishes that, and adopts. When one of these fails it begins again the next time."""
        return self.backlog.interrupted

    async def begin_revoke(self) -> Taken:
        """Stops to read what the group wants back. Positions stay until `finish_revoke`."""
        assert self._member is not None
        self._settling = self._member.version
        if self._member.failure is not None:
            raise self._member.failure
        held, wanted = self._member.held, self._member.wanted
        taken = Taken({}, {}, {})
        for pair, epoch in self._owned.items():
            if wanted.get(pair) != epoch:
                (taken.revoked if held.get(pair) == epoch else taken.lost)[pair] = epoch
        for pair in held.keys() - wanted.keys() - taken.revoked.keys():
            taken.unread[pair] = held[pair]
        for pair in (*taken.revoked, *taken.lost):
            fetcher = self._fetchers[pair]
            await fetcher.stop()
            self.backlog.drop(fetcher)
        for pair in taken.lost:
            self._forget(pair)
        return taken

    async def finish_revoke(self, taken: Taken) -> None:
        """Stores how far they were read, if this consumer does that by itself, and lets go of them."""
        assert self._member is not None
        if taken.revoked:
            await self.stored.commit_settled(taken.revoked)
            for pair in taken.revoked:
                self._forget(pair)
        # Also when nothing of it was ever read: the others wait for it.
        if leaving := taken.revoked | taken.unread:
            await self._member.release(leaving)

    def _forget(self, pair: TopicPartition) -> None:
        self._lost_records += self._fetchers.pop(pair).lost_records
        self._owned.pop(pair, None)
        self.backlog.positions.pop(pair, None)
        self.stored.forget(pair)

    async def adopt(self) -> list[TopicPartition]:
        """Begins to read what the group has given, and says what that is: also what it wanted back and left here after
        all, because it could not be let go of in time."""
        assert self._member is not None
        wanted = self._member.wanted
        new = {pair: epoch for pair, epoch in wanted.items() if pair not in self._owned}
        left = [pair for pair, epoch in self._owned.items() if wanted.get(pair) == epoch]
        again = [pair for pair in left if self._fetchers[pair].is_stopped]
        try:
            await self._read(new)
        except MemberFencedError:
            new = {}  # another has it by now, which the next heartbeat tells
        for pair in again:
            self._fetchers[pair].start(self.backlog.positions[pair])
        self._owned |= new
        self.backlog.interrupted = self._member.version != self._settling
        return [*new, *again]

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
        self.stored.rewound((topic, partition))
        fetcher.start(offset)

    async def offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        """The offset of the first record at or after that time; the end of the log when there is none."""
        self._fetcher(topic, partition)
        return await offset_at(self._cluster, topic, partition, timestamp)

    async def committed(self, topic: str, partition: int) -> int | None:
        check_partition(topic, len((await self._cluster.topic(topic)).partitions), partition)
        return await self.stored.committed(topic, partition)

    async def pause(self) -> None:
        """Stores positions and gives everything back to the group; `start` joins it again."""
        if self._started and self._member is not None:
            await self.stored.commit()
            await self._stop_reading()
            for pair in list(self._owned):
                self._forget(pair)
            self._started = False

    async def _stop_reading(self) -> None:
        for fetcher in self._fetchers.values():
            await fetcher.stop()
            self.backlog.drop(fetcher)
        await self.stored.stop()
        if self._member is not None:
            await self._member.leave()

    async def close(self, *, failed: bool = False) -> None:
        """`failed`: what was handed out last was not dealt with."""
        if not self._closed:
            self._closed = True
            if self._watch is not None:
                await self._watch.stop()
            for fetcher in self._fetchers.values():
                await fetcher.stop()
            try:
                try:
                    if self._started:
                        await self.stored.commit_last(failed=failed)
                finally:
                    await self._stop_reading()  # what could not be stored is no reason to stay a member
            finally:
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
        return self._lost_records + sum(fetcher.lost_records for fetcher in list(self._fetchers.values()))

    @property
    def has_group(self) -> bool:
        return self._group is not None

    @property
    def is_member(self) -> bool:
        """It shares partitions with the others of its group."""
        return self._member is not None

    @property
    def is_waiting(self) -> bool:
        """It has not begun, or has nothing to read until others of its group let go of something."""
        return not self._started or (self._member is not None and not self._owned and self._member.coming > 0)

    @property
    def assignment(self) -> list[TopicPartition]:
        """The partitions that are read."""
        return sorted(self._fetchers)


def check_count(max_records: object) -> None:
    if not isinstance(max_records, int) or isinstance(max_records, bool) or max_records < 1:
        raise InvalidRequestError(f"max_records is an int of 1 or more, not {max_records!r}")
