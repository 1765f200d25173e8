"""What --from and --partition mean."""

from __future__ import annotations

import datetime

import pytest

from quiver.cli.positions import Start, check_offset, choose_partitions, parse_start
from quiver.errors import InvalidRequestError, OffsetOutOfRangeError, UnknownPartitionError

NOON_US = int(datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC).timestamp()) * 1_000_000


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("earliest", Start(name="earliest")),
        ("Latest", Start(name="latest")),
        ("0", Start(offset=0)),
        ("42", Start(offset=42)),
        ("2026-01-31T12:00:00Z", Start(timestamp_us=NOON_US)),
        ("2026-01-31T12:00:00", Start(timestamp_us=NOON_US)),
        ("2026-01-31 13:00:00.000001+01:00", Start(timestamp_us=NOON_US + 1)),
        ("2026-01-31", Start(timestamp_us=NOON_US - 12 * 3600 * 1_000_000)),
    ],
)
def test_from_is_a_name_an_offset_or_a_time(text: str, start: Start) -> None:
    assert parse_start(text) == start


@pytest.mark.parametrize("text", ["", "-1", "yesterday", "4.2", "2026-13-01"])
def test_anything_else_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="use earliest, latest, an offset such as 42, or a time"):
        parse_start(text)


def test_one_partition_or_all() -> None:
    offsets = {0: (0, 5), 1: (2, 9)}
    assert choose_partitions("t", offsets, None) == offsets
    assert choose_partitions("t", offsets, 1) == {1: (2, 9)}
    with pytest.raises(UnknownPartitionError, match="topic t has no partition 2: it has 0 to 1"):
        choose_partitions("t", offsets, 2)


def test_an_offset_must_be_in_each_partition() -> None:
    check_offset("t", 5, {0: (0, 5), 1: (2, 9)})
    with pytest.raises(OffsetOutOfRangeError, match="offset 6 is out of range for t-0: valid offsets are 0 to 5"):
        check_offset("t", 6, {0: (0, 5), 1: (2, 9)})
    with pytest.raises(OffsetOutOfRangeError, match="t-1: valid offsets are 2 to 9"):
        check_offset("t", 1, {0: (0, 5), 1: (2, 9)})


def test_an_offset_that_one_of_several_partitions_lacks_names_the_way_out() -> None:
    with pytest.raises(OffsetOutOfRangeError, match="; --partition reads one partition"):
        check_offset("t", 6, {0: (0, 5), 1: (2, 9)})
