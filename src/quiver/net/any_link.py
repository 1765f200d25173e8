"""Requests to any one of several nodes that can all answer them, such as the managers of a cluster.

Rule: no retries, as of `RemoteLink`. A node that is out of reach or cannot answer now is left for the next of the list;
whoever asks again asks that one.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from quiver.errors import UnavailableError
from quiver.net.protocol import Buffer
from quiver.net.remote_link import CALL_TIMEOUT_S, RemoteLink


class AnyLink:
    def __init__(self, addresses: Iterable[str], node: str) -> None:
        """`node` names us to the other end."""
        self._node = node
        self._addresses = list(dict.fromkeys(addresses))
        self._link = RemoteLink(self._addresses[0], node)

    @property
    def addresses(self) -> list[str]:
        """All of them, the one that is asked next first."""
        return self._addresses

    def add(self, addresses: Iterable[str]) -> None:
        """Nodes that were heard of; they are asked when the ones before cannot answer."""
        self._addresses = list(dict.fromkeys((*self._addresses, *addresses)))

    async def call(
        self, request: Struct, payload: Buffer = b"", *, timeout_s: float = CALL_TIMEOUT_S
    ) -> tuple[Struct, tuple[Buffer, ...]]:
        link = self._link
        try:
            return await link.call(request, payload, timeout_s=timeout_s)
        except UnavailableError:
            if link is self._link and len(self._addresses) > 1:
                await self._go_on()
            raise

    async def _go_on(self) -> None:
        self._addresses = [*self._addresses[1:], self._addresses[0]]
        left, self._link = self._link, RemoteLink(self._addresses[0], self._node)
        await left.close()

    async def close(self) -> None:
        await self._link.close()
