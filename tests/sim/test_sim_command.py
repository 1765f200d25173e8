"""The command `quiver sim`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from quiver.cli import sim
from quiver.testing.processes import session_members
from quiver.testing.sim import campaign
from tests.system.kit import until


def quiver_sim(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quiver.cli.main", "sim", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_seeds_without_a_violation_end_well() -> None:
    found = quiver_sim("--seeds", "1")
    assert found.returncode == 0, found.stdout
    assert found.stdout.startswith("1 seeds, ")
    assert "events/s" in found.stdout and "simulated hours" in found.stdout


def in_process(monkeypatch: pytest.MonkeyPatch, violations: dict[int, str], *arguments: str) -> Result:
    """The command, with seeds that end as told."""

    def reports(seeds: Iterable[int], plant: str = "", jobs: int = 1) -> Iterator[campaign.Report]:
        for seed in seeds:
            story = ["0.0000 n1   is killed"] if seed in violations else []
            yield campaign.Report(seed, 10, 1.0, 0, 0, 0, 0, violations.get(seed, ""), story)

    monkeypatch.setattr(campaign, "reports", reports)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    app = typer.Typer()
    sim.register(app)
    return CliRunner().invoke(app, arguments)


def test_a_violation_is_told_with_its_seed_and_its_story_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    found = in_process(monkeypatch, {4: "1 one leader: two"}, "--seeds", "10")
    assert found.exit_code == 1
    assert "seed 4: 1 one leader: two\n  0.0000 n1   is killed" in found.stdout
    assert "10 seeds, 100 events" in found.stdout and "1 with a violation" in found.stdout
    assert found.stdout.endswith("Again: quiver sim --seed 4\n")


def test_a_planted_bug_that_is_caught_is_told_with_a_trace_and_ends_with_0() -> None:
    found = quiver_sim("--plant", "vote-not-durable", "--seed", "0")
    assert found.returncode == 0
    assert "seed 0: 3 durable votes" in found.stdout
    assert "VIOLATION" in found.stdout and "n1" in found.stdout


@pytest.mark.parametrize("name", ["vote-twice", "all"])
@pytest.mark.parametrize(("violations", "code"), [({2: "1 one leader"}, 0), ({}, 1)], ids=["caught", "not caught"])
def test_with_plants_the_exit_code_says_whether_all_were_caught(
    name: str, violations: dict[int, str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = in_process(monkeypatch, violations, "--plant", name, "--seeds", "3")
    assert found.exit_code == code
    assert ("NOT CAUGHT in 3 seeds" in found.stdout) == bool(code)


def test_one_plant_that_is_not_caught_is_enough_to_end_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "_catch", lambda name, *_, **__: name != "vote-twice")
    assert in_process(monkeypatch, {}, "--plant", "all").exit_code == 1


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
    told = quiver_sim("--help").stdout
    assert "$ quiver sim --plant all" in told and "Exit code 1" in told
