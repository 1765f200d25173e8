"""How managers become a quorum: once, all together; later newcomers and those who lost their disk are let in.

Rule: a quorum begins only when every manager of the list has said that it belongs to none. The one with the lowest id
decides, and keeps its decision on disk before it tells anyone. Who hears of a quorum takes it as it is; a manager that
is not among its voters asks to be let in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Final, NamedTuple

from quiver.errors import InvalidRequestError, UnavailableError
from quiver.manager.identity import Identity
from quiver.net.remote_link import RemoteLink
from quiver.wire.quorum_messages import GetQuorum, QuorumReply

logger = logging.getLogger("quiver.manager")

_ASK_AGAIN_S: Final = 0.05
_ANSWER_S: Final = 1.0


class Quorum(NamedTuple):
    """An empty cluster id: a new one."""

    cluster_id: str
    voters: tuple[int, ...]


def parse_peers(text: str) -> dict[int, str]:
    """'1=host:port,2=host:port' as addresses by manager id."""
    found: dict[int, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        number, _, address = part.partition("=")
        host, _, port = address.rpartition(":")
        if not (number.isascii() and number.isdigit() and host and port.isdigit()) or not int(number):
            raise InvalidRequestError(f"peers: {part!r} is not of the form 1=host:port")
        if int(number) in found:
            raise InvalidRequestError(f"peers: manager {number} is given twice")
        found[int(number)] = address
    return found


def decide(me: int, managers: Mapping[int, str], told: Mapping[int, QuorumReply]) -> Quorum | None:
    """The quorum that `me` belongs to, by what all managers said, itself included; None while that is open."""
    known = {(reply.cluster_id, tuple(reply.voters)) for reply in told.values() if reply.voters}
    clusters = {cluster_id for cluster_id, _ in known}
    if len(clusters) > 1:
        raise InvalidRequestError(
            f"the managers of the list belong to different clusters: {', '.join(sorted(clusters))}"
        )
    if known:
        return Quorum(*min(known))
    if me == min(managers) and told.keys() >= managers.keys():
        return Quorum("", tuple(told[manager].replica_id for manager in sorted(managers)))
    return None


class Founding:
    def __init__(self, me: int, managers: Mapping[int, str], identity: Identity) -> None:
        self._me = me
        self._managers = managers
        self._identity = identity
        self._links = {
            number: RemoteLink(at, f"manager-{me}", -number) for number, at in managers.items() if number != me
        }

    async def run(self) -> None:
        """Returns when this manager belongs to a quorum."""
        identity = self._identity
        try:
            while not identity.voters:
                mine = QuorumReply(self._me, identity.replica_id)
                told = {self._me: mine} | await self._ask_all()
                found = decide(self._me, self._managers, told)
                if found is None:
                    await asyncio.sleep(_ASK_AGAIN_S)
                elif found.cluster_id:
                    identity.belong(*found)
                else:
                    identity.found(found.voters)
        finally:
            for link in self._links.values():
                await link.close()

    async def _ask_all(self) -> dict[int, QuorumReply]:
        told = await asyncio.gather(*map(self._ask, self._links.values()))
        return {reply.manager_id: reply for reply in told if reply is not None}

    async def _ask(self, link: RemoteLink) -> QuorumReply | None:
        with contextlib.suppress(UnavailableError):  # it has not started yet, or is away
            reply, _ = await link.call(GetQuorum(), timeout_s=_ANSWER_S)
            assert isinstance(reply, QuorumReply)
            return reply
        return None
