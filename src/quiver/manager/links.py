"""How a manager reaches a broker, on this node or another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

Buffer = bytes | bytearray | memoryview


class BrokerLink(Protocol):
    async def call(self, request: Struct, payload: memoryview = ...) -> tuple[Struct, Sequence[Buffer]]:
        """The broker's typed reply and payload. Raises what the broker answered, or that it is out of reach."""
        ...
