"""Decides where `quiver consume` begins and ends in each partition, from what the user said and what the log holds.

Rule: pure. Offsets come in as {partition: (earliest, latest)}; ends are exclusive.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Mapping
from typing import Final, Literal

from quiver.errors import InvalidRequestError, OffsetOutOfRangeError, UnknownPartitionError


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """One of: a name, an offset, or a moment in microseconds since 1970 UTC."""

    name: Literal["earliest", "latest"] | None = None
    offset: int | None = None
    timestamp_us: int | None = None


_AGO: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(s|m|h|d)")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_start(text: str, option: str = "--from") -> Start:
    """`earliest`, `latest`, an offset, or an ISO time; a time without a zone is UTC."""
    lowered = text.strip().lower()
    if lowered == "earliest":
        return Start(name="earliest")
    if lowered == "latest":
        return Start(name="latest")
    if lowered.isascii() and lowered.isdigit():
        return Start(offset=int(lowered))
    try:
        moment = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        raise InvalidRequestError(
            f"{option} {text!r} is not a place to start: use earliest, latest, an offset such as 42, "
            "or a time such as 2026-01-31T12:00:00Z"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return Start(timestamp_us=(moment - epoch) // datetime.timedelta(microseconds=1))


def parse_place(text: str, now_us: int) -> Start:
    """As for a start, or how long ago: `90s`, `15m`, `2h`, `1d`."""
    ago = _AGO.fullmatch(text.strip().lower())
    if ago is None:
        return parse_start(text, "--to")
    return Start(timestamp_us=max(0, now_us - int(float(ago[1]) * _SECONDS[ago[2]] * 1e6)))


def choose_partitions(
    topic: str, offsets: Mapping[int, tuple[int, int]], partition: int | None
) -> dict[int, tuple[int, int]]:
    """All of the topic, or the one that was asked for."""
    if partition is None:
        return dict(offsets)
    if partition not in offsets:
        raise UnknownPartitionError(f"topic {topic} has no partition {partition}: it has 0 to {len(offsets) - 1}")
    return {partition: offsets[partition]}


def check_offset(topic: str, offset: int, offsets: Mapping[int, tuple[int, int]]) -> None:
    """Before the first record: an offset that one of the partitions does not hold."""
    for partition, (earliest, latest) in sorted(offsets.items()):
        if not earliest <= offset <= latest:
            error = OffsetOutOfRangeError.of(topic, partition, offset, earliest, latest)
            if len(offsets) > 1:
                error.args = (f"{error.message}; --partition reads one partition",)
            raise error
