"""Some of the rounds of cluster_rounds.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.system.cluster_rounds import run_rounds

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.xdist_group("cluster")]


def test_rounds_of_kills_in_a_cluster_lose_double_and_reorder_nothing(tmp_path: Path) -> None:
    """All 100 rounds: python -m tests.system.cluster_rounds --rounds 100"""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown by pytest when the test fails
    result = run_rounds(tmp_path, 4, seed)
    assert result.violations == []
    assert result.trouble == []
    assert result.seen >= result.acknowledged > 100
