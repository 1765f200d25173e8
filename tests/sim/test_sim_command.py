"""The command `quiver sim`."""

from __future__ import annotations

import subprocess
import sys


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


def test_an_unknown_bug_is_the_users_mistake() -> None:
    found = quiver_sim("--plant", "nonsense")
    assert found.returncode == 2
    assert "no bug is called 'nonsense'" in found.stderr


def test_help_has_examples() -> None:
    assert "$ quiver sim --plant all" in quiver_sim("--help").stdout
