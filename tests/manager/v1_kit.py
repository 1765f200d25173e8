"""A client of the v1 API that holds every answer against its general rules."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable
from typing import Any, NamedTuple, Self
from urllib.parse import quote, urlencode, urlsplit

import pyarrow as pa

from quiver.manager.v1_media import ARROW, JSON, NDJSON
from tests.system.kit import WAIT_S

STATUSES = {200, 201, 202, 204, 400, 404, 405, 406, 408, 409, 413, 415, 416, 431, 503}


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        assert self.status >= 400, self
        found: dict[str, Any] = self.body["error"]
        return found

    @property
    def lines(self) -> list[Any]:
        assert self.headers["content-type"] == NDJSON
        return [json.loads(line) for line in self.raw.splitlines()]

    @property
    def table(self) -> pa.Table:
        assert self.headers["content-type"] == ARROW
        return pa.ipc.open_stream(self.raw).read_all()


def checked(reply: Reply) -> Reply:
    """Never a 500; an error has one form, and the headers that go with its status."""
    assert reply.status in STATUSES, reply
    if reply.status >= 400:
        assert reply.headers["content-type"] == JSON, reply
        body = reply.body
        if reply.status != 503 or "error" in body:
            assert body.keys() == {"error"}, reply
            error = body["error"]
            assert isinstance(error["code"], str) and error["code"] == error["code"].lower(), reply
            assert isinstance(error["message"], str) and error["message"], reply
            assert error["retriable"] == (reply.status == 503), reply
        assert ("retry-after" in reply.headers) == (reply.status == 503), reply
        assert ("allow" in reply.headers) == (reply.status == 405), reply
    elif reply.status == 204:
        assert reply.raw == b"" and "content-length" not in reply.headers, reply
    return reply


class V1:
    """A client on one connection. Not for two threads at once."""

    def __init__(self, address: str, timeout_s: float = WAIT_S) -> None:
        where = urlsplit(address)
        assert where.hostname is not None
        self._connection = http.client.HTTPConnection(where.hostname, where.port, timeout=timeout_s)

    def request(
        self, method: str, target: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        try:
            self._connection.request(method, target, body, headers or {})
            response = self._connection.getresponse()
            raw = response.read()
        except BaseException:
            self._connection.close()  # half an exchange: the next request needs a new connection
            raise
        names = {name.lower(): value for name, value in response.getheaders()}
        reply = Reply(response.status, names, raw)
        return reply if method == "HEAD" else checked(reply)

    def json(self, method: str, target: str, body: Any, **headers: str) -> Reply:
        return self.request(method, target, json.dumps(body).encode(), {"content-type": JSON} | headers)

    # -- the calls that most tests need --

    def create(self, topic: str, partitions: int = 1) -> str:
        assert self.json("POST", "/v1/topics", {"name": topic, "partitions": partitions}).status == 201
        return topic

    def post(
        self, topic: str, body: bytes, media: str, partition: int | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        place = "" if partition is None else f"/partitions/{partition}"
        target = f"/v1/topics/{quote(topic, safe='')}{place}/records"
        return self.request("POST", target, body, {"content-type": media} | (headers or {}))

    def produce(self, topic: str, records: Iterable[Any], partition: int | None = None) -> list[tuple[int, int, int]]:
        """Records as dicts, or texts; returns (partition, offset, count) of what was stored."""
        body = {"records": [{"value": record} if isinstance(record, str) else record for record in records]}
        return runs(self.post(topic, json.dumps(body).encode(), JSON, partition))

    def fetch(self, topic: str, partition: int = 0, accept: str = JSON, **query: Any) -> Reply:
        target = f"/v1/topics/{topic}/partitions/{partition}/records"
        return self.request("GET", f"{target}?{urlencode(query)}" if query else target, None, {"accept": accept})

    def values(self, topic: str, partition: int = 0, **query: Any) -> list[str]:
        return [record["value"] for record in self.fetch(topic, partition, **query).body["records"]]

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def runs(reply: Reply) -> list[tuple[int, int, int]]:
    assert reply.status == 200, reply
    return [(run["partition"], run["offset"], run["count"]) for run in reply.body["offsets"]]


def ndjson(records: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def arrow(table: pa.Table | pa.RecordBatch, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write(table)
    return bytes(sink.getvalue())


def log_of(client: V1) -> dict[str, Any]:
    """Everything that a refused request must not change."""
    topics = client.request("GET", "/v1/topics").body["topics"]
    return {
        "transaction": client.request("GET", "/v1/health").body["transaction"],
        "topics": topics,
        "offsets": [client.request("GET", f"/v1/topics/{row['name']}/offsets").body for row in topics],
        "positions": [client.request("GET", f"/v1/groups/g/topics/{row['name']}/positions").body for row in topics],
    }
