"""Groups of real processes: one is killed, the primary is killed, members come and go; nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from quiver import Admin, Producer
from tests.system.group_kit import Members
from tests.system.kit import create_topic, until
from tests.system.managed_kit import ManagedCluster

PARTITIONS = 12
SESSION_S = 4.0
SETTLE_S_MAX = 60.0


def seen(members: Members) -> dict[tuple[int, int], list[tuple[int, float]]]:
    """All that was read: (partition, offset) -> [(member, time)]."""
    found: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
    for number, member in enumerate(members.all):
        for read in member.reads[:]:
            for offset in range(read.first, read.end):
                found[read.partition, offset].append((number, read.at_s))
    return found


@contextlib.contextmanager
def load(servers: str, topic: str) -> Iterator[list[float]]:
    """A record for each partition about every 20 ms; the list has when each of these rounds began."""
    rounds: list[float] = []
    ended = threading.Event()

    def produce() -> None:
        with Producer(servers, linger_ms=0) as producer:
            while not ended.wait(0.02):
                rounds.append(time.monotonic())
                for partition in range(PARTITIONS):
                    producer.send(topic, b"%d" % len(rounds), partition=partition)

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield rounds
    finally:
        ended.set()
        thread.join(30)


def until_shared(members: Members, numbers: set[int]) -> dict[int, int]:
    """Who reads which partition, once each of them has as much as the others: then nothing is to move any more."""

    def find() -> dict[int, int] | None:
        last: dict[int, tuple[float, int]] = {}
        for number, member in enumerate(members.all):
            for read in member.reads[:]:
                last[read.partition] = max(last.get(read.partition, (0.0, 0)), (read.at_s, number))
        shares = Counter(number for _, number in last.values())
        is_even = len(last) == PARTITIONS and max(shares.values()) - min(shares.values()) <= 1
        return {one: number for one, (_, number) in last.items()} if is_even and shares.keys() == numbers else None

    found: dict[int, int] = until(find, SETTLE_S_MAX)
    return found


def times(members: Members, partition: int, since_s: float) -> list[float]:
    """When somebody read from it since then."""
    return sorted({at for one in members.all for p, _, _, at in one.reads[:] if p == partition and at > since_s})


def until_all_read(members: Members, rounds: int) -> None:
    until(lambda: len(seen(members)) >= rounds * PARTITIONS)
    assert set(seen(members)) == {(p, offset) for p in range(PARTITIONS) for offset in range(rounds)}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ManagedCluster]:
    with ManagedCluster(tmp_path) as made:
        create_topic(made.servers, "t", PARTITIONS)
        yield made


def test_one_of_four_is_killed_and_only_its_partitions_pause(cluster: ManagedCluster) -> None:
    with Members(cluster.servers, "t", SESSION_S) as members:
        with load(cluster.servers, "t") as rounds:
            numbers = {members.start() for _ in range(4)}
            before = until_shared(members, numbers)
            members.all[3].kill()
            killed_s = time.monotonic()
            after = until_shared(members, numbers - {3})
        moved = {partition for partition, owner in before.items() if owner == 3}
        assert {p for p in before if before[p] != after[p]} == moved, "a member keeps what it keeps"
        resumed_s = min(times(members, partition, killed_s)[0] for partition in moved)
        sent = sum(killed_s < at_s < resumed_s for at_s in rounds)
        reads = seen(members)
        for partition in before.keys() - moved:
            # An offset is the number of its round.
            due = (reads[partition, offset] for offset, at_s in enumerate(rounds) if at_s > killed_s)
            meanwhile = sum(any(at_s < resumed_s for _, at_s in who) for who in due)
            assert meanwhile > sent / 10, f"{partition} was not read while the others waited for the session to end"
        until_all_read(members, len(rounds))


def test_members_come_and_go_and_nothing_is_lost(cluster: ManagedCluster) -> None:
    """Also while the primary is killed. Twice read is only what the one that was killed had not stored."""
    with Members(cluster.servers, "t", SESSION_S) as members:
        with load(cluster.servers, "t") as rounds:
            for _ in range(3):
                members.start()
            until_shared(members, {0, 1, 2})
            members.all[0].stop()
            until_shared(members, {1, 2})
            os.kill(cluster.manager_pid(cluster.primary()), signal.SIGKILL)
            members.start()
            until_shared(members, {1, 2, 3})
            members.all[1].kill()
            until_shared(members, {2, 3})
        until_all_read(members, len(rounds))
        twice = {place: reads for place, reads in seen(members).items() if len(reads) > 1}
        gone = {1} | {number for number, member in enumerate(members.all) if member.lost}
        assert all(gone & {number for number, _ in reads} for reads in twice.values()), (
            "only of the one that was killed"
        )
        for number in (2, 3):
            members.all[number].stop()
        with Admin(cluster.servers) as admin:
            info, positions = admin.describe_group("g")
        assert info.member_count == 0
        assert [one.lag for one in positions] == [0] * PARTITIONS, "a clean end stores everything"
