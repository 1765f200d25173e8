"""What is observed and not replicated: who was seen when, how much partitions hold, how far consumers are.

Rule: it is shown at once and written to the database in bulk, by every manager to its own. A slow database or a silent
broker holds up nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from itertools import islice
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

from quiver.clock import Clock
from quiver.errors import QuiverError
from quiver.manager.classic import ClassicApi
from quiver.manager.quorum import MetadataQuorum
from quiver.manager.registry import Registry
from quiver.manager.standing import Standing
from quiver.metadata.store import Store

logger = logging.getLogger("quiver.manager")

# A call is over so long after it was seen; later nobody looks whether it moved a position.
_CALL_US_MAX: Final = 30_000_000
# So many consumers' positions are asked for in one heartbeat; who called lately comes first.
_COUNTS_PER_HEARTBEAT: Final = 500
# So many blocks of rows are made ahead in one heartbeat, each in about a millisecond.
_BLOCKS_PER_HEARTBEAT: Final = 20
# So many replicas a broker is asked about in one heartbeat, on average.
_STATUSES_PER_HEARTBEAT: Final = 200


class _Mark(NamedTuple):
    """What was known at some time. Who was known then has a row when the database has the transactions of then; what is
    written of others before is lost, and must be written again."""

    applied: int
    rebuilt: int
    versions: tuple[int, int]
    counts: dict[int, int]


class Observer:
    def __init__(
        self,
        quorum: MetadataQuorum,
        registry: Registry,
        standing: Standing,
        classic: ClassicApi,
        store: Store,
        clock: Clock,
        heartbeat_s: float,
    ) -> None:
        self._quorum = quorum
        self._registry = registry
        self._standing = standing
        self._classic = classic
        self._store = store
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._reporter: asyncio.Task[None] | None = None
        self._recorder: asyncio.Task[None] | None = None
        self._polls: dict[int, asyncio.Task[None]] = {}
        self._poll_due_s: dict[int, float] = {}
        self._sizes: dict[int, int] = {}  # by partition: messages
        self._leaders: dict[int, int] = {}  # by partition: the broker
        # Consumers whose position is to be asked for: those that called lately, and those that were there before.
        self._watched: dict[int, None] = {}
        self._uncounted: dict[int, None] = {}
        self._counts: dict[int, int] = {}  # messages read, not yet in the database
        self._counted = 0  # the version of the consumers seen up to which they are watched
        self._recorded = (0, 0)  # the versions of producers and consumers seen that the database has
        self._rebuilt = -1  # which rows of the database these are in
        self._mark: _Mark | None = None

    def start(self) -> None:
        self._reporter = asyncio.get_running_loop().create_task(self._report())

    async def close(self) -> None:
        """A clean stop forgets nobody's last call."""
        if self._reporter is not None:
            tasks = [self._reporter, *self._polls.values(), *([self._recorder] if self._recorder else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._poll_all()
            await self._try_to_record()

    async def _report(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await self._poll_all()
            for _ in range(_BLOCKS_PER_HEARTBEAT):
                if not self._classic.make_rows_ahead():
                    break
                await asyncio.sleep(0)
            if self._recorder is None or self._recorder.done():
                self._recorder = loop.create_task(self._try_to_record())

    async def _poll_all(self) -> None:
        """One that does not answer is not waited for; what it says later still counts."""
        now_s = self._clock.monotonic_s()
        for broker_id in self._registry.brokers.attached:
            if broker_id not in self._polls and self._poll_due_s.get(broker_id, 0.0) <= now_s:
                task = self._polls[broker_id] = asyncio.get_running_loop().create_task(self._poll(broker_id))
                task.add_done_callback(lambda _, done=broker_id: self._polls.pop(done, None))  # type: ignore[misc]
        if self._polls:
            await asyncio.wait(self._polls.values(), timeout=self._heartbeat_s)

    async def _poll(self, broker_id: int) -> None:
        with contextlib.suppress(QuiverError):  # it is away; that it was not seen is told elsewhere
            statuses = await self._registry.brokers.status(broker_id)
            # A broker with thousands of replicas would spend its time on telling of them.
            rest_s = self._heartbeat_s * (len(statuses) // _STATUSES_PER_HEARTBEAT)
            self._poll_due_s[broker_id] = self._clock.monotonic_s() + rest_s
            for status in statuses:
                topic = self._quorum.state.topics.get(status.topic)
                if topic is not None and status.partition < len(topic.partitions) and status.role == "leader":
                    partition = topic.partitions[status.partition]
                    self._sizes[partition.id] = status.next_offset - status.start_offset
                    # Not simply who says so: one that was deposed may not know it yet.
                    self._leaders[partition.id] = self._registry.brokers.leader_of(partition)

    async def _try_to_record(self) -> None:
        try:
            await self._record()
        except (QuiverError, sa.exc.SQLAlchemyError, OSError) as error:
            logger.warning("report_failed error=%r", str(error))

    async def _record(self) -> None:
        """Only what is new; for a database that was made anew, everything."""
        state, registry, standing, database = self._quorum.state, self._registry, self._standing, self._quorum.database
        producers, consumers = registry.producers_seen, registry.consumers_seen
        rebuilt, anew = database.rebuilt, database.rebuilt != self._rebuilt
        if anew:
            self._uncounted = dict.fromkeys(state.consumers)
        await self._count_read()
        sizes, self._sizes, counts = self._sizes, {}, dict(self._counts)
        leaders, self._leaders = self._leaders, {}
        now = _Mark(state.applied, rebuilt, (producers.version, consumers.version), counts)
        reached = next((mark for mark in (now, self._mark) if mark and database.stored >= mark.applied), None)
        reports: dict[tuple[str, str], dict[int, Any]] = {
            ("partition_metadata", "size"): sizes,
            ("partition_metadata", "broker_id"): leaders,
            ("broker_metadata", "last_heartbeat"): dict(registry.brokers.seen),
            ("broker_metadata", "status"): {known: registry.broker_state(known) for known in state.brokers},
            ("manager_metadata", "last_heartbeat"): dict(standing.seen),
            ("manager_metadata", "status"): {known: standing.role_of(known) for known in state.managers},
            ("producer_metadata", "last_seen"): dict(producers) if anew else producers.since(self._recorded[0]),
            ("consumer_metadata", "last_seen"): dict(consumers) if anew else consumers.since(self._recorded[1]),
            ("consumer_metadata", "offset"): counts,
        }
        await database.run(self._store.record, reports)
        self._mark = now if reached else self._mark or now
        if reached:
            self._recorded, self._rebuilt = reached.versions, reached.rebuilt
            self._counts = {known: count for known, count in self._counts.items() if reached.counts.get(known) != count}

    async def _count_read(self) -> None:
        """Asks how far consumers got: those that called lately, and some of those that are not known of yet."""
        consumers, seen = self._quorum.state.consumers, self._registry.consumers_seen
        self._watched |= dict.fromkeys(seen.since(self._counted))
        self._counted = seen.version
        since_us = self._clock.now_us() - _CALL_US_MAX
        asked = [
            waiting for some in (self._watched, self._uncounted) for waiting in islice(some, _COUNTS_PER_HEARTBEAT)
        ]
        for known in asked:
            self._watched.pop(known, None)
            self._uncounted.pop(known, None)
            consumer = consumers.get(known)
            if consumer is None:
                continue
            if seen.get(known, 0) >= since_us:
                self._watched[known] = None  # its call may not be over: again, after the others
            try:
                self._counts[known] = await self._classic.messages_read(consumer)
            except QuiverError:  # deleted meanwhile, or a partition is out of order
                self._uncounted[known] = None
