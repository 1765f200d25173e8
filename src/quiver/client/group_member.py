"""One member of a consumer group: it joins, says that it is there, lets go of partitions and leaves.

Rule: it knows what the managers say that it has; whoever fetches decides when to follow. A member that was held to be
gone has nothing any more and joins again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

from msgspec import Struct

from quiver.client.backlog import TopicPartition
from quiver.client.cluster import Cluster, backoff_s
from quiver.errors import InvalidRequestError, QuiverError, UnavailableError, UnknownMemberError
from quiver.wire.group_messages import (
    BEAT_WAIT_MS_MAX,
    SESSION_MS_MAX,
    SESSION_MS_MIN,
    GroupBeat,
    GroupReply,
    Held,
    JoinGroup,
    LeaveGroup,
)
from quiver.wire.messages import Done

logger = logging.getLogger("quiver.client")

_BEATS_PER_SESSION: Final = 3
_UNHELD_S_MAX: Final = 0.5  # between two beats that nobody keeps waiting until there is something to say
_LEAVE_S: Final = 2.0  # who cannot say goodbye by then is missed when its session ends

R = TypeVar("R", bound=Struct)


def check_session(session_s: object) -> float:
    low_s, high_s = SESSION_MS_MIN / 1000, SESSION_MS_MAX / 1000
    if not isinstance(session_s, (int, float)) or isinstance(session_s, bool) or not low_s <= session_s <= high_s:
        raise InvalidRequestError(f"session_timeout is from {low_s} to {high_s:.0f} seconds, not {session_s!r}")
    return float(session_s)


class GroupMember:
    """`changed` is called on the loop when there is something else to read or to let go of."""

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        topics: list[str],
        changed: Callable[[], None],
        *,
        session_s: float,
        strategy: str,
        client: str,
    ) -> None:
        self._cluster = cluster
        self._group = group
        self._changed = changed
        self._session_s = check_session(session_s)
        self._beat_s = min(self._session_s / _BEATS_PER_SESSION, BEAT_WAIT_MS_MAX / 1000)
        self.id = f"{client[:200]}-{uuid.uuid4().hex[:12]}"
        self._joining = JoinGroup(group, self.id, topics, int(self._session_s * 1000), strategy)
        self._generation = 0
        self._task: asyncio.Task[None] | None = None
        self.version = 0  # another one whenever there is something else to read or to let go of
        self.failure: QuiverError | None = None  # why it cannot be a member any more
        self.held: Mapping[TopicPartition, int] = {}  # with the epoch of each
        self.wanted: Mapping[TopicPartition, int] = {}  # the same without those that it is to let go of
        self.coming = 0  # partitions that it gets when others have let go of them

    async def join(self) -> None:
        """Returns when it is a member, and stays one until `leave`."""
        self._take(await self._cluster.retrying(lambda: self._ask(self._joining, GroupReply)))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._beat(), name=f"member of {self._group}")

    async def release(self, partitions: Mapping[TopicPartition, int]) -> None:
        """It does not read these any more. A member that is gone has let go of everything."""
        released = [Held(*pair, epoch) for pair, epoch in partitions.items()]
        beat = GroupBeat(self._group, self.id, self._generation, 0, released)
        with contextlib.suppress(UnknownMemberError):
            self._take(await self._cluster.retrying(lambda: self._ask(beat, GroupReply)))

    async def leave(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        self.held = self.wanted = {}
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self._cluster.retrying(lambda: self._ask(LeaveGroup(self._group, self.id), Done))
        except (TimeoutError, QuiverError) as error:
            logger.warning("leave_failed group=%s error=%r", self._group, str(error))

    async def _beat(self) -> None:
        attempt = 0
        while True:
            try:
                if not await self._beat_once():
                    await asyncio.sleep(min(self._beat_s, _UNHELD_S_MAX))
                attempt = 0
            except UnknownMemberError:
                logger.warning("membership_lost group=%s member=%s", self._group, self.id)
                self._take(GroupReply(0))
                with contextlib.suppress(UnavailableError):
                    self._take(await self._ask(self._joining, GroupReply))
            except UnavailableError as error:
                if attempt == 0:
                    logger.warning("beat_failed group=%s error=%r", self._group, error.message)
                await asyncio.sleep(backoff_s(attempt))
                attempt += 1
            except QuiverError as error:  # a retry would not help: whoever reads is told
                self.failure = error
                self._tell()
                return

    async def _beat_once(self) -> bool:
        """False: nobody held the answer back, so the next one would come at once."""
        connection = await self._cluster.primary()
        wait_ms = 0 if connection is None else int(self._beat_s * 1000)
        generation = self._generation
        self._take(await self._ask(GroupBeat(self._group, self.id, generation, wait_ms), GroupReply))
        return connection is not None or self._generation != generation

    def _take(self, reply: GroupReply) -> None:
        if reply.generation and reply.generation <= self._generation:
            return  # nothing new, or overtaken by a later answer
        self._generation = reply.generation
        self.held, self.coming = _as_epochs(reply.held), reply.coming
        leaving = _as_epochs(reply.leaving)
        self.wanted = {pair: epoch for pair, epoch in self.held.items() if pair not in leaving}
        self._tell()

    def _tell(self) -> None:
        self.version += 1
        self._changed()

    async def _ask(self, request: Struct, reply_type: type[R]) -> R:
        connection = await self._cluster.primary()
        if connection is None:
            return await self._cluster.ask_any(request, reply_type)
        try:
            return await self._cluster.call(connection, request, reply_type)
        except UnavailableError:
            self._cluster.forget_primary()
            raise


def _as_epochs(partitions: Iterable[Held]) -> dict[TopicPartition, int]:
    return {(held.topic, held.partition): held.epoch for held in partitions}
