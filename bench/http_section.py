"""The sections `http` and `http-replicated`: classic calls of Quiver and of a queue of the classic design, one load."""

from __future__ import annotations

import contextlib
import json
import sys
import urllib.parse
from functools import partial

import report
from http_load import CONNECTIONS, MESSAGE_BYTES
from measure import Case, Row, Sample
from plan import Bench
from quiver_bench import delete_topic, next_topic
from reference_servers import PostgresServer, PostgresUnavailableError, ReferenceServer
from replicated_section import BROKERS, cluster_of
from servers import HERE, run_child

CALLS = {"produce": report.CLASSIC_PRODUCE, "consume": report.CLASSIC_CONSUME}
CALLS_3 = {"produce": report.CLASSIC_PRODUCE_3, "consume": report.CLASSIC_CONSUME_3}
MANAGERS = 3


def http(bench: Bench) -> list[Row]:
    return _compare(bench, "http", bench.servers, bench.http, CALLS, "")


def http_replicated(bench: Bench) -> list[Row]:
    """The same through the primary of three managers, every message on a majority of three brokers' disks."""
    bench.progress.section("http-replicated: starting three managers and three brokers")
    with cluster_of(bench, "http-cluster", MANAGERS) as cluster:
        said = f"{MANAGERS} managers, {BROKERS} brokers, {BROKERS} replicas"
        return _compare(bench, "http-replicated", cluster.servers, cluster.primary_http, CALLS_3, said)


def _compare(bench: Bench, section: str, servers: str, url: str, calls: dict[str, str], what: str) -> list[Row]:
    bench.progress.section(f"{section}: starting the reference queue")
    sizes = bench.sizes
    quiver_port = urllib.parse.urlsplit(url).port
    said = f"{CONNECTIONS} connections"
    ours = ", ".join(filter(None, (said, what)))
    cases = [
        Case(report.QUIVER, name, "requests", partial(_run_quiver, servers, quiver_port, call, sizes.http_quiver), ours)
        for call, name in calls.items()
    ]
    with contextlib.ExitStack() as stack:
        try:
            postgres = stack.enter_context(PostgresServer(bench.directory / f"{section}-postgres"))
        except PostgresUnavailableError as missing:
            skipped = bench.skip(section, report.REFERENCE, list(calls.values()), str(missing))
            return bench.run(section, cases) + skipped
        reference = stack.enter_context(ReferenceServer(bench.directory / f"{section}-reference", postgres.url))
        how = f"{said}; Flask, SQLAlchemy, PostgreSQL {reference.postgresql}"
        for call, name in calls.items():
            run = partial(run_load, reference.port, call, sizes.http_reference)
            cases.append(Case(report.REFERENCE, name, "requests", run, how))
        return bench.run(section, cases)


def _run_quiver(servers: str, port: int, call: str, requests: int) -> Sample:
    topic = next_topic()
    sample = run_load(port, call, requests, topic)
    delete_topic(servers, topic)
    return sample


def run_load(port: int, call: str, requests: int, topic: str | None = None) -> Sample:
    command = [sys.executable, str(HERE / "http_load.py"), str(port), call, topic or next_topic(), str(requests)]
    found = json.loads(run_child(command))
    count = int(found["requests"])
    latency = {name: found[name] for name in ("p50_ms", "p99_ms")}
    return Sample(found["seconds"], count, count * MESSAGE_BYTES, latency)
