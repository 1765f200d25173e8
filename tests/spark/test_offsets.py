"""Offsets and ranges, without Spark."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.errors import InvalidRequestError
from quiver.spark.offsets import OffsetRange, Offsets, limit_rows, ranges, resolve

EDGES = {"a": {0: (10, 20), 1: (0, 5)}, "b": {0: (0, 0)}}
EARLIEST = {"a": {"0": 10, "1": 0}, "b": {"0": 0}}
LATEST = {"a": {"0": 20, "1": 5}, "b": {"0": 0}}


@pytest.mark.parametrize("name", ["startingOffsets", "endingOffsets"])
def test_words_mean_the_edges(name: str) -> None:
    assert resolve("earliest", EDGES, name) == EARLIEST
    assert resolve("latest", EDGES, name) == LATEST


@pytest.mark.parametrize(
    ("given", "start", "end"),
    [
        ({}, EARLIEST, LATEST),
        ({"a": {}}, EARLIEST, LATEST),
        ({"a": {"0": 15}}, {**EARLIEST, "a": {"0": 15, "1": 0}}, {**LATEST, "a": {"0": 15, "1": 5}}),
        ({"a": {"0": -2, "1": -2}, "b": {"0": -2}}, EARLIEST, EARLIEST),
        ({"a": {"0": -1, "1": -1}, "b": {"0": -1}}, LATEST, LATEST),
        ({"a": {"0": 10, "1": 5}}, {**EARLIEST, "a": {"0": 10, "1": 5}}, {**LATEST, "a": {"0": 10, "1": 5}}),
    ],
)
def test_json_names_offsets_and_the_rest_is_everything(given: Any, start: Offsets, end: Offsets) -> None:
    assert resolve(json.dumps(given), EDGES, "startingOffsets") == start
    assert resolve(json.dumps(given), EDGES, "endingOffsets") == end


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("newest", "is 'earliest', 'latest' or JSON, not 'newest'"),
        ("Earliest", "is 'earliest', 'latest' or JSON"),
        ("[" * 100_000, "is 'earliest', 'latest' or JSON"),
        ("[]", 'as JSON is {"topic": {"partition": offset}}'),
        ("3", "as JSON is"),
        ("null", "as JSON is"),
        ('{"a": 3}', "as JSON is"),
        ('{"a": null}', "as JSON is"),
        ('{"a": ["0"]}', "as JSON is"),
        ('{"a": {"x": 3}}', "as JSON is"),
        ('{"a": {"-1": 3}}', "as JSON is"),
        ('{"a": {"01": 3}}', "as JSON is"),
        ('{"a": {"²": 3}}', "as JSON is"),
        ('{"a": {" 0": 3}}', "as JSON is"),
        ('{"c": {}}', "topic c is not one of those that are read"),
        ('{"a": {"2": 3}}', "topic a has no partition 2"),
        ('{"a": {"0": "15"}}', "an offset is an integer, not '15'"),
        ('{"a": {"0": 15.0}}', "an offset is an integer"),
        ('{"a": {"0": true}}', "an offset is an integer"),
        ('{"a": {"0": null}}', "an offset is an integer"),
        ('{"a": {"0": 9}}', "offset 9 of a-0 is out of range: 10 to 20"),
        ('{"a": {"0": 21}}', "offset 21 of a-0 is out of range: 10 to 20"),
        ('{"a": {"0": -3}}', "offset -3 of a-0 is out of range"),
    ],
)
def test_wrong_option_is_told_by_its_name(option: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        resolve(option, EDGES, "startingOffsets")
    assert "startingOffsets" in error.value.message
    assert message in error.value.message


@given(st.text(max_size=30) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_option_is_understood_or_refused(option: str) -> None:
    try:
        found = resolve(option, EDGES, "endingOffsets")
    except InvalidRequestError:
        return
    assert found.keys() == EDGES.keys()


spans = st.tuples(st.integers(0, 1000), st.integers(0, 300)).map(lambda pair: (pair[0], pair[0] + pair[1]))
partitions = st.dictionaries(st.integers(0, 5).map(str), spans, max_size=5)
plans = st.dictionaries(st.sampled_from(["a", "b", "c"]), partitions, max_size=3)


def split(plan: dict[str, dict[str, tuple[int, int]]]) -> tuple[Offsets, Offsets]:
    start = {topic: {number: span[0] for number, span in found.items()} for topic, found in plan.items()}
    end = {topic: {number: span[1] for number, span in found.items()} for topic, found in plan.items()}
    return start, end


def rows_between(start: Offsets, end: Offsets) -> int:
    return sum(end[topic][number] - start[topic][number] for topic in end for number in end[topic])


@given(plans, st.none() | st.integers(1, 400))
def test_ranges_cover_each_offset_once_in_order(
    plan: dict[str, dict[str, tuple[int, int]]], rows_per_task: int | None
) -> None:
    start, end = split(plan)
    found = ranges(start, end, rows_per_task)
    assert all(0 < piece.end - piece.start <= (rows_per_task or 10**9) for piece in found)
    for topic, spans_by_number in plan.items():
        for number, (first, stop) in spans_by_number.items():
            mine = [piece for piece in found if (piece.topic, piece.partition) == (topic, int(number))]
            assert [at for piece in mine for at in range(piece.start, piece.end)] == list(range(first, stop))
            if rows_per_task is None:
                assert len(mine) == (stop > first)


def test_partition_that_has_no_start_is_read_from_the_first_offset() -> None:
    assert ranges({}, {"a": {"0": 3}}, 2) == [OffsetRange("a", 0, 0, 2), OffsetRange("a", 0, 2, 3)]


@pytest.mark.parametrize("limit", [None, 5])
def test_end_before_the_start_is_refused(limit: int | None) -> None:
    start, end = {"a": {"0": 8}}, {"a": {"0": 7}}
    with pytest.raises(InvalidRequestError, match="from offset 8 to 7: the end is before the start"):
        ranges(start, end, limit)
    with pytest.raises(InvalidRequestError, match="Was the topic deleted and made again"):
        limit_rows(start, end, 5)


@given(plans, st.integers(1, 500))
def test_limited_end_takes_all_it_may_and_no_more(plan: dict[str, dict[str, tuple[int, int]]], rows_max: int) -> None:
    start, end = split(plan)
    limited = limit_rows(start, end, rows_max)
    assert rows_between(start, limited) == min(rows_max, rows_between(start, end))
    for topic, found in end.items():
        assert limited[topic].keys() == found.keys()
        for number, stop in found.items():
            assert start[topic][number] <= limited[topic][number] <= stop


@given(plans, st.integers(1, 500))
def test_partitions_get_equal_shares_while_they_have_rows(
    plan: dict[str, dict[str, tuple[int, int]]], rows_max: int
) -> None:
    start, end = split(plan)
    limited = limit_rows(start, end, rows_max)
    pairs = [(topic, number) for topic in end for number in end[topic]]
    taken = {pair: limited[pair[0]][pair[1]] - start[pair[0]][pair[1]] for pair in pairs}
    hungry = [taken[pair] for pair in pairs if limited[pair[0]][pair[1]] < end[pair[0]][pair[1]]]
    if hungry:
        # Nobody with rows left got less than another, but for the last row that cannot be shared.
        assert max(taken.values()) - min(hungry) <= 1


@given(plans, st.integers(1, 100))
def test_repeated_limits_reach_the_end(plan: dict[str, dict[str, tuple[int, int]]], rows_max: int) -> None:
    at, end = split(plan)
    steps = 0
    while at != end:
        at = limit_rows(at, end, rows_max)
        steps += 1
    start, _ = split(plan)
    assert steps == -(-rows_between(start, end) // rows_max)
