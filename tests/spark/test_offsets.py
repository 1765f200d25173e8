"""Offsets and ranges, without Spark."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.errors import InvalidRequestError
from quiver.spark.offsets import (
    Edge,
    Lookup,
    Mark,
    Moment,
    OffsetRange,
    Reach,
    cut,
    parse_places,
    parse_time,
    resolve,
    share,
    share_bytes,
)
from quiver.spark.offsets import spans as spans_between

EDGES = {"a": {0: Edge(10, 20), 1: Edge(0, 5, 3)}, "b": {0: Edge(0, 0)}}
EARLIEST = {"a": {0: 10, 1: 0}, "b": {0: 0}}
LATEST = {"a": {0: 20, 1: 5}, "b": {0: 0}}
NOON = 1_700_000_000_000_000  # 2023-11-14T22:13:20Z

Found = dict[str, dict[int, int]]


def resolved(option: str, name: str, *, lenient: bool = False) -> Found:
    """Every time is found at offset 12 of a-0, 1 of a-1 and 0 of b-0."""
    places = parse_places(option, name)
    found = {one: {("a", 0): 12, ("a", 1): 1}.get(one[:2], 0) for one in places.moments(EDGES)}
    return resolve(places, EDGES, name, found, lenient=lenient)


@pytest.mark.parametrize("name", ["startingOffsets", "endingOffsets"])
def test_words_mean_the_edges(name: str) -> None:
    assert resolved("earliest", name) == EARLIEST
    assert resolved("latest", name) == LATEST


def test_group_means_where_it_is_and_else_the_beginning() -> None:
    assert resolved("group", "startingOffsets") == {"a": {0: 10, 1: 3}, "b": {0: 0}}


@pytest.mark.parametrize(
    ("text", "micros"),
    [
        ("2023-11-14T22:13:20Z", NOON),
        ("2023-11-14 22:13:20.000001+00:00", NOON + 1),
        ("2023-11-15T03:58:20+05:45", NOON),
        ("1969-12-31T23:59:59.999999Z", -1),
    ],
)
def test_times_say_their_zone(text: str, micros: int) -> None:
    assert parse_time(text, "fromTime") == micros


def test_time_stands_for_everything_or_for_one_partition() -> None:
    whole = parse_places("2023-11-14T22:13:20Z", "startingOffsets")
    assert whole.everywhere == Moment(NOON)
    assert whole.moments(EDGES) == [Lookup("a", 0, NOON), Lookup("a", 1, NOON), Lookup("b", 0, NOON)]
    assert resolved("2023-11-14T22:13:20Z", "endingOffsets") == {"a": {0: 12, 1: 1}, "b": {0: 0}}
    one = json.dumps({"a": {"0": "2023-11-14T22:13:20Z", "1": "latest"}})
    assert resolved(one, "startingOffsets") == {"a": {0: 12, 1: 5}, "b": {0: 0}}


def test_what_was_trimmed_may_be_left_out() -> None:
    assert resolved('{"a": {"0": 3}}', "startingOffsets", lenient=True) == EARLIEST
    with pytest.raises(InvalidRequestError, match="offset 21 of a-0 is out of range"):
        resolved('{"a": {"0": 21}}', "startingOffsets", lenient=True)


@pytest.mark.parametrize(
    ("given", "start", "end"),
    [
        ({}, EARLIEST, LATEST),
        ({"a": {}}, EARLIEST, LATEST),
        ({"a": {"0": 15}}, {**EARLIEST, "a": {0: 15, 1: 0}}, {**LATEST, "a": {0: 15, 1: 5}}),
        ({"a": {"0": -2, "1": -2}, "b": {"0": -2}}, EARLIEST, EARLIEST),
        ({"a": {"0": -1, "1": -1}, "b": {"0": -1}}, LATEST, LATEST),
        ({"a": {"0": 10, "1": 5}}, {**EARLIEST, "a": {0: 10, 1: 5}}, {**LATEST, "a": {0: 10, 1: 5}}),
    ],
)
def test_json_names_offsets_and_the_rest_is_everything(given: Any, start: Found, end: Found) -> None:
    assert resolved(json.dumps(given), "startingOffsets") == start
    assert resolved(json.dumps(given), "endingOffsets") == end


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("newest", "is 'earliest', 'latest', 'group', a time or JSON, not 'newest'"),
        ("Earliest", "is 'earliest', 'latest', 'group', a time or JSON"),
        ("[" * 100_000, "a time or JSON"),
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
        ('{"a": {"0": "15"}}', "is a time like 2026-11-15T20:00:00Z, not '15'"),
        ('{"a": {"0": 15.0}}', "an offset is an integer"),
        ('{"a": {"0": true}}', "an offset is an integer"),
        ('{"a": {"0": null}}', "an offset is an integer"),
        ('{"a": {"0": 9}}', "offset 9 of a-0 is out of range: 10 to 20"),
        ('{"a": {"0": 21}}', "offset 21 of a-0 is out of range: 10 to 20"),
        ('{"a": {"0": -3}}', "offset -3 of a-0 is out of range"),
        ("2023-11-14T22:13:20", "does not say its time zone"),
        ("2023-11-34T22:13:20Z", "is a time like"),
        ("1969-12-31T23:59:59Z", "is before 1970"),
    ],
)
def test_wrong_option_is_told_by_its_name(option: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        resolved(option, "startingOffsets")
    assert "startingOffsets" in error.value.message
    assert message in error.value.message


@given(st.text(max_size=30) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_option_is_understood_or_refused(option: str) -> None:
    try:
        found = resolved(option, "endingOffsets")
    except InvalidRequestError:
        return
    assert found.keys() == EDGES.keys()


# What is between two marks

spans = st.tuples(st.integers(0, 1000), st.integers(0, 300)).map(lambda pair: (pair[0], pair[0] + pair[1]))
partitions = st.dictionaries(st.integers(0, 12), spans, max_size=5)
plans = st.dictionaries(st.sampled_from(["a", "b", "c"]), partitions, max_size=3)
Plan = dict[str, dict[int, tuple[int, int]]]


def split(plan: Plan, uids: dict[str, str] | None = None) -> tuple[Mark, Mark]:
    start = {topic: {number: span[0] for number, span in found.items()} for topic, found in plan.items()}
    end = {topic: {number: span[1] for number, span in found.items()} for topic, found in plan.items()}
    return Mark(start, uids or {}), Mark(end, uids or {})


@given(plans, st.none() | st.integers(1, 400))
def test_pieces_cover_each_offset_once_in_order(plan: Plan, rows_per_task: int | None) -> None:
    found = [piece for span in spans_between(*split(plan)) for piece in cut(span, rows_per_task)]
    assert all(0 < piece.end - piece.start <= (rows_per_task or 10**9) for piece in found)
    for topic, spans_by_number in plan.items():
        for number, (first, stop) in spans_by_number.items():
            mine = [piece for piece in found if (piece.topic, piece.partition) == (topic, number)]
            assert [at for piece in mine for at in range(piece.start, piece.end)] == list(range(first, stop))
            if rows_per_task is None:
                assert len(mine) == (stop > first)


@given(plans)
def test_mark_is_the_same_after_spark_kept_it(plan: Plan) -> None:
    mark, _ = split(plan, {"a": "1f", "c": ""})
    kept = json.dumps(mark.to_json())
    assert json.dumps(Mark.from_json(json.loads(kept)).to_json()) == kept
    assert list(map(int, (n for found in json.loads(kept).values() for n in found if n != "uid"))) == [
        number for topic in sorted(plan) for number in sorted(plan[topic])
    ]


def test_partition_that_has_no_start_is_read_from_the_first_offset() -> None:
    assert list(spans_between(Mark({}, {}), Mark({"a": {0: 3}}, {"a": "1f"}))) == [OffsetRange("a", 0, 0, 3, "1f")]


def test_end_before_the_start_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="from offset 8 to 7: the end is before the start"):
        list(spans_between(Mark({"a": {0: 8}}, {}), Mark({"a": {0: 7}}, {})))


def test_topic_that_was_made_again_is_known_by_its_uid_alone() -> None:
    start, end = Mark({"a": {0: 8}}, {"a": "1f"}), Mark({"a": {0: 9}}, {"a": "2f"})
    with pytest.raises(InvalidRequestError, match="topic a was deleted and made again since it was last read"):
        list(spans_between(start, end))
    assert list(spans_between(start, end, lenient=True)) == [OffsetRange("a", 0, 0, 9, "2f")]
    assert list(spans_between(start, end._replace(uids={"a": "1f"}))) == [OffsetRange("a", 0, 8, 9, "1f")]
    assert list(spans_between(start._replace(uids={}), end)) == [OffsetRange("a", 0, 8, 9, "2f")]  # an old checkpoint


waitings = st.dictionaries(st.integers(0, 20), st.integers(0, 300), max_size=12)


@given(waitings, st.integers(1, 500))
def test_share_gives_all_it_may_and_equal_parts_to_those_who_wait(waiting: dict[int, int], most: int) -> None:
    taken = share(waiting, most)
    assert sum(taken.values()) == min(most, sum(waiting.values()))
    assert all(0 <= taken[one] <= waiting[one] for one in waiting)
    hungry = [taken[one] for one in waiting if taken[one] < waiting[one]]
    if hungry:
        # Nobody with rows left got less than another, but for the last row that cannot be shared.
        assert max(taken.values()) - min(hungry) <= 1


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40)), max_size=8), st.integers(1, 5000))
def test_bytes_are_shared_likewise(parts: list[tuple[int, int]], most: int) -> None:
    """Each range has so many batches of ten records, all of its own size."""
    waiting = [OffsetRange("t", number, 100, 100 + 10 * count) for number, (count, _) in enumerate(parts)]
    size_of = {one: size for one, (_, size) in zip(waiting, parts, strict=True)}

    def measure(wanted: dict[OffsetRange, int]) -> dict[OffsetRange, Reach]:
        counts = {one: max(1, bytes_max // size_of[one]) for one, bytes_max in wanted.items()}
        return {one: Reach(one.start + 10 * count, count * size_of[one]) for one, count in counts.items()}

    ends = share_bytes(waiting, most, measure)
    assert all(one.start <= ends[one] <= one.end for one in waiting)
    used = {one: (ends[one] - one.start) // 10 * size_of[one] for one in waiting}
    assert sum(used.values()) <= most or sum(size > 0 for size in used.values()) == 1
    if any(one.end > one.start for one in waiting):
        assert sum(used.values()) > 0
    total = sum((one.end - one.start) // 10 * size_of[one] for one in waiting)
    if total <= most // max(1, len(waiting)):
        assert all(ends[one] == one.end for one in waiting)
