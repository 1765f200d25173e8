"""What the driver asks of the cluster while it plans: which topics there are, and what their partitions hold.

Rule: questions and positions only; records are read and written by executors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Final, NamedTuple, Self

from quiver.client.admin import AsyncAdmin
from quiver.client.loop_thread import shared_loop
from quiver.errors import InvalidRequestError, UnknownTopicError
from quiver.spark.offsets import Edge, Edges, Lookup, Mark, OffsetRange, Places, Reach, resolve
from quiver.spark.options import Topics
from quiver.types import TopicInfo

REQUEST_TIMEOUT_S: Final = 60.0
_NOBODY: Final = "spark"  # asks for the edges of a partition; it never has a position


class Seen(NamedTuple):
    """The partitions of the topics that are read, and the uids of these topics."""

    edges: Edges
    uids: Mapping[str, str]

    def latest(self) -> Mark:
        return self.mark({topic: {n: edge.latest for n, edge in found.items()} for topic, found in self.edges.items()})

    def only(self, wants: Callable[[str, int], bool]) -> Seen:
        """Without the partitions that are not wanted."""
        edges = {
            topic: {n: edge for n, edge in found.items() if wants(topic, n)} for topic, found in self.edges.items()
        }
        return Seen(edges, self.uids)

    def mark(self, offsets: Mapping[str, Mapping[int, int]]) -> Mark:
        return Mark({topic: dict(found) for topic, found in offsets.items()}, dict(self.uids))


class ClusterView:
    """Not for carrying around: a process that plans makes its own."""

    def __init__(self, servers: str) -> None:
        self._io = shared_loop()
        self._admin = AsyncAdmin(servers, request_timeout=REQUEST_TIMEOUT_S)

    def look(self, topics: Topics, group: str | None = None, *, lenient: bool = False) -> Seen:
        """`lenient`: a named topic that is gone is left out."""
        return self._io.call(self._look(topics, group or _NOBODY, lenient=lenient))

    async def _look(self, topics: Topics, group: str, *, lenient: bool) -> Seen:
        infos = await self._admin.describe_topics(None if topics.patterns else topics.names)
        wanted = topics.matching(infos)
        if missing := [name for name in wanted if name not in infos]:
            if not lenient:
                raise UnknownTopicError(f"topic {missing[0]} does not exist", topic=missing[0])
            wanted = [name for name in wanted if name in infos]
        if not wanted and not topics.names:
            raise InvalidRequestError(f"no topic matches {' or '.join(topics.patterns)}")
        edges = await asyncio.gather(*(self._edges(infos[name], group) for name in wanted))
        return Seen(dict(zip(wanted, edges, strict=True)), {name: infos[name].uid for name in wanted})

    async def _edges(self, topic: TopicInfo, group: str) -> dict[int, Edge]:
        found = await self._admin.groups.positions(group, topic)
        return {one.partition: Edge(one.earliest, one.latest, one.offset) for one in found}

    def find(self, moments: Iterable[Lookup]) -> dict[Lookup, int]:
        """The offset of the first record at or after each of these times."""

        async def all_of_them() -> dict[Lookup, int]:
            asked = list(moments)
            return dict(zip(asked, await asyncio.gather(*(self._admin.offset_at(*one) for one in asked)), strict=True))

        return self._io.call(all_of_them())

    def resolve(self, places: Places, name: str, seen: Seen, *, lenient: bool = False) -> Mark:
        """Where the option `name` means. Raises InvalidRequestError when that cannot be."""
        found = self.find(places.moments(seen.edges))
        return seen.mark(resolve(places, seen.edges, name, found, lenient=lenient))

    def measure(self, wanted: Mapping[OffsetRange, int]) -> dict[OffsetRange, Reach]:
        """How far so many stored bytes of each range reach."""

        async def reach(one: OffsetRange, bytes_max: int) -> Reach:
            return Reach(*await self._admin.offset_after(one.topic, one.partition, one.start, bytes_max))

        async def all_of_them() -> dict[OffsetRange, Reach]:
            found = await asyncio.gather(*(reach(one, most) for one, most in wanted.items()))
            return dict(zip(wanted, found, strict=True))

        return self._io.call(all_of_them())

    def commit(self, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        self._io.call(self._admin.groups.commit(group, offsets))

    def close(self) -> None:
        self._io.call(self._admin.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
