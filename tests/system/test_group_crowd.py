"""Many members of one group, a short run of `group_crowd`: all get a share, and take over what the silent ones had."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.group_crowd import Plan, run_crowd

pytestmark = pytest.mark.system


@pytest.mark.timeout(300)
def test_a_crowd_shares_and_takes_over(tmp_path: Path) -> None:
    result = run_crowd(tmp_path, Plan(members=40, partitions=40, session_s=2.0, idle_s=0.1))
    assert result.changes < 40, "members that come together are told together"
