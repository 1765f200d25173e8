"""A snapshot travels in parts, because its check-point may be longer than any message.

Rule: parts belong together when they name the same snapshot and the same checksum of the whole. They may come in any
order, and twice; while one is missing nothing is installed, and the leader sends all of them again.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import msgspec
from crc32c import crc32c

from quiver.raft import Snapshot

logger = logging.getLogger("quiver.replication")

PARTS_MAX: Final = 4096  # a snapshot with more is not taken


def cut(message: Snapshot, body: bytes, part_bytes: int) -> list[tuple[Snapshot, memoryview]]:
    """The messages that bring `body` over."""
    pieces = [memoryview(body)[at : at + part_bytes] for at in range(0, len(body), part_bytes)]
    shared = {"parts": len(pieces), "checksum": crc32c(body)}
    return [(msgspec.structs.replace(message, part=n, **shared), piece) for n, piece in enumerate(pieces)]


class SnapshotParts:
    """What came of the snapshot that is on its way to `me`. The replica that was here before is sent the same."""

    def __init__(self, me: int) -> None:
        self._me = me
        self._of: tuple[int, ...] = ()
        self._pieces: dict[int, bytes] = {}

    def add(self, message: Snapshot, piece: Any) -> Snapshot | None:
        """The snapshot with its body once all of it is there."""
        if message.to != self._me:
            return None
        if message.parts == 1:
            return msgspec.structs.replace(message, body=piece)
        of = (message.sender, message.term, message.index, message.parts, message.checksum)
        if of != self._of:
            self._of, self._pieces = of, {}
            logger.info("snapshot_coming sender=%d index=%d parts=%d", message.sender, message.index, message.parts)
        if not 0 <= message.part < message.parts <= PARTS_MAX:
            return None
        self._pieces[message.part] = bytes(piece)
        if len(self._pieces) < message.parts:
            return None
        body = b"".join(self._pieces[part] for part in range(message.parts))
        self._of, self._pieces = (), {}
        if crc32c(body) != message.checksum:
            return None
        return msgspec.structs.replace(message, part=0, parts=1, body=memoryview(body))
