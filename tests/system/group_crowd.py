"""Very many members of one group: how long they take to share, and what they cost the primary while nothing happens.

    python -m tests.system.group_crowd --members 1000
    python -m tests.system.group_crowd --members 1000 --consumers

Members of this process share a few connections; with `--consumers` each is a `quiver.aio.Consumer` with its own, which
reads. They come all at once, sit still for a while, then a tenth of them falls silent and the others take over.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import uvloop

from quiver import aio
from quiver.client.cluster import Cluster
from quiver.client.group_member import GroupMember
from tests.system.kit import create_topic, end_by_signal
from tests.system.managed_kit import ManagedCluster

TOPIC: Final = "crowd"
GROUP: Final = "crowd"
CONNECTIONS: Final = 4  # that all members share
SETTLE_S_MAX: Final = 120.0
TICK: Final = os.sysconf("SC_CLK_TCK")


class Plan(NamedTuple):
    members: int
    partitions: int
    session_s: float = 10.0
    idle_s: float = 10.0
    consumers: bool = False


class Result(NamedTuple):
    members: int
    joined_s: float  # until everyone has its share
    moved_s: float  # from the silence of some until the others have theirs, without the session
    join_cpu_s: float  # of the primary
    idle_cpu: float  # its share of a processor, while nothing happens
    changes: int  # that the first of them was told of


class Reader(Protocol):
    """A member of either kind."""

    @property
    def share(self) -> set[int]: ...

    @property
    def changes(self) -> int: ...

    async def begin(self) -> None: ...

    async def fall_silent(self) -> None: ...

    async def end(self) -> None: ...


class Light:
    """A member that reads nothing and lets go at once."""

    def __init__(self, cluster: Cluster, session_s: float) -> None:
        self._asked = asyncio.Event()
        settings = {"session_s": session_s, "strategy": "sticky", "client": "light"}
        self._member = GroupMember(cluster, GROUP, [TOPIC], self._asked.set, **settings)  # type: ignore[arg-type]
        self._task: asyncio.Task[None] | None = None

    @property
    def share(self) -> set[int]:
        return {number for _, number in self._member.held}

    @property
    def changes(self) -> int:
        return self._member.version

    async def begin(self) -> None:
        await self._member.join()
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            leaving = {pair: epoch for pair, epoch in self._member.held.items() if pair not in self._member.wanted}
            if leaving:
                await self._member.release(leaving)

    async def fall_silent(self) -> None:
        assert self._task is not None and self._member._task is not None
        for task in (self._task, self._member._task):
            task.cancel()
        await asyncio.gather(self._task, self._member._task, return_exceptions=True)
        self._member.held = {}

    async def end(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await self._member.leave()


class Whole:
    """A consumer as an application has it."""

    def __init__(self, servers: str, session_s: float) -> None:
        self._consumer = aio.Consumer(servers, [TOPIC], group=GROUP, session_timeout=session_s, client_id="whole")
        self._task: asyncio.Task[None] | None = None

    @property
    def share(self) -> set[int]:
        engine = self._consumer._engine
        return set() if engine is None else {number for _, number in engine.assignment}

    @property
    def changes(self) -> int:
        engine = self._consumer._engine
        return 0 if engine is None or engine._member is None else engine._member.version

    async def begin(self) -> None:
        await self._consumer.poll(timeout=0)
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            await self._consumer.poll(timeout=60.0)

    async def fall_silent(self) -> None:
        engine = self._consumer._engine
        assert self._task is not None and engine is not None and engine._member is not None
        assert engine._member._task is not None
        self._task.cancel()
        engine._member._task.cancel()
        engine._fetchers.clear()

    async def end(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._consumer.close()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


async def until_shared(readers: list[Reader], partitions: int) -> None:
    """All is read by somebody, by one each, and everyone has as much as the others."""
    least = partitions // len(readers)
    async with asyncio.timeout(SETTLE_S_MAX):
        while True:
            shares = [reader.share for reader in readers]
            once = sum(map(len, shares)) == len(set().union(*shares)) == partitions
            if once and all(least <= len(share) <= least + 1 for share in shares):
                return
            await asyncio.sleep(0.05)


async def play(servers: str, pid: int, plan: Plan) -> Result:
    members, partitions = plan.members, plan.partitions
    clusters = [Cluster(servers, "crowd", 60.0) for _ in range(0 if plan.consumers else CONNECTIONS)]
    readers: list[Reader] = [
        Whole(servers, plan.session_s) if plan.consumers else Light(clusters[number % CONNECTIONS], plan.session_s)
        for number in range(members)
    ]
    began_s, spent_s = time.monotonic(), cpu_s(pid)
    await asyncio.gather(*(reader.begin() for reader in readers))
    await until_shared(readers, partitions)
    joined_s, join_cpu_s = time.monotonic() - began_s, cpu_s(pid) - spent_s
    began_s, spent_s = time.monotonic(), cpu_s(pid)
    await asyncio.sleep(plan.idle_s)
    idle_cpu = (cpu_s(pid) - spent_s) / (time.monotonic() - began_s)
    gone, rest = readers[: members // 10], readers[members // 10 :]
    await asyncio.gather(*(reader.fall_silent() for reader in gone))
    began_s = time.monotonic()
    await until_shared(rest, partitions)
    moved_s = max(0.0, time.monotonic() - began_s - plan.session_s)
    await asyncio.gather(*(reader.end() for reader in rest))
    for cluster in clusters:
        await cluster.close()
    return Result(members, joined_s, moved_s, join_cpu_s, idle_cpu, rest[0].changes)


def run_crowd(directory: Path, plan: Plan) -> Result:
    with ManagedCluster(directory) as cluster:
        create_topic(cluster.servers, TOPIC, plan.partitions)
        pid = cluster.manager_pid(cluster.primary())
        result = uvloop.run(play(cluster.servers, pid, plan))
        assert not cluster.trouble()
    return result


def main() -> int:
    end_by_signal()
    parser = argparse.ArgumentParser(prog="python -m tests.system.group_crowd", description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--partitions", type=int, default=1000)
    parser.add_argument("--consumers", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(run_crowd(Path(directory), Plan(arguments.members, arguments.partitions, consumers=arguments.consumers)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
