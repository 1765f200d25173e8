"""The section `groups`: what commits cost, and what a member's death costs the others.

Rule: members are processes; a pause is the time between two records of one partition that anybody read.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import quiver_bench
import report
from measure import Case, Row, Sample, latency_row, make_values
from plan import Bench
from servers import HERE, end

from quiver import Consumer, Producer

PARTITIONS = 12
MEMBERS = 4
SESSION_S = 2.0
STEP_S = 0.02  # between two records of a partition
BEFORE_S = 2.0  # looked at before the kill
AFTER_S = SESSION_S + 2.0
SETTLE_S_MAX = 60.0
COMMIT_S = 1.0


def groups(bench: Bench) -> list[Row]:
    return _commits(bench) + _death(bench)


# -- commits -------------------------------------------------------------------------------------------------------


def _commits(bench: Bench) -> list[Row]:
    """The same topic read by a group of one, with and without a commit every second; so often that several come in."""
    bench.progress.section("groups: filling")
    values, times = make_values(bench.sizes.read_redis, 100), bench.sizes.group_times
    count = len(values) * times
    with quiver_bench.fresh_topic(bench.servers, PARTITIONS) as topic:
        quiver_bench.fill_topic(bench.servers, topic, values, times)
        cases = [
            Case(system, name, "records", partial(_read, bench.servers, topic, count, passes, interval_s, arrow=arrow))
            for name, arrow, passes in ((report.GROUP_POLL, False, 2), (report.GROUP_POLL_ARROW, True, 4))
            for system, interval_s in ((report.QUIVER, COMMIT_S), (report.NO_COMMITS, None))
        ]
        return bench.run("groups", cases)


_names = itertools.count(1)


def _read(servers: str, topic: str, count: int, passes: int, interval_s: float | None, *, arrow: bool) -> Sample:
    settings = {"group": f"bench-{next(_names)}", "commit_interval": interval_s}
    with Consumer(servers, [topic], **settings) as consumer:
        read, began_s = 0, time.perf_counter()
        for end_of_pass in range(count, count * passes + 1, count):
            while read < end_of_pass:
                if arrow:
                    got = consumer.poll_arrow(quiver_bench.READ_TIMEOUT_S).num_rows
                else:
                    got = len(consumer.poll(quiver_bench.POLL_RECORDS_MAX, quiver_bench.READ_TIMEOUT_S))
                if not got:
                    raise RuntimeError(f"{read} of {count * passes} records came, then none")
                read += got
            for partition in range(PARTITIONS):
                consumer.seek(topic, partition, 0)
        seconds = time.perf_counter() - began_s
    return Sample(seconds, read, read * 100)


# -- the death of a member -----------------------------------------------------------------------------------------


class Member:
    """`reads` has (partition, time); only the thread that listens adds to it."""

    def __init__(self, servers: str, topic: str) -> None:
        command = [sys.executable, str(HERE / "group_member.py"), servers, topic, "bench", str(SESSION_S)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        self.reads: list[tuple[int, float]] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            partition, at_s = line.split()
            self.reads.append((int(partition), float(at_s)))

    def since(self, began_s: float) -> set[int]:
        """The partitions that it has read from."""
        return {partition for partition, at_s in self.reads[:] if at_s >= began_s}

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()
        end(self._process, signal.SIGKILL)


@contextlib.contextmanager
def _members(servers: str, topic: str) -> Iterator[list[Member]]:
    made: list[Member] = []
    try:
        for _ in range(MEMBERS):
            made.append(Member(servers, topic))
        yield made
    finally:
        for member in made:
            member.kill()


@contextlib.contextmanager
def _load(servers: str, topic: str) -> Iterator[None]:
    ended = threading.Event()

    def produce() -> None:
        with Producer(servers, linger_ms=0) as producer:
            while not ended.wait(STEP_S):
                for partition in range(PARTITIONS):
                    producer.send(topic, b"one", partition=partition)

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _death(bench: Bench) -> list[Row]:
    rounds = bench.sizes.group_deaths
    bench.progress.section("groups: a member is killed", rounds)
    resumed_s: list[float] = []
    kept_s: list[float] = []
    before_s: list[float] = []
    for number in range(1, rounds + 1):
        bench.progress.step(f"({number}/{rounds})")
        with quiver_bench.fresh_topic(bench.servers, PARTITIONS) as topic, _load(bench.servers, topic):
            one = _one_death(bench.servers, topic)
            for known, new in zip((resumed_s, kept_s, before_s), one, strict=True):
                known.extend(new)
    note = f"{PARTITIONS} partitions, {MEMBERS} members, sessions of {SESSION_S:g} s, killed {rounds} times"
    longest = {"seconds": max(resumed_s)}
    return [
        Row("groups", report.QUIVER, report.GROUP_RESUME, longest, f"{note}; longest of {len(resumed_s)}"),
        _gaps(report.QUIVER, kept_s, "from the kill on"),
        _gaps(report.BEFORE, before_s, "the same partitions"),
    ]


def _gaps(system: str, gaps_s: list[float], note: str) -> Row:
    row = latency_row("groups", system, report.GROUP_KEPT, gaps_s, f"between two records, {note}; `s` is the longest")
    return Row(row.section, system, row.name, row.figures | {"seconds": max(gaps_s)}, row.note)


def _one_death(servers: str, topic: str) -> tuple[list[float], list[float], list[float]]:
    """(how long each moved partition paused, gaps between records of the others afterwards, and before)."""
    with _members(servers, topic) as members:
        shares = _until_shared(members)
        time.sleep(BEFORE_S)
        killed_s = time.monotonic()
        members[0].kill()
        time.sleep(AFTER_S)
        reads = sorted((at_s, partition) for member in members for partition, at_s in member.reads[:])
    moved, kept = shares[0], set().union(*shares[1:])
    times = {partition: [at_s for at_s, read in reads if read == partition] for partition in moved | kept}
    resumed = [_gap_around(times[partition], killed_s) for partition in moved]
    after = [gap for partition in kept for gap in _gaps_in(times[partition], killed_s, killed_s + AFTER_S)]
    before = [gap for partition in kept for gap in _gaps_in(times[partition], killed_s - BEFORE_S, killed_s)]
    return resumed, after, before


def _gap_around(times: list[float], at_s: float) -> float:
    """From that moment to the next record, or to the end when none came."""
    return next((found for found in times if found > at_s), float("inf")) - at_s


def _gaps_in(times: list[float], begin_s: float, end_s: float) -> list[float]:
    inside = [at_s for at_s in times if begin_s <= at_s <= end_s]
    return [after - before for before, after in itertools.pairwise(inside)]


def _until_shared(members: list[Member]) -> list[set[int]]:
    """What each of them reads, once all is read, by one each."""
    deadline_s = time.monotonic() + SETTLE_S_MAX
    while time.monotonic() < deadline_s:
        time.sleep(0.2)
        shares = [member.since(time.monotonic() - 0.5) for member in members]
        if sum(map(len, shares)) == len(set().union(*shares)) == PARTITIONS and all(shares):
            return shares
    raise RuntimeError("the members did not share the partitions")
