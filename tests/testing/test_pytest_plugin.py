"""The fixture that is shipped to users: a cluster of real processes in a test session of their own."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from quiver import Admin, Consumer, Producer
from quiver.errors import InvalidRequestError, UnavailableError
from quiver.testing.cluster import QuiverCluster, clusters

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]


def users_suite() -> str:
    """The example of docs/testing.md is the test."""
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    return text.partition("```python\n")[2].partition("```")[0]


def test_example_of_the_documentation_passes_in_a_session_of_its_own(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(users_suite())
    result = pytester.runpytest_subprocess("-p", "no:xdist", "-v")
    result.assert_outcomes(passed=3)


def test_one_cluster_serves_a_session_and_is_gone_with_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_first(quiver_cluster):
            cluster = quiver_cluster()
            print("pid", *[node._process.pid for node in cluster._brokers.values()])
            cluster.kill_broker()
            assert cluster.brokers == []

        def test_second(quiver_cluster):
            cluster = quiver_cluster()
            assert cluster.brokers == [1], "what the test before killed runs again"
            print("pid", *[node._process.pid for node in cluster._brokers.values()])
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:xdist", "-s")
    result.assert_outcomes(passed=2)
    pids = [int(line.split("pid ")[1]) for line in result.outlines if "pid " in line]
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_pytest_finds_the_fixture_by_itself_once_it_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"quiver": "quiver.testing.pytest_plugin"}


def test_what_was_acknowledged_outlives_every_broker_in_turn(tmp_path: Path) -> None:
    with QuiverCluster(tmp_path / "c", 3, raft_election_ms=200) as cluster:
        topic = cluster.new_topic(settings={"retention.ms": -1})
        with Producer(cluster.servers) as producer, Consumer(cluster.servers, [topic], idle_timeout=10) as consumer:
            for number in cluster.brokers:
                producer.send(topic, b"%d" % number).result(30)
                cluster.kill_broker(number)
                assert number not in cluster.brokers
                assert next(iter(consumer)).value == b"%d" % number
                cluster.restart()
            assert cluster.brokers == [1, 2, 3]


def test_nodes_keep_port_and_data_and_take_settings(tmp_path: Path) -> None:
    with QuiverCluster(tmp_path / "c", message_bytes_max=50) as cluster:
        before, topic = (cluster.servers, cluster.http), cluster.new_topic()
        cluster.kill_broker()
        assert cluster.servers == ""
        cluster.restart()
        assert (cluster.servers, cluster.http) == before
        with Admin(cluster.servers) as admin:
            assert admin.list_topics() == [topic]
    assert cluster.brokers == []


def test_two_calls_share_a_cluster_and_settings_tell_them_apart(tmp_path: Path) -> None:
    with clusters(tmp_path) as made:
        one = made()
        assert made(brokers=1) is one
        assert made(heartbeat_s=0.5) is not one


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="brokers is a number from 1 to 9, not 0"):
        QuiverCluster(tmp_path / "a", 0)
    with pytest.raises(UnavailableError, match="broker-1 did not start: QUIVER_RETENTION_CHECK_S"):
        QuiverCluster(tmp_path / "b", retention_check_s="soon")
    with QuiverCluster(tmp_path / "c") as cluster, pytest.raises(InvalidRequestError, match="there is no broker 4"):
        cluster.kill_broker(4)
    assert os.listdir(tmp_path / "c")
