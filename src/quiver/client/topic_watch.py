"""Asks now and then how many partitions topics have: their number can grow while they are written and read.

Rule: trouble is not its business. Who cannot be asked now is asked the next time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from quiver.client.cluster import Cluster
from quiver.errors import InvalidRequestError, QuiverError
from quiver.types import TopicInfo

REFRESH_S: Final = 30.0


class TopicWatch:
    """`topics` tells which are of interest, `seen` is told what is known of each."""

    def __init__(
        self,
        cluster: Cluster,
        every_s: float,
        topics: Callable[[], Collection[str]],
        seen: Callable[[TopicInfo], Awaitable[None]],
    ) -> None:
        if isinstance(every_s, bool) or not isinstance(every_s, (int, float)) or not 0 < every_s < math.inf:
            raise InvalidRequestError(f"metadata_refresh is a number of seconds above 0, not {every_s!r}")
        self._cluster = cluster
        self._every_s = every_s
        self._topics = topics
        self._seen = seen
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._watch(), name="topic watch")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            with contextlib.suppress(QuiverError):
                for topic in (await self._cluster.metadata(sorted(self._topics()))).topics:
                    await self._seen(topic)
