"""What comes while a replica waits for its disk. A snapshot that arrives while a check-point is being written holds;
while one waits itself, no check-point is begun; one that the disk refuses commits nothing, and one that finds no space
waits for it; and what waited behind a vote is not forgotten."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from quiver.broker.partition import Partition
from quiver.log.checkpoint import Checkpoint
from quiver.log.flush import CheckpointJob, FlushJob
from quiver.log.partition_log import PartitionLog
from quiver.log.slots import HardStateFile
from quiver.raft.messages import AppendReply, Vote, VoteReply
from tests.broker.kit import settle
from tests.manager.kit import until
from tests.replication.replica_kit import DIRECTORY, LEADER, LOG, ME, SNAPSHOT, Follower, Held


@pytest.mark.parametrize("kind", ["partition", "manager"])
def test_a_check_point_under_way_does_not_replace_the_snapshot_that_came_meanwhile(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        writers = Held(CheckpointJob)
        follower = Follower(kind, tmp_path, writers)
        leader, replica = follower.leader, follower.replica
        await follower.start()
        leader.append(replica, 5)
        await until(lambda: leader.was_told(5) and writers.held)
        leader.snapshot(replica)
        await until(lambda: replica.raft.commit == SNAPSHOT.start.index)
        writers.release()
        await until(lambda: leader.was_told(SNAPSHOT.start.index) and not replica._log.is_checkpointing)
        assert replica._log.checkpoint.generation == 1
        await follower.owner.stop()
        assert PartitionLog(follower.disk, DIRECTORY, LOG).checkpoint == replica._log.checkpoint

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["partition", "manager"])
def test_no_check_point_is_begun_while_a_snapshot_waits_for_the_disk(kind: str, tmp_path: Path) -> None:
    """It would be of the old log, with what the group knows of the new one: after a crash the replica would believe
    that it has no entries, though it acknowledged some."""

    async def scenario() -> None:
        writers = Held(None)
        follower = Follower(kind, tmp_path, writers)
        leader, replica = follower.leader, follower.replica
        await follower.start()
        leader.append(replica, 2)
        await until(lambda: leader.was_told(2))
        writers.kind = FlushJob
        leader.append(replica, 5)  # now a check-point is due, of the entries before these
        leader.snapshot(replica)
        await until(lambda: replica.raft.commit == SNAPSHOT.start.index)
        await settle()
        assert writers.held and replica._log.checkpoint_due
        assert replica._log.checkpoint == Checkpoint()
        writers.release()
        await until(lambda: leader.was_told(SNAPSHOT.start.index))
        await follower.owner.stop()
        assert replica._log.checkpoint.generation == 1
        assert PartitionLog(follower.disk, DIRECTORY, LOG).checkpoint == replica._log.checkpoint

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["partition", "manager"])
def test_what_came_while_a_vote_waited_for_the_disk_is_taken_right_after_it(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        writers = Held(HardStateFile)
        follower = Follower(kind, tmp_path, writers)
        leader, replica = follower.leader, follower.replica
        await follower.start()
        replica.receive(Vote(LEADER, ME, 1, 0, 0), memoryview(b""))
        await until(lambda: writers.held)
        leader.append(replica, 2)
        await settle()
        assert not any(isinstance(message, (AppendReply, VoteReply)) for message in leader.told)
        writers.release()
        await until(lambda: leader.was_told(2))
        await follower.owner.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("operation", ["pwrite", "datasync", "rename"])
@pytest.mark.parametrize("kind", ["partition", "manager"])
def test_a_snapshot_that_the_disk_refuses_commits_nothing_of_the_old_log(
    kind: str, operation: str, tmp_path: Path
) -> None:
    """The group has committed other entries in their places: that is why it sends a snapshot."""

    async def scenario() -> None:
        follower = Follower(kind, tmp_path, Held(None))
        leader, replica = follower.leader, follower.replica
        await follower.start()
        leader.append(replica, 3, committed=1)
        await until(lambda: leader.was_told(3))
        assert not replica._log.checkpoint_due  # or that would meet the fault
        follower.disk.fail(operation, errno.EIO, path="state.tmp")
        leader.snapshot(replica)
        await until(lambda: replica.raft.failed)
        await settle()
        assert replica.commit_end == 2
        owner = follower.owner
        assert (owner.state.applied_index if isinstance(owner, Partition) else owner.state.applied) <= 1
        assert not leader.was_told(SNAPSHOT.start.index)
        await owner.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("refused", ["pwrite of state.tmp", "datasync of state.tmp", "pwrite of synced"])
@pytest.mark.parametrize("kind", ["partition", "manager"])
def test_a_snapshot_that_finds_no_space_is_installed_when_there_is_some(
    kind: str, refused: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        follower = Follower(kind, tmp_path, Held(None))
        leader, replica, disk = follower.leader, follower.replica, follower.disk
        await follower.start()
        leader.append(replica, 3, committed=1)
        await until(lambda: leader.was_told(3))
        operation, _, name = refused.partition(" of ")
        for nth in range(1, 4):
            disk.fail(operation, errno.ENOSPC, nth, name)
        leader.snapshot(replica)
        await until(lambda: replica._work.is_full)
        leader.append(replica, 9)  # what it cannot take in is not kept either
        assert not replica._inputs and not replica.raft.failed
        assert replica.commit_end == 2 and replica._log.next_index == 4
        assert not disk.exists(f"{DIRECTORY}/state.tmp")
        if isinstance(follower.owner, Partition):
            assert follower.owner.status().state == "full"
        assert not leader.was_told(SNAPSHOT.start.index)
        await until(lambda: replica.tick() and leader.was_told(SNAPSHOT.start.index))
        assert not replica._work.is_full
        await follower.owner.stop()
        assert PartitionLog(disk, DIRECTORY, LOG).checkpoint == replica._log.checkpoint
        assert replica._log.checkpoint.generation == 1

    asyncio.run(scenario())
