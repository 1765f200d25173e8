"""A snapshot that arrives while a check-point is being written in a thread: the snapshot holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest

from quiver.broker.partition import Partition
from quiver.clock import SystemClock
from quiver.config import LogSettings, RaftSettings
from quiver.errors import CorruptLogError
from quiver.log.checkpoint import Checkpoint, LogStart, encode_checkpoint
from quiver.log.flush import CheckpointJob
from quiver.log.partition_log import PartitionLog
from quiver.manager.quorum import MetadataQuorum
from quiver.metadata.store import Store, sqlite_url
from quiver.raft import AnyMessage, Append, Membership, Snapshot
from quiver.raft.messages import AppendReply
from quiver.replication.group import replica_id
from quiver.replication.raft_replica import RaftReplica
from quiver.replication.seat import RaftSetup, Seat
from quiver.testing.faulty_disk import FaultyDisk
from quiver.wire.frame import Entry, Kind, encode_frame, stamp
from tests.broker.kit import InlineExecutor
from tests.manager.kit import until

T = TypeVar("T")

UID = "u"
DIRECTORY = "data/log"
# A check-point is due after the first entries.
LOG = LogSettings(checkpoint_bytes=300, retention_ms=None)
SLOW = RaftSettings(heartbeat_ms=60_000, election_ms=60_000)  # nobody stands for election
LEADER, ME, OTHER = (replica_id(number, 7) for number in (1, 2, 3))
GROUP = Membership((LEADER, ME, OTHER))
SNAPSHOT = Checkpoint(500, 3, 0, b"", LogStart(500, 3, 0))


class CheckpointsHeld(InlineExecutor):
    """Runs every job at once but those that write a check-point: these when the test says so."""

    def __init__(self) -> None:
        self.held: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        if not isinstance(getattr(fn, "__self__", None), CheckpointJob):
            return super().submit(fn, *args, **kwargs)
        future: Future[T] = Future()
        self.held.append((fn, future))
        return future

    def release(self) -> None:
        for job, future in self.held:
            future.set_result(job())
        self.held = []


class Leader:
    """Stands for the leader and for the way to it: what it is told, and the messages a test lets it send."""

    def __init__(self) -> None:
        self.told: list[AnyMessage] = []

    def send(self, broker: int, uid: str, message: AnyMessage, frames: Sequence[Any] = ()) -> bool:
        self.told.append(message)
        return True

    def flush(self) -> None:
        return

    def append(self, replica: RaftReplica, count: int) -> None:
        entry = Entry.control(Kind.NOOP, b"")
        frames = b"".join(encode_frame(stamp(entry, index, 1, 0), b"") for index in range(1, count + 1))
        replica.receive(Append(LEADER, ME, 1, 0, 0, count, count, ((1, 1),)), memoryview(frames))

    def snapshot(self, replica: RaftReplica) -> None:
        message = Snapshot(LEADER, ME, 3, SNAPSHOT.start.index, SNAPSHOT.start.term, GROUP)
        replica.receive(message, memoryview(encode_checkpoint(SNAPSHOT)))

    def was_told(self, index: int) -> bool:
        return any(isinstance(message, AppendReply) and message.match == index for message in self.told)


class Follower:
    """A partition's replica, or a manager's, on a simulated disk."""

    def __init__(self, kind: str, path: Path) -> None:
        self.disk = FaultyDisk(0)
        self.writers = CheckpointsHeld()
        self.leader = Leader()
        seat = Seat(UID, ME, GROUP.voters)
        self.owner: Partition | MetadataQuorum
        if kind == "partition":
            log = PartitionLog(self.disk, DIRECTORY, LOG)
            setup = RaftSetup(seat, DIRECTORY, SLOW, self.leader, _undamaged)
            self.owner = Partition("t", 0, log, self.disk, self.writers, InlineExecutor(), SystemClock(), None, setup)
            assert self.owner.raft is not None
            self.replica = self.owner.raft
        else:
            store = Store(sqlite_url(path / "metadata.db"))
            self.owner = MetadataQuorum(
                self.disk, DIRECTORY, store, SystemClock(), self.writers, seat, self.leader, SLOW, LOG
            )
            self.replica = self.owner.replica

    async def start(self) -> None:
        if isinstance(self.owner, Partition):
            self.owner.start()
        else:
            await self.owner.start()


def _undamaged(error: CorruptLogError) -> None:
    raise error


@pytest.mark.parametrize("kind", ["partition", "manager"])
def test_a_check_point_under_way_does_not_replace_the_snapshot_that_came_meanwhile(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        follower = Follower(kind, tmp_path)
        leader, replica, writers = follower.leader, follower.replica, follower.writers
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
