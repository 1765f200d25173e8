"""A replica that ends where its broker lives on: no connection is lost, so the others must be told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quiver.raft.messages import Heartbeat, TimeoutNow, VoteReply
from tests.manager.kit import until
from tests.replication.replica_kit import LEADER, ME, OTHER, Follower, Held


@pytest.mark.parametrize("kind", ["partition", "manager"])
def test_leader_that_ends_without_a_successor_wakes_the_others_and_calls_for_one(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        follower = Follower(kind, tmp_path, Held(None))
        told, replica = follower.leader.told, follower.replica
        await follower.start()
        replica.receive(TimeoutNow(OTHER, ME, 0), memoryview(b""))
        await until(lambda: replica.raft.term == 1)
        replica.receive(VoteReply(OTHER, ME, 1, granted=True), memoryview(b""))
        await until(lambda: replica.raft.leader is not None)
        told.clear()
        await follower.owner.stop()
        beats = {message.to: message.quiesce for message in told if isinstance(message, Heartbeat)}
        assert beats == {LEADER: False, OTHER: False}
        assert [type(message) for message in told[-1:]] == [TimeoutNow]

    asyncio.run(scenario())
