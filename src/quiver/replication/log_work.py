"""Does to a replica's log what the Raft core says: append, truncate, begin anew."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from quiver.clock import Clock
from quiver.errors import CorruptLogError, DiskFullError, NotLeaderError
from quiver.log.checkpoint import decode_checkpoint
from quiver.log.disk import SpaceError
from quiver.log.partition_log import PartitionLog
from quiver.raft import Extend, Install, Membership, Own, Raft, Snapshot, Truncate
from quiver.replication.frame_cache import FrameCache
from quiver.replication.group import broker_of, encode
from quiver.replication.seat import Owner
from quiver.wire.frame import Entry, FrameHeader, Kind

logger = logging.getLogger("quiver.replication")

_RETRY_S: Final = 0.5  # after which a snapshot that found no space is tried again


class LogWork:
    def __init__(
        self,
        uid: str,
        log: PartitionLog,
        cache: FrameCache,
        clock: Clock,
        owner: Owner,
        on_damage: Callable[[CorruptLogError], None],
    ) -> None:
        self._on_damage = on_damage
        self._uid = uid
        self._log = log
        self._cache = cache
        self._clock = clock
        self._owner = owner
        self.is_full = False  # there was no space for a snapshot; until there is, it can take in nothing else
        self._retry_at_s = 0.0

    def append(self, term: int, entry: Entry) -> FrameHeader:
        header, frame = self._log.append_entry(term, entry, self._clock.monotonic_s())
        self._cache.add(frame)
        return header

    def change(self, raft: Raft, membership: Membership) -> None:
        """Proposes it, unless the lead is being handed over: who takes over is asked again."""
        try:
            _, term = raft.propose_membership(membership)
        except NotLeaderError:
            return
        payload = encode(membership)
        self._owner.entry_appended(self.append(term, Entry.control(Kind.MEMBERSHIP, payload)), payload)
        logger.info("membership uid=%s voters=%s learners=%s", self._uid, membership.voters, membership.learners)

    def do(self, work: Truncate | Extend | Own | Install, leader_id: int) -> bool:
        """A truncation and an installation block, and come only when nothing is on its way to the disk. False: there is
        no space for a snapshot, and the same work is to come again; DiskFullError says so the first time."""
        if isinstance(work, Extend):
            now_s = self._clock.monotonic_s()
            for header, payload, frame in work.append.body:
                if header.index >= work.first:
                    self._log.append_frame(header, [frame], now_s)
                    self._cache.add([frame])
                    self._owner.entry_appended(header, payload)
        elif isinstance(work, Truncate):
            logger.info("truncated uid=%s first=%d end=%d", self._uid, work.index, self._log.next_index)
            self._truncate(work.index)
            self._cache.drop_from(work.index)
            lost = NotLeaderError("another leader's entry took this place", leader=broker_of(leader_id))
            self._owner.entries_removed(work.index, lost)
        elif isinstance(work, Own):
            self._owner.entry_appended(self.append(work.term, Entry.control(Kind.NOOP, b"")), b"")
        else:
            return self._install(work.snapshot)
        return True

    def _truncate(self, index: int) -> None:
        try:
            self._log.truncate_suffix(index)
        except CorruptLogError as error:  # in what stays; the replica ends here, and is opened again when it is mended
            self._on_damage(error)
            raise self._log.stop(error) from error

    def _install(self, snapshot: Snapshot) -> bool:
        now_s = self._clock.monotonic_s()
        if self.is_full and now_s < self._retry_at_s:
            return False
        given = decode_checkpoint(snapshot.body, "a snapshot")
        generation = self._log.checkpoint.generation + 1
        checkpoint = given._replace(generation=generation, catching_up=True)
        try:
            self._log.install(checkpoint)
        except SpaceError as error:
            is_new, self.is_full, self._retry_at_s = not self.is_full, True, now_s + _RETRY_S
            if is_new:
                raise DiskFullError(f"no space for a snapshot in {self._log.directory}: {error}") from error
            return False
        self.is_full = False
        logger.info("snapshot_installed uid=%s start=%d index=%d", self._uid, given.start.index, given.index)
        self._cache.drop_from(0)
        self._cache.first = self._log.next_index
        self._owner.log_replaced(checkpoint)
        return True
