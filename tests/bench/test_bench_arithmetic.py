from __future__ import annotations

import struct
from pathlib import Path

import pytest
from floor import whole_frames
from http_load import whole_body
from machine import file_system_of
from measure import Case, Row, Sample, percentile_ms, run_in_turns
from redis_bench import client_name, entry_pattern
from report import (
    COLUMNS,
    FLOOR,
    POLL,
    QUIVER,
    REDIS,
    TARGETS,
    XREAD_100_B,
    XREAD_BY_HAND,
    Target,
    judge,
    rows_table,
    targets_table,
)
from sections import redis_notes
from sim_section import counted


class NoSteps:
    def step(self, text: str) -> None:
        pass


def test_cases_take_turns_and_the_median_run_counts():
    order = []

    def runs(name: str, seconds: list[float]) -> Case:
        left = iter(seconds)

        def run() -> Sample:
            order.append(name)
            return Sample(next(left), 100, 1_000_000)

        return Case(name, "produce", "records", run)

    rows = run_in_turns("s", [runs("a", [1.0, 9.0, 2.0]), runs("b", [4.0, 4.0, 4.0])], 3, NoSteps())

    assert order == ["a", "b"] * 3
    assert [row.figures for row in rows] == [
        {"records_per_s": 50.0, "mb_per_s": 0.5},
        {"records_per_s": 25.0, "mb_per_s": 0.25},
    ]


def test_the_fastest_variant_counts_and_the_note_names_the_others():
    cases = [
        Case("Redis", "XADD", "records", lambda: Sample(2.0, 100, 100), "slow"),
        Case("Redis", "XADD", "records", lambda: Sample(1.0, 100, 100), "fast"),
    ]
    (row,) = run_in_turns("s", cases, 1, NoSteps())
    assert row.figures["records_per_s"] == 100
    assert row.note == "fast, the fastest; slow 50"


def test_further_figures_of_the_runs_have_their_own_median():
    left = iter([3.0, 9.0, 1.0])
    case = Case("Quiver", "produce", "requests", lambda: Sample(1.0, 10, 10, {"p50_ms": next(left)}))
    (row,) = run_in_turns("s", [case], 3, NoSteps())
    assert row.figures == {"requests_per_s": 10.0, "mb_per_s": 0.00001, "p50_ms": 3.0}


@pytest.mark.parametrize(("percent", "expected_ms"), [(50, 50_000), (99, 99_000), (100, 100_000)])
def test_percentile_is_a_sample(percent: int, expected_ms: float):
    assert percentile_ms([float(second) for second in range(100, 0, -1)], percent) == expected_ms


@pytest.mark.parametrize(
    ("at_least", "figures", "expected"),
    [
        (True, (60.0, 100.0), (0.6, True)),
        (True, (40.0, 100.0), (0.4, False)),
        (False, (40.0, 100.0), (0.4, True)),
        (True, (40.0, None), (None, None)),
        (True, (None, 100.0), (None, None)),
    ],
)
def test_ratio_is_judged_only_when_both_rows_are_there(at_least, figures, expected):
    target = Target("t", "x", "mb_per_s", 0.5, at_least, (FLOOR, "x"))
    rows = [
        Row("s", system, "x", {} if value is None else {"mb_per_s": value})
        for system, value in zip((QUIVER, FLOOR), figures, strict=True)
    ]
    (verdict,) = judge([target], rows)
    assert (verdict.measured, verdict.met) == expected


def test_report_without_any_row_says_that_nothing_was_measured():
    verdicts = judge(TARGETS, [])
    assert {verdict.met for verdict in verdicts} == {None}
    assert targets_table(verdicts).row_count == len(TARGETS)
    assert rows_table("t", [Row("s", "Redis", "XADD", note="SKIPPED: none")]).row_count == 1


def test_every_figure_that_is_judged_has_a_column():
    assert {target.figure for target in TARGETS} <= set(COLUMNS)


def test_the_simulator_is_measured_by_its_closing_line_and_only_without_a_violation():
    said = (
        "2 seeds, 38,286 events, 12,345 events/s, 0.02 simulated hours, 1 records and 2 commands, {} with a violation"
    )
    assert counted("anything before\n" + said.format(0) + "\n") == (38286, 12345.0)
    with pytest.raises(RuntimeError):
        counted(said.format(10))


def test_redis_notes_say_which_row_is_judged_and_the_ratio_to_the_other():
    rows = [
        Row("s", QUIVER, POLL, {"records_per_s": 300.0}, "a"),
        Row("s", REDIS, XREAD_100_B, {"records_per_s": 100.0}, "b"),
        Row("s", REDIS, XREAD_BY_HAND, {"records_per_s": 200.0}),
    ]
    assert [row.note for row in redis_notes(rows, XREAD_100_B, XREAD_BY_HAND, [POLL])] == [
        "a",
        f"JUDGED: {client_name()}; b",
        "not judged: hand-packed client, of which poll is 1.50 x",
    ]


def test_every_ratio_target_of_redis_is_judged_by_redis_py():
    against = {target.against[1] for target in TARGETS if target.against and target.against[0] == REDIS}
    assert not any("by hand" in name for name in against)


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        (b"", None),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n", None),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{", None),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", b"{}"),
        (b"HTTP/1.1 200 OK\r\nServer: x\r\nContent-Length:0\r\n\r\n", b""),
    ],
)
def test_an_answer_is_taken_when_its_whole_body_has_come(received: bytes, expected: bytes | None):
    assert whole_body(bytearray(received)) == expected


def test_floor_counts_whole_frames_only():
    frame = struct.pack("<I", 5) + b"12345"
    assert whole_frames(memoryview(b"")) == (0, 0)
    assert whole_frames(memoryview(frame * 2 + frame[:-1])) == (18, 2)
    assert whole_frames(memoryview(frame + b"\0\0")) == (9, 1)


def test_hand_made_redis_client_is_not_misled_by_values_that_look_like_the_protocol():
    entry = b"*2\r\n$3\r\n1-0\r\n*2\r\n$1\r\nv\r\n$%d\r\n%s\r\n"
    evil = entry % (4, b"evil")
    answer = b"*1\r\n*2\r\n$1\r\ns\r\n*2\r\n" + 2 * (entry % (len(evil), evil))
    assert entry_pattern(len(evil)).findall(answer) == [(b"1-0", evil)] * 2


def test_file_system_is_that_of_the_longest_mount_point():
    mounts = "/dev/a / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n"
    assert file_system_of(Path("/tmp/x"), mounts) == "tmpfs"
    assert file_system_of(Path("/home/x"), mounts) == "ext4"
