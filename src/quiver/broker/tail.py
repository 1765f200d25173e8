"""The entries of a log that are not committed yet, and who waits for each.

Rule: an entry leaves the tail in one of two ways: it is committed and applied to the state, or it is gone from the log.
Who waits is answered once, and not before that is certain.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from quiver.broker.partition_state import PartitionState
from quiver.errors import ConflictError, MemberFencedError
from quiver.replication.waiting import Asker, Waiter, refuse
from quiver.wire.frame import FrameHeader, Kind
from quiver.wire.messages import Position


class TailEntry(NamedTuple):
    header: FrameHeader
    payload: Any  # what the state needs of it: nothing of data
    waiters: list[Waiter]


class Tail:
    def __init__(self, state: PartitionState) -> None:
        self.state = state
        self._entries: deque[TailEntry] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, header: FrameHeader, payload: Any, waiters: list[Waiter] | None = None) -> None:
        if header.index > self.state.applied_index:  # else the state came with a snapshot and has it already
            self.state.extend(header)
            kept = None if header.kind == Kind.DATA else payload
            # Quicker than by its own name.
            self._entries.append(tuple.__new__(TailEntry, (header, kept, waiters or [])))

    def wait_for_last(self, waiters: list[Waiter]) -> None:
        self._entries[-1].waiters.extend(waiters)

    def wait_for(self, index: int, future: Asker, reply: Any) -> None:
        self._entries[index - self._entries[0].header.index].waiters.append((future, reply))

    def remove(self, first: int, error: Exception) -> None:
        """Entries from `first` on are gone."""
        self.state.roll_back(first)
        while self._entries and self._entries[-1].header.index >= first:
            refuse(self._entries.pop().waiters, error)

    def send_away(self, error: Exception) -> None:
        """The entries stay, but nobody can be told here what becomes of them."""
        for entry in self._entries:
            refuse(entry.waiters, error)
            entry.waiters.clear()

    def replace(self, state: PartitionState) -> None:
        self._entries.clear()
        self.state = state

    def commit(self, end: int) -> list[FrameHeader]:
        """Applies the entries below `end` and answers who waits for them; returns their headers."""
        committed = []
        while self._entries and self._entries[0].header.index < end:
            header, payload, waiters = self._entries[0]
            refused = self.state.apply(header, payload)
            self._entries.popleft()  # not before: whoever waits for an entry must be found when this fails
            for place in refused if waiters else ():  # nobody waits on a follower
                future, position = waiters[place]
                if not future.done():
                    future.set_exception(self._conflict(position))
            for future, reply in waiters:
                if not future.done():
                    future.set_result(reply)
            committed.append(header)
        return committed

    def _conflict(self, position: Position) -> ConflictError | MemberFencedError:
        if self.state.is_fenced(position):
            epoch, group = self.state.epochs.get(position.consumer, 0), f"group {position.consumer}"
            gone = f"{group} was deleted since this partition was claimed"
            since = f"another member of {group} has this partition since epoch {epoch}"
            return MemberFencedError(since if epoch else gone, epoch=epoch)
        current = self.state.positions.get(position.consumer)
        return ConflictError(f"the position is {current}, not {position.expected}", current=current)
