"""A cluster of a manager and three brokers that `quiver up --detach` supervises, and what can be done to it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from quiver import Admin
from quiver.cli.cluster_file import SUPERVISOR_LOCK, Cluster, read_cluster
from quiver.cli.lock import holder_pid, is_held
from quiver.errors import UnavailableError
from quiver.types import PartitionStatus
from tests.system.kit import ENVIRON, SMALL_FILES, until

BROKERS: Final = 3
BACK_S_MAX: Final = 60.0  # a broker that died often is started again after up to ten seconds
LAG_MAX: Final = 100  # entries; under load the last few are always on their way
LOG_TROUBLE: Final = ("Traceback", "partition_corrupt", "owner_failed", "partition_failed", "request_failed")
MANAGER: Final = 0  # where a number of a broker is asked for


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row, below those of outgoing connections (see `kit.free_port`)."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    dice = random.SystemRandom()
    while True:
        first = dice.randrange(10_000, low - count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


class Replicas:
    """What the brokers of any cluster say of the partitions of a topic."""

    servers: str

    def statuses(self, topic: str) -> dict[int, list[PartitionStatus]]:
        """By broker; of those that answer."""
        with Admin(self.servers, request_timeout=2) as admin:
            return admin.replica_status(topic)

    def leader(self, topic: str, partition: int = 0, other_than: int = 0) -> int:
        """The broker that leads, as soon as there is one; of two that both say so the one of the later term."""

        def find() -> int:
            try:
                told = self.statuses(topic)
            except UnavailableError:
                return 0
            leading = [
                (one.term, broker)
                for broker, statuses in told.items()
                for one in statuses
                if one.partition == partition and one.role == "leader" and broker != other_than
            ]
            return max(leading)[1] if leading else 0

        return int(until(find, BACK_S_MAX))

    def until_whole(self, topic: str, brokers: int = BROKERS) -> None:
        """Until each partition has a leader that sees so many voters, all of them close behind it."""
        deadline_s = time.monotonic() + BACK_S_MAX
        told: object = None
        while time.monotonic() < deadline_s:
            with contextlib.suppress(UnavailableError):
                told = found = self.statuses(topic)
                if len(found) == brokers and _is_whole(found, brokers):
                    return
            time.sleep(0.05)
        raise AssertionError(f"not all replicas of {topic} came back: {told}")


def _is_whole(told: dict[int, list[PartitionStatus]], brokers: int) -> bool:
    partitions = {one.partition for statuses in told.values() for one in statuses}
    whole = {
        one.partition
        for statuses in told.values()
        for one in statuses
        if one.role == "leader"
        and sum(replica.voter and replica.lag <= LAG_MAX for replica in one.replicas) == brokers
        and len(one.replicas) == brokers
    }
    online = all(one.state == "online" for statuses in told.values() for one in statuses)
    # A voter that is gone may be close behind for a while: whoever takes its place must be there.
    everywhere = all({one.partition for one in statuses} == partitions for statuses in told.values())
    return online and everywhere and bool(partitions) and whole == partitions


class ReplicatedCluster(Replicas):
    """Ends with the `with` block, all its processes."""

    def __init__(self, directory: Path, settings: dict[str, str] | None = None, managers: int = 1) -> None:
        self.data_dir = directory / "data"
        self._managers = managers
        self._environ = ENVIRON | (SMALL_FILES if settings is None else settings)
        self._stopped: set[int] = set()  # pids that got SIGSTOP

    def start(self) -> None:
        """Returns when it takes messages."""
        first = free_ports(2 * self._managers + BROKERS)  # the last ones for HTTP
        http_port = first + self._managers + BROKERS
        command = [sys.executable, "-m", "quiver.cli.main", "up", "--brokers", str(BROKERS), "--detach"]
        command += ["--data-dir", str(self.data_dir), "--port", str(first), "--http-port", str(http_port)]
        command += ["--managers", str(self._managers)] if self._managers > 1 else []
        run = subprocess.run(command, capture_output=True, env=self._environ, timeout=60)
        assert run.returncode == 0, run.stderr.decode()
        self.servers = ",".join(broker.address for broker in self.file.brokers)

    @property
    def file(self) -> Cluster:
        found = read_cluster(self.data_dir)
        assert found is not None
        return found

    def address(self, broker: int) -> str:
        return next(entry.address for entry in self.file.brokers if entry.id == broker)

    def pid(self, broker: int) -> int:
        """Of its present or, while it is being restarted, of its last life."""
        if broker == MANAGER:
            primary = self.file.http[0]
            return next(entry.pid for entry in self.file.managers if entry.http == primary)
        return next(entry.pid for entry in self.file.brokers if entry.id == broker)

    def is_alive(self, pid: int) -> bool:
        """Whether that is a process of this cluster: a pid of a dead one may be somebody else's by now."""
        with contextlib.suppress(OSError):
            return os.fsencode(self.data_dir) in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False

    def signal(self, broker: int, number: int) -> int:
        """To a broker or MANAGER that runs; returns its pid. The supervisor starts it again when it dies."""
        pid: int = until(lambda: self.is_alive(found := self.pid(broker)) and found, BACK_S_MAX)
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            self._stopped.add(pid)
        elif number == signal.SIGCONT:
            self._stopped.discard(pid)
        return pid

    def kill(self, *brokers: int) -> dict[int, int]:
        """SIGKILL, all at once; returns the pids of the lives that ended."""
        return {broker: self.signal(broker, signal.SIGKILL) for broker in brokers}

    def kill_while_it_starts(self, broker: int, after_s: float) -> None:
        """SIGKILL to the next life of one that was just killed, so long after it took its directory."""
        name = "manager-1" if broker == MANAGER else f"broker-{broker}"
        last, lock = self.pid(broker), self.data_dir / name / "lock"
        until(lambda: holder_pid(lock) not in (None, last), BACK_S_MAX)
        time.sleep(after_s)
        if (pid := holder_pid(lock)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def until_back(self, ended: dict[int, int]) -> None:
        """Until those whose earlier pids are given serve again."""
        until(lambda: all(self.pid(broker) != pid for broker, pid in ended.items()), BACK_S_MAX)

    def log(self, name: str) -> str:
        return (self.data_dir / "logs" / f"{name}.log").read_text()

    def trouble(self) -> list[str]:
        """What no log of a cluster should say, whatever happened to it."""
        managers = (f"manager-{number}" for number in range(1, self._managers + 1))
        names = [*managers, *(f"broker-{number}" for number in range(1, BROKERS + 1)), "supervisor"]
        return [
            f"{name}: {line}"
            for name in names
            for line in self.log(name).splitlines()
            if any(word in line for word in LOG_TROUBLE)
        ]

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for pid in filter(self.is_alive, self._stopped):
            os.kill(pid, signal.SIGCONT)
        lock = self.data_dir / SUPERVISOR_LOCK
        if (pid := holder_pid(lock)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        until(lambda: not is_held(lock), BACK_S_MAX)


@contextlib.contextmanager
def paused(cluster: ReplicatedCluster, *brokers: int) -> Iterator[None]:
    """SIGSTOP: they are there and say nothing, and do not know that time passes."""
    try:
        for broker in brokers:
            cluster.signal(broker, signal.SIGSTOP)
        yield
    finally:
        for broker in brokers:
            cluster.signal(broker, signal.SIGCONT)
