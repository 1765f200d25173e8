"""What a run of the benchmark is: how much work each case does, and what every section is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from measure import KIB, MB, MIB, Case, Row, run_in_turns
from progress import SectionProgress


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """How much one run of each case does: a second or a few each on a machine of two cores."""

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
    http_quiver: int = 19_200  # requests, shared by 64 connections
    http_reference: int = 2560
    spark_records: int = 10_000_000
    spark_writes: int = 5_000_000
    spark_triggers: int = 20
    replicated_batches: tuple[tuple[int, int], ...] = ((16 * KIB, 2000), (128 * KIB, 1000))
    small_batches: int = 30_000
    start_rounds: int = 3
    failover_rounds: int = 50
    idle_partitions: int = 1000
    idle_s: float = 20.0
    metadata_topics: int = 10_000
    metadata_consumers: int = 100_000
    metadata_lists: int = 20
    group_times: int = 60  # the topic read by groups is this many times `read_redis` records
    group_deaths: int = 3
    sim_seeds: int = 30


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
    http_quiver=3200,
    http_reference=640,
    spark_records=200_000,
    spark_writes=200_000,
    spark_triggers=5,
    replicated_batches=((128 * KIB, 200),),
    small_batches=5000,
    start_rounds=1,
    failover_rounds=3,
    idle_partitions=100,
    idle_s=5.0,
    metadata_topics=500,
    metadata_consumers=5000,
    metadata_lists=5,
    group_times=10,
    group_deaths=1,
    sim_seeds=3,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """What every section gets: `servers` and `http` are the node's addresses.

    `redis_port` None: there is no Redis, `redis_missing` says why.
    """

    sizes: Sizes
    directory: Path
    progress: SectionProgress
    servers: str
    http: str
    floor_port: int
    redis_port: int | None
    redis_missing: str

    def run(self, section: str, cases: list[Case]) -> list[Row]:
        self.progress.section(section, len(cases) * self.sizes.repeats)
        return run_in_turns(section, cases, self.sizes.repeats, self.progress)

    def skip(self, section: str, system: str, names: Sequence[str], why: str) -> list[Row]:
        """Rows that say what was not measured and why; said on standard error too."""
        self.progress.warn(f"{section}: {system} is SKIPPED: {why}")
        return [Row(section, system, name, note=f"SKIPPED: {why}") for name in names]
