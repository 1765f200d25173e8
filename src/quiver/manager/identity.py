"""Who a manager is: its file `quorum.json`, which tells one disk from the next and names the quorum it belongs to.

Rule: the number of the disk is drawn when the directory is made. A manager that lost its log has forgotten what it
promised; it takes another number and is another replica, so that it never counts under its old name.
"""

from __future__ import annotations

import logging
import secrets
import uuid
from typing import Final

import msgspec
from msgspec.structs import replace

from quiver.errors import CorruptLogError, InvalidRequestError
from quiver.log.disk import Disk, write_atomically
from quiver.log.partition_log import PartitionLog
from quiver.log.slots import HardStateFile
from quiver.manager.quorum import LOG_SETTINGS
from quiver.replication.group import replica_id
from quiver.types import HardState

logger = logging.getLogger("quiver.manager")

_FILE: Final = "quorum.json"
_CLUSTER_ID_FILE: Final = "cluster_id"  # of the versions that had one manager


class Kept(msgspec.Struct, frozen=True):
    """`voters` are the replicas the quorum began with, empty while this manager belongs to none. `addresses`: of
    managers that are elsewhere than the settings say, or nowhere; as of transaction `addresses_at`."""

    disk_id: int
    cluster_id: str = ""
    voters: tuple[int, ...] = ()
    addresses: dict[int, str] = {}
    addresses_at: int = 0


class Identity:
    """Blocking; `directory` is the manager's, made when missing."""

    def __init__(self, disk: Disk, directory: str, manager_id: int) -> None:
        self._disk = disk
        self._manager_id = manager_id
        self._path = f"{directory}/{_FILE}"
        self.log_directory = f"{directory}/log"
        disk.make_directory(directory)
        if disk.exists(self._path):
            self._kept = self._read()
            self._check_log()
        else:
            self._kept = Kept(secrets.randbits(32))
            self._keep(self._taken_over(f"{directory}/{_CLUSTER_ID_FILE}"))

    @property
    def replica_id(self) -> int:
        return replica_id(self._manager_id, self._kept.disk_id)

    @property
    def cluster_id(self) -> str:
        return self._kept.cluster_id

    @property
    def voters(self) -> tuple[int, ...]:
        return self._kept.voters

    @property
    def addresses(self) -> dict[int, str]:
        return self._kept.addresses

    def keep_addresses(self, addresses: dict[int, str], transaction: int) -> None:
        """Nothing is changed by what was true before: after a start the metadata is behind until a primary is found,
        and the primary may be one of these."""
        if transaction >= self._kept.addresses_at and addresses != self._kept.addresses:
            self._keep(replace(self._kept, addresses=addresses, addresses_at=transaction))

    def belong(self, cluster_id: str, voters: tuple[int, ...]) -> None:
        """Makes this manager one of that quorum, for ever."""
        # Its vote has a place on disk first: without it, a manager that belongs to a quorum has lost its log.
        self._disk.make_directory(self.log_directory)
        HardStateFile(self._disk, self.log_directory)
        self._keep(replace(self._kept, cluster_id=cluster_id, voters=voters))
        logger.info("quorum cluster=%s voters=%s", cluster_id, voters)

    def found(self, voters: tuple[int, ...]) -> None:
        """A new quorum."""
        self.belong(uuid.uuid4().hex, voters)

    def renew(self) -> None:
        """What this manager had is gone or damaged: it is a newcomer now. A damaged log is put aside."""
        if self.voters == (self.replica_id,):
            raise CorruptLogError(
                f"the metadata log in {self.log_directory} is gone, and no other manager has it: restore the directory"
            )
        if self._disk.exists(self.log_directory):
            if self._disk.exists(aside := f"{self.log_directory}.damaged"):
                self._disk.remove_tree(aside)
            self._disk.rename(self.log_directory, aside)
        self._keep(replace(self._kept, disk_id=secrets.randbits(32)))
        self.belong(self.cluster_id, self.voters)

    def _check_log(self) -> None:
        if self.voters and not self._disk.exists(f"{self.log_directory}/hardstate"):
            logger.error("metadata_log_lost directory=%s", self.log_directory)
            self.renew()

    def _taken_over(self, cluster_id_path: str) -> Kept:
        """A directory of a version that had one manager and no votes is a quorum of one."""
        if not self._disk.exists(self.log_directory):
            return self._kept
        cluster_id = uuid.uuid4().hex
        if self._disk.exists(cluster_id_path):
            file = self._disk.open(cluster_id_path)
            cluster_id = file.pread(file.size(), 0).decode("ascii", "replace").strip()
        log = PartitionLog(self._disk, self.log_directory, LOG_SETTINGS)
        HardStateFile(self._disk, self.log_directory).write(HardState(log.last_term, 0))
        return Kept(self._kept.disk_id, cluster_id, (self.replica_id,))

    def _read(self) -> Kept:
        file = self._disk.open(self._path)
        try:
            return msgspec.json.decode(file.pread(file.size(), 0), type=Kept)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"{self._path} cannot be read: {error}") from error

    def _keep(self, kept: Kept) -> None:
        write_atomically(self._disk, self._path, msgspec.json.encode(kept))
        self._kept = kept
