"""What members of consumer groups say to the managers, and what is asked about groups."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from quiver.types import GroupInfo
from quiver.wire.fields import ConsumerName, Name, UInt32, UInt64
from quiver.wire.leaders import ByLeader, Led

SESSION_MS_MIN: Final = 500
SESSION_MS_MAX: Final = 3_600_000
BEAT_WAIT_MS_MAX: Final = 5_000
GROUP_TOPICS_MAX: Final = 1_000
RELEASED_MAX: Final = 100_000

MemberId = Annotated[str, Meta(min_length=1, max_length=255)]


class Held(Struct, array_like=True, frozen=True):
    """A partition that a member has since `epoch`."""

    topic: Name
    partition: UInt32
    epoch: UInt64


class JoinGroup(Struct, array_like=True, frozen=True):
    """A member comes, or wants other topics; it chooses its id itself, so that asking twice makes one member of it.

    Without a heartbeat for `session_ms` it counts as gone. `strategy` is how the group shares partitions.
    """

    group: ConsumerName
    member: MemberId
    topics: Annotated[list[Name], Meta(min_length=1, max_length=GROUP_TOPICS_MAX)]
    session_ms: Annotated[int, Meta(ge=SESSION_MS_MIN, le=SESSION_MS_MAX)] = 10_000
    strategy: Annotated[str, Meta(max_length=20)] = "sticky"


class GroupBeat(Struct, array_like=True, frozen=True):
    """A member is there. Answered when its group is in another generation than the one it knows, at the latest after
    `wait_ms`. `released` are partitions it has let go of."""

    group: ConsumerName
    member: MemberId
    generation: UInt64
    wait_ms: Annotated[int, Meta(ge=0, le=BEAT_WAIT_MS_MAX)] = 0
    released: Annotated[list[Held], Meta(max_length=RELEASED_MAX)] = []


class GroupReply(Struct, array_like=True, frozen=True):
    """What a member has, of that, what it is to let go of, and how many it is to get from others. When the generation
    is the one it knows: nothing."""

    generation: int
    held: list[Held] = []
    leaving: list[Held] = []
    coming: int = 0


class LeaveGroup(Struct, array_like=True, frozen=True):
    group: ConsumerName
    member: MemberId


class GetGroups(Struct, array_like=True, frozen=True):
    """All groups, or one with its members."""

    group: ConsumerName | None = None


class GroupsReply(Struct, array_like=True, frozen=True):
    groups: list[GroupInfo]


class DeleteGroup(Struct, array_like=True, frozen=True):
    """Only a group without members. Its positions are the partitions' business."""

    group: ConsumerName


class FenceGroup(Struct, array_like=True, frozen=True):
    """Somebody is about to set the positions of a group without members. It claims the partitions like a member, under
    the epoch that it gets: whoever had them cannot move them any more, and whoever joins meanwhile fences it."""

    group: ConsumerName


class FenceReply(Struct, array_like=True, frozen=True):
    epoch: int


class GetPositions(Struct, array_like=True, frozen=True):
    """Where a consumer is in the partitions that a broker leads; without a name, all groups."""

    consumer: ConsumerName | None = None


class StoredPosition(Struct, array_like=True, frozen=True):
    """The log of the partition has start_offset up to high_watermark."""

    topic: str
    partition: int
    consumer: str
    offset: int
    start_offset: int
    high_watermark: int


class PositionsReply(Struct, array_like=True, frozen=True):
    positions: list[StoredPosition]
    led: list[Led] = []  # all partitions that these are of, also those without any
    broken: list[tuple[str, int]] = []


def positions_of(found: ByLeader[PositionsReply]) -> list[StoredPosition]:
    """Those that leaders told of."""
    replies = {id(reply): reply for reply in found.values()}.values()
    return [one for reply in replies for one in reply.positions if found.get((one.topic, one.partition)) is reply]


# What the managers answer; positions are the brokers'.
GROUP_REQUESTS: Final = (JoinGroup, GroupBeat, LeaveGroup, GetGroups, DeleteGroup, FenceGroup)
GROUP_KINDS: Final[dict[int, type[Struct]]] = {
    40: JoinGroup,
    41: GroupBeat,
    42: LeaveGroup,
    43: GetGroups,
    44: DeleteGroup,
    45: GetPositions,
    46: FenceGroup,
}
GROUP_REPLIES: Final[dict[type[Struct], type[Struct]]] = {
    JoinGroup: GroupReply,
    GroupBeat: GroupReply,
    GetGroups: GroupsReply,
    GetPositions: PositionsReply,
    FenceGroup: FenceReply,
}
