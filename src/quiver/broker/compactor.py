"""Compaction of one partition: what its leader orders, and how each replica carries it out.

The leader orders by an entry of the log. A replica carries out the last order whenever it gets to it, and keeps a mark
of that beside the log. What one replica sends to another may be compacted already or not: that is harmless as long as
no record that says 'deleted' goes before the records it deletes are gone everywhere. So the leader asks all members of
the group, those that are away too, and orders such records away only up to an order that each has carried out.

Rule: an answer counts for one term and one order, and only after the leader has carried out that order itself: whoever
begins anew after its answer gets its entries from a log in which these records are gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Final

import msgspec

from quiver.broker.partition_state import Compact, PartitionState
from quiver.errors import CorruptLogError, LogFailedError
from quiver.log.compaction import Order, compact
from quiver.log.disk import Disk
from quiver.log.partition_log import PartitionLog
from quiver.log.slots import TwoSlots
from quiver.raft.messages import Compacted
from quiver.replication.group import broker_of
from quiver.replication.raft_replica import RaftReplica
from quiver.topic_settings import COMPACT, TopicRules
from quiver.wire.frame import Entry, Kind

logger = logging.getLogger("quiver.broker")

# New records are left alone until there are so many bytes of them, or a segment's worth, and as many as older ones.
_NEW_BYTES_MIN: Final = 1024 * 1024
MARK_FILE: Final = "compacted"


def completed_order(disk: Disk, directory: str) -> TwoSlots | None:
    """The order that was carried out last, and the generation of the log it was carried out in."""
    path = f"{directory}/{MARK_FILE}"
    return TwoSlots(disk, path) if disk.exists(path) else None


class Compactor:
    """`wake` has the owner look again when files may be replaced by others."""

    def __init__(
        self,
        name: str,
        log: PartitionLog,
        disk: Disk,
        threads: Executor,
        wake: Callable[[], None],
        on_damage: Callable[[CorruptLogError], None],
    ) -> None:
        self._name = name
        self._log = log
        self._disk = disk
        self._threads = threads
        self._wake = wake
        self._on_damage = on_damage
        self._mark = completed_order(disk, log.directory)
        self._oldest_deleted_us: int | None = None
        self._asked = (0, 0)  # term and order of the answers
        self._answers: dict[int, int] = {}
        self._working: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def completed(self) -> int:
        """The index of the order that this log was compacted by."""
        if self._mark is None or self._mark.values[1] != self._log.checkpoint.generation:
            return 0  # it began anew since
        return self._mark.values[0]

    # -- each replica --------------------------------------------------------------------------------------------

    async def carry_out(self, order: Order) -> None:
        """Returns when it is done, or cannot be done now: it is tried again."""
        # Entries may still be on their way; and a check-point that was begun before the order was there may still write
        # the index of a segment that is to be replaced.
        ready = self.completed < order.index < self._log.synced_index and not self._log.is_checkpointing
        if ready and not self._closing and self._log.failure is None:
            self._working = asyncio.get_running_loop().create_task(self._compact(order))
            await asyncio.shield(self._working)
            self._working = None

    async def _compact(self, order: Order) -> None:
        before, generation = self._log.size_bytes, self._log.checkpoint.generation
        try:
            found = await compact(self._log, self._disk, order, self._threads, self._goes_on)
            if found is None:
                return
            write = partial(self._write_mark, order.index, generation)
            self._mark = await asyncio.get_running_loop().run_in_executor(self._threads, write)
        except CorruptLogError as error:
            self._on_damage(error)
            return
        except (OSError, LogFailedError) as error:
            # The files are whole, each of them old or new; what is missing is done the next time.
            logger.warning("compaction_failed partition=%s error=%r", self._name, str(error))
            return
        finally:
            self._wake()
        self._oldest_deleted_us = found.oldest_deleted_us
        sizes = (before, self._log.size_bytes)
        logger.info("compacted partition=%s index=%d bytes=%d left=%d", self._name, order.index, *sizes)

    def _write_mark(self, index: int, generation: int) -> TwoSlots:
        """Blocking. Without it the order would only be carried out once more."""
        mark = self._mark or TwoSlots(self._disk, f"{self._log.directory}/{MARK_FILE}")
        mark.write(index, generation, sync=True)
        self._disk.sync_directory(self._log.directory)
        return mark

    def _goes_on(self) -> bool:
        self._wake()  # a snapshot may wait for its turn
        return not self._closing

    async def close(self) -> None:
        """Returns when no file is touched any more."""
        self._closing = True
        if self._working is not None:
            await asyncio.wait([self._working])

    # -- the leader ----------------------------------------------------------------------------------------------

    def plan(self, state: PartitionState, rules: TopicRules, now_us: int, raft: RaftReplica | None) -> Entry | None:
        """The next order; None while the last one is not carried out, or where little would come of one."""
        order = state.order
        if rules.cleanup != COMPACT or self.completed < order.index:
            return None
        drop_end, drop_before_us = order.drop_end, order.drop_before_us
        if order.index and (raft is None or self._all_have(order.index, raft)):
            drop_end, drop_before_us = order.index, max(drop_before_us, now_us - rules.tombstone_ms * 1000)
        oldest_us = self._oldest_deleted_us
        may_drop = drop_end > order.drop_end or drop_before_us > order.drop_before_us
        if self._has_enough(order.index) or (may_drop and oldest_us is not None and oldest_us < drop_before_us):
            return Entry.control(Kind.COMPACT, msgspec.msgpack.encode(Compact(drop_end, drop_before_us)))
        return None

    def _has_enough(self, index: int) -> bool:
        """There is as much that is new as what was compacted, and more than is worth the work."""
        old_bytes = sum(segment.size_bytes for segment in self._log.segments_before(index))
        new_bytes = self._log.size_bytes - old_bytes
        return new_bytes >= max(old_bytes, min(self._log.settings.segment_bytes_max, _NEW_BYTES_MIN))

    def _all_have(self, index: int, raft: RaftReplica) -> bool:
        """Whether every member has said that it has carried out that order. Asks those that have not; their answers
        count the next time."""
        core = raft.raft
        if self._asked != (core.term, index):
            self._asked, self._answers = (core.term, index), {}
        others = [member for member in core.membership.members if member != core.me]
        missing = [member for member in others if self._answers.get(member, 0) < index]
        for member in missing:
            raft.transport.send(broker_of(member), raft.seat.uid, Compacted(core.me, member, core.term, index))
        return not missing

    def receive(self, message: Compacted, raft: RaftReplica) -> None:
        me = raft.seat.me
        if message.to != me:
            return  # it is meant for a predecessor on this broker
        if message.index is None:
            answer = Compacted(me, message.sender, message.term, message.about, self.completed)
            raft.transport.send(broker_of(message.sender), raft.seat.uid, answer)
        elif (message.term, message.about) == self._asked:
            self._answers[message.sender] = message.index
