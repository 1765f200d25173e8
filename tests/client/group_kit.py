"""What the tests of groups share: members that end with the test, and short ways to read with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from quiver import Consumer
from quiver.client.group_member import GroupMember
from quiver.client.loop_thread import shared_loop
from quiver.types import Record
from tests.client.kit import new_topic, until

SESSION_S = 60.0  # nobody is missed, however slow the machine
SHORT_SESSION_S = 1.0  # of those that are to be missed


@pytest.fixture
def topic(servers: str) -> str:
    return new_topic(servers, 6)


@pytest.fixture
def member(servers: str, topic: str) -> Iterator[Callable[..., Consumer]]:
    """Makes consumers of one group that end with the test."""
    with ExitStack() as stack:

        def make(**settings: Any) -> Consumer:
            settings = {"group": topic, "session_timeout": SESSION_S} | settings
            return stack.enter_context(Consumer(servers, [topic], **settings))

        yield make


def read(members: list[Consumer], found: list[Record], enough: Callable[[], bool]) -> None:
    """Each of them looks for records in turn."""

    def look() -> bool:
        for one in members:
            found.extend(one.poll(timeout=0.02))
        return enough()

    until(look)


def are_shared(members: list[Consumer], partitions: int = 6) -> bool:
    """Everything is read by one of them, and everyone has a share."""
    owned = [one.assignment() for one in members]
    return sum(map(len, owned)) == len({pair for part in owned for pair in part}) == partitions and all(owned)


def kill(consumer: Consumer) -> None:
    """As if its process had died: no more heartbeats, no goodbye."""

    async def end(member: GroupMember) -> None:
        assert member._task is not None
        member._task.cancel()

    member = consumer._engine._member
    assert member is not None
    shared_loop().call(end(member))
