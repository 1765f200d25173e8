"""DATA/cluster.json: how tools and client commands find a running cluster, and who runs it.

Rule: the file is replaced, never changed in place, so a reader sees an old or a new one but no half of one. It may be
stale after a crash: whether the cluster runs is decided by the supervisor's lock.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import msgspec

from quiver.cli import lock

CLUSTER_FILE = "cluster.json"
SUPERVISOR_LOCK = "supervisor.lock"


class BrokerEntry(msgspec.Struct, frozen=True):
    id: int
    pid: int
    address: str


class ManagerEntry(msgspec.Struct, frozen=True):
    id: int
    pid: int
    http: str
    address: str


class SupervisorEntry(msgspec.Struct, frozen=True):
    """`takes_brokers`: SIGUSR1 makes it start brokers whose directories were made since. Others would die of it."""

    pid: int
    takes_brokers: bool = False


class Cluster(msgspec.Struct, frozen=True):
    """`http` has the primary first. While a node is being restarted its entry keeps the old pid and address."""

    servers: tuple[str, ...]
    brokers: tuple[BrokerEntry, ...]
    supervisor: SupervisorEntry
    managers: tuple[ManagerEntry, ...] = ()
    http: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """A supervisor that holds its lock. `cluster` is None until all nodes have taken messages once."""

    pid: int | None
    cluster: Cluster | None


def write_cluster(data_dir: Path, cluster: Cluster) -> None:
    path = data_dir / CLUSTER_FILE
    draft = path.with_suffix(".json.new")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(cluster), indent=2) + b"\n")
    os.replace(draft, path)


def remove_cluster(data_dir: Path) -> None:
    (data_dir / CLUSTER_FILE).unlink(missing_ok=True)


def read_cluster(data_dir: Path) -> Cluster | None:
    """None when there is no such file or its content is none of ours."""
    try:
        return msgspec.json.decode((data_dir / CLUSTER_FILE).read_bytes(), type=Cluster)
    except (OSError, msgspec.MsgspecError):
        return None


def supervisor_lock(data_dir: Path) -> lock.FileLock:
    return lock.FileLock(data_dir / SUPERVISOR_LOCK)


def find_running(data_dir: Path) -> Running | None:
    """The cluster that runs on this data directory now, None when none does."""
    path = data_dir / SUPERVISOR_LOCK
    if not lock.is_held(path):
        return None
    return Running(lock.holder_pid(path), read_cluster(data_dir))
