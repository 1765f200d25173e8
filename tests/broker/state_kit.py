"""A log in memory, for tests of the pure partition state."""

from __future__ import annotations

from typing import Any

import msgspec

from quiver.broker.partition_state import PartitionState, Stored, Trim
from quiver.log.checkpoint import Checkpoint
from quiver.wire.frame import Entry, FrameHeader, Kind, sequence_step, stamp
from quiver.wire.messages import Position


class Log:
    """A log in memory: gives entries their places and the state its events."""

    def __init__(self, checkpoint: Checkpoint | None = None) -> None:
        checkpoint = checkpoint or Checkpoint()
        self.state = PartitionState(checkpoint)
        self.next_index, self.next_offset = checkpoint.index + 1, checkpoint.next_offset
        self.tail: list[tuple[FrameHeader, Any]] = []

    def append(self, entry: Entry) -> FrameHeader:
        header = stamp(entry, self.next_index, 1, self.next_offset)
        self.next_index, self.next_offset = header.index + 1, header.next_offset
        self.state.extend(header)
        self.tail.append((header, entry.payload))
        return header

    def commit(self, count: int | None = None) -> None:
        for header, payload in self.tail[:count]:
            self.state.apply(header, payload)
        del self.tail[:count]

    def roll_back(self) -> None:
        self.state.roll_back()
        if self.tail:
            self.next_index, self.next_offset = self.tail[0][0].index, self.tail[0][0].base_offset
        self.tail.clear()

    def produce(
        self, sequence: int, count: int = 3, *, producer: int = 7, epoch: int = 0, flags: int = 0
    ) -> Stored | FrameHeader:
        """As the owner does: judge, then append what is new."""
        stored = self.state.judge(producer, epoch, sequence, sequence_step(flags, count))
        return stored or self.append(data(sequence, count, producer=producer, epoch=epoch, flags=flags))


def data(sequence: int, count: int, *, producer: int, epoch: int = 0, flags: int = 0) -> Entry:
    entry = Entry(Kind.DATA, b"", 0, count, producer_id=producer, producer_epoch=epoch, sequence=sequence)
    return entry._replace(flags=flags)


def positions(*found: Position) -> Entry:
    return Entry.control(Kind.POSITIONS, msgspec.msgpack.encode(list(found)))


def trim(index: int, offset: int) -> Entry:
    return Entry.control(Kind.TRIM, msgspec.msgpack.encode(Trim(index, offset)))
