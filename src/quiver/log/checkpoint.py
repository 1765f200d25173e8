"""The `state` file: what a log must know to start from its first kept index without the entries before it.

Rule: replaced as a whole, atomically, and on disk before anything it stands for is deleted.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from crc32c import crc32c

from quiver.errors import CorruptLogError
from quiver.log.disk import Disk

_MAGIC: Final = b"QVC2"
# magic, checksum of the rest, index, term, next offset; index, term and next offset of the start; generation,
# catching up, length of the state, length of the group
_HEAD = struct.Struct("<4sIQQQQQQQBQQ")


class LogStart(NamedTuple):
    """The last entry that is no longer in the log, and the next offset after it."""

    index: int = 0  # type: ignore[assignment]  # our word; tuple.index is never called
    term: int = 0
    next_offset: int = 0


class Checkpoint(NamedTuple):
    """The state after applying all entries up to and including `index`; the owner alone understands `state` and
    `group`.

    `generation` counts how often the log was replaced by a snapshot. `catching_up`: the log may end before `index`,
    since the entries between its start and `index` are still on their way.
    """

    index: int = 0  # type: ignore[assignment]  # our word; tuple.index is never called
    term: int = 0
    next_offset: int = 0
    state: bytes = b""
    start: LogStart = LogStart()
    generation: int = 0
    catching_up: bool = False
    group: bytes = b""


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    index, term, next_offset, state, start, generation, catching_up, group = checkpoint
    fields = (index, term, next_offset, *start, generation, catching_up, len(state), len(group))
    raw = bytearray(_HEAD.pack(_MAGIC, 0, *fields) + state + group)
    struct.pack_into("<I", raw, 4, crc32c(raw[8:]))
    return bytes(raw)


def decode_checkpoint(raw: bytes | memoryview, path: str) -> Checkpoint:
    """Raises CorruptLogError, which names `path`, where it is damaged."""
    if len(raw) < _HEAD.size:
        raise CorruptLogError.at(path, 0, "the check-point is cut short")
    magic, checksum, index, term, next_offset, *rest = _HEAD.unpack_from(raw)
    *start, generation, catching_up, state_length, group_length = rest
    whole = len(raw) == _HEAD.size + state_length + group_length
    if magic != _MAGIC or not whole or checksum != crc32c(memoryview(raw)[8:]):
        raise CorruptLogError.at(path, 0, "wrong checksum of the check-point")
    end = _HEAD.size + state_length
    state, group = bytes(raw[_HEAD.size : end]), bytes(raw[end:])
    return Checkpoint(index, term, next_offset, state, LogStart(*start), generation, bool(catching_up), group)


def read_checkpoint(disk: Disk, path: str) -> Checkpoint:
    """The checkpoint, or an empty one where there is no file. Raises CorruptLogError for a damaged one."""
    if not disk.exists(path):
        return Checkpoint()
    file = disk.open(path)
    return decode_checkpoint(file.pread(file.size(), 0), path)
