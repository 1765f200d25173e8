"""What a partition's log means: offsets, producers' sequences, consumers' positions, the log start, what to compact.

Rule: pure, and a function of the entries alone, so that every replica has the same. Sequences and offsets are judged
against the tail, uncommitted entries included; positions and the log start count once committed.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

import msgspec

from quiver.errors import OutOfOrderSequenceError, OverloadedError, ProducerFencedError
from quiver.log.checkpoint import Checkpoint
from quiver.log.compaction import Order
from quiver.wire.fields import REGISTERED
from quiver.wire.frame import FLAG_CLIENT, FLAG_UNSEQUENCED, FrameHeader, Kind, sequence_step
from quiver.wire.messages import Position

# Batches remembered for each producer, to answer a retry with its first offset. The SDK has fewer in flight.
PRODUCER_BATCHES_MAX: Final = 8
# Producers remembered. Beyond it the one that was silent longest is forgotten; its next batch must begin a new epoch.
PRODUCERS_MAX: Final = 10_000
POSITIONS_MAX: Final = 100_000
OFFSET_UNKNOWN: Final = -1


class Trim(msgspec.Struct, array_like=True, frozen=True):
    """Payload of a TRIM entry: what stays begins at this index and this offset."""

    index: int
    offset: int


class Compact(msgspec.Struct, array_like=True, frozen=True):
    """Payload of a COMPACT entry: all before it is to be compacted; see `Order`."""

    drop_end: int
    drop_before_us: int


class Stored(NamedTuple):
    """A batch that is in the log already: a retry gets this answer."""

    index: int  # type: ignore[assignment]  # our word; tuple.index is never called
    base_offset: int


class _Batch(msgspec.Struct, array_like=True, frozen=True):
    index: int
    sequence: int
    step: int  # the next batch has the sequence that is so much higher
    base_offset: int


def _batch_of(header: FrameHeader) -> _Batch:
    step = sequence_step(header.flags, header.record_count)
    return _Batch(header.index, header.sequence, step, header.base_offset)


class _Producer(msgspec.Struct, array_like=True):
    epoch: int
    batches: list[_Batch]


class _Image(msgspec.Struct, array_like=True, frozen=True):
    """The check-pointed form."""

    start_offset: int
    trim_index: int
    producers: dict[int, _Producer]
    positions: dict[str, int]
    client_counts: dict[int, int] = {}
    epochs: dict[str, int] = {}
    order: tuple[int, int, int] = Order()


_image_decoder = msgspec.msgpack.Decoder(_Image)
_positions_decoder = msgspec.msgpack.Decoder(list[Position])
_trim_decoder = msgspec.msgpack.Decoder(Trim)
_compact_decoder = msgspec.msgpack.Decoder(Compact)


class PartitionState:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.applied_index = checkpoint.index
        self.applied_term = checkpoint.term
        self.next_offset = checkpoint.next_offset  # the high watermark: records below it are committed
        image = _image_decoder.decode(checkpoint.state) if checkpoint.state else _Image(0, 1, {}, {}, {}, {})
        self.start_offset = image.start_offset
        self.trim_index = image.trim_index
        self.positions = image.positions
        self.epochs = image.epochs  # of the last member of each group that claimed this partition
        self.client_counts = image.client_counts  # records by the number of a client name
        self.order = Order(*image.order)  # the last compaction that was ordered
        self._producers = image.producers
        # Batches in the log and not committed, by producer: (epoch, batch) in log order.
        self._tail: dict[int, deque[tuple[int, _Batch]]] = {}

    # -- the tail ------------------------------------------------------------------------------------------------

    def judge(self, producer_id: int, epoch: int, sequence: int, step: int) -> Stored | None:
        """None: this batch is the next of its producer. Raises for a gap or an old epoch."""
        if producer_id == 0:
            return None
        tail = self._tail.get(producer_id, ())
        producer = self._producers.get(producer_id)
        known_epoch = tail[-1][0] if tail else producer.epoch if producer else 0
        last = tail[-1][1] if tail else producer.batches[-1] if producer else None
        if last is not None and epoch == known_epoch and sequence == last.sequence + last.step:
            return None
        if epoch < known_epoch:
            raise ProducerFencedError(f"producer {producer_id} has written with epoch {known_epoch}, not {epoch}")
        expected = 0
        if epoch == known_epoch:
            batches = list(producer.batches) if producer and producer.epoch == epoch else []
            batches.extend(batch for batch_epoch, batch in tail if batch_epoch == epoch)
            if batches:
                expected = batches[-1].sequence + batches[-1].step
                for batch in batches:
                    if batch.sequence == sequence:
                        return Stored(batch.index, batch.base_offset)
                if sequence + step <= batches[0].sequence:
                    # Sequences have no gaps: it was stored, longer ago than we remember. Not so within what we do
                    # remember: that is another batch under old numbers, perhaps of one that is not committed.
                    return Stored(0, OFFSET_UNKNOWN)
        if sequence != expected:
            raise OutOfOrderSequenceError(
                f"producer {producer_id} sent sequence {sequence}, expected {expected}", expected=expected, got=sequence
            )
        return None

    def extend(self, header: FrameHeader) -> None:
        """An entry was appended and is not committed yet."""
        if header.producer_id and not header.flags & FLAG_UNSEQUENCED:
            self._tail.setdefault(header.producer_id, deque()).append((header.producer_epoch, _batch_of(header)))

    def roll_back(self, first: int = 0) -> None:
        """The uncommitted entries from that index on are gone from the log."""
        for producer_id, batches in list(self._tail.items()):
            while batches and batches[-1][1].index >= first:
                batches.pop()
            if not batches:
                del self._tail[producer_id]

    # -- what is committed ---------------------------------------------------------------------------------------

    def apply(self, header: FrameHeader, payload: Any) -> list[int]:
        """The next entry is committed. Returns which of the positions in it were refused: they had moved meanwhile."""
        assert header.index == self.applied_index + 1
        tail = self._tail.get(header.producer_id)
        if tail and tail[0][1].index == header.index:
            tail.popleft()
            if not tail:
                del self._tail[header.producer_id]
        self.applied_index = header.index
        self.applied_term = header.term
        self.next_offset = header.next_offset
        if header.kind == Kind.DATA:
            if header.flags & FLAG_CLIENT:
                counted = self.client_counts.get(header.producer_id, 0)
                self.client_counts[header.producer_id] = counted + header.record_count
            if header.producer_id and not header.flags & FLAG_UNSEQUENCED:
                self._apply_batch(header)
        elif header.kind == Kind.POSITIONS:
            moves = enumerate(_positions_decoder.decode(payload))
            return [place for place, position in moves if not self._move(position)]
        elif header.kind == Kind.TRIM:
            trim = _trim_decoder.decode(payload)
            self.start_offset = max(self.start_offset, trim.offset)
            self.trim_index = max(self.trim_index, trim.index)
        elif header.kind == Kind.COMPACT:
            compact, before = _compact_decoder.decode(payload), self.order
            # Never less than before: what is gone at one replica must go at all of them.
            drop_end = max(before.drop_end, compact.drop_end)
            self.order = Order(header.index, drop_end, max(before.drop_before_us, compact.drop_before_us))
        return []

    def _move(self, position: Position) -> bool:
        known = self.positions.get(position.consumer)
        if position.expected is not None and position.expected != (-1 if known is None else known):
            return False
        if self.is_fenced(position):
            return False
        if position.epoch:
            self.epochs[position.consumer] = position.epoch
        if position.act == "forget":
            self.positions.pop(position.consumer, None)
            self.epochs.pop(position.consumer, None)
        elif position.act == "move" and (known is None or position.rewind or position.offset > known):
            self.positions[position.consumer] = position.offset
        return True

    def is_fenced(self, position: Position) -> bool:
        """Another member of the group has the partition since, or the group was forgotten."""
        known = self.epochs.get(position.consumer, 0)
        if position.act == "claim":
            return 0 < position.epoch < known
        return position.epoch not in (0, known)  # what moves was claimed before

    def positions_of(self, consumer: str | None) -> dict[str, int]:
        """Of one consumer, or of all groups."""
        if consumer is None:
            return {name: offset for name, offset in self.positions.items() if not name.startswith(REGISTERED)}
        return {consumer: self.positions[consumer]} if consumer in self.positions else {}

    def check_room(self, consumer: str) -> None:
        known = consumer in self.positions or consumer in self.epochs
        if not known and max(len(self.positions), len(self.epochs)) >= POSITIONS_MAX:
            raise OverloadedError(f"the partition has its maximum of {POSITIONS_MAX} consumers")

    def _apply_batch(self, header: FrameHeader) -> None:
        # Taken out and put back: the dict's order is the order of last use, the same on every replica.
        producer = self._producers.pop(header.producer_id, None)
        if producer is None or producer.epoch != header.producer_epoch:
            producer = _Producer(header.producer_epoch, [])
        producer.batches.append(_batch_of(header))
        del producer.batches[:-PRODUCER_BATCHES_MAX]
        self._producers[header.producer_id] = producer
        if len(self._producers) > PRODUCERS_MAX:
            del self._producers[next(iter(self._producers))]

    def image(self) -> Checkpoint:
        """The committed state as a check-point."""
        image = _Image(
            self.start_offset,
            self.trim_index,
            self._producers,
            self.positions,
            self.client_counts,
            self.epochs,
            self.order,
        )
        return Checkpoint(self.applied_index, self.applied_term, self.next_offset, msgspec.msgpack.encode(image))
