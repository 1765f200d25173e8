"""How consumed records look."""

from __future__ import annotations

import json

from quiver.cli.records import as_json, as_text
from quiver.types import Record


def record(value: bytes | None, key: bytes | None = None, headers: tuple[tuple[str, bytes], ...] = ()) -> Record:
    return Record("t", 3, 42, 1_769_860_800_000_001, key, value, headers)


def test_text_is_the_bytes_of_the_value_and_a_newline() -> None:
    assert as_text([record(b"one"), record(b"\xff\x00"), record(None)]) == b"one\n\xff\x00\n\n"


def test_json_has_every_field_on_one_line() -> None:
    line = as_json([record('grüße\n"x"'.encode(), b"k", (("h", b"1"), ("h", b"2")))])
    assert line.count(b"\n") == 1
    assert json.loads(line) == {
        "topic": "t",
        "partition": 3,
        "offset": 42,
        "timestamp": "2026-01-31T12:00:00.000001Z",
        "key": "k",
        "value": 'grüße\n"x"',
        "headers": [["h", "1"], ["h", "2"]],
    }


def test_json_marks_bytes_that_are_not_utf8_and_keeps_nothing_apart_from_empty() -> None:
    fields = json.loads(as_json([record(b"\xff", None)]))
    assert fields["value"] == {"base64": "/w=="}
    assert fields["key"] is None
    assert json.loads(as_json([record(b"")]))["value"] == ""
    assert json.loads(as_json([record(None)]))["value"] is None
