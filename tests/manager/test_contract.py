"""The classic HTTP API call by call, on a real node: what each takes and what its success carries."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.manager.kit import Api, HttpNode, fresh

pytestmark = pytest.mark.system


@pytest.fixture
def topic(api: Api) -> str:
    """Two partitions."""
    return api.create(fresh(), 2)


# -- each row of the table ---------------------------------------------------------------------------------------


def test_topics_are_listed_under_both_names(api: Api) -> None:
    first, second = api.create(fresh()), api.create(fresh())
    found = api.get("/topics")
    assert found.keys() == {"topics", "message"}
    assert found["topics"] == found["message"]
    assert [name for name in found["topics"] if name in (first, second)] == [first, second]


def test_a_topic_is_created_with_its_partitions(api: Api) -> None:
    name = fresh()
    found = api.post("/topics", topic_name=name, partitions=3, replication_factor=2)
    assert found == {"message": f"Topic {name} created successfully", "topic_name": name, "partitions": [0, 1, 2]}


def test_a_topic_has_one_partition_when_nothing_is_said(api: Api) -> None:
    name = fresh()
    assert api.post("/topics", topic_name=name)["partitions"] == [0]
    assert api.get("/topics/partitions", topic_name=name) == {"partitions": [0]}


def test_an_existing_topic_is_a_failure(api: Api, topic: str) -> None:
    assert api.refusal("POST", "/topics", topic_name=topic, partitions=5) == "Topic already exists"
    assert api.get("/topics/partitions", topic_name=topic) == {"partitions": [0, 1]}


@pytest.mark.parametrize("path", ["/topics/partitions", "/topics/partition"])
def test_partitions_are_listed(api: Api, topic: str, path: str) -> None:
    assert api.get(path, topic_name=topic) == {"partitions": [0, 1]}


def test_a_producer_is_registered(api: Api, topic: str) -> None:
    found = api.post("/producer/register", topic=topic)
    assert found.keys() == {"producer_id"}
    assert type(found["producer_id"]) is int
    assert api.post("/producer/register", topic=topic, partition_id=1)["producer_id"] == found["producer_id"] + 1


def test_a_producer_creates_its_topic(api: Api) -> None:
    name = fresh()
    api.producer(name)
    assert name in api.get("/topics")["topics"]
    assert api.get("/topics/partitions", topic_name=name) == {"partitions": [0]}


def test_a_consumer_is_registered(api: Api, topic: str) -> None:
    found = api.post("/consumer/register", topic=topic)
    assert found.keys() == {"consumer_id"}
    assert type(found["consumer_id"]) is int
    assert api.post("/consumer/register", topic=topic, partition_id=0)["consumer_id"] == found["consumer_id"] + 1


def test_a_consumer_creates_no_topic(api: Api) -> None:
    name = fresh()
    assert api.refusal("POST", "/consumer/register", topic=name) == f"Topic {name} does not exist"
    assert name not in api.get("/topics")["topics"]


def test_a_message_is_produced(api: Api, topic: str) -> None:
    producer = api.producer(topic)
    found = api.post("/producer/produce", topic=topic, producer_id=producer, message="hello", partition_id=1)
    assert found == {"partition_id": 1, "offset": 0}
    found = api.post("/producer/produce", topic=topic, producer_id=producer, message="again", partition_id=1)
    assert found == {"partition_id": 1, "offset": 1}


def test_a_message_is_consumed(api: Api, topic: str) -> None:
    producer, consumer = api.producer(topic), api.consumer(topic)
    api.produce(topic, producer, "hello", partition_id=1)
    found = api.get("/consumer/consume", topic=topic, consumer_id=consumer)
    assert found == {"message": "hello", "offset": 0, "partition_id": 1}
    answer = api.call("GET", "/consumer/consume", topic=topic, consumer_id=consumer)
    assert answer.status == 400
    assert answer.body == {"status": "failure", "message": f"No new message is published to {topic}"}


def test_an_offset_is_set(api: Api, topic: str) -> None:
    producer, consumer = api.producer(topic, partition_id=0), api.consumer(topic, partition_id=0)
    for number in range(3):
        api.produce(topic, producer, f"m{number}")
    assert api.consume_all(topic, consumer) == ["m0", "m1", "m2"]
    api.post("/consumer/set_offset", consumer_id=consumer, offset=0)
    assert api.consume_all(topic, consumer) == ["m1", "m2"]


def test_the_size_is_what_is_left_to_read(api: Api, topic: str) -> None:
    producer, consumer = api.producer(topic), api.consumer(topic)
    assert api.get("/size", topic=topic, consumer_id=consumer) == {"size": 0}
    for number in range(5):
        api.produce(topic, producer, f"m{number}")
    assert api.get("/size", topic=topic, consumer_id=consumer) == {"size": 5}
    api.consume(topic, consumer)
    assert api.get("/size", topic=topic, consumer_id=consumer) == {"size": 4}


def test_messages_of_a_client_are_counted(api: Api, topic: str) -> None:
    producer, client = api.producer(topic), fresh("client")
    assert api.get("/producer/client_size", prod_client=client) == {"count": 0}
    for number in range(3):
        api.produce(topic, producer, f"m{number}", prod_client=client)
    assert api.get("/producer/client_size", prod_client=client) == {"count": 3}


def test_replicas_name_this_manager(api: Api, node: HttpNode) -> None:
    me = {"ip": "127.0.0.1", "port": int(node.http.rsplit(":", 1)[1])}
    assert api.get("/replicas") == {"replicas": [me], "primary": me}


def test_brokers_are_listed_added_and_removed_as_far_as_an_embedded_node_can(api: Api, node: HttpNode) -> None:
    (row,) = api.get("/brokers")["brokers"]
    assert row.keys() == {"broker_id", "endpoint", "status", "last_heartbeat"}
    assert (row["broker_id"], row["endpoint"], row["status"]) == (1, node.address, "active")
    assert datetime.datetime.fromisoformat(row["last_heartbeat"]).tzinfo is not None
    assert api.post("/brokers", endpoint=node.address)["broker_id"] == 1
    assert "127.0.0.1:9" in api.refusal("POST", "/brokers", endpoint="127.0.0.1:9")
    assert api.refusal("DELETE", "/brokers/1").startswith("Broker 1 is the only one")
    assert api.refusal("DELETE", "/brokers/7") == "Broker 7 does not exist"
    assert api.refusal("DELETE", "/brokers/x") == "broker_id must be an integer"
    assert api.refusal("DELETE", "/brokers/7", broker_id=1) == "Broker 7 does not exist", "the path says which"
    assert [row["broker_id"] for row in api.get("/brokers")["brokers"]] == [1]


def test_health_tells_of_everyone(api: Api, node: HttpNode, topic: str) -> None:
    producer, consumer = api.producer(topic), api.consumer(topic)
    found = api.get("/health")
    assert (found["role"], found["term"]) == ("primary", 1)
    assert type(found["lag"]) is int
    assert found["lag"] >= 0
    (manager,) = found["managers"]
    assert {"ip": manager["ip"], "port": manager["port"]} == api.get("/replicas")["primary"]
    rows = {
        "managers": manager,
        "brokers": next(row for row in found["brokers"] if row["broker_id"] == 1),
        "producers": next(row for row in found["producers"] if row["producer_id"] == producer),
        "consumers": next(row for row in found["consumers"] if row["consumer_id"] == consumer),
    }
    assert rows["producers"]["topic"] == rows["consumers"]["topic"] == topic
    for row in rows.values():
        assert datetime.datetime.fromisoformat(row["last_heartbeat"]).tzinfo is not None


# -- how parameters may come -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["topic", "topic_name", "name"])
def test_a_topic_may_be_called_by_three_names(api: Api, name: str) -> None:
    topic = fresh()
    field: dict[str, Any] = {name: topic}
    api.post("/topics", **field, partitions=2)
    assert api.get("/topics/partitions", **field) == {"partitions": [0, 1]}
    producer = api.post("/producer/register", **field)["producer_id"]
    consumer = api.post("/consumer/register", **field)["consumer_id"]
    api.post("/producer/produce", **field, producer_id=producer, message="m")
    assert api.get("/size", **field, consumer_id=consumer) == {"size": 1}
    assert api.get("/consumer/consume", **field, consumer_id=consumer)["message"] == "m"
    api.post("/consumer/set_offset", **field, consumer_id=consumer, offset=-1)
    assert api.get("/size", **field, consumer_id=consumer) == {"size": 1}


@pytest.mark.parametrize("name", ["partition_id", "partition"])
def test_a_partition_may_be_called_by_two_names(api: Api, topic: str, name: str) -> None:
    field: dict[str, Any] = {name: 1}
    producer, consumer = api.producer(topic, **field), api.consumer(topic, **field)
    assert api.produce(topic, producer, "m", **field) == (1, 0)
    assert api.consume(topic, consumer, **field) == "m"
    api.post("/consumer/set_offset", consumer_id=consumer, offset=-1, **field)
    assert api.consume(topic, consumer) == "m"


@pytest.mark.parametrize("name", ["prod_client", "prod_name"])
def test_a_client_may_be_called_by_two_names(api: Api, topic: str, name: str) -> None:
    producer, client = api.producer(topic), fresh("client")
    field: dict[str, Any] = {name: client}
    first = api.produce(topic, producer, "m", sequence=0, **field)
    assert api.produce(topic, producer, "m", sequence=0, prod_client=client) == first
    assert api.get("/producer/client_size", **field) == {"count": 1}


def as_query(api: Api, method: str, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    return api.request(method, path, query=fields).body


def as_body(api: Api, method: str, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    return api.request(method, path, body=json.dumps(fields).encode()).body


def as_strings(api: Api, method: str, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    return as_body(api, method, path, {name: str(value) for name, value in fields.items()})


def as_both(api: Api, method: str, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    names = sorted(fields)
    query = {name: fields[name] for name in names[::2]}
    rest = {name: fields[name] for name in names[1::2]}
    return api.request(method, path, query=query, body=json.dumps(rest).encode()).body


def with_unknown_fields(api: Api, method: str, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    more = {"what": None, "is": [1, {"this": 1.5}], "Topic": "x", "": "", "\x00": "\ud7ff", "offsets": "NaN"}
    return as_body(api, method, path, fields | more)


Form = Callable[[Api, str, str, dict[str, Any]], dict[str, Any]]


@pytest.mark.parametrize("send", [as_query, as_body, as_strings, as_both, with_unknown_fields])
def test_every_call_takes_its_parameters_in_every_form(api: Api, send: Form) -> None:
    """POST with query parameters, GET with a JSON body, numbers as strings, and more than was asked for."""
    topic, client = fresh(), fresh("client")

    def call(method: str, path: str, **fields: Any) -> dict[str, Any]:
        found = send(api, method, path, fields)
        assert found.pop("status") == "success", found
        return found

    assert call("POST", "/topics", topic_name=topic, partitions=2, replication_factor=1)["partitions"] == [0, 1]
    assert call("GET", "/topics/partitions", topic_name=topic) == {"partitions": [0, 1]}
    producer = call("POST", "/producer/register", topic=topic, partition_id=1)["producer_id"]
    consumer = call("POST", "/consumer/register", topic=topic, partition_id=1)["consumer_id"]
    produce = {"topic": topic, "producer_id": producer, "message": "m & ü", "partition_id": 1, "key": "k"}
    stored = {"partition_id": 1, "offset": 0}
    assert call("POST", "/producer/produce", **produce, prod_client=client, sequence=0) == stored
    consume = {"topic": topic, "consumer_id": consumer, "partition_id": 1}
    assert call("GET", "/consumer/consume", **consume, after=-1) == {"message": "m & ü", **stored}
    assert call("GET", "/consumer/consume", **consume, after=-1) == {"message": "m & ü", **stored}
    assert call("GET", "/size", topic=topic, consumer_id=consumer) == {"size": 0}
    call("POST", "/consumer/set_offset", consumer_id=consumer, offset=-1, topic=topic, partition_id=1)
    assert call("GET", "/size", topic=topic, consumer_id=consumer) == {"size": 1}
    assert call("GET", "/producer/client_size", prod_client=client) == {"count": 1}


def test_null_is_as_good_as_nothing(api: Api, topic: str) -> None:
    fields = dict.fromkeys(("partition_id", "partition", "key", "prod_client", "sequence"))
    producer = api.producer(topic, partition_id=None)
    assert api.produce(topic, producer, "m", **fields) == (0, 0)
    assert api.produce(topic, producer, "m", **fields) == (1, 0)


@pytest.mark.parametrize(
    "message",
    ["", " ", "\x00", "a\nb\r\nc", '"quoted" \\ {json}', "ünïcödé 漢字 🏹", "\ud7ff\ue000\uffff", "x" * 100_000],
    ids=lambda message: repr(message)[:20],
)
def test_the_message_received_is_the_message_sent(api: Api, topic: str, message: str) -> None:
    producer, consumer = api.producer(topic), api.consumer(topic)
    api.produce(topic, producer, message)
    assert api.consume(topic, consumer) == message


@pytest.mark.parametrize("name", ["a", "A" * 249, "...", "-", "_", "a.b-c_D9", ".a", "0"])
def test_topic_names_that_are_allowed(api: Api, name: str) -> None:
    name = name if len(name) > 200 else f"{name}{fresh('.')}"
    assert api.post("/topics", topic_name=name)["topic_name"] == name
    assert name in api.get("/topics")["topics"]


def test_the_largest_topic_name_of_dots_is_no_directory(api: Api) -> None:
    assert api.post("/topics", topic_name="...")["topic_name"] == "..."
    producer, consumer = api.producer("..."), api.consumer("...")
    api.produce("...", producer, "m")
    assert api.consume_all("...", consumer) == ["m"]
