"""Topics, offsets, groups, brokers and health over the v1 API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from quiver import Admin, Consumer
from tests.manager.kit import Api, HttpNode, fresh
from tests.manager.v1_kit import V1, Reply, log_of

pytestmark = pytest.mark.system


@pytest.fixture
def v1(node: HttpNode) -> Iterator[V1]:
    with V1(node.http) as made:
        yield made


# -- topics ----------------------------------------------------------------------------------------------------------


def test_a_topic_is_made_described_listed_and_deleted(v1: V1, node: HttpNode) -> None:
    topic = fresh()
    made = v1.json("POST", "/v1/topics", {"name": topic, "partitions": 3, "replication_factor": 2})
    assert made.status == 201
    assert made.headers["location"] == f"/v1/topics/{topic}"
    assert made.body == v1.request("GET", made.headers["location"]).body
    assert made.body["replication_factor"] == 2
    assert [row["partition"] for row in made.body["partitions"]] == [0, 1, 2]
    assert all(row["leader"] == 1 and row["replicas"] == [1] for row in made.body["partitions"])
    assert made.body["created"] > 1_700_000_000_000_000
    rows = v1.request("GET", "/v1/topics").body["topics"]
    assert {"name": topic, "partitions": 3, "replication_factor": 2} in rows
    with Admin(node.address) as admin:
        assert topic in admin.list_topics()
    assert v1.request("DELETE", f"/v1/topics/{topic}").status == 204
    gone = v1.request("GET", f"/v1/topics/{topic}")
    assert (gone.status, gone.error["code"], gone.error["topic"]) == (404, "unknown_topic", topic)
    assert topic not in [row["name"] for row in v1.request("GET", "/v1/topics").body["topics"]]


def test_a_topic_that_exists_is_a_conflict(v1: V1) -> None:
    topic = v1.create(fresh())
    again = v1.json("POST", "/v1/topics", {"name": topic, "partitions": 9})
    assert (again.status, again.error["code"]) == (409, "topic_exists")
    assert len(v1.request("GET", f"/v1/topics/{topic}").body["partitions"]) == 1


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": ""},
        {"name": "."},
        {"name": ".."},
        {"name": "a/b"},
        {"name": "a\n"},
        {"name": "x" * 250},
        {"name": 5},
        {"name": None},
        {"name": "ok", "partitions": 0},
        {"name": "ok", "partitions": 10_001},
        {"name": "ok", "partitions": "1"},
        {"name": "ok", "partitions": 1.5},
        {"name": "ok", "partitions": True},
        {"name": "ok", "replication_factor": 0},
        {"name": "ok", "replication_factor": 10**30},
        {"name": "ok", "partition": 1},
        [],
        None,
        "ok",
    ],
)
def test_a_topic_that_cannot_be_is_refused(v1: V1, body: Any) -> None:
    before = log_of(v1)
    reply = v1.json("POST", "/v1/topics", body)
    assert reply.status == 400, reply
    assert log_of(v1) == before


# -- offsets ---------------------------------------------------------------------------------------------------------


def offsets(v1: V1, topic: str, query: str = "") -> list[dict[str, int]]:
    found: list[dict[str, int]] = v1.request("GET", f"/v1/topics/{topic}/offsets{query}").body["partitions"]
    return found


def test_offsets_say_where_partitions_begin_and_end(v1: V1) -> None:
    topic = v1.create(fresh(), 2)
    v1.produce(topic, ["a", "b", "c"], 1)
    assert offsets(v1, topic) == [
        {"partition": 0, "earliest": 0, "latest": 0},
        {"partition": 1, "earliest": 0, "latest": 3},
    ]
    assert offsets(v1, topic, "?partition=1") == [{"partition": 1, "earliest": 0, "latest": 3}]
    assert v1.request("GET", f"/v1/topics/{topic}/offsets?partition=2").status == 404


def test_offsets_say_where_a_time_is(v1: V1) -> None:
    topic = v1.create(fresh())
    for number in range(5):
        v1.produce(topic, [{"value": "x", "timestamp": number * 1000}, {"value": "y", "timestamp": number * 1000 + 1}])

    def at(timestamp: int) -> int:
        return offsets(v1, topic, f"?timestamp={timestamp}")[0]["at_timestamp"]

    assert [at(number * 1000) for number in range(5)] == [0, 2, 4, 6, 8]
    assert at(4002) == 10
    assert [at(timestamp) for timestamp in (-1, -2, -3, -(2**62))] == [0, 0, 0, 0]


# -- groups ----------------------------------------------------------------------------------------------------------


def commit(v1: V1, topic: str, group: str, partition: int = 0, **body: Any) -> Reply:
    return v1.json("PUT", f"/v1/groups/{quote(group, safe='')}/topics/{topic}/partitions/{partition}/position", body)


def position(v1: V1, topic: str, group: str, partition: int = 0) -> Any:
    reply = v1.request("GET", f"/v1/groups/{quote(group, safe='')}/topics/{topic}/partitions/{partition}/position")
    return reply.body["offset"]


def test_a_group_has_no_position_until_it_commits_one(v1: V1) -> None:
    topic = v1.create(fresh(), 2)
    v1.produce(topic, ["a", "b", "c"], 0)
    assert position(v1, topic, "g") is None
    moved = commit(v1, topic, "g", offset=2)
    assert moved.body == {"group": "g", "topic": topic, "partition": 0, "offset": 2}
    assert v1.request("GET", f"/v1/groups/g/topics/{topic}/positions").body["partitions"] == [
        {"partition": 0, "offset": 2, "earliest": 0, "latest": 3, "lag": 1},
        {"partition": 1, "offset": None, "earliest": 0, "latest": 0, "lag": 0},
    ]
    assert position(v1, topic, "other") is None


def test_a_position_moves_back_only_with_rewind(v1: V1) -> None:
    topic = v1.create(fresh())
    v1.produce(topic, ["a", "b", "c"])
    commit(v1, topic, "g", offset=3)
    assert commit(v1, topic, "g", offset=1).body["offset"] == 3, "the answer is the position that holds"
    assert commit(v1, topic, "g", offset=1, rewind=True).body["offset"] == 1
    assert position(v1, topic, "g") == 1


def test_a_position_moves_only_from_where_it_was_expected(v1: V1) -> None:
    topic = v1.create(fresh())
    v1.produce(topic, ["a", "b", "c"])
    assert commit(v1, topic, "g", offset=1, expected=-1).status == 200
    conflict = commit(v1, topic, "g", offset=2, expected=-1)
    assert (conflict.status, conflict.error["code"], conflict.error["current"]) == (409, "conflict", 1)
    assert commit(v1, topic, "g", offset=2, expected=1).body["offset"] == 2


def test_a_position_beyond_the_end_is_refused(v1: V1) -> None:
    topic = v1.create(fresh())
    reply = commit(v1, topic, "g", offset=1)
    assert (reply.status, reply.error["latest"]) == (416, 0)
    assert position(v1, topic, "g") is None


def test_groups_of_the_sdk_and_of_http_are_the_same(v1: V1, node: HttpNode) -> None:
    topic = v1.create(fresh())
    v1.produce(topic, ["a", "b", "c"])
    commit(v1, topic, "shared/ü group", offset=1)
    with Consumer(node.address, [topic], group="shared/ü group") as consumer:
        assert [record.value for record in consumer.poll(2, timeout=30)] == [b"b", b"c"]
        consumer.commit()
    assert position(v1, topic, "shared/ü group") == 3


def test_positions_of_registered_consumers_are_not_to_be_moved(v1: V1, api: Api) -> None:
    topic = v1.create(fresh())
    v1.produce(topic, ["a", "b"])
    consumer = api.consumer(topic)
    assert commit(v1, topic, f"#{consumer}", offset=2).status == 400
    assert commit(v1, topic, "x" * 256, offset=2).status == 400
    assert commit(v1, topic, "", offset=2).status == 404
    assert api.consume(topic, consumer) == "a"


# -- the cluster -----------------------------------------------------------------------------------------------------


def test_a_topic_gets_more_partitions_and_never_fewer(v1: V1) -> None:
    v1.create("grows", 2)
    reply = v1.json("PATCH", "/v1/topics/grows", {"partitions": 4})
    assert reply.status == 200
    assert [row["partition"] for row in reply.body["partitions"]] == [0, 1, 2, 3]
    assert [row["latest"] for row in offsets(v1, "grows")] == [0, 0, 0, 0]
    fewer = v1.json("PATCH", "/v1/topics/grows", {"partitions": 3})
    assert (fewer.status, fewer.error["message"]) == (400, "Topic grows has 4 partitions; their number can only grow")
    both = v1.json("PATCH", "/v1/topics/grows", {"partitions": 3, "settings": {"retention.ms": 1000}})
    assert (both.status, v1.request("GET", "/v1/topics/grows").body["settings"]) == (400, {}), "all of it or nothing"
    assert v1.json("PATCH", "/v1/topics/nowhere", {"partitions": 3}).status == 404


def test_a_node_of_its_own_has_nothing_to_move_and_cannot_do_without_its_broker(v1: V1) -> None:
    nothing = {"moves": [], "draining": []}
    assert v1.request("GET", "/v1/moves").body == nothing
    reply = v1.request("POST", "/v1/rebalance")
    assert (reply.status, reply.body) == (202, nothing)
    refused = v1.request("DELETE", "/v1/brokers/1")
    assert refused.error["message"] == "Broker 1 is the only one: nothing could take its partitions"
    for wrong, why in (("9", "Broker 9 does not exist"), ("x", "a broker has a number, not 'x'")):
        refused = v1.request("DELETE", f"/v1/brokers/{wrong}")
        assert (refused.status, refused.error["message"]) == (400, why)


def test_brokers_and_health_tell_who_is_here(v1: V1, node: HttpNode) -> None:
    (broker,) = v1.request("GET", "/v1/brokers").body["brokers"]
    assert (broker["broker_id"], broker["endpoint"], broker["status"]) == (1, node.address, "active")
    health = v1.request("GET", "/v1/health").body
    assert (health["status"], health["role"]) == ("ok", "primary")
    assert [row["broker_id"] for row in health["brokers"]] == [1]
    assert "consumers" not in health, "there may be a hundred thousand"


def test_head_is_get_without_a_body(v1: V1) -> None:
    reply = v1.request("HEAD", "/v1/topics")
    assert (reply.status, reply.raw) == (200, b"")
    assert v1.request("HEAD", "/v1/topics/nobody").status == 404
    assert v1.request("GET", "/v1/topics").status == 200, "the connection is still in step"
