"""A driver that is killed at random moments, and executors that are, on a standalone cluster of two workers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from quiver import Producer
from quiver.testing.processes import session_members
from tests.spark.driver_rounds import START_S_MAX, Driver, job_of, kill_drivers
from tests.spark.kit import Lake, finish
from tests.system.kit import ENVIRON, Node, free_port, read_all, values_of


@pytest.mark.timeout(400)  # two drivers start one after the other
def test_driver_killed_at_random_moments_loses_and_doubles_nothing(lake: Lake, node: Node, tmp_path: Path) -> None:
    """One round; `python -m tests.spark.driver_rounds --rounds 20` does more."""
    source, sink = f"source-{os.getpid()}", f"sink-{os.getpid()}"
    job = job_of(node.address, tmp_path, source, sink)
    rows = kill_drivers(node.address, job, 1, random.Random())
    stream = lake.read_stream(source, startingOffsets="earliest", **job["options"]).select("value", "key")
    finish(lake.write_stream(stream, sink, tmp_path / "checkpoint"))
    assert Counter(values_of(read_all(node.address, sink))) == rows


class Standalone:
    """Spark's own cluster manager with two workers of one core each, from the pip package."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._home = Path(pyspark.__file__).parent
        self.port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        master = ["master.Master", "--host", "127.0.0.1", "--port", str(self.port), "--webui-port", str(free_port())]
        self._start("master", master)
        for number in (1, 2):
            worker = ["worker.Worker", "--host", "127.0.0.1", "--cores", "1", "--memory", "1g"]
            worker += ["--webui-port", str(free_port()), "--work-dir", str(directory / f"work-{number}")]
            self._start(f"worker-{number}", [*worker, f"spark://127.0.0.1:{self.port}"])

    def _start(self, name: str, arguments: list[str]) -> None:
        with (self._directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(self._home / "bin" / "spark-class"), f"org.apache.spark.deploy.{arguments[0]}", *arguments[1:]],
                env=ENVIRON
                | {
                    "SPARK_HOME": str(self._home),
                    "SPARK_LOCAL_DIRS": str(self._directory),
                    "SPARK_DAEMON_MEMORY": "256m",
                    "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
                    "PYSPARK_PYTHON": sys.executable,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)

    def executors(self) -> list[int]:
        """The pids of the executors' JVMs, which the workers started."""
        pids = [pid for process in self._processes[1:] for pid in session_members(process.pid)]
        return [pid for pid in pids if b"CoarseGrainedExecutorBackend" in _command(pid)]

    def stop(self) -> None:
        for process in self._processes:
            while members := list(session_members(process.pid)):
                for pid in members:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            process.wait()


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[Standalone]:
    made = Standalone(tmp_path)
    yield made
    made.stop()


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(400)
@pytest.mark.xdist_group("spark")
def test_executor_killed_on_a_standalone_cluster_loses_and_doubles_nothing(
    standalone: Standalone, node: Node, tmp_path: Path
) -> None:
    """Its tasks run again on the other worker, and slow ones run twice at once."""
    job = job_of(node.address, tmp_path / "driver", f"many-{os.getpid()}", f"copies-{os.getpid()}")
    rows = [b"%06d" % number + b"." * 4000 for number in range(6000)]  # 24 MB in 24 tasks
    with Producer(node.address) as producer:
        for partition in range(3):
            producer.send_many(job["source"], rows[partition::3], partition=partition).result(60)
    speculation = {"multiplier": "1.0", "quantile": "0.1", "minTaskRuntime": "10ms", "interval": "20ms"}
    job |= {"batch": True, "master": f"spark://127.0.0.1:{standalone.port}", "options": {"rowsPerTask": 250}}
    job["settings"] = {
        "spark.executor.memory": "512m",
        "spark.speculation": "true",
        **{f"spark.speculation.{name}": value for name, value in speculation.items()},
    }
    with Driver(job) as driver:
        driver.until_rows(node.address, job["sink"], 1)
        os.kill(standalone.executors()[0], signal.SIGKILL)
        assert driver.process.wait(START_S_MAX) == 0, driver.log[-3000:]
    assert Counter(values_of(read_all(node.address, job["sink"]))) == Counter(rows)
