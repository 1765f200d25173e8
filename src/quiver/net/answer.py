"""The answer to one request, given by whoever has it, when he has it.

It is set like a future, and written at once: a future's callbacks wait for the next turn of the loop, and a produce
that waits for nothing else would wait for that.
"""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import Struct

from quiver.wire.packet import Packet


class Asker(Protocol):
    """Where the answer goes."""

    def answered(self, answer: Answer, reply: Struct) -> None: ...

    def refused(self, answer: Answer, error: Exception) -> None: ...


class Answer:
    __slots__ = ("_asker", "_is_done", "correlation", "kind", "size_bytes")

    def __init__(self, asker: Asker, packet: Packet) -> None:
        self._asker = asker
        self._is_done = False
        self.kind = packet.kind
        self.correlation = packet.correlation
        self.size_bytes = packet.size_bytes

    def done(self) -> bool:
        return self._is_done

    def set_result(self, reply: Any) -> None:
        self._is_done = True
        self._asker.answered(self, reply)

    def set_exception(self, error: Any) -> None:
        self._is_done = True
        self._asker.refused(self, error)

    def cancel(self) -> bool:
        """The asker is gone."""
        self._is_done = True
        return True


class LocalFlow:
    """A caller in this process takes a reply at once."""

    is_writable = True

    async def until_writable(self) -> None:
        return
