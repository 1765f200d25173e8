"""R33 and R34 on one node that is killed in the middle: see r33_kit.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quiver import Admin, Consumer, Producer
from quiver.classic import MyConsumer, MyProducer
from tests.system.cluster_kit import SupervisedCluster
from tests.system.kit import Node
from tests.system.r33_kit import (
    CONSUMERS,
    PRODUCERS,
    Disturbance,
    HttpDoor,
    Run,
    SdkDoor,
    check,
    create_topics,
    run_all,
    write_log_files,
)

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]

KILLS = 2


@pytest.mark.parametrize(
    ("over_http", "partitions"),
    [
        pytest.param(["P1", "P3", "P5", "C1", "C3"], 1, id="both-doors"),
        pytest.param(PRODUCERS + CONSUMERS, 1, id="http"),
        pytest.param(["P2", "P4", "C1", "C2"], 3, id="both-doors-3-partitions"),
    ],
)
def test_produced_is_consumed_in_one_order_though_the_node_is_killed(
    tmp_path: Path, over_http: list[str], partitions: int
) -> None:
    with SupervisedCluster(tmp_path) as cluster:
        run = Run(write_log_files(tmp_path), [Disturbance(cluster.kill_node, cluster.until_back)] * KILLS)
        create_topics(cluster.servers, partitions)
        http, sdk = HttpDoor(cluster.http), SdkDoor(cluster.servers)
        run_all(run, {name: http if name in over_http else sdk for name in PRODUCERS + CONSUMERS})
        assert len(set(cluster.pids)) == KILLS + 1
    check(run, partitions)


# -- one producer, one consumer --------------------------------------------------------------------------------------

MESSAGE = "2026-11-15T20:03:52 INFO DS grüße, 日本 🏹\twith a tab and a newline\n"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with Node(tmp_path_factory.mktemp("node")) as made:
        yield made


@pytest.fixture
def ds(node: Node) -> Iterator[str]:
    """The topic DS, new for each test."""
    with Admin(node.address) as admin:
        admin.create_topic("DS")
        yield "DS"
        admin.delete_topic("DS")


@pytest.mark.parametrize("receiver", ["http", "sdk"])
@pytest.mark.parametrize("sender", ["http", "sdk"])
def test_message_received_is_the_message_sent(node: Node, ds: str, sender: str, receiver: str) -> None:
    if sender == "http":
        with MyProducer(node.http) as classic_producer:
            classic_producer.RegisterProducer(ds)
            classic_producer.Enqueue(ds, MESSAGE)
    else:
        with Producer(node.address) as producer:
            producer.send(ds, MESSAGE.encode()).result(30)
    if receiver == "http":
        with MyConsumer(node.http) as classic_consumer:
            classic_consumer.RegisterConsumer(ds)
            assert classic_consumer.Dequeue(ds) == MESSAGE
            assert classic_consumer.Size(ds) == 0
    else:
        with Consumer(node.address, [ds], start="earliest") as consumer:
            (record,) = consumer.poll(timeout=30)
            assert record.value == MESSAGE.encode()
