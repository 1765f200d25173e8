"""The way to the manager that leads.

Rule: what only the primary may do is done there, wherever it was asked. While none is known it waits a little; what was
handed over is not handed over twice, unless it was refused because that manager does not lead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct

from quiver.errors import (
    ConnectionLostError,
    NotLeaderError,
    OutcomeUnknownError,
    RequestTimeoutError,
    UnavailableError,
)
from quiver.manager.links import Buffer, Reply
from quiver.manager.quorum import MetadataQuorum
from quiver.net.remote_link import RemoteLink
from quiver.wire.messages import KIND_OF, REPLY_TO, encode
from quiver.wire.quorum_messages import ForPrimary, FromPrimary

logger = logging.getLogger("quiver.manager")

# How long a request waits for a primary to be found. An election takes a second or two; whoever waits longer is told.
_SEARCH_S: Final = 5.0
_PAUSE_S: Final = 0.05
_SEEN_S: Final = 1.0
_CALL_S: Final = 15.0  # a topic's creation tells all brokers


class Primary:
    """`addresses` of all managers, kept current."""

    def __init__(self, quorum: MetadataQuorum, addresses: Mapping[int, str], cluster_id: str) -> None:
        self._quorum = quorum
        self._addresses = addresses
        self._cluster_id = cluster_id
        self._links: dict[int, RemoteLink] = {}

    async def ask(
        self, request: Struct, payload: Buffer = b"", *, search_s: float | None = None, call_s: float = _CALL_S
    ) -> Reply | None:
        """The primary's reply. None: this manager leads, and must do it itself."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + (_SEARCH_S if search_s is None else search_s)
        why = "no manager leads now"
        while True:
            if self._quorum.leads:
                return None
            primary = 0 if self._quorum.replica.is_settling else self._quorum.primary
            if primary not in (0, self._quorum.me):
                try:
                    return await self._hand_over(primary, request, payload, call_s)
                except NotLeaderError as error:
                    why = error.message
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                raise UnavailableError(f"the metadata cannot be changed now: {why}")
            if primary:
                await asyncio.sleep(min(_PAUSE_S, left_s))
            else:
                await self._quorum.until_changed(left_s)

    async def _hand_over(self, manager: int, request: Struct, payload: Buffer, call_s: float) -> Reply:
        link = self._link(manager)
        try:
            await link.connect()
        except UnavailableError as error:
            raise NotLeaderError(f"manager {manager} is out of reach: {error.message}") from error
        wrapped = ForPrimary(self._cluster_id, KIND_OF[type(request)], encode(request))
        try:
            reply, data = await link.call(wrapped, payload, timeout_s=call_s)
        except (ConnectionLostError, RequestTimeoutError) as error:
            raise OutcomeUnknownError(
                f"manager {manager} was lost while it did this: it may or may not have been done"
            ) from error
        assert isinstance(reply, FromPrimary)
        # Whoever asked here will look here for what was done.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SEEN_S):
                await self._quorum.until_applied(reply.index)
        return msgspec.msgpack.decode(reply.reply, type=REPLY_TO[type(request)]), data

    def _link(self, manager: int) -> RemoteLink:
        known = self._quorum.state.managers.get(manager)
        address = self._addresses.get(manager) or (known.address if known else "")
        if not address:
            raise NotLeaderError(f"nobody knows the address of manager {manager}")
        link = self._links.get(manager)
        if link is None or link.address != address:
            link = self._links[manager] = RemoteLink(address, f"manager-{self._quorum.me}", -manager)
        return link

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()
