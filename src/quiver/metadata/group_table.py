"""The groups there are, by name.

Rule: pure. What may not be is refused before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from quiver.errors import GroupActiveError, InvalidRequestError, UnknownGroupError
from quiver.metadata.commands import ChangeGroup
from quiver.metadata.groups import Change, Group, changed

GROUPS_MAX: Final = 10_000
GROUP_MEMBERS_MAX: Final = 5_000


Count = Callable[[str], int]  # how many partitions a topic has; 0: there is no such topic


class Counters(Protocol):
    ownership: int


class GroupTable(dict[str, Group]):
    def named(self, name: str) -> Group:
        found = self.get(name)
        if found is None:
            raise UnknownGroupError(f"group {name} does not exist")
        return found

    def change(self, command: ChangeGroup, count: Count, counters: Counters) -> tuple[Group, bool]:
        """The group after it, and whether that is another than before. The first member makes it."""
        joined = {member.id for member in command.change.joined} - set(command.change.left)
        group = self.named(command.group) if not joined else self.get(command.group, Group(command.group))
        if group.name not in self and len(self) >= GROUPS_MAX:
            raise InvalidRequestError(f"there are {GROUPS_MAX} groups already; delete those that nobody needs")
        if joined and len(joined | {member.id for member in group.members}) > GROUP_MEMBERS_MAX:
            raise InvalidRequestError(f"group {group.name} has its maximum of {GROUP_MEMBERS_MAX} members")
        if not group.members:
            group = msgspec.structs.replace(group, strategy=command.strategy)
        return self._shared(group, command.change, count, counters)

    def share_again(self, topic: str, count: Count, counters: Counters) -> list[Group]:
        """The groups that are different because a topic has other partitions than before."""
        concerned = [self[name] for name in sorted(self) if topic in self[name].topics]
        found = [self._shared(group, Change(), count, counters) for group in concerned]
        return [group for group, differs in found if differs]

    def _shared(self, group: Group, change: Change, count: Count, counters: Counters) -> tuple[Group, bool]:
        topics = group.topics.union(*(member.topics for member in change.joined))
        before, counts = self.get(group.name), {topic: count(topic) for topic in topics if count(topic)}
        after, counters.ownership = changed(group, change, counts, counters.ownership)
        self[group.name] = after
        return after, after is not before

    def delete(self, name: str) -> Group:
        group = self.named(name)
        _check_at_rest(group)
        del self[name]
        return group

    def fence(self, name: str, counters: Counters) -> int:
        """An epoch above those that its members had, and below those of whoever joins later. Of any name: a group may
        have positions and nothing else."""
        _check_at_rest(self.get(name, Group(name)))
        epoch, counters.ownership = counters.ownership, counters.ownership + 1
        return epoch


def _check_at_rest(group: Group) -> None:
    if group.members:
        raise GroupActiveError(f"group {group.name} has {len(group.members)} active members; stop them first")
