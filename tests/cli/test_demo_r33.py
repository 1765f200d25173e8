"""How the demo judges what consumers saw."""

from __future__ import annotations

from quiver.cli.demo_r33 import HTTP_PRODUCERS, SDK_PRODUCERS, TOPICS, lines_of, verdict

PRODUCED = [b"a", b"b", b"c"]


def test_the_same_lines_in_the_same_order_are_right() -> None:
    assert verdict(PRODUCED, {"C1": [b"c", b"a", b"b"], "C2": [b"c", b"a", b"b"]}) == (0, 0, True)


def test_what_is_wrong_is_counted() -> None:
    assert verdict(PRODUCED, {"C1": [b"a", b"b"], "C2": [b"a", b"b"]}) == (2, 0, True)
    assert verdict(PRODUCED, {"C1": [b"a", b"b", b"b", b"c"]}) == (0, 1, True)
    assert verdict(PRODUCED, {"C1": [b"a", b"b", b"c"], "C2": [b"b", b"a", b"c"]}) == (0, 0, False)


def test_every_producer_has_a_topic_and_lines_of_its_own() -> None:
    producers = SDK_PRODUCERS + HTTP_PRODUCERS
    assert {name for names, _ in TOPICS.values() for name in names} == set(producers)
    lines = [line for name in producers for line in lines_of(name, 400)]
    assert len(lines) == len(set(lines))
