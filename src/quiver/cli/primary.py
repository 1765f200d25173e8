"""Asks managers who leads them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

from quiver.errors import QuiverError
from quiver.net.remote_link import RemoteLink
from quiver.wire.quorum_messages import GetQuorum, QuorumReply

_ANSWER_S: Final = 1.0


async def find_primary(addresses: Sequence[str]) -> int:
    """The manager that leads by the word of the newest term; 0 when nobody knows."""
    told = [reply for reply in await asyncio.gather(*map(_ask, addresses)) if reply is not None and reply.primary]
    return max(told, key=lambda reply: reply.term).primary if told else 0


async def _ask(address: str) -> QuorumReply | None:
    link = RemoteLink(address, "supervisor")
    try:
        with contextlib.suppress(QuiverError):  # it is away, or just starting
            reply, _ = await link.call(GetQuorum(), timeout_s=_ANSWER_S)
            assert isinstance(reply, QuorumReply)
            return reply
    finally:
        await link.close()
    return None
