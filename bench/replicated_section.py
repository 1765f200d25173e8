"""The sections of a cluster of three brokers: `start`, `replicated`, `failover`, `idle`.

Rule: every topic has three replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import floor
import quiver_bench
import report
import uvloop
from crc32c import crc32c
from measure import KIB, MB, Case, Row, Sample, human_size, latency_row
from plan import Bench
from servers import Floor, ReplicatedFloor, uninterrupted

from quiver import Admin, Producer
from quiver.net.connection import open_connection
from quiver.wire.batch_check import SCHEMA_ID_V1
from quiver.wire.messages import Produce
from quiver.wire.records import batch_from_lists, encode_batch

BROKERS = 3
IN_FLIGHT_MAX = 5  # batches of one partition; the SDK's own limit, given to the floor's client too
MANAGERS = 3
MANY_IN_FLIGHT = 256
LOAD_S = 0.5  # under load before the kill
LATENCY_TURNS = 4
SETTLE_S = 5.0  # a group goes quiet after two seconds
ACK_TIMEOUT_S = 30.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Cluster:
    """`quiver up --brokers 3` with its default settings."""

    def __init__(self, directory: Path, managers: int = 1) -> None:
        self._directory = directory
        size = ("--brokers", str(BROKERS), *(("--managers", str(managers)) if managers > 1 else ()))
        self._quiver("up", *size, "--detach", "--port", "0", "--http-port", "0")

    def _quiver(self, *words: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("QUIVER_")}
        command = [str(Path(sys.executable).parent / "quiver"), *words, "--data-dir", str(self._directory)]
        done = subprocess.run(command, env=clean, capture_output=True, text=True, check=False, start_new_session=True)
        if done.returncode:
            raise RuntimeError(f"quiver {words[0]} failed: {done.stderr.strip()}")

    def _content(self) -> dict[str, Any]:
        return json.loads((self._directory / "cluster.json").read_text())

    def brokers(self) -> dict[int, dict[str, Any]]:
        return {broker["id"]: broker for broker in self._content()["brokers"]}

    @property
    def primary_http(self) -> str:
        with urllib.request.urlopen(f"{self._content()['http'][0]}/replicas", timeout=ACK_TIMEOUT_S) as answer:
            primary = json.load(answer)["primary"]
        return f"http://{primary['ip']}:{primary['port']}"

    @property
    def servers(self) -> str:
        return ",".join(broker["address"] for broker in self.brokers().values())

    def stop(self) -> None:
        with uninterrupted():
            self._quiver("down")


@contextlib.contextmanager
def cluster_of(bench: Bench, name: str, managers: int = 1) -> Iterator[Cluster]:
    cluster = Cluster(bench.directory / name, managers)
    try:
        yield cluster
    finally:
        cluster.stop()


def start(bench: Bench) -> list[Row]:
    """`quiver up --detach` of three managers and three brokers on empty disks, from the command to its return."""
    rounds = bench.sizes.start_rounds
    bench.progress.section("start", rounds)
    seconds = []
    for number in range(rounds):
        bench.progress.step(f"round {number + 1} of {rounds}")
        began_s = time.perf_counter()
        with cluster_of(bench, f"start-{number}", MANAGERS):
            seconds.append(time.perf_counter() - began_s)
    figures = {"seconds": statistics.median(seconds)}
    return [Row("start", report.QUIVER, report.START, figures, f"median of {rounds}, slowest {max(seconds):.2f} s")]


def replicated(bench: Bench) -> list[Row]:
    with contextlib.ExitStack() as stack:
        bench.progress.section("replicated: starting three brokers")
        cluster = stack.enter_context(cluster_of(bench, "cluster"))
        followers = [stack.enter_context(Floor(bench.directory / f"follower-{n}")).port for n in (1, 2)]
        leader = stack.enter_context(ReplicatedFloor(bench.directory / "floor-leader", followers)).port
        cases = []
        for size, count in bench.sizes.replicated_batches:
            name = f"{human_size(size)} batches, 3 replicas"
            quiver_run = partial(quiver_bench.produce_batches, cluster.servers, size, count)
            floor_run = partial(floor.send_frames, leader, size, count, IN_FLIGHT_MAX)
            cases.append(Case(report.QUIVER, name, "batches", quiver_run, f"{IN_FLIGHT_MAX} in flight"))
            cases.append(Case(report.FLOOR, name, "batches", floor_run, f"{IN_FLIGHT_MAX} in flight"))
        count, said = bench.sizes.small_batches, f"{MANY_IN_FLIGHT} in flight"
        small = partial(produce_small, cluster.servers, count)
        cases.append(Case(report.QUIVER, report.SMALL_BATCHES, "batches", small, said))
        floor_small = partial(floor.send_frames, leader, 100, count, MANY_IN_FLIGHT)
        cases.append(Case(report.FLOOR, report.SMALL_BATCHES, "batches", floor_small, said))
        rows = bench.run("replicated", cases)
        return rows + _latency(bench, cluster.servers, leader)


def _latency(bench: Bench, servers: str, floor_port: int) -> list[Row]:
    bench.progress.section("replicated: latency", LATENCY_TURNS * 3)
    quiver_s: list[float] = []
    aio_s: list[float] = []
    floor_s: list[float] = []
    rounds = bench.sizes.latency_rounds // LATENCY_TURNS
    with quiver_bench.fresh_topic(servers) as topic:
        for _ in range(LATENCY_TURNS):
            bench.progress.step("Quiver")
            quiver_s += quiver_bench.round_trips(servers, topic, bytes(100), rounds)
            bench.progress.step("Quiver, asyncio")
            aio_s += quiver_bench.round_trips_aio(servers, topic, bytes(100), rounds)
            bench.progress.step("floor")
            floor_s += floor.round_trips(floor_port, 100, rounds)
    return [
        latency_row("replicated", report.QUIVER, report.ONE_IN_FLIGHT_3, quiver_s, "send(...).result()"),
        latency_row("replicated", report.QUIVER, report.ONE_IN_FLIGHT_3_AIO, aio_s, "await (await send(...))"),
        latency_row("replicated", report.FLOOR, report.ONE_IN_FLIGHT_3, floor_s),
    ]


def produce_small(servers: str, count: int) -> Sample:
    """Batches of one record on one partition, each acknowledged by itself."""
    payload = encode_batch(batch_from_lists([0], None, [bytes(100)], None))
    request_of = partial(Produce, partition=0, record_count=1, timestamp_min=0, timestamp_max=0)

    async def run(topic: str, address: str) -> float:
        connection = await open_connection(address, "bench", timeout_s=10)
        request = request_of(topic=topic, payload_crc=crc32c(payload), schema_id=SCHEMA_ID_V1)
        began_s = time.perf_counter()
        left = count

        async def worker() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await connection.submit(request, [payload])

        await asyncio.gather(*(worker() for _ in range(MANY_IN_FLIGHT)))
        seconds = time.perf_counter() - began_s
        connection.close()
        return seconds

    with quiver_bench.fresh_topic(servers) as topic, Producer(servers) as producer:
        producer.send(topic, b"first").result()
        return Sample(uvloop.run(run(topic, leader_of(servers, topic))), count, count * 100)


def leader_of(servers: str, topic: str) -> str:
    with Admin(servers) as admin:
        nodes = {node.id: node.address for node in admin.nodes()}
        return nodes[admin.describe_topic(topic).partitions[0].leader]


def failover(bench: Bench) -> list[Row]:
    """From the kill of a leader under load to the next acknowledgement, each time after all replicas caught up.

    The acknowledgement that counts is of a record that was sent when the leader was seen to be dead, so that one which
    was under way at that moment cannot be taken for it. It is sent behind all that were in flight, in the same
    partition: it is acknowledged after they are. The time begins before the kill.
    """
    rounds = bench.sizes.failover_rounds
    bench.progress.section("failover", rounds)
    seconds = []
    with (
        cluster_of(bench, "failover") as cluster,
        quiver_bench.fresh_topic(cluster.servers) as topic,
        Producer(cluster.servers) as producer,
    ):
        for number in range(rounds):
            bench.progress.step(f"round {number + 1} of {rounds}")
            seconds.append(_fail_over(cluster, producer, topic))
    note = f"{rounds} rounds of SIGKILL, {MANY_IN_FLIGHT} sends in flight"
    return [latency_row("failover", report.QUIVER, report.FAILOVER, seconds, note)]


class Load:
    """Records to one topic, so many in flight all the time, until the block ends; then each must be acknowledged."""

    def __init__(self, producer: Producer, topic: str) -> None:
        self._producer, self._topic = producer, topic
        self._in_flight: deque[Any] = deque()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def unacknowledged(self) -> int:
        return sum(not sent.done() for sent in self._in_flight.copy())

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                while len(self._in_flight) < MANY_IN_FLIGHT:
                    self._in_flight.append(self._producer.send(self._topic, bytes(100)))
                self._in_flight.popleft().result(ACK_TIMEOUT_S)
            for sent in self._in_flight:
                sent.result(ACK_TIMEOUT_S)
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._error is not None:
            raise RuntimeError("a record of the load was not acknowledged") from self._error


def _fail_over(cluster: Cluster, producer: Producer, topic: str) -> float:
    until_all_replicas(cluster.servers, topic)
    address = leader_of(cluster.servers, topic)
    leader = next(broker for broker in cluster.brokers().values() if broker["address"] == address)
    with Load(producer, topic) as load:
        time.sleep(LOAD_S)
        began_s = time.perf_counter()
        kill_and_wait(leader["pid"])
        if not load.unacknowledged:
            raise RuntimeError("nothing was in flight when the leader died")
        producer.send(topic, bytes(100)).result(ACK_TIMEOUT_S)
        taken_s = time.perf_counter() - began_s
    deadline_s = time.monotonic() + ACK_TIMEOUT_S
    while cluster.brokers()[leader["id"]]["pid"] == leader["pid"] and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return taken_s


def kill_and_wait(pid: int) -> None:
    """Returns when it is dead: a signal alone lets a process on another core run a little longer."""
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if not select.select([descriptor], [], [], ACK_TIMEOUT_S)[0]:
            raise RuntimeError(f"process {pid} does not die")
    finally:
        os.close(descriptor)


def until_all_replicas(servers: str, topic: str) -> None:
    """Waits until the leader sees every replica at its own end."""
    deadline_s = time.monotonic() + ACK_TIMEOUT_S
    with Admin(servers) as admin:
        while time.monotonic() < deadline_s:
            found = [status for status in admin.partition_status(topic) if status.role == "leader"]
            if found and len(found[0].replicas) == BROKERS and not any(replica.lag for replica in found[0].replicas):
                return
            time.sleep(0.05)
    raise RuntimeError("a replica does not catch up")


def idle(bench: Bench) -> list[Row]:
    """What partitions cost that nobody uses, and what the first record to one of them costs."""
    partitions = bench.sizes.idle_partitions
    bench.progress.section("idle", 4)
    bench.progress.step(f"{partitions:,} partitions")
    with (
        cluster_of(bench, "idle") as cluster,
        quiver_bench.fresh_topic(cluster.servers, partitions) as topic,
        Producer(cluster.servers) as producer,
    ):
        usual = [_timed(producer, topic, 0) for _ in range(200)]
        for future in [producer.send(topic, b"one", partition=number) for number in range(partitions)]:
            future.result(60)
        bench.progress.step("settling")
        time.sleep(SETTLE_S)
        bench.progress.step("watching")
        before = {number: _cpu_s(broker["pid"]) for number, broker in cluster.brokers().items()}
        time.sleep(bench.sizes.idle_s)
        shares = [
            (_cpu_s(broker["pid"]) - before[number]) / bench.sizes.idle_s * 100
            for number, broker in cluster.brokers().items()
        ]
        rss = [_rss_bytes(broker["pid"]) / MB for broker in cluster.brokers().values()]
        bench.progress.step("waking")
        chosen = random.Random(1).sample(range(partitions), min(50, partitions))
        woken = [_timed(producer, topic, number) for number in chosen]
    usual_ms, late_ms = statistics.median(usual) * 1000, max(woken) * 1000
    note = f"usual p50 {usual_ms:.1f} ms, slowest of {len(woken)} woken {late_ms:.1f} ms"
    return [
        Row("idle", report.QUIVER, report.IDLE_CPU, {"percent": max(shares)}, "of one core, the busiest broker"),
        Row("idle", report.QUIVER, report.IDLE_RSS, {"rss_mb": max(rss)}, "the largest broker"),
        Row("idle", report.QUIVER, report.IDLE_WAKE, {"p99_ms": late_ms - usual_ms}, note),
    ]


def _timed(producer: Producer, topic: str, partition: int) -> float:
    began_s = time.perf_counter()
    producer.send(topic, bytes(100), partition=partition).result(ACK_TIMEOUT_S)
    return time.perf_counter() - began_s


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _rss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith("VmRSS"))
