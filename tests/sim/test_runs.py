"""Whole runs: seeds without a violation, the same again, planted bugs caught."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quiver.testing.plants import PLANTS, planted
from quiver.testing.sim.campaign import report
from quiver.testing.sim.group_run import GroupsPlay
from quiver.testing.sim.manager_run import ManagersPlay
from quiver.testing.sim.run import BrokersPlay, Play, play

SEEDS = range(14)
# Bugs that show at once, one of each kind, and the run that shows them; `quiver sim --plant all` runs them all.
PLANTS_SHOWN: dict[str, Callable[[int], Play]] = {
    **dict.fromkeys(
        (
            "vote-not-durable",
            "pre-vote-ignored",
            "commit-old-term",
            "ack-before-fsync",
            "restart-commits-all",
            "lost-disk-same-name",
            "reply-before-commit",
            "dedup-not-rebuilt",
            "position-moves-back",
            "fence-not-checked",
            "moved-back-same-name",
            "stale-word-obeyed",
            "room-taken-for-entries",
            "taken-in-with-old-log",
        ),
        BrokersPlay,
    ),
    **dict.fromkeys(("command-acknowledged-early", "ids-counted-anew", "database-gap"), ManagersPlay),
    **dict.fromkeys(
        ("epochs-counted-by-group", "given-before-let-go", "claim-sets-back", "stored-when-handed-out"), GroupsPlay
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_keeps_every_rule(seed: int) -> None:
    found = report(seed)
    assert not found.violation, "\n".join([found.violation, *found.story])
    assert found.acknowledged > 0 and found.commands > 0


def test_a_seed_is_the_same_run_every_time() -> None:
    first, again = report(3), report(3)
    assert (first.digest, first.events) == (again.digest, again.events)
    assert first.digest != report(4).digest


def test_a_seed_is_the_same_run_in_every_process() -> None:
    code = "from quiver.testing.sim.campaign import report; print(report(3).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert digests == {f"{report(3).digest}\n"}


@pytest.mark.parametrize("name", PLANTS_SHOWN)
def test_a_planted_bug_is_caught(name: str) -> None:
    with planted(name):
        runs = (play(PLANTS_SHOWN[name](seed)) for seed in range(25))
        caught = next((found for found in runs if found.violation), None)
    assert caught is not None, f"{name} was not caught in 25 seeds"
    assert "VIOLATION" in caught.trace.last(1)[0]


def test_a_plant_leaves_nothing_behind() -> None:
    for name in PLANTS:
        patches = PLANTS[name].patches()
        before = [getattr(target, attribute) for target, attribute, _ in patches]
        with planted(name):
            assert [getattr(target, attribute) for target, attribute, _ in patches] != before
        assert [getattr(target, attribute) for target, attribute, _ in patches] == before


def test_the_documents_tell_of_every_planted_bug() -> None:
    table = (Path(__file__).parents[2] / "docs/simulation.md").read_text().partition("## Planted bugs")[2]
    told = {row[1]: row[2] for row in re.finditer(r"^\| `([a-z-]+)` \| (.+?) \|", table, re.MULTILINE)}
    assert told == {name: found.what for name, found in PLANTS.items()}


def test_at_least_twenty_bugs_are_planted() -> None:
    assert len(PLANTS) >= 20
