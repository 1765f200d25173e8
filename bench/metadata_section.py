"""The section `metadata`: a node with very many topics, and one with very many consumers.

What it takes to make them, to list them, to start again, and in memory. Rule: a restart ends with the first list that
has everything.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

import report
import uvloop
from http_load import CONNECTIONS, Connection, post
from measure import MB, Row, latency_row
from plan import Bench
from servers import Node

from quiver import Admin

FILL_TIMEOUT_S = 600.0
RESTARTS = 3
TOPIC = "many"


def metadata(bench: Bench) -> list[Row]:
    bench.progress.section("metadata", 4)
    return _topics(bench) + _consumers(bench)


def _topics(bench: Bench) -> list[Row]:
    count, lists = bench.sizes.metadata_topics, bench.sizes.metadata_lists
    directory = bench.directory / "topics"
    bench.progress.step(f"{count:,} topics")
    with Node(directory) as node:
        requests = [post("/topics", topic_name=f"topic-{n}", partitions=1, replication_factor=1) for n in range(count)]
        made_s = uvloop.run(_send_all(node.http, requests))
        found = [
            latency_row("metadata", report.QUIVER, name, _timed(partial(call, node, count), lists), "")
            for name, call in (
                (report.LIST_CLASSIC, _list_classic),
                (report.LIST_V1, _list_v1),
                (report.LIST_SDK, _list_sdk),
            )
        ]
    bench.progress.step("restarting")
    seconds, memory = _restarts(directory, partial(_list_classic, count=count))
    per_s = f"made at {count / made_s:,.0f} topics/s over {CONNECTIONS} connections"
    restart = {"seconds": seconds, "rss_mb": memory / MB}
    return [*found, Row("metadata", report.QUIVER, report.RESTART_TOPICS, restart, per_s)]


def _consumers(bench: Bench) -> list[Row]:
    count, lists = bench.sizes.metadata_consumers, bench.sizes.metadata_lists
    directory = bench.directory / "consumers"
    bench.progress.step(f"{count:,} consumers")
    with Node(directory) as node:
        _send_now(node, post("/topics", topic_name=TOPIC))
        made_s = uvloop.run(_send_all(node.http, [post("/consumer/register", topic=TOPIC)] * count))
        listed = _timed(partial(_list_consumers, node, count), lists)
    bench.progress.step("restarting")
    seconds, memory = _restarts(directory, partial(_list_consumers, count=count))
    first = f"the first one, when all are new, {listed[0] * 1000:.0f} ms"
    per_s = f"registered at {count / made_s:,.0f}/s over {CONNECTIONS} connections"
    restart = {"seconds": seconds, "rss_mb": memory / MB}
    return [
        latency_row("metadata", report.QUIVER, report.LIST_CONSUMERS, listed, first),
        Row("metadata", report.QUIVER, report.RESTART_CONSUMERS, restart, per_s),
    ]


def _timed(call: Callable[[], None], times: int) -> list[float]:
    taken_s = []
    for _ in range(times):
        began_s = time.perf_counter()
        call()
        taken_s.append(time.perf_counter() - began_s)
    return taken_s


def _restarts(directory: Path, call: Callable[[Node], None]) -> tuple[float, int]:
    """(median seconds from the start of the process to the end of `call`, bytes of memory then)."""
    taken_s, memory = [], 0
    for _ in range(RESTARTS):
        began_s = time.perf_counter()
        with Node(directory) as node:
            call(node)
            taken_s.append(time.perf_counter() - began_s)
            memory = node.memory_bytes()["VmRSS"]
    return statistics.median(taken_s), memory


def _get(node: Node, path: str) -> bytes:
    with urllib.request.urlopen(node.http + path, timeout=60) as answer:
        return answer.read()


def _expect(found: int, count: int) -> None:
    if found != count:
        raise RuntimeError(f"{found} listed, not {count}")


def _list_classic(node: Node, count: int) -> None:
    _expect(len(json.loads(_get(node, "/topics"))["topics"]), count)


def _list_v1(node: Node, count: int) -> None:
    _expect(len(json.loads(_get(node, "/v1/topics"))["topics"]), count)


def _list_sdk(node: Node, count: int) -> None:
    with Admin(node.address) as admin:
        _expect(len(admin.list_topics()), count)


def _list_consumers(node: Node, count: int) -> None:
    _expect(_get(node, "/health").count(b'"consumer_id"'), count)


def _send_now(node: Node, request: bytes) -> None:
    uvloop.run(_send_all(node.http, [request]))


async def _send_all(url: str, requests: list[bytes]) -> float:
    """The seconds until all are answered, each with success."""
    port = urllib.parse.urlsplit(url).port
    loop = asyncio.get_running_loop()
    shares = [share for n in range(CONNECTIONS) if (share := requests[n::CONNECTIONS])]
    connections = [(await loop.create_connection(Connection, "127.0.0.1", port))[1] for _ in shares]
    try:
        async with asyncio.timeout(FILL_TIMEOUT_S):
            began_s = time.perf_counter()
            await asyncio.gather(*(one.exchange(mine) for one, mine in zip(connections, shares, strict=True)))
            return time.perf_counter() - began_s
    finally:
        for connection in connections:
            connection.close()
