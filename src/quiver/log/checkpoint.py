"""The `state` file: what a log must know to start from its first kept index without the entries before it.

Rule: replaced as a whole, atomically, and on disk before anything it stands for is deleted.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from crc32c import crc32c

from quiver.errors import CorruptLogError
from quiver.log.disk import Disk

_MAGIC: Final = b"QVCP"
_HEAD = struct.Struct("<4sIQQQQ")  # magic, checksum of the rest, index, term, next offset, length of the state


class Checkpoint(NamedTuple):
    """The state after applying all entries up to and including `index`; the owner alone understands `state`."""

    index: int = 0  # type: ignore[assignment]  # our word; tuple.index is never called
    term: int = 0
    next_offset: int = 0
    state: bytes = b""


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    fields = (checkpoint.index, checkpoint.term, checkpoint.next_offset, len(checkpoint.state))
    raw = bytearray(_HEAD.pack(_MAGIC, 0, *fields) + checkpoint.state)
    struct.pack_into("<I", raw, 4, crc32c(raw[8:]))
    return bytes(raw)


def read_checkpoint(disk: Disk, path: str) -> Checkpoint:
    """The checkpoint, or an empty one where there is no file. Raises CorruptLogError for a damaged one."""
    if not disk.exists(path):
        return Checkpoint()
    file = disk.open(path)
    raw = file.pread(file.size(), 0)
    if len(raw) < _HEAD.size:
        raise CorruptLogError.at(path, 0, "the check-point is cut short")
    magic, checksum, index, term, next_offset, length = _HEAD.unpack_from(raw)
    if magic != _MAGIC or checksum != crc32c(memoryview(raw)[8:]) or len(raw) != _HEAD.size + length:
        raise CorruptLogError.at(path, 0, "wrong checksum of the check-point")
    return Checkpoint(index, term, next_offset, raw[_HEAD.size :])
