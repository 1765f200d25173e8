"""`verify` on logs, a topic and frames: what is right passes, and each kind of trouble is found and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quiver.errors import InvalidRequestError, UnknownTopicError
from quiver.spark import verify
from quiver.spark.jobs.running import JobProgress
from quiver.spark.jobs.verify import Verified
from tests.spark.kit import Lake

Line = dict[str, Any]


def seen(topic: str, partition: int, count: int) -> list[Line]:
    return [
        {"topic": topic, "partition": partition, "offset": offset, "value": f"{partition}-{offset}"}
        for offset in range(count)
    ]


def log(path: Path, lines: list[Line]) -> str:
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return str(path)


def found(result: Verified) -> dict[tuple[str, str], int]:
    return {(one.who, one.what): one.count for one in result.findings}


def examples(result: Verified, what: str) -> tuple[str, ...]:
    return next(one.examples for one in result.findings if one.what == what)


def test_what_is_right_passes(lake: Lake, tmp_path: Path) -> None:
    topic = lake.new_topic(2)
    odd = b"\xff\x00 not text"
    for partition in range(2):
        lake.fill(topic, [line["value"].encode() for line in seen(topic, partition, 250)] + [odd], partition)
    packed = {"base64": "/wAgbm90IHRleHQ="}
    lines = [
        line
        for partition in range(2)
        for line in (*seen(topic, partition, 250), {"partition": partition, "offset": 250, "value": packed})
    ]
    foreign = [{"topic": "another", "partition": 0, "offset": 0, "value": "x"}]
    mixed = [line for pair in zip(lines[:251], lines[251:], strict=True) for line in pair]
    told: list[JobProgress] = []
    result = verify(
        lake.spark,
        topic,
        produced=[log(tmp_path / "p1.jsonl", lines[:300]), log(tmp_path / "p2.jsonl", lines[300:])],
        consumed={"c1": log(tmp_path / "c1.jsonl", lines + foreign), "c2": log(tmp_path / "c2.jsonl", mixed)},
        servers=lake.servers,
        on_progress=told.append,
    )
    assert result.findings == ()
    assert result.produced == 502
    assert [tuple(side) for side in result.sides] == [
        (who, partition, 251, 0, 250) for who in ("c1", "c2", "topic") for partition in range(2)
    ]
    assert "produced = seen" in result.checks and "seen in the order of offsets" in result.checks
    assert told and told[-1].tasks_done > 0


def test_each_kind_of_trouble_is_found_and_shown(lake: Lake, tmp_path: Path) -> None:
    lines = seen("t", 0, 200)
    gap = lines[:50] + lines[53:]
    twice = lines[:120] + lines[119:]
    swapped = [*lines[:70], lines[71], lines[70], *lines[72:]]
    other = [{**line, "value": "forged"} if line["offset"] == 9 else line for line in lines]
    broken = tmp_path / "broken.jsonl"
    broken.write_text(Path(log(tmp_path / "whole.jsonl", lines)).read_text() + '{"topic": "t", "part')
    result = verify(
        lake.spark,
        "t",
        produced=log(tmp_path / "p.jsonl", lines),
        consumed={
            "gap": log(tmp_path / "gap.jsonl", gap),
            "twice": log(tmp_path / "twice.jsonl", twice),
            "swapped": log(tmp_path / "swapped.jsonl", swapped),
            "other": log(tmp_path / "other.jsonl", other),
            "broken": str(broken),
        },
        examples=2,
    )
    assert found(result) == {
        ("gap", "missing"): 3,
        ("gap", "lost"): 3,
        ("twice", "offset twice"): 1,
        ("twice", "doubled"): 1,
        ("swapped", "out of order"): 1,
        ("other", "lost"): 1,
        ("other", "never produced"): 1,
        ("", "not the same for all"): 1,
        ("broken", "unreadable"): 1,
    }
    assert examples(result, "missing") == ("partition 0, offsets 50 to 52",)
    assert examples(result, "offset twice") == ("partition 0, offset 119: 2 times",)
    assert examples(result, "out of order") == ("partition 0, offset 70 after 71",)
    assert examples(result, "not the same for all") == ("partition 0, offset 9: 0-9, and forged",)
    assert examples(result, "lost") == ("0-50: made 1, seen 0 times", "0-51: made 1, seen 0 times")
    assert examples(result, "never produced") == ("forged: made 0, seen 1 times",)
    assert examples(result, "unreadable") == ('{"topic": "t", "part',)


def test_logs_without_offsets_are_compared_line_by_line(lake: Lake, tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(100)]
    (tmp_path / "p.txt").write_text("\n".join(lines))
    (tmp_path / "same.txt").write_text("\n".join(lines))
    (tmp_path / "turned.txt").write_text("\n".join([*lines[:98], lines[99], lines[98]]))
    paths = {name: str(tmp_path / f"{name}.txt") for name in ("same", "turned")}
    result = verify(lake.spark, "t", produced=str(tmp_path / "p.txt"), consumed=paths)
    assert found(result) == {("", "order differs"): 2}
    assert examples(result, "order differs")[0] == "partition 0, message 99: line 98, and line 99"
    assert result.sides[0].first is None


def test_frames_and_expressions_name_messages(lake: Lake) -> None:
    """Repeated values are no fault where nobody said that they name a message."""
    rows = [(0, number, f'{{"n": {number % 9}}}') for number in range(10)]
    frame = lake.frame(rows, "partition int, offset bigint, value string")
    assert verify(lake.spark, "t", consumed={"c": frame}).right
    result = verify(lake.spark, "t", consumed={"c": frame}, id="get_json_object(value, '$.n')")
    assert found(result) == {("c", "doubled"): 1}
    assert examples(result, "doubled") == ("0: made 1, seen 2 times",)


def test_mistakes_are_told_in_one_sentence(lake: Lake, tmp_path: Path) -> None:
    here = log(tmp_path / "c.jsonl", seen("t", 0, 3))
    with pytest.raises(InvalidRequestError, match="nothing to verify"):
        verify(lake.spark, "t")
    with pytest.raises(InvalidRequestError, match=r"Path does not exist: .*missing"):
        verify(lake.spark, "t", consumed={"c": str(tmp_path / "missing.jsonl")})
    with pytest.raises(InvalidRequestError, match="`nonsense` cannot be resolved"):
        verify(lake.spark, "t", consumed={"c": here}, id="nonsense + 1")
    with pytest.raises(InvalidRequestError, match="choose another name"):
        verify(lake.spark, "t", consumed={"topic": here})
    with pytest.raises(UnknownTopicError, match="nowhere"):
        verify(lake.spark, "nowhere", servers=lake.servers)
