"""A partition's replica, or a manager's, alone on a simulated disk; a test says what its peers say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from quiver.broker.partition import Partition
from quiver.clock import SystemClock
from quiver.config import LogSettings, RaftSettings
from quiver.errors import CorruptLogError
from quiver.log.checkpoint import Checkpoint, LogStart, encode_checkpoint
from quiver.log.flusher import FlushPolicy
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

T = TypeVar("T")

UID = "u"
DIRECTORY = "data/log"
# A check-point is due after the first entries.
LOG = LogSettings(checkpoint_bytes=300, retention_ms=None)
SLOW = RaftSettings(heartbeat_ms=60_000, election_ms=60_000)  # nobody stands for election
LEADER, ME, OTHER = (replica_id(number, 7) for number in (1, 2, 3))
GROUP = Membership((LEADER, ME, OTHER))
SNAPSHOT = Checkpoint(500, 3, 0, b"", LogStart(500, 3, 0))


class Held(InlineExecutor):
    """Runs every job at once but those of one kind: these when the test says so."""

    def __init__(self, kind: type | None) -> None:
        self.kind = kind
        self.held: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        if self.kind is None or not isinstance(getattr(fn, "__self__", None), self.kind):
            return super().submit(fn, *args, **kwargs)
        future: Future[T] = Future()
        self.held.append((partial(fn, *args, **kwargs), future))
        return future

    def release(self) -> None:
        """These, and all that come."""
        self.kind = None
        for job, future in self.held:
            future.set_result(job())
        self.held = []


class Leader:
    """Stands for the leader and for the way to it: what it is told, and the messages a test lets it send."""

    def __init__(self) -> None:
        self.told: list[AnyMessage] = []

    def send(
        self, broker: int, uid: str, message: AnyMessage, frames: Sequence[Any] = (), *, now: bool = False
    ) -> bool:
        self.told.append(message)
        return True

    def append(self, replica: RaftReplica, count: int, committed: int | None = None) -> None:
        """Entries 1 to `count`; all are committed unless it is said how many."""
        entry = Entry.control(Kind.NOOP, b"")
        frames = b"".join(encode_frame(stamp(entry, index, 1, 0), b"") for index in range(1, count + 1))
        commit = count if committed is None else committed
        replica.receive(Append(LEADER, ME, 1, 0, 0, count, commit, ((1, 1),)), memoryview(frames))

    def snapshot(self, replica: RaftReplica) -> None:
        message = Snapshot(LEADER, ME, 3, SNAPSHOT.start.index, SNAPSHOT.start.term, GROUP)
        replica.receive(message, memoryview(encode_checkpoint(SNAPSHOT)))

    def was_told(self, index: int) -> bool:
        return any(isinstance(message, AppendReply) and message.match == index for message in self.told)


class Follower:
    """A partition's replica, or a manager's, on a simulated disk."""

    def __init__(self, kind: str, path: Path, writers: Held, policy: FlushPolicy | None = None) -> None:
        self.disk = FaultyDisk(0)
        self.writers = writers
        self.leader = Leader()
        seat = Seat(UID, ME, GROUP.voters)
        self.owner: Partition | MetadataQuorum
        if kind == "partition":
            log = PartitionLog(self.disk, DIRECTORY, LOG)
            setup = RaftSetup(seat, DIRECTORY, SLOW, self.leader, _undamaged)
            self.owner = Partition("t", 0, log, self.disk, self.writers, InlineExecutor(), SystemClock(), policy, setup)
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


class Turns:
    """Counts those of a partition."""

    def __init__(self, partition: Partition) -> None:
        self.count = 0
        own = partition._own

        def counting() -> None:
            self.count += 1
            own()

        partition._own = counting  # type: ignore[method-assign]


def _undamaged(error: CorruptLogError) -> None:
    raise error
