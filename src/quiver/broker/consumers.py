"""Who is registered to read a topic, as the managers know it.

Rule: what the managers said is used again for a moment only where a consumer more makes no difference.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from quiver.clock import Clock
from quiver.errors import NoConsumersError
from quiver.wire.admin_messages import ConsumersReply

_KNOWN_S: Final = 1.0  # a topic that lost its last consumer may take messages for so long


class Consumers(NamedTuple):
    told: ConsumersReply

    def of(self, partition: int) -> list[str]:
        """The names under which their positions are kept, of those that read this partition."""
        return [f"#{number}" for number in (*self.told.everywhere, *self.told.by_partition.get(partition, ()))]

    @property
    def are_there(self) -> bool:
        return bool(self.told.everywhere or self.told.by_partition)


ConsumersOf = Callable[[str], Awaitable[Consumers]]


class ConsumerCheck:
    """Lets messages in only where somebody reads them."""

    def __init__(self, consumers_of: ConsumersOf, clock: Clock) -> None:
        self._consumers_of = consumers_of
        self._clock = clock
        self._known_s: dict[str, float] = {}  # topic -> when somebody was last known to read it

    async def __call__(self, topic: str) -> None:
        """Raises NoConsumersError for a topic that nobody is registered to."""
        now_s = self._clock.monotonic_s()
        if now_s - self._known_s.get(topic, -_KNOWN_S) < _KNOWN_S:
            return
        if not (await self._consumers_of(topic)).are_there:
            raise NoConsumersError(f"Topic {topic} takes no messages while it has no consumer", topic=topic)
        self._known_s[topic] = now_s
