"""Seeded runs of pure replicas in a bad world. More of them: python -m tests.raft.chaos 0 5000."""

from __future__ import annotations

import pytest

from tests.raft.chaos import run_seed


@pytest.mark.parametrize("seed", range(40))
def test_replicas_keep_what_raft_promises_and_recover(seed: int) -> None:
    run_seed(seed)


def test_a_seed_is_the_same_run_every_time() -> None:
    assert run_seed(7).trace == run_seed(7).trace
