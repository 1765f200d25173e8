"""A group that is never at rest: a short run of `group_rounds`, and its judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.group_kit import Piece, Verdict, judge
from tests.system.group_rounds import run_rounds


@pytest.mark.timeout(300)
def test_members_join_leave_and_are_killed_all_the_time(tmp_path: Path) -> None:
    result = run_rounds(tmp_path, records=60_000, seconds=10, seed=1)
    assert result.verdict.is_good, result
    assert result.verdict.again <= result.verdict.loose
    assert not result.trouble and not sum(result.lags), result
    assert result.killed and result.joined > 4, "nothing happened"


@pytest.mark.parametrize(
    ("pieces", "verdict"),
    [
        ([(0, 10, False)], Verdict(0, 0, 0, 0)),
        ([(0, 4, False), (6, 10, False)], Verdict(2, 0, 0, 0)),
        ([(0, 6, False), (4, 10, False)], Verdict(0, 2, 2, 0)),
        ([(0, 6, True), (4, 10, False)], Verdict(0, 2, 0, 6)),
        ([(0, 6, True), (6, 10, False)], Verdict(0, 0, 0, 6)),
        ([(0, 6, True), (0, 6, True), (0, 10, False)], Verdict(0, 12, 0, 12)),
        ([(0, 3, False), (3, 6, True), (2, 10, False)], Verdict(0, 4, 1, 3)),
    ],
)
def test_the_judge_tells_what_is_missing_and_what_came_again(
    pieces: list[tuple[int, int, bool]], verdict: Verdict
) -> None:
    assert judge([Piece(0, *piece) for piece in pieces], {0: 10}) == verdict
