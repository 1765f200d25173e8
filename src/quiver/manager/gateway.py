"""Both HTTP APIs on one port: the classic one by its contract, v1 under /v1, /openapi.json and /docs.

Rule: a manager that is cut off from the others says so, but for its health. What changes metadata is handed to the
primary.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

from quiver.clock import Clock
from quiver.config import NodeSettings
from quiver.errors import QuiverError
from quiver.manager.classic import ClassicApi
from quiver.manager.http import ClassicHttp, failure, is_v1
from quiver.manager.http_server import HttpAnswer, HttpRequest
from quiver.manager.moves import Moves
from quiver.manager.primary import Primary
from quiver.manager.quorum import MetadataQuorum
from quiver.manager.registry import Registry
from quiver.manager.relay import is_for_primary, relay
from quiver.manager.standing import Standing
from quiver.manager.v1_admin import Administration
from quiver.manager.v1_errors import answer_of
from quiver.manager.v1_fetch import Fetching
from quiver.manager.v1_groups import GroupCalls
from quiver.manager.v1_http import V1Http
from quiver.manager.v1_produce import Producing

# What needs no metadata, or says itself how fresh it is.
_ALWAYS: Final = (b"/health", b"/v1/health", b"/openapi.json", b"/docs")


class Gateway:
    """`primary`: the way to the manager that leads, None for a manager that is alone."""

    def __init__(
        self,
        quorum: MetadataQuorum,
        registry: Registry,
        moves: Moves,
        standing: Standing,
        primary: Primary | None,
        classic: ClassicApi,
        clock: Clock,
        settings: NodeSettings,
    ) -> None:
        limits = (settings.message_bytes_max, settings.http_body_bytes_max)
        producing = Producing(registry, classic.joiner, clock, *limits)
        self._standing = standing
        self._primary = primary
        self._classic = ClassicHttp(classic)
        administration, groups = Administration(quorum, registry, moves, classic), GroupCalls(quorum, registry)
        self._v1 = V1Http(administration, groups, producing, Fetching(registry))

    def answer(self, request: HttpRequest) -> Awaitable[HttpAnswer]:
        if self._primary is None or (self._standing.is_primary and self._standing.is_fresh):
            return self.answer_here(request)
        return self._answer_among_others(request, self._primary)

    def answer_here(self, request: HttpRequest) -> Awaitable[HttpAnswer]:
        return self._v1.answer(request) if is_v1(request.target) else self._classic.answer(request)

    async def _answer_among_others(self, request: HttpRequest, primary: Primary) -> HttpAnswer:
        try:
            found: HttpAnswer | None = None
            if is_for_primary(request.method, request.target):
                found = await relay(primary, request)
            elif request.target.partition(b"?")[0] not in _ALWAYS:
                await self._standing.check()
        except QuiverError as error:
            if is_v1(request.target):
                return answer_of(error)
            return failure(400 if error.http_status == 400 else 503, error.message)
        return await self.answer_here(request) if found is None else found
