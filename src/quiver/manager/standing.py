"""Where this manager stands among the others: who is there, who leads, and whether what it knows is fresh.

Each manager beats: the primary by a round of Raft heartbeats, which shows that it still leads; the others by a request
to it, which brings back the last transaction and who was seen elsewhere. What is known here is as fresh as the moment
at which the last beat that succeeded was sent.

Rule: that moment is taken before anything is sent, so that a manager which was frozen in between knows that it was.
Whoever is not fresh says that it is cut off, and answers nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import Final

from quiver.clock import Clock
from quiver.errors import NotLeaderError, QuiverError, RequestTimeoutError, UnavailableError
from quiver.manager.primary import Primary
from quiver.manager.quorum import MetadataQuorum
from quiver.manager.registry import Registry
from quiver.manager.sightings import Seen, Sightings
from quiver.metadata.commands import RegisterManager
from quiver.metadata.manager_table import Manager
from quiver.wire.messages import GetMetadata
from quiver.wire.quorum_messages import BeatReply, ManagerBeat

logger = logging.getLogger("quiver.manager")

_BEATS_PER_STALE: Final = 4
_BEAT_S: Final = 1.0  # then a beat is given up, and the next one begins
# A request that finds this manager cut off waits so long for the next beat before it is refused.
_PATIENCE_S: Final = 0.3


class Standing:
    """`me` is how this manager registers. `stale_s`: see `metadata_stale_s`; infinite for a manager that is alone."""

    def __init__(
        self,
        quorum: MetadataQuorum,
        registry: Registry,
        primary: Primary | None,
        clock: Clock,
        me: Manager,
        *,
        heartbeat_s: float,
        stale_s: float,
    ) -> None:
        self._quorum = quorum
        self._registry = registry
        self._primary = primary
        self._clock = clock
        self._me = me
        self._pause_s = min(heartbeat_s, stale_s / _BEATS_PER_STALE)
        self._stale_s = stale_s if primary is not None else math.inf
        self._fresh_s = clock.monotonic_s() if primary is None else -math.inf
        self._fresh_us = 0
        self._since_us = 0  # of what the primary has told
        self._told = (0, 0)  # the versions of whom we have seen that the others were told of
        self._sightings = Sightings()
        self._sightings_term = 0
        self._index = 0  # the last transaction that the primary told of
        self._beating = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.seen: dict[int, int] = {}
        self.stored: dict[int, int] = {}

    # -- what is known -------------------------------------------------------------------------------------------

    @property
    def is_primary(self) -> bool:
        return self._quorum.leads

    @property
    def is_fresh(self) -> bool:
        return self._clock.monotonic_s() - self._fresh_s <= self._stale_s

    @property
    def lag(self) -> int:
        """How many transactions the database of this manager is behind, as far as is known."""
        return max(0, max(self._index, self._quorum.state.applied) - self._quorum.database.stored)

    @property
    def cut_off_since_us(self) -> int | None:
        return None if self.is_fresh else self._fresh_us

    def role_of(self, manager_id: int) -> str:
        return "primary" if manager_id == self._quorum.primary else "secondary"

    async def check(self) -> None:
        """Raises UnavailableError when what is known here may be old."""
        if self.is_fresh:
            return
        with contextlib.suppress(QuiverError, TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await self.catch_up()
        if not self.is_fresh:
            raise UnavailableError(f"manager {self._me.id} is cut off from the other managers; ask another one")

    # -- beats ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._beat())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def host(self, topic: str) -> bool:
        """Asks the primary to see to it that brokers have this topic. False: this manager leads, it is its own work."""
        return self._primary is not None and await self._primary.ask(GetMetadata([topic])) is not None

    async def until_fresh(self) -> None:
        """Until this manager has been in touch with a primary, and is known to it."""
        while not (self.is_fresh and self._quorum.state.managers.get(self._me.id) == self._me):
            with contextlib.suppress(UnavailableError):
                await self.catch_up()
            await self._quorum.until_changed(self._pause_s)

    async def catch_up(self) -> None:
        """Returns when all that was acknowledged before this call is known here. Raises UnavailableError."""
        asked_s = self._clock.monotonic_s()
        if self._primary is None:
            return
        async with self._beating:
            if self._fresh_s < asked_s:  # else a beat that was sent since has shown it for us too
                try:
                    async with asyncio.timeout(_BEAT_S):
                        await self._beat_once(self._primary)
                except TimeoutError as error:
                    raise RequestTimeoutError("the primary of the metadata does not answer") from error

    async def _beat(self) -> None:
        told = ""
        while True:
            try:
                await self.catch_up()
                if self.is_primary:  # it enters itself; the others are entered when they beat
                    self.seen[self._me.id], self.stored[self._me.id] = (
                        self._clock.now_us(),
                        self._quorum.database.stored,
                    )
                    await self._enter(self._me)
                told = ""
            except QuiverError as error:
                if error.message != told:  # said once, not at every beat
                    told = error.message
                    logger.warning("manager_beat_failed manager=%d error=%r", self._me.id, told)
            await asyncio.sleep(self._pause_s)

    async def _beat_once(self, primary: Primary) -> None:
        sent_s, sent_us = self._clock.monotonic_s(), self._clock.now_us()
        versions = self._versions()
        found = await primary.ask(self._message(), search_s=_BEAT_S, call_s=_BEAT_S)
        if found is None:
            index = await self._quorum.confirm()
        else:
            reply = found[0]
            assert isinstance(reply, BeatReply)
            index = reply.index
            self._take(reply)
            self._told = versions
        self._index = max(self._index, index)
        await self._quorum.until_applied(index)
        self._fresh_s, self._fresh_us = max(self._fresh_s, sent_s), sent_us

    def _message(self) -> ManagerBeat:
        me, seen = self._me, self._seen_since(self._told)
        return ManagerBeat(
            *(me.id, me.address, me.http, me.replica_id, self._quorum.database.stored, self._since_us),
            seen.producers,
            seen.consumers,
        )

    def _versions(self) -> tuple[int, int]:
        return self._registry.producers_seen.version, self._registry.consumers_seen.version

    def _seen_since(self, versions: tuple[int, int]) -> Seen:
        """Also what others have told: they are told once too often rather than not at all."""
        registry, (producers, consumers) = self._registry, versions
        return Seen(registry.producers_seen.since(producers), registry.consumers_seen.since(consumers))

    def _all_seen(self) -> Seen:
        return Seen(dict(self._registry.producers_seen), dict(self._registry.consumers_seen))

    def _take(self, reply: BeatReply) -> None:
        self.seen |= reply.managers
        self.stored |= reply.stored
        self._registry.note_seen(reply.producers, reply.consumers)
        self._since_us = reply.now_us

    async def _enter(self, manager: Manager) -> None:
        if self._quorum.state.managers.get(manager.id) != manager:
            fields = (manager.id, manager.address, manager.http, manager.replica_id)
            await self._quorum.propose(RegisterManager(*fields, self._clock.now_us()))

    # -- as the primary ------------------------------------------------------------------------------------------

    async def beat_of(self, beat: ManagerBeat) -> BeatReply:
        """Another manager beats. Raises NotLeaderError when this one does not lead."""
        if not self.is_primary:
            raise NotLeaderError(f"manager {self._me.id} does not lead", leader=self._quorum.primary)
        now_us = self._clock.now_us()
        self.seen[beat.manager_id], self.stored[beat.manager_id] = now_us, beat.stored
        self._registry.note_seen(beat.producers, beat.consumers)
        await self._enter(Manager(beat.manager_id, beat.address, beat.http, beat.replica_id))
        index = await self._quorum.confirm()
        news = self._news_for(beat, now_us)
        seen, stored = self.seen | {self._me.id: now_us}, self.stored | {self._me.id: self._quorum.database.stored}
        return BeatReply(index, now_us, seen, stored, news.producers, news.consumers)

    def _news_for(self, beat: ManagerBeat, now_us: int) -> Seen:
        if self._sightings_term != self._quorum.term:
            self._sightings_term = self._quorum.term
            self._sightings.clear()
        self._sightings.note(self._me.id, self._seen_since(self._told))
        self._told = self._versions()
        self._sightings.note(beat.manager_id, Seen(beat.producers, beat.consumers))
        return self._sightings.for_manager(beat.manager_id, beat.since_us, now_us, self._all_seen)
