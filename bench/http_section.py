"""The section `http`: the classic calls of Quiver and of a queue of the classic design, under one load."""

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
from servers import HERE, run_child

CALLS = {"produce": report.CLASSIC_PRODUCE, "consume": report.CLASSIC_CONSUME}


def http(bench: Bench) -> list[Row]:
    bench.progress.section("http: starting the reference queue")
    sizes = bench.sizes
    quiver_port = urllib.parse.urlsplit(bench.http).port
    said = f"{CONNECTIONS} connections"
    cases = [
        Case(report.QUIVER, name, "requests", partial(_run_quiver, bench, quiver_port, call, sizes.http_quiver), said)
        for call, name in CALLS.items()
    ]
    with contextlib.ExitStack() as stack:
        try:
            postgres = stack.enter_context(PostgresServer(bench.directory / "postgres"))
        except PostgresUnavailableError as missing:
            skipped = bench.skip("http", report.REFERENCE, list(CALLS.values()), str(missing))
            return bench.run("http", cases) + skipped
        reference = stack.enter_context(ReferenceServer(bench.directory / "reference", postgres.url))
        how = f"{said}; Flask, SQLAlchemy, PostgreSQL {reference.postgresql}"
        for call, name in CALLS.items():
            run = partial(run_load, reference.port, call, sizes.http_reference)
            cases.append(Case(report.REFERENCE, name, "requests", run, how))
        return bench.run("http", cases)


def _run_quiver(bench: Bench, port: int, call: str, requests: int) -> Sample:
    topic = next_topic()
    sample = run_load(port, call, requests, topic)
    delete_topic(bench.servers, topic)
    return sample


def run_load(port: int, call: str, requests: int, topic: str | None = None) -> Sample:
    command = [sys.executable, str(HERE / "http_load.py"), str(port), call, topic or next_topic(), str(requests)]
    found = json.loads(run_child(command))
    count = int(found["requests"])
    latency = {name: found[name] for name in ("p50_ms", "p99_ms")}
    return Sample(found["seconds"], count, count * MESSAGE_BYTES, latency)
