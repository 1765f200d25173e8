"""Moves of one partition travel together, and each is answered for itself."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import Struct

from quiver.errors import ConflictError, OverloadedError, UnavailableError
from quiver.manager.links import Buffer, Reply
from quiver.manager.position_mover import PositionMover
from quiver.wire.messages import CommitPositions, CommitPositionsReply, ErrorReply, Position


class Broker:
    """Answers when it is let; refuses the consumers it is told to."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.let = asyncio.Event()
        self.refused: dict[str, ErrorReply] = {}
        self.failure: Exception | None = None

    async def call(self, request: Struct, payload: Buffer = b"") -> Reply:
        assert isinstance(request, CommitPositions)
        names = [position.consumer for position in request.positions]
        self.asked.append(names)
        await self.let.wait()
        if self.failure is not None:
            raise self.failure
        known = enumerate(names)
        return CommitPositionsReply({place: self.refused[name] for place, name in known if name in self.refused}), ()


def position(number: int) -> Position:
    return Position(f"#{number}", 1, False, 0)


def test_what_comes_while_one_is_under_way_goes_together() -> None:
    async def main() -> None:
        broker = Broker()
        mover = PositionMover(lambda topic, partition: broker)
        first = mover.move("logs", 0, position(0))
        await asyncio.sleep(0)
        rest = [mover.move("logs", 0, position(number)) for number in (1, 2, 3)]
        broker.let.set()
        await asyncio.gather(first, *rest)
        assert broker.asked == [["#0"], ["#1", "#2", "#3"]]
        await mover.move("logs", 0, position(4))
        assert broker.asked[2:] == [["#4"]]

    asyncio.run(main())


def test_one_that_is_refused_does_not_keep_the_others() -> None:
    async def main() -> None:
        broker = Broker()
        broker.let.set()
        broker.refused = {
            "#1": ErrorReply("ConflictError", "it is 5", {"current": 5}),
            "#2": ErrorReply("OverloadedError", "too many", {}),
        }
        mover = PositionMover(lambda topic, partition: broker)
        zero, one, two = [mover.move("logs", 0, position(number)) for number in range(3)]
        await zero
        with pytest.raises(ConflictError) as refused:
            await one
        assert refused.value.facts == {"current": 5}
        with pytest.raises(OverloadedError):
            await two

    asyncio.run(main())


def test_a_failure_is_told_to_all_and_the_next_are_tried() -> None:
    async def main() -> None:
        broker = Broker()
        broker.let.set()
        broker.failure = UnavailableError("away")
        mover = PositionMover(lambda topic, partition: broker)
        moves = [mover.move("logs", 0, position(number)) for number in range(3)]
        found = await asyncio.gather(*moves, return_exceptions=True)
        assert found == [broker.failure] * 3
        broker.failure = None
        await mover.move("logs", 0, position(9))

    asyncio.run(main())


def test_who_went_away_does_not_keep_the_others() -> None:
    async def main() -> None:
        broker = Broker()
        mover = PositionMover(lambda topic, partition: broker)
        gone, here = mover.move("logs", 0, position(0)), mover.move("logs", 0, position(1))
        gone.cancel()
        broker.let.set()
        await here

    asyncio.run(main())
