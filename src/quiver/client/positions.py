"""What a consumer stores of how far it has read: when it is told to, or by itself.

By itself it stores what the reader is done with: what was handed out before it came back for more. So a crash makes
records come again, and loses none.

Rule: a stored position moves back only after a seek. With an epoch, a partition that another member has by now refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Iterable, Mapping

from quiver.client.backlog import Backlog, TopicPartition
from quiver.client.cluster import Cluster
from quiver.errors import InvalidRequestError, MemberFencedError, QuiverError
from quiver.wire.messages import CommitPosition, GetPosition, Position, PositionReply

logger = logging.getLogger("quiver.client")


class Positions:
    """`interval_s` is how often positions are stored without being told to; None: never."""

    def __init__(self, cluster: Cluster, group: str | None, backlog: Backlog, interval_s: float | None) -> None:
        number = isinstance(interval_s, (int, float)) and not isinstance(interval_s, bool)
        if interval_s is not None and not (number and 0 < interval_s < math.inf):
            raise InvalidRequestError(f"commit_interval is a number of seconds above 0, not {interval_s!r}")
        if interval_s is not None and group is None:
            raise InvalidRequestError("commit_interval needs a group")
        self._cluster = cluster
        self._group = group
        self._backlog = backlog
        self._interval_s = interval_s
        self._committed: dict[TopicPartition, int] = {}
        self._epochs: dict[TopicPartition, int] = {}
        self._rewound: set[TopicPartition] = set()
        self._settled: Mapping[TopicPartition, int] = {}  # what the reader is done with
        self._task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        if self._group is None:
            raise InvalidRequestError(
                "only a consumer with a group has committed positions: Consumer(..., group='name')"
            )
        return self._group

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._interval_s is not None:
            self._task = asyncio.get_running_loop().create_task(self._keep(self._interval_s), name="commit")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _keep(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            with contextlib.suppress(QuiverError):  # the next time, or the reader, meets it again
                await self.commit_settled()

    # -- from the reader's thread --------------------------------------------------------------------------------

    def settle(self) -> None:
        """The reader comes back for more: it is done with everything that was handed out."""
        if self._interval_s is not None:
            self._settled = dict(self._backlog.positions)

    # -- on the loop ---------------------------------------------------------------------------------------------

    async def claim(self, topic: str, partition: int, epoch: int) -> int | None:
        """Where the group is in a partition. With an epoch, whoever had it before cannot move it from now on."""
        if self._group is None:
            return None
        if not epoch:
            offset = await self.committed(topic, partition)
        else:
            request = CommitPosition(topic, partition, Position(self._group, 0, epoch=epoch, act="claim"))
            offset = (await self._cluster.ask(topic, partition, request, PositionReply)).offset
            self._epochs[topic, partition] = epoch
        if offset is not None:
            self._committed[topic, partition] = offset
        return offset

    async def pin(self, pair: TopicPartition, offset: int, epoch: int) -> None:
        """Stores where the member begins that claimed the partition at that epoch."""
        await self._store(pair, Position(self.name, offset, epoch=epoch))

    def forget(self, pair: TopicPartition) -> None:
        """The partition is not read any more."""
        self._committed.pop(pair, None)
        self._epochs.pop(pair, None)
        self._rewound.discard(pair)
        self._settled = {known: offset for known, offset in self._settled.items() if known != pair}

    def rewound(self, pair: TopicPartition) -> None:
        self._rewound.add(pair)

    async def commit(self) -> None:
        """All that was handed out. Raises MemberFencedError when another member has one of the partitions."""
        if self._group is None:
            raise InvalidRequestError("only a consumer with a group can commit: Consumer(..., group='name')")
        await self._commit_all(dict(self._backlog.positions))

    async def commit_settled(self, pairs: Iterable[TopicPartition] | None = None) -> None:
        """What the reader is done with, if this consumer stores by itself. What another has by now is left to it."""
        if self._interval_s is None:
            return
        wanted = self._settled if pairs is None else pairs
        try:
            await self._commit_all({pair: self._settled[pair] for pair in wanted if pair in self._settled})
        except MemberFencedError as error:
            logger.warning("commit_fenced group=%s error=%r", self._group, error.message)

    async def commit_last(self, *, failed: bool) -> None:
        """At the end. `failed`: the reader was not done with what was handed out last."""
        if not failed:
            self.settle()
        await self.commit_settled()

    async def committed(self, topic: str, partition: int) -> int | None:
        request = GetPosition(topic, partition, self.name)
        return (await self._cluster.ask(topic, partition, request, PositionReply)).offset

    async def _commit_all(self, positions: Mapping[TopicPartition, int]) -> None:
        moved = {pair: offset for pair, offset in positions.items() if self._committed.get(pair) != offset}
        done = await asyncio.gather(*(self._commit(*one) for one in moved.items()), return_exceptions=True)
        for error in done:
            if error is not None:
                raise error

    async def _commit(self, pair: TopicPartition, offset: int) -> None:
        rewinds = pair in self._rewound
        await self._store(pair, Position(self.name, offset, rewinds, epoch=self._epochs.get(pair, 0)))
        if rewinds:
            self._rewound.discard(pair)

    async def _store(self, pair: TopicPartition, position: Position) -> None:
        await self._cluster.ask(*pair, CommitPosition(*pair, position), PositionReply)
        self._committed[pair] = position.offset
