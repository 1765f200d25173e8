"""docs/requirements.md names, for each row of the acceptance list, tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "requirements.md"
ROWS = range(1, 36)


def rows() -> dict[int, str]:
    """The cell of each row that says what shows it."""
    found = re.findall(r"^\| R(\d+) .*? \| .*? \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    numbers = [int(number) for number, _ in found]
    assert len(set(numbers)) == len(numbers), "a row stands there twice"
    return {int(number): cell for number, cell in found}


def named_in(cell: str) -> list[tuple[Path, str]]:
    """The tests of a cell as (file or directory, name); a name may leave out what is the same as before."""
    found: list[tuple[Path, str]] = []
    for text in re.findall(r"`((?:tests/|test_|::)[^`\s]*)`", cell):
        where, _, test = text.partition("::")
        if where.startswith("tests/"):
            path = ROOT / where
        elif where:
            path = found[-1][0].parent / where
        else:
            path = found[-1][0]
        found.append((path, test))
    return found


def test_every_row_is_there() -> None:
    assert sorted(rows()) == list(ROWS)


@pytest.mark.parametrize("number", ROWS)
def test_every_row_names_tests_that_exist(number: int) -> None:
    named = named_in(rows()[number])
    assert named
    for path, test in named:
        assert path.exists(), path
        if test:
            assert re.search(rf"^(async )?def {re.escape(test)}\(", path.read_text(), re.MULTILINE), (path, test)
