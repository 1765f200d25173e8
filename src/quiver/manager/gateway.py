"""Both HTTP APIs on one port: the classic one by its contract, v1 under /v1, /openapi.json and /docs."""

from __future__ import annotations

from collections.abc import Awaitable

from quiver.clock import Clock
from quiver.config import NodeSettings
from quiver.manager.classic import ClassicApi
from quiver.manager.http import ClassicHttp, is_v1
from quiver.manager.http_server import HttpAnswer, HttpRequest
from quiver.manager.moves import Moves
from quiver.manager.quorum import MetadataQuorum
from quiver.manager.registry import Registry
from quiver.manager.v1_admin import Administration
from quiver.manager.v1_fetch import Fetching
from quiver.manager.v1_http import V1Http
from quiver.manager.v1_produce import Producing


class Gateway:
    def __init__(
        self,
        quorum: MetadataQuorum,
        registry: Registry,
        moves: Moves,
        classic: ClassicApi,
        clock: Clock,
        settings: NodeSettings,
    ) -> None:
        limits = (settings.message_bytes_max, settings.http_body_bytes_max)
        producing = Producing(registry, classic.joiner, clock, *limits)
        self._classic = ClassicHttp(classic)
        self._v1 = V1Http(Administration(quorum, registry, moves, classic), producing, Fetching(registry))

    def answer(self, request: HttpRequest) -> Awaitable[HttpAnswer]:
        return self._v1.answer(request) if is_v1(request.target) else self._classic.answer(request)
