"""Moves the positions of registered consumers, those of one partition together: a thousand calls become a few.

Rule: one request of a partition is under way at a time; what comes meanwhile is in the next. Each move names the
position it expects and is answered for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from quiver.errors import error_from_wire
from quiver.manager.links import BrokerLink
from quiver.wire.fields import POSITIONS_MAX
from quiver.wire.messages import CommitPositions, CommitPositionsReply, ErrorReply, Position


class _Move(NamedTuple):
    position: Position
    done: asyncio.Future[None]


class PositionMover:
    def __init__(self, link_of: Callable[[str, int], BrokerLink]) -> None:
        self._link_of = link_of
        self._waiting: dict[tuple[str, int], list[_Move]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def move(self, topic: str, partition: int, position: Position) -> asyncio.Future[None]:
        """Done when the position is on a majority of disks. Its error is what the broker answered."""
        move = _Move(position, asyncio.get_running_loop().create_future())
        place = (topic, partition)
        waiting = self._waiting.get(place)
        if waiting is not None:
            waiting.append(move)
        else:
            self._waiting[place] = [move]
            task = asyncio.get_running_loop().create_task(self._drain(place))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return move.done

    async def _drain(self, place: tuple[str, int]) -> None:
        while moves := self._waiting[place][:POSITIONS_MAX]:
            del self._waiting[place][:POSITIONS_MAX]
            try:
                refused = await self._send(place, [move.position for move in moves])
            except Exception as error:  # whatever it is: nobody may wait for ever
                for move in moves:
                    if not move.done.done():
                        move.done.set_exception(error)
                continue
            for number, move in enumerate(moves):
                if move.done.done():
                    continue
                if (reply := refused.get(number)) is None:
                    move.done.set_result(None)
                else:
                    move.done.set_exception(error_from_wire(reply.code, reply.message, reply.facts))
        del self._waiting[place]

    async def _send(self, place: tuple[str, int], positions: list[Position]) -> dict[int, ErrorReply]:
        reply, _ = await self._link_of(*place).call(CommitPositions(*place, positions))
        assert isinstance(reply, CommitPositionsReply)
        return reply.refused
