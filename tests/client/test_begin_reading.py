"""Where several partitions are begun together and one cannot be, nothing of it goes on behind the caller's back."""

from __future__ import annotations

import asyncio

import pytest

from quiver.client.consumer import ConsumerEngine
from quiver.errors import MemberFencedError


def test_what_begins_beside_one_that_fails_is_ended_before_the_next_try() -> None:
    ended: list[int] = []

    async def first_offset(topic: str, partition: int, epoch: int) -> int:
        if partition == 1:
            raise MemberFencedError("another has it")
        try:
            return await asyncio.Future()
        finally:
            ended.append(partition)

    engine = ConsumerEngine.__new__(ConsumerEngine)
    engine._first_offset = first_offset  # type: ignore[method-assign]

    async def begin() -> None:
        with pytest.raises(MemberFencedError):
            await engine._read({("t", 0): 4, ("t", 1): 5, ("t", 2): 6})
        assert sorted(ended) == [0, 2]

    asyncio.run(asyncio.wait_for(begin(), 10))
