"""A replica that its group put out begins anew when it is wanted again; not when somebody has taken it in meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quiver.errors import CorruptLogError
from quiver.raft.messages import Join, Outdated
from quiver.replication.applicant import Applicant
from tests.manager.kit import until
from tests.replication.replica_kit import LEADER, ME, OTHER, Follower, Held

SAID = (3, 1)  # where its log ended when it asked


@pytest.mark.parametrize(
    ("answer", "begins"),
    [
        (Outdated(LEADER, ME, 9, *SAID), True),
        (Outdated(LEADER, ME, 9, 2, 1), False),
        (Outdated(LEADER, ME, 9, 3, 2), False),
        (Outdated(LEADER, OTHER, 9, *SAID), False),
    ],
)
def test_it_begins_anew_if_it_is_meant_and_nothing_came_since_it_asked(
    answer: Outdated, begins: bool, tmp_path: Path
) -> None:
    async def scenario() -> None:
        begun: list[CorruptLogError] = []
        follower = Follower("partition", tmp_path, Held(None))
        leader, replica = follower.leader, follower.replica
        replica._applicant = Applicant(replica._log, leader, replica._clock, begun.append)
        await follower.start()
        leader.append(replica, 3, committed=1)
        await until(lambda: leader.was_told(3))
        replica._applicant.ask(replica.seat, replica.raft)
        assert [message for message in leader.told if isinstance(message, Join)] == [Join(ME, 0, 1, *SAID)] * 3
        replica.receive(answer, memoryview(b""))
        assert bool(begun) == begins
        assert [error.facts for error in begun] == [{"verdict": "outdated"}] * begins
        assert replica.raft.failed == begins
        leader.told.clear()
        leader.append(replica, 5)
        if begins:
            await asyncio.sleep(0.05)
            assert not leader.told, "it took in something after it was given up"
        else:
            await until(lambda: leader.was_told(5))
        await follower.owner.stop()

    asyncio.run(scenario())


def test_a_manager_never_does(tmp_path: Path) -> None:
    """Nothing is compacted there, and what it has is as good as new."""

    async def scenario() -> None:
        follower = Follower("manager", tmp_path, Held(None))
        leader, replica = follower.leader, follower.replica
        await follower.start()
        leader.append(replica, 3)
        await until(lambda: leader.was_told(3))
        replica._applicant.ask(replica.seat, replica.raft)
        assert Join(ME, 0, 1) in leader.told
        replica.receive(Outdated(LEADER, ME, 9, *SAID), memoryview(b""))
        assert not replica.raft.failed
        await follower.owner.stop()

    asyncio.run(scenario())
