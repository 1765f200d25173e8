"""Every scenario of testdata/ comes out as its file says. `pytest tests/raft --regenerate` writes the files anew."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from tests.raft.transcript import play, regenerate

SCENARIOS = sorted((Path(__file__).parent / "testdata").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_comes_out_as_written(path: Path, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("regenerate", default=False):
        regenerate(path)
    expected = path.read_text()
    found = play(expected)
    if found != expected:
        lines = difflib.unified_diff(expected.splitlines(), found.splitlines(), "expected", "found", lineterm="", n=8)
        pytest.fail(f"{path.name}\n" + "\n".join(lines), pytrace=False)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_says_which_claim_it_shows(path: Path) -> None:
    text = path.read_text()
    assert re.match(r"# (Raft|thesis|ours) ?(§[\d.]+)?.*: .+", text), "the first line names the section and the claim"
    assert "! does not come to rest" not in text
    assert "! there is no such message" not in text
