"""A leader is cut off by the network under load: work goes on without it; it does not acknowledge or serve old ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.direct_line import direct_line
from tests.system.network_kit import NetworkCluster
from tests.system.private_world import in_private_world
from tests.system.workload import Load, under_load

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.xdist_group("cluster")]


@in_private_world
def test_leader_cut_off_by_the_network_is_replaced_and_comes_back(tmp_path: Path) -> None:
    with NetworkCluster(tmp_path) as cluster, under_load(cluster.servers, "cut") as load:
        for way in (cluster.cut_off, cluster.mute, cluster.deafen):
            asyncio.run(_cut_from_the_others(cluster, load, way))
        _cut_from_everybody(cluster, load)


async def _cut_from_the_others(cluster: NetworkCluster, load: Load, way: Callable[[int], None]) -> None:
    """Clients still reach it."""
    old = cluster.leader(load.topic)
    async with direct_line(cluster.address(old)) as line:
        way(old)
        await asyncio.to_thread(cluster.leader, load.topic, 0, old)
        await asyncio.to_thread(load.until_acknowledged, 200)
        acknowledged = load.acknowledged_ends()[0]
        (await line.insist(load)).check(acknowledged)
    cluster.heal()
    await asyncio.to_thread(cluster.until_whole, load.topic)


def _cut_from_everybody(cluster: NetworkCluster, load: Load) -> None:
    old = cluster.leader(load.topic)
    cluster.pull_cable(old)
    cluster.leader(load.topic, other_than=old)
    load.until_acknowledged(200)
    cluster.heal()
    cluster.until_whole(load.topic)
