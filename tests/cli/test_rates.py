"""Messages a second, from two looks."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from quiver.cli import status
from quiver.cli.rates import Rates, shown
from quiver.errors import UnavailableError


def topics(**ends: int) -> list[dict[str, Any]]:
    return [{"name": name, "partitions": [{"partition": 0, "next_offset": end}]} for name, end in ends.items()]


def rates_of(found: list[dict[str, Any]]) -> dict[str, float | None]:
    return {topic["name"]: topic["partitions"][0]["rate"] for topic in found}


def test_rate_is_what_came_since_the_last_look() -> None:
    rates = Rates()
    first, second, third = topics(a=5), topics(a=25, new=7), topics(a=25, new=3)
    for found, now_s in ((first, 100.0), (second, 102.0), (third, 103.0)):
        rates.look(found, now_s)
    assert rates_of(first) == {"a": None}
    assert rates_of(second) == {"a": 10.0, "new": None}
    assert rates_of(third) == {"a": 0.0, "new": None}, "it was made again: what it had is gone"


def test_two_looks_at_one_moment_have_no_rate() -> None:
    rates = Rates()
    rates.look(topics(a=1), 5.0)
    again = topics(a=9)
    rates.look(again, 5.0)
    assert rates_of(again) == {"a": None}


@pytest.mark.parametrize(("rate", "text"), [(None, "-"), (0.0, "0"), (0.44, "0.4"), (12.3, "12"), (12345.6, "12,346")])
def test_rates_are_short(rate: float | None, text: str) -> None:
    assert shown(rate) == text


def test_watch_goes_on_through_trouble_until_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter([{"running": True, "topics": topics(a=1)}, None, {"running": True, "topics": topics(a=3)}])
    monkeypatch.setattr(status.time, "sleep", lambda seconds: None)

    def look() -> dict[str, Any]:
        try:
            report = next(looks)
        except StopIteration:
            raise KeyboardInterrupt from None
        if report is None:
            raise UnavailableError("nobody answers")
        return report

    with pytest.raises(typer.Exit) as ended:
        status.keep_watching(look, 1.0, as_json=True)
    assert ended.value.exit_code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "nobody answers" in lines[1] and '"next_offset":3' in lines[2]
