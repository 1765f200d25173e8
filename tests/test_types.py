from __future__ import annotations

import datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.errors import InvalidTopicError
from quiver.types import TOPIC_NAME_BYTES_MAX, PartitionStatus, Record, TopicInfo, check_topic_name

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@pytest.mark.parametrize("name", ["a", "logs", "A.b_c-9", "...", ".hidden", "-", "x" * TOPIC_NAME_BYTES_MAX])
def test_plain_names_are_allowed(name: str) -> None:
    assert check_topic_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        "../x",
        "a b",
        "a\n",
        "a\0",
        "tést",
        "x" * (TOPIC_NAME_BYTES_MAX + 1),
        "a" * 100_000,
        "\uff41",
    ],
)
def test_other_names_are_refused_with_the_rule(name: str) -> None:
    with pytest.raises(InvalidTopicError, match="is not allowed: use 1 to 249 of") as caught:
        check_topic_name(name)
    assert len(caught.value.message) < 300, "the message does not repeat an endless name"


@pytest.mark.parametrize("name", [None, 5, b"logs", ["logs"]])
def test_name_that_is_no_string_is_refused(name: object) -> None:
    with pytest.raises(InvalidTopicError, match=f"a string, not {type(name).__name__}"):
        check_topic_name(name)


@given(name=st.text(max_size=300))
def test_allowed_names_are_safe_in_paths_and_metrics(name: str) -> None:
    try:
        check_topic_name(name)
    except InvalidTopicError:
        return
    assert name.isascii() and not set(name) & set("/\\\0 \n*?:\"'") and name not in ("", ".", "..")


@given(moment=st.datetimes(timezones=st.just(datetime.UTC)))
def test_datetime_of_a_record_is_exact_to_the_microsecond(moment: datetime.datetime) -> None:
    timestamp = (moment - EPOCH) // datetime.timedelta(microseconds=1)
    assert Record("t", 0, 0, timestamp, None, None).datetime == moment


def test_record_is_a_value() -> None:
    one = Record("t", 0, 5, 1, b"k", b"v", (("h", b"x"),))
    assert one == Record("t", 0, 5, 1, b"k", b"v", (("h", b"x"),))
    assert len({one, Record("t", 0, 5, 1, b"k", b"v", (("h", b"x"),))}) == 1
    with pytest.raises(AttributeError):
        one.offset = 6  # type: ignore[misc]


def test_described_values_survive_the_wire_and_ignore_newer_fields() -> None:
    raw = msgspec.msgpack.encode(
        {"name": "t", "partitions": [{"id": 0, "leader": 1, "replicas": [1], "isr": []}], "x": 1}
    )
    assert msgspec.msgpack.decode(raw, type=TopicInfo).partitions[0].replicas == (1,)
    status = PartitionStatus("t", 0, "online", 1, 2, 3, 4)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(status), type=PartitionStatus) == status
