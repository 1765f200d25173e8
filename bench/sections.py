"""The sections of the benchmark: which cases are run against each other, and how much work each is.

Rule: the systems of a section take turns, so that their ratio does not depend on the minute they ran in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import floor
import quiver_bench
import redis_bench
import report
from group_section import groups
from http_section import http, http_replicated
from machine import time_syncs
from measure import KIB, MB, Case, Row, human_size, latency_row, make_values
from metadata_section import metadata
from plan import Bench
from replicated_section import failover, idle, replicated, start
from servers import Node
from sim_section import simulator
from spark_section import spark

IN_FLIGHT_MAX = 5  # batches; the SDK's own limit, given to the floor's client too
LATENCY_TURNS = 4
SETTLE_S = 1.0
IDLE_PARTITIONS = 100
MEMORY_VALUE_BYTES = KIB


def disk(bench: Bench) -> list[Row]:
    """What the disk itself takes. Always measured: every other figure depends on it."""
    bench.progress.section("disk")
    return [
        latency_row(
            "disk",
            "disk",
            f"append {human_size(size)}, fdatasync",
            time_syncs(bench.directory, size, bench.sizes.sync_rounds),
            "no network",
        )
        for size in (100, 128 * KIB)
    ]


def batches(bench: Bench) -> list[Row]:
    cases = []
    for size, count in bench.sizes.batches:
        name = f"{human_size(size)} batches"
        quiver_run = partial(quiver_bench.produce_batches, bench.servers, size, count)
        floor_run = partial(floor.send_frames, bench.floor_port, size, count, IN_FLIGHT_MAX)
        cases.append(Case(report.QUIVER, name, "batches", quiver_run, f"{IN_FLIGHT_MAX} in flight, 1 KiB values"))
        cases.append(Case(report.FLOOR, name, "batches", floor_run, f"{IN_FLIGHT_MAX} in flight"))
    return bench.run("batches", cases)


def produce(bench: Bench) -> list[Row]:
    sizes = bench.sizes
    small, large = make_values(sizes.records_100_b, 100), make_values(sizes.records_1_kib, KIB)

    def quiver_case(name: str, run: Callable, values: list[bytes], variant: str) -> Case:
        return Case(report.QUIVER, name, "records", partial(run, bench.servers, values), variant)

    per_call = f"{quiver_bench.RECORDS_PER_CALL:,} records a call"
    cases = [
        quiver_case(report.SEND_MANY_100_B, quiver_bench.produce_many, small, per_call),
        quiver_case("send_many, 1 KiB", quiver_bench.produce_many, large, per_call),
        quiver_case("send, 100 B", quiver_bench.produce_single, small[: sizes.records_single], "one record a call"),
    ]
    if not bench.redis_port:
        missing = bench.skip("produce", report.REDIS, [report.XADD_100_B], bench.redis_missing)
        return bench.run("produce", cases) + missing
    values = small[: sizes.records_redis]
    for count in redis_bench.COUNTS:
        xadd = partial(redis_bench.xadd_redis_py, bench.redis_port, values, count)
        cases.append(Case(report.REDIS, report.XADD_100_B, "records", xadd, f"pipelines of {count:,}"))
    by_hand = partial(redis_bench.xadd_by_hand, bench.redis_port, values)
    cases.append(Case(report.REDIS, report.XADD_BY_HAND, "records", by_hand))
    rows = bench.run("produce", cases)
    return redis_notes(rows, report.XADD_100_B, report.XADD_BY_HAND, [report.SEND_MANY_100_B])


def consume(bench: Bench) -> list[Row]:
    sizes = bench.sizes
    bench.progress.section("consume: filling")
    values = make_values(sizes.read_redis, 100)
    with quiver_bench.fresh_topic(bench.servers) as topic:
        quiver_bench.fill_topic(bench.servers, topic, values, sizes.read_quiver_times)
        cases = []
        for name, arrow in ((report.POLL_ARROW, True), (report.POLL, False)):
            stored = sizes.read_redis * sizes.read_quiver_times
            run = partial(quiver_bench.consume, bench.servers, topic, stored, 100, arrow=arrow)
            variant = "" if arrow else f"max_records={quiver_bench.POLL_RECORDS_MAX}"
            cases.append(Case(report.QUIVER, name, "records", run, variant))
        if not bench.redis_port:
            missing = bench.skip("consume", report.REDIS, [report.XREAD_100_B], bench.redis_missing)
            return bench.run("consume", cases) + missing
        redis_bench.xadd_by_hand(bench.redis_port, values)
        reads = ((report.XREAD_100_B, redis_bench.xread_redis_py), (report.XREAD_BY_HAND, redis_bench.xread_by_hand))
        for name, read in reads:
            for count in redis_bench.COUNTS:
                run = partial(read, bench.redis_port, count, sizes.read_redis, 100)
                cases.append(Case(report.REDIS, name, "records", run, f"COUNT {count:,}"))
        rows = bench.run("consume", cases)
    return redis_notes(rows, report.XREAD_100_B, report.XREAD_BY_HAND, [report.POLL_ARROW, report.POLL])


def redis_notes(rows: list[Row], judged: str, by_hand: str, names: list[str]) -> list[Row]:
    """Says which Redis row the targets use, and what the ratios to the other one are."""
    ratios = report.ratios(rows, names, (report.REDIS, by_hand), "records_per_s")
    notes = {
        judged: f"JUDGED: {redis_bench.client_name()}",
        by_hand: f"not judged: hand-packed client, of which {ratios}",
    }
    return [
        replace(row, note="; ".join(filter(None, (notes[row.name], row.note)))) if row.name in notes else row
        for row in rows
    ]


def latency(bench: Bench) -> list[Row]:
    sizes = bench.sizes
    bench.progress.section("latency", LATENCY_TURNS * 3)
    quiver_s: list[float] = []
    aio_s: list[float] = []
    floor_s: list[float] = []
    rounds = sizes.latency_rounds // LATENCY_TURNS
    with quiver_bench.fresh_topic(bench.servers) as topic:
        for _ in range(LATENCY_TURNS):
            bench.progress.step("Quiver")
            quiver_s += quiver_bench.round_trips(bench.servers, topic, bytes(100), rounds)
            bench.progress.step("Quiver, asyncio")
            aio_s += quiver_bench.round_trips_aio(bench.servers, topic, bytes(100), rounds)
            bench.progress.step("floor")
            floor_s += floor.round_trips(bench.floor_port, 100, rounds)
    return [
        latency_row("latency", report.QUIVER, report.ONE_IN_FLIGHT, quiver_s, "send(...).result()"),
        latency_row("latency", report.QUIVER, report.ONE_IN_FLIGHT_AIO, aio_s, "await (await send(...)), asyncio SDK"),
        latency_row("latency", report.FLOOR, report.ONE_IN_FLIGHT, floor_s),
    ]


def memory(bench: Bench) -> list[Row]:
    """On nodes of their own. A reading node is a new process: memory left over from producing would hide its growth."""
    bench.progress.section("memory", 4)
    bench.progress.step(f"idle node with {IDLE_PARTITIONS} partitions")
    with Node(bench.directory / "idle-node") as node, quiver_bench.fresh_topic(node.address, IDLE_PARTITIONS) as topic:
        quiver_bench.fill_partitions(node.address, topic, IDLE_PARTITIONS)
        time.sleep(SETTLE_S)
        idle_bytes = node.memory_bytes()["VmRSS"]
    rows = [Row("memory", report.QUIVER, report.IDLE_NODE, {"rss_mb": idle_bytes / MB}, "one record in each")]

    directory, topic = bench.directory / "read-node", "read"
    values = make_values(10_000, MEMORY_VALUE_BYTES)
    times = -(-bench.sizes.memory_bytes // (len(values) * MEMORY_VALUE_BYTES))
    bench.progress.step("filling")
    with Node(directory) as node:
        quiver_bench.fill_topic(node.address, topic, values, times, create=True)
    for name, arrow in ((report.GROWTH_POLL_ARROW, True), (report.GROWTH_POLL, False)):
        bench.progress.step(name)
        with Node(directory) as node:
            node.forget_peak()
            before_bytes = node.memory_bytes()["VmRSS"]
            read = quiver_bench.consume(node.address, topic, times * len(values), MEMORY_VALUE_BYTES, arrow=arrow)
            grown_bytes = node.memory_bytes()["VmHWM"] - before_bytes
        note = f"over {before_bytes / MB:.0f} MB; {read.value_bytes / MB:,.0f} MB read"
        rows.append(Row("memory", report.QUIVER, name, {"rss_mb": grown_bytes / MB}, note))
    return rows


SECTIONS: dict[str, Callable[[Bench], list[Row]]] = {
    "batches": batches,
    "produce": produce,
    "consume": consume,
    "latency": latency,
    "http": http,
    "memory": memory,
    "spark": spark,
    "start": start,
    "replicated": replicated,
    "failover": failover,
    "idle": idle,
    "http-replicated": http_replicated,
    "metadata": metadata,
    "groups": groups,
    "simulator": simulator,
}
