"""R35: brokers and managers on three hosts; the network cuts one off, both ways and one way, under the load of R33."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.network_kit import HostsCluster
from tests.system.private_world import in_private_world
from tests.system.r33_kit import (
    CONSUMERS,
    PRODUCERS,
    TOPICS,
    Disturbance,
    HttpDoor,
    Run,
    SdkDoor,
    check,
    create_topics,
    run_all,
    write_log_files,
)

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("cluster"),
]

LINES = 150
OVER_HTTP = ["P1", "P4", "C1", "C3"]


@in_private_world
def test_a_host_is_cut_off_and_comes_back_and_nothing_is_lost(tmp_path: Path) -> None:
    """Each time the host of the primary, which also leads some partitions."""
    with HostsCluster(tmp_path) as cluster:
        create_topics(cluster.servers, 3)

        def disturbance(cut: Callable[[int], None]) -> Disturbance:
            struck: list[int] = []

            def strike() -> None:
                struck.append(cluster.primary())
                cut(struck[0])

            def recover() -> None:
                cluster.primary(other_than=struck[0])
                cluster.heal()
                cluster.until_managers_agree()
                for topic in TOPICS:
                    cluster.until_whole(topic)

            return Disturbance(strike, recover)

        ways = (cluster.cut_off, cluster.mute, cluster.deafen, cluster.pull_cable)
        run = Run(write_log_files(tmp_path, LINES), [disturbance(way) for way in ways])
        http, sdk = HttpDoor(cluster.http), SdkDoor(cluster.servers)
        run_all(run, {name: http if name in OVER_HTTP else sdk for name in PRODUCERS + CONSUMERS})
        assert cluster.trouble() == []
    check(run, 3)
