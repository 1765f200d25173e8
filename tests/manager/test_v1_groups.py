"""Groups and registered consumers over the v1 API."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest

from quiver import Consumer
from tests.manager.kit import Api, HttpNode, fresh
from tests.manager.v1_kit import V1

pytestmark = pytest.mark.system


@pytest.fixture
def v1(node: HttpNode) -> Iterator[V1]:
    with V1(node.http) as made:
        yield made


def put(v1: V1, topic: str, count: int) -> None:
    body = {"records": [{"value": str(number)} for number in range(count)]}
    assert v1.json("POST", f"/v1/topics/{topic}/partitions/0/records", body).status == 200


def test_group_with_members_is_listed_and_described_with_its_lag(v1: V1, node: HttpNode) -> None:
    topic, other, group = v1.create(fresh(), 2), v1.create(fresh()), fresh()
    put(v1, topic, 5)
    with Consumer(node.address, [topic], group=group) as consumer:
        assert len(consumer.poll(3, timeout=10)) == 3
        consumer.commit()
        rows = v1.request("GET", "/v1/groups").body["groups"]
        assert {"name": group, "members": 1, "assignment": "sticky"} in rows
        told = v1.request("GET", f"/v1/groups/{group}").body
        (member,) = told.pop("members")
        assert told.pop("generation") > 0
        found = {"topic": topic, "earliest": 0, "lost": 0, "member": member["id"]}
        assert told == {
            "name": group,
            "assignment": "sticky",
            "lag": 2,
            "partitions": [
                {**found, "partition": 0, "offset": 3, "latest": 5, "lag": 2},
                {**found, "partition": 1, "offset": 0, "latest": 0, "lag": 0},
            ],
        }
        assert member["topics"] == [topic]
        assert member["partitions"] == [{"topic": topic, "partition": number} for number in (0, 1)]
    assert other not in str(told)
    told = v1.request("GET", f"/v1/groups/{group}").body
    assert told["members"] == [] and [one["member"] for one in told["partitions"]] == [None, None]


def test_group_that_only_has_positions_is_a_group(v1: V1) -> None:
    topic, group = v1.create(fresh()), "a name/with 100 %"
    put(v1, topic, 4)
    path = f"/v1/groups/{quote(group, safe='')}"
    assert v1.json("PUT", f"{path}/topics/{topic}/partitions/0/position", {"offset": 1}).status == 200
    assert {"name": group, "members": 0, "assignment": ""} in v1.request("GET", "/v1/groups").body["groups"]
    told = v1.request("GET", path).body
    assert (told["lag"], told["generation"], told["members"]) == (3, 0, [])
    assert [(one["topic"], one["offset"], one["lag"]) for one in told["partitions"]] == [(topic, 1, 3)]


@pytest.mark.parametrize(
    ("group", "status", "code"),
    [("nobody", 404, "unknown_group"), ("%237", 400, "invalid_request"), ("x" * 300, 400, "invalid_request")],
)
def test_other_groups_are_refused(v1: V1, group: str, status: int, code: str) -> None:
    told = v1.request("GET", f"/v1/groups/{group}")
    assert (told.status, told.error["code"]) == (status, code)
    assert v1.request("DELETE", "/v1/groups").status == 405


def test_registered_consumer_is_forgotten(v1: V1, node: HttpNode) -> None:
    topic = v1.create(fresh())
    put(v1, topic, 3)
    with Api(node.http) as api:
        number = api.post("/consumer/register", topic=topic)["consumer_id"]
        asked = {"topic": topic, "consumer_id": number}
        assert api.get("/consumer/consume", **asked)["message"] == "0"
        assert v1.request("DELETE", f"/v1/consumers/{number}").status == 204
        gone = api.call("GET", "/consumer/consume", **asked)
        assert (gone.status, gone.message) == (400, f"Consumer {number} is not registered to topic {topic}")
        assert api.post("/consumer/register", topic=topic)["consumer_id"] > number
    again = v1.request("DELETE", f"/v1/consumers/{number}")
    assert (again.status, again.error["code"]) == (404, "unknown_group")
    assert again.error["message"] == f"Consumer {number} is not registered"
    for wrong in ("x", "-1", "1.5", "9" * 30):
        assert v1.request("DELETE", f"/v1/consumers/{wrong}").status == 400
