"""A manager's directory tells who it is; without its log it is somebody else."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quiver.clock import SystemClock
from quiver.config import LogSettings
from quiver.errors import CorruptLogError
from quiver.log.disk import SystemDisk
from quiver.log.partition_log import PartitionLog
from quiver.log.replica import SoloReplica
from quiver.manager.identity import Identity
from quiver.manager.quorum import LOG_SETTINGS, METADATA_UID, MetadataQuorum
from quiver.metadata.commands import encode_command
from quiver.metadata.store import Store, sqlite_url
from quiver.replication.group import broker_of, replica_id
from quiver.replication.seat import Seat
from quiver.testing.faulty_disk import FaultyDisk, SimulatedCrash
from quiver.wire.frame import Entry, Kind
from tests.broker.kit import InlineExecutor
from tests.metadata.kit import create, produce


def test_a_manager_is_the_same_after_each_start_and_two_are_never_the_same(tmp_path: Path) -> None:
    disk = SystemDisk()
    first, second = (Identity(disk, str(tmp_path / name), 3) for name in "ab")
    assert broker_of(first.replica_id) == broker_of(second.replica_id) == 3
    assert first.replica_id != second.replica_id
    assert first.voters == ()
    first.found((first.replica_id,))
    again = Identity(disk, str(tmp_path / "a"), 3)
    assert (again.replica_id, again.cluster_id, again.voters) == (first.replica_id, first.cluster_id, first.voters)


def test_a_manager_without_its_log_is_another_replica_of_the_same_quorum(tmp_path: Path) -> None:
    disk = SystemDisk()
    identity = Identity(disk, str(tmp_path), 1)
    voters = (identity.replica_id, replica_id(2, 5), replica_id(3, 6))
    identity.belong("c", voters)
    disk.remove_tree(identity.log_directory)
    again = Identity(disk, str(tmp_path), 1)
    assert again.replica_id != identity.replica_id
    assert broker_of(again.replica_id) == 1
    assert (again.cluster_id, again.voters) == ("c", voters)


def test_where_the_others_are_is_not_forgotten_by_metadata_that_is_behind(tmp_path: Path) -> None:
    """After a kill the metadata begins before the change, and only that address leads to whoever has the rest."""
    identity = Identity(SystemDisk(), str(tmp_path), 1)
    identity.keep_addresses({4: "h:4"}, 9)
    identity.keep_addresses({}, 0)
    again = Identity(SystemDisk(), str(tmp_path), 1)
    again.keep_addresses({}, 8)
    assert again.addresses == identity.addresses == {4: "h:4"}
    again.keep_addresses({5: "h:5"}, 9)
    assert Identity(SystemDisk(), str(tmp_path), 1).addresses == {5: "h:5"}


def test_the_only_manager_without_its_log_says_so(tmp_path: Path) -> None:
    disk = SystemDisk()
    identity = Identity(disk, str(tmp_path), 1)
    identity.found((identity.replica_id,))
    disk.remove_tree(identity.log_directory)
    with pytest.raises(CorruptLogError, match="is gone, and no other manager has it"):
        Identity(disk, str(tmp_path), 1)


@pytest.mark.parametrize("steps", range(1, 40))
def test_a_power_cut_at_any_step_leaves_a_manager_that_starts(steps: int) -> None:
    """Whoever said that it belongs to a quorum finds it again under the same name."""
    disk = FaultyDisk(steps)
    disk.stop_at(steps)
    said: tuple[int, str] | None = None
    with contextlib.suppress(SimulatedCrash):
        identity = Identity(disk, "m", 1)
        identity.belong("c", (identity.replica_id, replica_id(2, 5), replica_id(3, 6)))
        said = identity.replica_id, identity.cluster_id
    disk.crash()
    again = Identity(disk, "m", 1)
    assert said in (None, (again.replica_id, again.cluster_id))


def test_a_directory_of_a_version_with_one_manager_goes_on(tmp_path: Path) -> None:
    """A log without votes and the file cluster_id."""
    disk = SystemDisk()
    directory = tmp_path / "manager-1"
    commands = [create("logs", 3), produce("logs"), produce("logs")]

    async def as_before() -> None:
        with ThreadPoolExecutor(1) as threads:
            log = PartitionLog(disk, str(directory / "log"), LogSettings(segment_bytes_max=8 << 20, retention_ms=None))
            woken = asyncio.Event()
            replica = SoloReplica(log, threads, SystemClock(), woken.set)
            for command in commands:
                replica.propose(Entry.control(Kind.COMMAND, encode_command(command)))
            replica.step()
            await woken.wait()
            replica.step()
            await replica.close()

    async def now() -> None:
        identity = Identity(disk, str(directory), 1)
        assert identity.cluster_id == "the-old-one"
        assert identity.voters == (identity.replica_id,)
        seat = Seat(METADATA_UID, identity.replica_id, identity.voters)
        store = Store(sqlite_url(directory / "metadata.db"))
        quorum = MetadataQuorum(
            disk, identity.log_directory, store, SystemClock(), InlineExecutor(), seat, log_settings=LOG_SETTINGS
        )
        await quorum.start(identity.cluster_id)
        await quorum.until_led()
        assert list(quorum.state.topics) == ["logs"]
        assert quorum.term > 1, "the old entries were written in term 1"
        assert (await quorum.propose(produce("logs"))).id == 3
        await quorum.stop()

    asyncio.run(as_before())
    (directory / "cluster_id").write_text("the-old-one")
    asyncio.run(now())
    assert Identity(disk, str(directory), 1).cluster_id == "the-old-one"
