"""Parameters of a classic call, typed when they are taken."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.errors import InvalidRequestError
from quiver.manager.params import Params


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (7, 7),
        ("7", 7),
        (" 7 ", 7),
        ("-1", -1),
        ("007", 7),
        (7.0, 7),
        (-1.0, -1),
        (0, 0),
        (2**63 - 1, 2**63 - 1),
        ("9" * 18, 10**18 - 1),
    ],
)
def test_numbers_may_be_strings(value: Any, expected: int) -> None:
    found = Params({"offset": value}).integer("offset")
    assert found == expected
    assert type(found) is int


@pytest.mark.parametrize(
    "value",
    [
        *("", "x", "1x", "1.0", "0x1", "1_0", "--1", "- 1", "+1", "\uff11", "²", "9" * 19, "9" * 5000, "\x00", "nan"),
        *(True, False, 1.5, 1e300, float("inf"), float("nan"), 2**63, -(2**63), 2**200),
        *([], [1], {}, {"a": 1}, b"1"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_integer_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^offset must be an integer$"):
        Params({"offset": value}).integer("offset")


@pytest.mark.parametrize("value", [1, 1.5, True, [], {}, ["a"]])
def test_what_is_no_string_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^message must be a string$"):
        Params({"message": value}).text("message")


def test_what_is_missing_is_said_by_its_first_name() -> None:
    params = Params({"other": 1, "null": None})
    with pytest.raises(InvalidRequestError, match=r"^topic is missing$"):
        params.text("topic", "topic_name", "name")
    with pytest.raises(InvalidRequestError, match=r"^null is missing$"):
        params.integer("null")
    assert params.optional_text("topic") is None
    assert params.optional_integer("null") is None
    assert params.integer("null", default=3) == 3
    assert params.integer("other", default=3) == 1


def test_the_first_of_several_names_that_has_a_value_counts() -> None:
    params = Params({"topic": None, "topic_name": "b", "name": "c"})
    assert params.text("topic", "topic_name", "name") == "b"
    assert params.text("name", "topic_name") == "c"


def test_an_empty_string_is_a_string() -> None:
    assert Params({"message": ""}).text("message") == ""


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.lists(st.integers()),
    st.dictionaries(st.text(), st.none()),
)


@given(values)
def test_any_value_is_an_integer_a_string_or_the_clients_mistake(value: Any) -> None:
    params = Params({"x": value})
    for take, kind in ((params.optional_integer, int), (params.optional_text, str)):
        try:
            found = take("x")
        except InvalidRequestError as error:
            assert error.message.startswith("x must be")
        else:
            assert found is None or type(found) is kind
