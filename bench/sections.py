"""The sections of the benchmark: which cases are run against each other, and how much work each is.

Rule: the systems of a section take turns, so that their ratio does not depend on the minute they ran in.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import floor
import quiver_bench
import redis_bench
import report
from machine import time_syncs
from measure import KIB, MB, MIB, Case, Row, human_size, latency_row, make_values, run_in_turns
from progress import SectionProgress
from servers import Node

IN_FLIGHT_MAX = 5  # batches; the SDK's own limit, given to the floor's client too
LATENCY_TURNS = 4
SETTLE_S = 1.0
IDLE_PARTITIONS = 100
MEMORY_VALUE_BYTES = KIB


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """How much one run of each case does: about a second each on a machine of two cores."""

    repeats: int = 3
    batches: tuple[tuple[int, int], ...] = ((KIB, 8000), (16 * KIB, 4000), (128 * KIB, 2000), (MIB, 250))
    records_100_b: int = 1_000_000
    records_1_kib: int = 200_000
    records_single: int = 200_000
    records_redis: int = 100_000
    read_quiver_times: int = 20  # the consumed topic is this many times `read_redis` records
    read_redis: int = 100_000
    latency_rounds: int = 2000
    sync_rounds: int = 200
    memory_bytes: int = 1000 * MB


QUICK = Sizes(
    repeats=1,
    batches=((KIB, 1000), (16 * KIB, 500), (128 * KIB, 200), (MIB, 50)),
    records_100_b=200_000,
    records_1_kib=50_000,
    records_single=50_000,
    records_redis=20_000,
    read_quiver_times=10,
    read_redis=50_000,
    latency_rounds=400,
    sync_rounds=50,
    memory_bytes=100 * MB,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """What every section gets. `redis_port` None: there is no Redis, `redis_missing` says why."""

    sizes: Sizes
    directory: Path
    progress: SectionProgress
    servers: str
    floor_port: int
    redis_port: int | None
    redis_missing: str

    def run(self, section: str, cases: list[Case]) -> list[Row]:
        self.progress.section(section, len(cases) * self.sizes.repeats)
        return run_in_turns(section, cases, self.sizes.repeats, self.progress)

    def skipped(self, section: str, name: str) -> list[Row]:
        return [] if self.redis_port else [Row(section, report.REDIS, name, note=f"SKIPPED: {self.redis_missing}")]


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
    if bench.redis_port:
        for run, variant in ((redis_bench.xadd_redis_py, "redis-py"), (redis_bench.xadd_by_hand, "by hand")):
            xadd = partial(run, bench.redis_port, small[: sizes.records_redis])
            cases.append(Case(report.REDIS, report.XADD_100_B, "records", xadd, variant))
    return bench.run("produce", cases) + bench.skipped("produce", report.XADD_100_B)


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
        if bench.redis_port:
            redis_bench.xadd_by_hand(bench.redis_port, values)
            for read, client in ((redis_bench.xread_redis_py, "redis-py"), (redis_bench.xread_by_hand, "by hand")):
                for count in (1000, 10_000):
                    run = partial(read, bench.redis_port, count, sizes.read_redis, 100)
                    cases.append(Case(report.REDIS, report.XREAD_100_B, "records", run, f"{client} COUNT {count}"))
        return bench.run("consume", cases) + bench.skipped("consume", report.XREAD_100_B)


def latency(bench: Bench) -> list[Row]:
    sizes = bench.sizes
    bench.progress.section("latency", LATENCY_TURNS * 2)
    quiver_s: list[float] = []
    floor_s: list[float] = []
    rounds = sizes.latency_rounds // LATENCY_TURNS
    with quiver_bench.fresh_topic(bench.servers) as topic:
        for _ in range(LATENCY_TURNS):
            bench.progress.step("Quiver")
            quiver_s += quiver_bench.round_trips(bench.servers, topic, bytes(100), rounds)
            bench.progress.step("floor")
            floor_s += floor.round_trips(bench.floor_port, 100, rounds)
    return [
        latency_row("latency", report.QUIVER, report.ONE_IN_FLIGHT, quiver_s, "send(...).result()"),
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
    "memory": memory,
}
