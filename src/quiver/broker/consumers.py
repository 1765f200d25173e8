"""Who reads a topic, as the managers know it: registered consumers, and groups with members.

Rule: what the managers said is used again for a moment only where a consumer more makes no difference.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final, NamedTuple

from quiver.clock import Clock
from quiver.errors import NoConsumersError
from quiver.wire.admin_messages import ConsumersReply
from quiver.wire.fields import REGISTERED

_KNOWN_S: Final = 1.0  # a topic that lost its last consumer may take messages for so long


class Consumers(NamedTuple):
    told: ConsumersReply

    def of(self, partition: int) -> list[str]:
        """The names under which their positions are kept, of those that read this partition."""
        numbers = (*self.told.everywhere, *self.told.by_partition.get(partition, ()))
        return [*(f"{REGISTERED}{number}" for number in numbers), *self.told.groups]

    def gone(self, positions: Iterable[str]) -> list[str]:
        """Those that are not registered any more. Who was registered since this was told has a higher number."""
        known = {*self.told.everywhere, *(number for some in self.told.by_partition.values() for number in some)}
        numbers = [int(name[1:]) for name in positions if name.startswith(REGISTERED) and name[1:].isdigit()]
        return [f"{REGISTERED}{number}" for number in numbers if number not in known and number <= self.told.last]

    @property
    def are_there(self) -> bool:
        return bool(self.told.everywhere or self.told.by_partition or self.told.groups)


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
