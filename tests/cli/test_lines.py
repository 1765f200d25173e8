"""Input lines become messages, whole and in order, in bounded memory."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.cli.lines import Lines, read_lines, split_key
from quiver.errors import InvalidRequestError, MessageTooLargeError


def pieces(*parts: bytes):  # type: ignore[no-untyped-def]
    """A reader that returns each part as one read, as a pipe does."""
    waiting = iter(parts)
    return lambda _size: next(waiting, b"")


def test_a_line_that_came_in_two_reads_is_one_message() -> None:
    assert list(read_lines(pieces(b"on", b"e\ntwo\nth", b"ree\n"), 100)) == [
        Lines(1, [b"one", b"two"]),
        Lines(3, [b"three"]),
    ]


def test_the_last_line_counts_without_its_newline() -> None:
    assert [line for chunk in read_lines(pieces(b"a\nb"), 100) for line in chunk.lines] == [b"a", b"b"]


def test_empty_input_has_no_lines_and_an_empty_line_is_an_empty_message() -> None:
    assert list(read_lines(pieces(b""), 100)) == []
    assert [chunk.lines for chunk in read_lines(pieces(b"\n\n"), 100)] == [[b"", b""]]


@pytest.mark.parametrize("parts", [(b"ok\nok\n12345\nno\n",), (b"ok\nok\n123", b"45"), (b"ok\nok\n12345",)])
def test_a_line_over_the_limit_is_named_after_the_lines_before_it(parts: tuple[bytes, ...]) -> None:
    seen: list[bytes] = []
    with pytest.raises(MessageTooLargeError, match=r"^line 3 is longer than a message may be \(4 bytes\)"):
        for chunk in read_lines(pieces(*parts), 4):
            seen += chunk.lines
    assert seen == [b"ok", b"ok"]


@given(st.binary(max_size=200), st.integers(1, 20))
def test_lines_are_those_of_the_input_whatever_the_reads(content: bytes, read_bytes: int) -> None:
    stream = io.BytesIO(content)
    found = [line for chunk in read_lines(lambda _size: stream.read(read_bytes), 1000) for line in chunk.lines]
    expected = content.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert found == expected


def test_key_and_value_are_split_at_the_first_separator() -> None:
    assert split_key(b"k:v:w", b":", 1) == (b"k", b"v:w")
    assert split_key(b":v", b":", 1) == (b"", b"v")
    assert split_key(b"k\t", b"\t", 1) == (b"k", b"")


def test_a_line_without_separator_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="line 7 has no key: ':' is not in it"):
        split_key(b"value", b":", 7)
