"""Records over the v1 API: what one form writes the others read, and so does the SDK."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from quiver import Producer
from quiver.manager.v1_media import ARROW, JSON, NDJSON
from quiver.wire.partitioning import partition_of_key
from tests.manager.kit import Api, HttpNode, fresh
from tests.manager.v1_kit import V1, arrow, ndjson, runs
from tests.system.kit import read_all

pytestmark = pytest.mark.system

TIME_US = 1_700_000_000_123_456


@pytest.fixture
def v1(node: HttpNode) -> Iterator[V1]:
    with V1(node.http) as made:
        yield made


def read(node: HttpNode, topic: str) -> list[Any]:
    return read_all(node.address, topic)


# -- in --------------------------------------------------------------------------------------------------------------


def test_the_sdk_reads_what_json_wrote(v1: V1, node: HttpNode) -> None:
    topic = v1.create(fresh())
    records = [
        {"value": "text ü🏹"},
        {"value_base64": base64.b64encode(b"\xff\x00").decode(), "key_base64": "/w=="},
        {"value": None, "key": "k"},
        {"value": "", "key": "", "timestamp": TIME_US, "headers": {"a": "1", "b": "ü"}},
        {"value": "t", "timestamp": "2024-01-01T01:00:00.5+01:00"},
        {"value": "h", "headers": [{"name": "a", "value_base64": "/w=="}, {"name": "a", "value": "again"}]},
    ]
    assert v1.produce(topic, records) == [(0, 0, 6)]
    found = read(node, topic)
    assert [record.value for record in found] == ["text ü🏹".encode(), b"\xff\x00", None, b"", b"t", b"h"]
    assert [record.key for record in found] == [None, b"\xff", b"k", b"", None, None]
    assert [record.offset for record in found] == list(range(6))
    assert found[3].timestamp == TIME_US
    assert found[4].timestamp == 1_704_067_200_500_000
    assert found[3].headers == (("a", b"1"), ("b", "ü".encode()))
    assert found[5].headers == (("a", b"\xff"), ("a", b"again"))


def test_the_sdk_reads_what_ndjson_wrote(v1: V1, node: HttpNode) -> None:
    topic = v1.create(fresh())
    body = ndjson({"value": f"v{number}"} for number in range(5000)) + b"\r\n\n" + b'{"value":"last"}'
    assert runs(v1.post(topic, body, NDJSON)) == [(0, 0, 5001)]
    assert [record.value for record in read(node, topic)] == [*(b"v%d" % number for number in range(5000)), b"last"]


@pytest.mark.parametrize("media", ["application/ndjson", "application/jsonl", "Application/X-NDJSON; charset=UTF-8"])
def test_lines_of_json_have_many_names(v1: V1, media: str) -> None:
    topic = v1.create(fresh())
    assert runs(v1.post(topic, b'{"value":"x"}\n', media)) == [(0, 0, 1)]


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_the_sdk_reads_what_arrow_wrote(v1: V1, node: HttpNode, compression: str | None) -> None:
    topic = v1.create(fresh())
    table = pa.table(
        {
            "value": pa.array([b"a" * 1000, None, b"\xff"], pa.binary()),
            "key": pa.array(["k", None, "ü"], pa.large_string()),
            "timestamp": pa.array([1, None, 3], pa.timestamp("ms", "Europe/Berlin")),
            "headers": pa.array([[("h", "1")], None, []], pa.map_(pa.string(), pa.string())),
        }
    )
    assert runs(v1.post(topic, arrow(table, compression), ARROW)) == [(0, 0, 3)]
    found = read(node, topic)
    assert [(record.value, record.key) for record in found] == [
        (b"a" * 1000, b"k"),
        (None, None),
        (b"\xff", "ü".encode()),
    ]
    assert (found[0].timestamp, found[2].timestamp) == (1000, 3000)
    assert found[1].timestamp > TIME_US, "none given: now"
    assert found[0].headers == (("h", b"1"),)


def test_an_arrow_stream_of_several_batches_is_stored_in_order(v1: V1, node: HttpNode) -> None:
    topic = v1.create(fresh())
    parts = [pa.record_batch({"value": [f"{part}-{row}" for row in range(100)]}) for part in range(5)]
    assert runs(v1.post(topic, arrow(pa.Table.from_batches(parts)), ARROW)) == [(0, 0, 500)]
    assert [record.value for record in read(node, topic)] == [
        b"%d-%d" % (part, row) for part in range(5) for row in range(100)
    ]


def test_a_request_larger_than_a_batch_is_stored_whole_and_in_order(v1: V1, node: HttpNode) -> None:
    topic = v1.create(fresh())
    values = [b"%06d" % number + b"x" * 20_000 for number in range(300)]
    assert runs(v1.post(topic, arrow(pa.table({"value": values})), ARROW)) == [(0, 0, 300)]
    assert [record.value for record in read(node, topic)] == values


# -- where they go ---------------------------------------------------------------------------------------------------


def test_a_key_chooses_the_partition_as_it_does_for_the_sdk(v1: V1, node: HttpNode) -> None:
    topic = v1.create(fresh(), 5)
    keys = [f"key-{number}" for number in range(200)]
    v1.produce(topic, [{"value": key, "key": key} for key in keys])
    v1.post(topic, arrow(pa.table({"value": keys, "key": keys})), ARROW)
    found = read(node, topic)
    assert len(found) == 400
    assert all(record.partition == partition_of_key(record.key, 5) for record in found)
    by_partition = [[r.value.decode() for r in found if r.partition == number] for number in range(5)]
    for partition, values in enumerate(by_partition):
        wanted = [key for key in keys if partition_of_key(key.encode(), 5) == partition]
        assert values == wanted * 2, "the order of a request is kept"


def test_a_record_may_name_its_partition_in_every_form(v1: V1) -> None:
    topic = v1.create(fresh(), 3)
    records = [{"value": str(number), "key": "k", "partition": number % 3} for number in range(6)]
    assert v1.produce(topic, records) == [(0, 0, 2), (1, 0, 2), (2, 0, 2)]
    assert runs(v1.post(topic, ndjson(records), NDJSON)) == [(0, 2, 2), (1, 2, 2), (2, 2, 2)]
    table = pa.table({"value": ["a", "b"], "partition": pa.array([2, 0], pa.uint8())})
    assert runs(v1.post(topic, arrow(table), ARROW)) == [(0, 4, 1), (2, 4, 1)]
    assert v1.values(topic, 2) == ["2", "5", "2", "5", "a"]


def test_requests_without_keys_take_turns_and_each_stays_together(v1: V1) -> None:
    topic = v1.create(fresh(), 3)
    assert [v1.produce(topic, ["a", "b"])[0][0] for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [v1.values(topic, number) for number in range(3)] == [["a", "b", "a", "b"]] * 3


def test_the_path_may_name_the_partition(v1: V1) -> None:
    topic = v1.create(fresh(), 3)
    assert v1.produce(topic, [{"value": "a", "key": "k"}, {"value": "b", "partition": 2}], 2) == [(2, 0, 2)]
    wrong = v1.json("POST", f"/v1/topics/{topic}/partitions/1/records", {"records": [{"value": "a", "partition": 2}]})
    assert (wrong.status, wrong.error["code"]) == (400, "invalid_request")
    assert v1.values(topic, 1) == []


# -- out -------------------------------------------------------------------------------------------------------------


def test_every_form_reads_what_the_sdk_wrote(v1: V1, node: HttpNode) -> None:
    topic = v1.create(fresh())
    with Producer(node.address) as producer:
        producer.send(topic, b"text", key=b"k", timestamp=TIME_US, headers={"a": b"1", "b": b"\xff"}).result()
        producer.send(topic, b"\xff", key=b"\xfe").result()
        producer.send(topic, None).result()
    as_json = v1.fetch(topic).body
    assert {name: as_json[name] for name in ("start_offset", "high_watermark", "next_offset")} == {
        "start_offset": 0,
        "high_watermark": 3,
        "next_offset": 3,
    }
    first, second, third = as_json["records"]
    assert first == {
        "partition": 0,
        "offset": 0,
        "timestamp": TIME_US,
        "key": "k",
        "value": "text",
        "headers": [{"name": "a", "value": "1"}, {"name": "b", "value_base64": "/w=="}],
    }
    assert (second["key_base64"], second["value_base64"]) == ("/g==", "/w==")
    assert (third["key"], third["value"]) == (None, None)
    lines = v1.fetch(topic, accept=NDJSON)
    assert lines.lines == as_json["records"]
    assert lines.headers["quiver-next-offset"] == "3"
    table = v1.fetch(topic, accept=ARROW).table
    assert table.column_names == ["partition", "offset", "timestamp", "key", "value", "headers"]
    assert table.column("value").to_pylist() == [b"text", b"\xff", None]
    assert table.column("offset").to_pylist() == [0, 1, 2]
    assert table.column("headers").to_pylist()[0] == [("a", b"1"), ("b", b"\xff")]


def test_base64_for_all_if_asked_for(v1: V1) -> None:
    topic = v1.create(fresh())
    v1.produce(topic, [{"value": "a", "key": "k", "headers": {"h": "x"}}])
    (record,) = v1.fetch(topic, encoding="base64").body["records"]
    assert (record["value_base64"], record["key_base64"]) == ("YQ==", "aw==")
    assert record["headers"] == [{"name": "h", "value_base64": "eA=="}]


def test_classic_and_v1_see_the_same_messages(v1: V1, api: Api) -> None:
    topic = v1.create(fresh())
    v1.produce(topic, ["from v1"])
    api.produce(topic, api.producer(topic), "from classic", key="k")
    assert v1.values(topic) == ["from v1", "from classic"]
    assert api.consume_all(topic, api.consumer(topic)) == ["from v1", "from classic"]


@pytest.mark.parametrize("accept", [JSON, NDJSON, ARROW])
def test_a_fetch_goes_on_where_the_last_one_ended(v1: V1, node: HttpNode, accept: str) -> None:
    topic = v1.create(fresh())
    with Producer(node.address) as producer:
        for start in range(0, 1000, 100):
            producer.send_many(topic, [b"%d" % number for number in range(start, start + 100)])
            producer.flush()
    found: list[Any] = []
    offset = 0
    while True:
        reply = v1.fetch(topic, accept=accept, offset=offset, max_records=70, max_bytes=1)
        if accept == ARROW:
            part = [value.decode() for value in reply.table.column("value").to_pylist()]
        else:
            records = reply.lines if accept == NDJSON else reply.body["records"]
            part = [record["value"] for record in records]
        assert len(part) <= 70
        found += part
        if not part:
            break
        offset = int(reply.headers["quiver-next-offset"])
    assert found == [str(number) for number in range(1000)]


def test_json_is_limited_by_records_and_arrow_by_bytes_unless_told(v1: V1) -> None:
    topic = v1.create(fresh())
    v1.produce(topic, [str(number) for number in range(3000)])
    assert len(v1.fetch(topic).body["records"]) == 500
    assert len(v1.fetch(topic, max_records=2500).body["records"]) == 2500
    assert v1.fetch(topic, accept=ARROW).table.num_rows == 3000


@pytest.mark.parametrize(
    ("accept", "given"),
    [
        ("*/*", JSON),
        ("", JSON),
        ("application/*", JSON),
        (f"text/html, {NDJSON};q=0.5", NDJSON),
        (f"{JSON};q=0.1, {ARROW}", ARROW),
        (f"{JSON};q=0, */*", NDJSON),
        ("application/jsonl", NDJSON),
    ],
)
def test_the_client_gets_the_form_it_likes_best(v1: V1, accept: str, given: str) -> None:
    topic = v1.create(fresh())
    assert v1.fetch(topic, accept=accept).headers["content-type"] == given


def test_earliest_and_latest_are_offsets_too(v1: V1) -> None:
    topic = v1.create(fresh())
    v1.produce(topic, ["a", "b"])
    assert v1.values(topic, offset="earliest") == ["a", "b"]
    assert v1.fetch(topic, offset="latest").body["next_offset"] == 2
    assert v1.values(topic, offset=1) == ["b"]
    beyond = v1.fetch(topic, offset=3)
    assert (beyond.status, beyond.error["code"]) == (416, "offset_out_of_range")
    assert (beyond.error["earliest"], beyond.error["latest"]) == (0, 2)


# -- waiting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", [JSON, NDJSON, ARROW])
def test_a_fetch_that_waits_is_woken_by_the_next_record(v1: V1, node: HttpNode, accept: str) -> None:
    """Before one that began earlier, waits as long and gets nothing."""
    topic, quiet = v1.create(fresh()), v1.create(fresh())
    with V1(node.http) as other, V1(node.http) as earlier:
        waiting = threading.Thread(target=lambda: earlier.fetch(quiet, wait_ms=20_000))
        waiting.start()
        timer = threading.Timer(0.3, lambda: other.produce(topic, ["new"]))
        timer.start()
        reply = v1.fetch(topic, accept=accept, wait_ms=20_000, offset=0)
        is_first = waiting.is_alive()
        timer.join()
        other.produce(quiet, ["enough"])
        waiting.join()
    assert reply.headers["quiver-next-offset"] == "1"
    assert is_first


def test_a_wait_without_news_ends_in_time_and_empty(v1: V1) -> None:
    topic = v1.create(fresh())
    began_s = time.monotonic()
    reply = v1.fetch(topic, wait_ms=1300)
    assert reply.body["records"] == []
    assert time.monotonic() - began_s > 1.2, "it waited"
    assert v1.fetch(topic, accept=ARROW).table.num_rows == 0
    assert v1.fetch(topic, accept=NDJSON).raw == b""


def test_a_wait_ends_when_the_topic_does(v1: V1, node: HttpNode) -> None:
    topic = v1.create(fresh())
    with V1(node.http) as other:
        timer = threading.Timer(0.3, lambda: other.request("DELETE", f"/v1/topics/{topic}"))
        timer.start()
        reply = v1.fetch(topic, wait_ms=20_000)
        timer.join()
    assert reply.status in (404, 503), reply


# -- exactly once ----------------------------------------------------------------------------------------------------


def numbered(v1: V1, topic: str, sequence: int, values: list[str], epoch: int | None = None) -> Any:
    headers = {"Quiver-Producer": f"app-{topic}", "Quiver-Sequence": str(sequence)}
    if epoch is not None:
        headers["Quiver-Epoch"] = str(epoch)
    body = json.dumps({"records": [{"value": value} for value in values]}).encode()
    return v1.post(topic, body, JSON, 0, headers)


def test_the_same_sequence_again_is_stored_once(v1: V1, api: Api) -> None:
    topic = v1.create(fresh())
    first = numbered(v1, topic, 0, ["a", "b"])
    again = numbered(v1, topic, 0, ["a", "b"])
    assert (runs(first), first.body["duplicate"]) == ([(0, 0, 2)], False)
    assert (runs(again), again.body["duplicate"]) == ([(0, 0, 2)], True)
    assert runs(numbered(v1, topic, 2, ["c"])) == [(0, 2, 1)]
    assert v1.values(topic) == ["a", "b", "c"]
    assert api.client_size(f"app-{topic}") == 3


def test_a_gap_in_the_sequence_is_a_conflict_that_names_the_expected(v1: V1) -> None:
    topic = v1.create(fresh())
    numbered(v1, topic, 0, ["a"])
    gap = numbered(v1, topic, 5, ["f"])
    assert (gap.status, gap.error["code"], gap.error["expected"]) == (409, "out_of_order_sequence", 1)
    assert v1.values(topic) == ["a"]


def test_a_higher_epoch_begins_again_and_shuts_out_the_lower(v1: V1) -> None:
    topic = v1.create(fresh())
    numbered(v1, topic, 0, ["a"])
    assert runs(numbered(v1, topic, 0, ["b"], epoch=1)) == [(0, 1, 1)]
    fenced = numbered(v1, topic, 1, ["c"], epoch=0)
    assert (fenced.status, fenced.error["code"]) == (409, "producer_fenced")
    assert v1.values(topic) == ["a", "b"]


def test_a_large_numbered_request_is_one_batch(v1: V1) -> None:
    topic = v1.create(fresh())
    values = [f"{number:05d}" + "x" * 1000 for number in range(4000)]
    assert runs(numbered(v1, topic, 0, values)) == [(0, 0, 4000)]
    assert runs(numbered(v1, topic, 0, values)) == [(0, 0, 4000)]
    assert runs(numbered(v1, topic, 4000, ["end"])) == [(0, 4000, 1)]


def test_a_producers_name_alone_is_a_label(v1: V1, api: Api) -> None:
    topic = v1.create(fresh(), 2)
    body = json.dumps({"records": [{"value": "a"}]}).encode()
    for _ in range(3):
        assert v1.post(topic, body, JSON, None, {"Quiver-Producer": f"label-{topic}"}).status == 200
    assert api.client_size(f"label-{topic}") == 3


def test_many_at_once_are_all_stored_and_none_is_split(v1: V1, node: HttpNode) -> None:
    topic = v1.create(fresh())
    answers: list[tuple[str, int]] = []

    def produce(worker: int) -> None:
        with V1(node.http) as client:
            for number in range(25):
                ((_, offset, count),) = client.produce(topic, [f"{worker}-{number}-{row}" for row in range(4)])
                assert count == 4
                answers.append((f"{worker}-{number}", offset))

    threads = [threading.Thread(target=produce, args=(worker,)) for worker in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = [record.value.decode() for record in read(node, topic)]
    assert len(values) == 12 * 25 * 4
    assert len(answers) == 12 * 25
    for name, offset in answers:
        assert values[offset : offset + 4] == [f"{name}-{row}" for row in range(4)]
