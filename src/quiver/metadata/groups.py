"""Consumer groups: who is a member, who reads which partition, and who is to read it next.

A partition is given to its next reader only when the last one has let go of it or is no member any more; members keep
what they keep. Each time a partition is given to somebody it gets a new epoch. Partitions refuse positions of an older
epoch than they have seen, so that whoever was away cannot store anything over its successor.

Rule: pure. A group is a value; a change makes another one, with a higher generation when anything is different. Epochs
and generations are never used twice, also not by a group that is deleted and made again.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from quiver.metadata.assignment import STICKY, Place, assign


class Member(msgspec.Struct, frozen=True):
    """`session_ms`: without a word for so long it counts as gone."""

    id: str
    topics: tuple[str, ...]
    session_ms: int


class Share(msgspec.Struct, frozen=True, array_like=True):
    """A partition, who reads it since `epoch`, and who is to read it. While these differ the reader is to let go."""

    topic: str
    partition: int
    owner: str
    epoch: int
    target: str


class Released(msgspec.Struct, frozen=True, array_like=True):
    """A member has let go of a partition that it was given at `epoch`."""

    member: str
    topic: str
    partition: int
    epoch: int


class Group(msgspec.Struct, frozen=True):
    name: str
    strategy: str = STICKY
    generation: int = 0
    members: tuple[Member, ...] = ()
    shares: tuple[Share, ...] = ()

    @property
    def key(self) -> str:
        """Its name without what no database takes in a text."""
        return self.name.replace("\\", "\\\\").replace("\0", "\\0")

    @property
    def topics(self) -> set[str]:
        """What its members want, and what was not let go of yet."""
        return {topic for member in self.members for topic in member.topics} | {share.topic for share in self.shares}


class Change(msgspec.Struct, frozen=True):
    """What happens to a group at once. Who joins again joins with other topics."""

    joined: list[Member] = []
    left: list[str] = []
    released: list[Released] = []


def changed(group: Group, change: Change, counts: Mapping[str, int], next_epoch: int) -> tuple[Group, int]:
    """The group after it, and the next number that is not used yet. `counts`: partitions of every topic there is."""
    members = {member.id: member for member in group.members if member.id not in change.left}
    members |= {member.id: member for member in change.joined}
    released = {(one.member, one.topic, one.partition, one.epoch) for one in change.released}
    owned: dict[Place, tuple[str, int]] = {}
    for share in group.shares:
        here = share.owner in members and share.partition < counts.get(share.topic, 0)
        if here and (share.owner, share.topic, share.partition, share.epoch) not in released:
            owned[share.topic, share.partition] = share.owner, share.epoch
    wants = {member.id: member.topics for member in members.values()}
    wanted = {topic: counts[topic] for topics in wants.values() for topic in topics if topic in counts}
    if change.released and not change.joined and not change.left:
        targets = {(share.topic, share.partition): share.target for share in group.shares if share.target}
    else:
        targets = assign(group.strategy, wanted, wants, _present(group, members, owned))
    shares = []
    for topic, partition in sorted(targets.keys() | owned.keys()):
        target = targets.get((topic, partition), "")
        owner, epoch = owned.get((topic, partition), ("", 0))
        if not owner:
            owner, epoch = target, next_epoch
            next_epoch += 1
        shares.append(Share(topic, partition, owner, epoch, target))
    after = (tuple(members[member] for member in sorted(members)), tuple(shares))
    if after == (group.members, group.shares):
        return group, next_epoch
    return Group(group.name, group.strategy, next_epoch, *after), next_epoch + 1


def _present(group: Group, members: Mapping[str, Member], owned: Mapping[Place, tuple[str, int]]) -> dict[Place, str]:
    """Who has each partition, for the balance: its reader, or once that one let go, who was to have it next."""
    targets = {(share.topic, share.partition): share.target for share in group.shares if share.target in members}
    return targets | {place: owner for place, (owner, _) in owned.items()}
