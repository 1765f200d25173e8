"""Ownership of a directory follows the process that holds it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from quiver.cli.lock import FileLock, holder_pid, is_held

HOLD = """
import sys
from pathlib import Path
from quiver.cli.lock import FileLock
assert FileLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_is_exclusive_and_names_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_held(path)
    with FileLock(path) as lock:
        assert lock.acquire()
        assert is_held(path)
        assert holder_pid(path) == os.getpid()
        assert not FileLock(path).acquire()
    assert not is_held(path)
    assert holder_pid(path) is None


def test_a_pid_left_in_the_file_does_not_count_as_running(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(f"{os.getpid()}\n")
    assert not is_held(path)
    assert holder_pid(path) is None


def test_a_killed_holder_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert holder_pid(path) == holder.pid
        assert not FileLock(path).acquire(wait_s=0.05)
        holder.kill()
        with FileLock(path) as lock:
            assert lock.acquire(wait_s=10.0)


def test_a_missing_directory_is_not_held(tmp_path: Path) -> None:
    assert not is_held(tmp_path / "no" / "lock")
