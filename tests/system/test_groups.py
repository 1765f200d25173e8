"""Groups of real processes: one is killed, the primary is killed, members come and go; nothing is lost."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from quiver import Admin, Producer
from tests.system.group_kit import Members
from tests.system.kit import create_topic, until
from tests.system.managed_kit import ManagedCluster

PARTITIONS = 12
SESSION_S = 2.0


def seen(members: Members) -> dict[tuple[int, int], list[tuple[int, float]]]:
    """All that was read: (partition, offset) -> [(member, time)]."""
    found: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
    for number, member in enumerate(members.all):
        for read in member.reads[:]:
            for offset in range(read.first, read.end):
                found[read.partition, offset].append((number, read.at_s))
    return found


def readers(members: Members, since_s: float) -> dict[int, set[int]]:
    """Who has read from each partition since then."""
    found: dict[int, set[int]] = defaultdict(set)
    for number, member in enumerate(members.all):
        for read in member.reads[:]:
            if read.at_s > since_s:
                found[read.partition].add(number)
    return found


@contextlib.contextmanager
def load(servers: str, topic: str) -> Iterator[list[int]]:
    """A record for each partition about every 20 ms; the list has how many rounds there were."""
    rounds, ended = [0], threading.Event()

    def produce() -> None:
        with Producer(servers, linger_ms=0) as producer:
            while not ended.wait(0.02):
                for partition in range(PARTITIONS):
                    producer.send(topic, b"%d" % rounds[0], partition=partition)
                rounds[0] += 1

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield rounds
    finally:
        ended.set()
        thread.join(30)


def until_shared(members: Members, numbers: set[int]) -> dict[int, int]:
    """Who reads which partition, once each is read by one and everyone has a share."""

    def find() -> dict[int, int] | None:
        owners = readers(members, time.monotonic() - 0.5)
        if len(owners) == PARTITIONS and all(len(one) == 1 for one in owners.values()):
            found = {partition: next(iter(one)) for partition, one in owners.items()}
            return found if set(found.values()) == numbers else None
        return None

    found: dict[int, int] = until(find)
    return found


def gaps(members: Members, partition: int, since_s: float, until_s: float) -> float:
    times = sorted(at_s for (p, _), reads in seen(members).items() if p == partition for _, at_s in reads)
    times = [at_s for at_s in times if since_s <= at_s <= until_s]
    return max((b - a for a, b in itertools.pairwise(times)), default=float("inf"))


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
            killed_s = time.monotonic()
            members.all[3].kill()
            after = until_shared(members, numbers - {3})
            until(lambda: time.monotonic() > killed_s + SESSION_S + 1)
        moved = {partition for partition, owner in before.items() if owner == 3}
        now_s = time.monotonic()
        assert {p for p in before if before[p] != after[p]} == moved, "a member keeps what it keeps"
        for partition in before:
            gap_s = gaps(members, partition, killed_s - 0.5, now_s)
            assert gap_s < (SESSION_S + 1 if partition in moved else 0.8), f"{partition} paused for {gap_s:.2f} s"
        until_all_read(members, rounds[0])


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
        until_all_read(members, rounds[0])
        twice = {place: reads for place, reads in seen(members).items() if len(reads) > 1}
        assert all(reads[0][0] == 1 for reads in twice.values()), "only of the one that was killed"
        for number in (2, 3):
            members.all[number].stop()
        with Admin(cluster.servers) as admin:
            info, positions = admin.describe_group("g")
        assert info.member_count == 0
        assert [one.lag for one in positions] == [0] * PARTITIONS, "a clean end stores everything"
