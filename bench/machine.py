"""Facts of the machine that the figures depend on."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

import quiver

PACKAGES = ("pyarrow", "redis", "hiredis", "flask", "werkzeug", "sqlalchemy", "psycopg", "pyspark")


def machine_facts(data_dir: Path) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _first("/proc/cpuinfo", "model name"),
        "cpu_count": os.cpu_count(),
        "cpu_count_usable": len(os.sched_getaffinity(0)),
        "load_average_at_start": os.getloadavg()[0],
        "memory_total": _first("/proc/meminfo", "MemTotal"),
        "kernel": f"{platform.system()} {platform.release()}",
        "file_system": file_system_of(data_dir, Path("/proc/mounts").read_text()),
        "python": platform.python_version(),
        "quiver": quiver.__version__,
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def file_system_of(path: Path, mounts: str) -> str:
    """The kind of the file system that holds `path`: that of the longest mount point above it."""
    kinds = {fields[1]: fields[2] for fields in (line.split() for line in mounts.splitlines())}
    return next((kinds[str(above)] for above in (path, *path.parents) if str(above) in kinds), "unknown")


def time_syncs(directory: Path, size: int, rounds: int) -> list[float]:
    """Seconds of each append of `size` bytes with its fdatasync, in this process, to a file of its own."""
    path = directory / "syncs"
    data = os.urandom(size)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    seconds = []
    try:
        for _ in range(rounds):
            began_s = time.perf_counter()
            os.write(fd, data)
            os.fdatasync(fd)
            seconds.append(time.perf_counter() - began_s)
    finally:
        os.close(fd)
        path.unlink()
    return seconds


def _first(path: str, name: str) -> str:
    lines = Path(path).read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "unknown")
