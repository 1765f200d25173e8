"""A damaged frame in the log of a manager that runs is filled in place with a peer's bytes.

What the log says was applied long ago, so the manager goes on meanwhile: it answers, takes entries, and leads if it
did. It neither votes nor stands for election until the place is whole again (`replication/repair.py` says how).

Rule: only what this manager has synced is looked at; behind that somebody writes.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from functools import partial
from typing import Final

from quiver.errors import CorruptLogError
from quiver.log.disk import Disk
from quiver.log.partition_log import PartitionLog
from quiver.log.segment import scan_frames
from quiver.raft import AnyMessage
from quiver.raft.messages import RepairReply
from quiver.replication.append_sender import Transport
from quiver.replication.raft_replica import RaftReplica
from quiver.replication.repair import Repairer, UnrepairableError

logger = logging.getLogger("quiver.manager")

_TRY_AGAIN_S: Final = 5.0


class Mending:
    """`damage` is what was found, until it is mended. A manager that is alone has nobody to mend it from."""

    def __init__(self, disk: Disk, threads: Executor, transport: Transport) -> None:
        self._disk = disk
        self._threads = threads
        self._transport = transport
        self._replica: RaftReplica | None = None
        self._log: PartitionLog | None = None
        self._repairer: Repairer | None = None
        self._task: asyncio.Task[None] | None = None
        self.damage: CorruptLogError | None = None

    def of(self, replica: RaftReplica, log: PartitionLog) -> None:
        self._replica, self._log = replica, log

    def found(self, error: CorruptLogError) -> None:
        """The replica has stopped to vote."""
        self.damage = error
        if self._task is None and self._replica is not None and self._log is not None:
            work = self._mend(self._replica, self._log, error)
            self._task = asyncio.get_running_loop().create_task(work)

    def receive(self, message: AnyMessage, frames: memoryview) -> bool:
        """True: it was for us."""
        if not isinstance(message, RepairReply):
            return False
        if self._repairer is not None:
            self._repairer.receive(message, frames)
        return True

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _mend(self, replica: RaftReplica, log: PartitionLog, error: CorruptLogError) -> None:
        path, uid = str(error.facts.get("path", "")), replica.seat.uid
        while self._disk.exists(path):  # else the log begins behind it by now
            voters = list(replica.raft.membership.voters)
            self._repairer = Repairer(uid, replica.seat.me, voters, self._disk, self._threads, self._transport)
            try:
                await self._repairer.run(error, partial(_damage_in, self._disk, path, log.synced_index))
                break
            except (UnrepairableError, OSError) as why:
                logger.error("metadata_log_not_mended path=%s error=%r", path, str(why))
                await asyncio.sleep(_TRY_AGAIN_S)
        logger.info("metadata_log_mended path=%s", path)
        self._repairer = self._task = self.damage = None
        replica.raft.may_vote = True


def _damage_in(disk: Disk, path: str, end: int) -> CorruptLogError | None:
    """What else is bad in a file, before the entry `end`; blocking."""
    try:
        file = disk.open(path)
        for _, header, _ in scan_frames(file, path, 0, file.size()):
            if header.index + 1 >= end:
                break
    except CorruptLogError as found:
        return found
    except FileNotFoundError:
        pass  # trimmed meanwhile, with all that was bad in it
    return None
