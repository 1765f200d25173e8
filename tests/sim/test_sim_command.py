"""The command `quiver sim`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quiver.testing.processes import session_members
from tests.system.kit import until


def quiver_sim(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quiver.cli.main", "sim", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_seeds_without_a_violation_end_well() -> None:
    found = quiver_sim("--seeds", "1")
    assert found.returncode == 0, found.stdout
    assert found.stdout.startswith("1 seeds, ")
    assert "events/s" in found.stdout and "simulated hours" in found.stdout


def test_a_violation_is_told_with_its_seed_and_a_trace_and_ends_with_1() -> None:
    found = quiver_sim("--plant", "vote-not-durable", "--seed", "0")
    assert found.returncode == 1
    assert "seed 0: 3 durable votes" in found.stdout
    assert "VIOLATION" in found.stdout and "n1" in found.stdout


def test_a_limit_of_events_ends_the_run() -> None:
    found = quiver_sim("--seeds", "50", "--events", "1")
    assert found.returncode == 0
    assert found.stdout.startswith("1 seeds, ")


def test_seeds_may_run_in_several_processes() -> None:
    found = quiver_sim("--seeds", "2", "--jobs", "2")
    assert found.returncode == 0, found.stdout
    assert found.stdout.startswith("2 seeds, ")


def ignores_interrupts(pid: int) -> bool:
    with contextlib.suppress(OSError):  # it has just ended
        ignored = Path(f"/proc/{pid}/status").read_text().partition("SigIgn:")[2].split()[0]
        return bool(int(ignored, 16) & 1 << signal.SIGINT - 1)
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_ends_it_ends_all_its_processes(number: int) -> None:
    command = [sys.executable, "-m", "quiver.cli.main", "sim", "--seeds", "500", "--jobs", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as sim:
        # Two that run seeds, and Python's own helper: all that leave interrupts to the first, once they are at work.
        until(lambda: sum(map(ignores_interrupts, session_members(sim.pid))) >= 3)
        os.kill(sim.pid, number)
        told, _ = sim.communicate(timeout=60)
    assert sim.returncode != 0 and b" seeds, " in told and b"Traceback" not in told, told
    until(lambda: not list(session_members(sim.pid)))


def test_an_unknown_bug_is_the_users_mistake() -> None:
    found = quiver_sim("--plant", "nonsense")
    assert found.returncode == 2
    assert "no bug is called 'nonsense'" in found.stderr


def test_help_has_examples() -> None:
    assert "$ quiver sim --plant all" in quiver_sim("--help").stdout
