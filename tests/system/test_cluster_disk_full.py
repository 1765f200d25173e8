"""The disk of one broker is full under load: the others go on, and it catches up when space returns."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from quiver import Admin
from tests.system.kit import until
from tests.system.private_world import in_private_world, mount_small_disk
from tests.system.replicated_kit import ReplicatedCluster
from tests.system.workload import PARTITIONS, under_load

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.xdist_group("cluster")]

DISK_BYTES = 48 * 1024 * 1024


def fill(path: Path) -> None:
    """Until nothing more goes in."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1024 * 1024, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def until_leads(cluster: ReplicatedCluster, broker: int) -> None:
    """One of the partitions. On a busy machine others may have been elected: then each is given its share."""
    with Admin(cluster.servers) as admin:

        def leads() -> bool:
            if broker in {cluster.leader("full", partition) for partition in range(PARTITIONS)}:
                return True
            if admin.moves() == ([], []):
                admin.rebalance()
            return False

        until(leads)


@in_private_world
def test_full_disk_of_one_broker_stops_nobody_and_is_made_good_when_space_returns(tmp_path: Path) -> None:
    cluster = ReplicatedCluster(tmp_path)
    small = 2  # it leads one of three partitions
    mount_small_disk(cluster.data_dir / f"broker-{small}", DISK_BYTES)
    with cluster, under_load(cluster.servers, "full") as load:
        filler = cluster.data_dir / f"broker-{small}" / "filler"
        until_leads(cluster, small)
        fill(filler)
        until(lambda: any(one.state == "full" for one in cluster.statuses("full").get(small, ())))
        load.until_acknowledged(500)
        filler.unlink()
        cluster.until_whole("full")
        assert cluster.pid(small) and cluster.trouble() == []
