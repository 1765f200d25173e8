"""v1 requests by chance: no 500, one form of error, and the log holds exactly what was acknowledged.

Made from the table of routes: right requests with something wrong in them, so that they get far before they fail.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
import pyarrow as pa

from quiver.manager.v1_media import ARROW, JSON, NDJSON
from quiver.manager.v1_routes import ROUTES, Route
from tests.manager.classic_fuzz import ANY_VALUES
from tests.manager.kit import Api
from tests.manager.v1_kit import V1, Reply, arrow, ndjson

TOPICS = ("fuzz-a", "fuzz-b")
NEW_TOPICS = tuple(f"fuzz-new-{number}" for number in range(5))


class Fuzzer:
    def __init__(self, dice: random.Random, client: V1) -> None:
        self.dice = dice
        self.client = client
        self.statuses: Counter[int] = Counter()
        self.successes: Counter[str] = Counter()
        self.stored: Counter[tuple[str, int]] = Counter()

    def step(self) -> None:
        dice = self.dice
        route = dice.choice(ROUTES)
        names = {"topic": dice.choice(TOPICS), "partition": dice.choice((0, 1)), "group": dice.choice(("g", "h ü"))}
        names |= {"broker": dice.choice((1, 2, 0)), "consumer": dice.choice((1, 2, 0))}
        changes = route.call in ("delete_topic", "alter_topic")
        if changes:
            names["topic"] = dice.choice(NEW_TOPICS)
        for name in names:
            if dice.random() < 0.05 and not (changes and name == "topic"):
                names[name] = dice.choice(ANY_VALUES)
        path = route.path.format(**{name: quote(str(value)[:300], safe="") for name, value in names.items()})
        query = self._query(route)
        headers, body = self._body(route)
        method = route.method if dice.random() < 0.95 else dice.choice(("PATCH", "PUT", "HEAD", "OPTIONS"))
        if method != route.method and method == "PUT" and route.call == "position":
            method = "PATCH"
        reply = self.client.request(method, path + query, body, headers)
        self._note(route if method == route.method else None, names, reply)

    def _query(self, route: Route) -> str:
        dice = self.dice
        fields: dict[str, Any] = {}
        for field in msgspec.structs.fields(route.query):
            if dice.random() < 0.3:
                good = {"offset": "0", "max_records": 10, "wait_ms": 1, "encoding": "base64"}.get(field.name, 1)
                fields[field.name] = good if dice.random() < 0.6 else dice.choice(ANY_VALUES)
        if fields.get("wait_ms") not in (None, 1):
            fields["wait_ms"] = dice.choice(("x", -1, 10**9, ""))  # nobody waits here
        if dice.random() < 0.03:
            fields[dice.choice(("x", "topic", "offset "))] = dice.choice(ANY_VALUES)
        return f"?{urlencode({name: str(value)[:2000] for name, value in fields.items()})}" if fields else ""

    def _body(self, route: Route) -> tuple[dict[str, str], bytes | None]:
        dice = self.dice
        if not route.body:
            return ({"accept": dice.choice((JSON, NDJSON, ARROW, "*/*", "x"))}, None)
        media = dice.choice(list(route.body))
        if route.call == "create_topic":
            raw = json.dumps(self._mutated({"name": dice.choice(NEW_TOPICS), "partitions": 1})).encode()
        elif route.call == "alter_topic":
            raw = json.dumps(self._mutated({"partitions": dice.randint(1, 3)})).encode()
        elif route.call == "commit":
            raw = json.dumps(self._mutated({"offset": dice.choice((0, 1, 2)), "rewind": True})).encode()
        else:
            raw = self._records(media)
        if dice.random() < 0.1:
            raw = self._damaged(raw)
        headers = {"content-type": media if dice.random() < 0.95 else dice.choice((JSON, NDJSON, ARROW, "text/plain"))}
        if dice.random() < 0.2 and route.headers:
            headers["Quiver-Producer"] = dice.choice(("p", "q", "", "x" * 300))
            headers["Quiver-Sequence"] = dice.choice(("0", "1", "2", "-1", "x"))
        return headers, raw

    def _records(self, media: str) -> bytes:
        dice = self.dice
        records = []
        for _ in range(dice.randint(1, 4)):
            record: dict[str, Any] = {"value": dice.choice(("v", "", "ü"))}
            if dice.random() < 0.3:
                record |= {"key": "k", "headers": {"h": "1"}, "timestamp": dice.choice((0, 10**15, -5))}
            if dice.random() < 0.1:
                record["partition"] = dice.choice((0, 1))
            records.append(self._mutated(record) if dice.random() < 0.15 else record)
        if media == JSON:
            return json.dumps({"records": records}).encode()
        if media == NDJSON:
            return ndjson(records)
        return arrow(self._table(), dice.choice((None, "lz4", "zstd")))

    def _table(self) -> pa.Table:
        dice = self.dice
        count = dice.randint(0, 4)
        columns: dict[str, Any] = {"value": pa.array([b"v"] * count, dice.choice((pa.binary(), pa.large_binary())))}
        extra = {
            "key": pa.array(["k"] * count, dice.choice((pa.string(), pa.string(), pa.binary_view()))),
            "timestamp": pa.array([5] * count, dice.choice((pa.int64(), pa.timestamp("ns"), pa.date64()))),
            "partition": pa.array([dice.choice((0, 1, 1, 2))] * count, dice.choice((pa.int8(), pa.uint64()))),
            "headers": pa.array([[("a", "b")]] * count, pa.map_(pa.string(), pa.string())),
            "other": pa.nulls(count),
        }
        for name in dice.sample(list(extra), dice.choice((0, 0, 1, 2))):
            columns[name] = extra[name]
        return pa.table(columns)

    def _mutated(self, fields: dict[str, Any]) -> dict[str, Any]:
        dice = self.dice
        fields = dict(fields)
        for _ in range(dice.choice((0, 0, 1, 2))):
            name = dice.choice((*fields, "x", "key_base64", "value_base64", "timestamp", "partition", "expected"))
            fields[name] = dice.choice(ANY_VALUES)
        if fields.get("name") is not None and fields["name"] not in NEW_TOPICS:
            fields["name"] = dice.choice(("", ".", "a b", 5, [], "x" * 250))
        if fields.get("partitions") not in (None, 1, 2, 3, True):
            fields["partitions"] = dice.choice((0, -1, 10_001, "1", 2**70))  # thousands take their time
        return fields

    def _damaged(self, raw: bytes) -> bytes:
        dice = self.dice
        damaged = bytearray(raw)
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(len(damaged) + 1)
            damaged[at : at + dice.randint(0, 3)] = dice.randbytes(dice.randint(0, 3))
        return bytes(damaged)

    def _note(self, route: Route | None, names: dict[str, Any], reply: Reply) -> None:
        self.statuses[reply.status] += 1
        assert reply.status != 503, reply
        if route is None or reply.status >= 300:
            return
        self.successes[route.call] += 1
        if route.call.startswith("produce") and not reply.body["duplicate"]:
            assert reply.body["count"] == sum(run["count"] for run in reply.body["offsets"])
            for run in reply.body["offsets"]:
                place = (names["topic"], run["partition"])
                assert run["offset"] == self.stored[place], "nothing was stored that was not acknowledged"
                self.stored[place] += run["count"]


def fuzz_v1(http: str, cases: int, seed: int) -> None:
    with V1(http) as client:
        for topic in TOPICS:
            client.create(topic, 2)
        with Api(http) as classic:
            classic.consumer(TOPICS[0])
        fuzzer = Fuzzer(random.Random(seed), client)
        for _ in range(cases):
            fuzzer.step()
        for topic in TOPICS:
            for row in client.request("GET", f"/v1/topics/{topic}/offsets").body["partitions"]:
                assert row["latest"] == fuzzer.stored[topic, row["partition"]]
                left = client.fetch(topic, row["partition"], max_records=100_000, max_bytes=8 * 1024 * 1024)
                assert len(left.body["records"]) == row["latest"], "all of it can be read"
    # The dice must have met every call and most ways to fail, or they prove nothing.
    assert fuzzer.successes.keys() == {route.call for route in ROUTES} - {"remove_broker"}  # it is the only one
    assert {200, 201, 204, 400, 404, 405, 406, 409, 415, 416} <= fuzzer.statuses.keys()
    assert fuzzer.statuses[200] > cases // 4
