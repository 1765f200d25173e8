"""The kinds of field that requests have, with their limits."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

REPLICAS_MAX: Final = 100
CONSUMER_NAME_MAX: Final = 255
REGISTERED: Final = "#"  # the name of a registered consumer is this and its number; no group begins with it

UInt64 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
UInt32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Timestamp = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Name = Annotated[str, Meta(max_length=1000)]
Uid = Annotated[str, Meta(pattern="^[0-9a-f]{32}\\Z")]
BrokerId = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Voters = Annotated[list[UInt64], Meta(max_length=REPLICAS_MAX)]  # replica ids: broker id << 32 | disk id
# Of a topic, as `topic_settings` reads them: only what was set.
Settings = Annotated[dict[Annotated[str, Meta(max_length=100)], bool | int | str], Meta(max_length=100)]
ConsumerName = Annotated[str, Meta(min_length=1, max_length=CONSUMER_NAME_MAX)]
POSITIONS_MAX: Final = 1_000  # in one request
