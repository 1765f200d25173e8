"""The disk as one life of a node sees it, and as a power cut would leave it.

Rule: who looks at the medium never changes it, and reads each frame once.
"""

from __future__ import annotations

import builtins
import errno
import struct

from crc32c import crc32c

from quiver.errors import CorruptLogError
from quiver.log.checkpoint import decode_checkpoint
from quiver.log.disk import File
from quiver.log.recovery import STATE_FILE
from quiver.testing.faulty_disk import FaultyDisk
from quiver.types import HardState

_FRAME = struct.Struct("<2s6xI12xQQ")  # magic, payload length, index, term
_HEADER_BYTES = 96
_SLOT = struct.Struct("<IQQQ")
_SLOT_STARTS = (0, 512)


class LifeDisk:
    """The `Disk` of one process: of no use after its end."""

    def __init__(self, disk: FaultyDisk) -> None:
        self.disk = disk
        self.alive = True

    def _now(self) -> FaultyDisk:
        if not self.alive:
            raise OSError(errno.EBADF, "the process that used this disk is gone")
        return self.disk

    def open(self, path: str, *, create: bool = False) -> File:
        return self._now().open(path, create=create)

    def exists(self, path: str) -> bool:
        return self._now().exists(path)

    def list(self, directory: str) -> builtins.list[str]:
        return self._now().list(directory)

    def make_directory(self, path: str) -> None:
        self._now().make_directory(path)

    def rename(self, source: str, target: str) -> None:
        self._now().rename(source, target)

    def remove(self, path: str) -> None:
        self._now().remove(path)

    def remove_tree(self, path: str) -> None:
        self._now().remove_tree(path)

    def sync_directory(self, path: str) -> None:
        self._now().sync_directory(path)


def durable_term(disk: FaultyDisk, directory: str, index: int) -> int | None:
    """The term of that entry on the medium; None where no power cut would leave it. One with a flipped bit counts: it
    was stored, and so was what is behind it."""
    first = -1
    for name in disk.durable_names(directory):
        if name.endswith(".seg") and first < int(name[:-4]) <= index:
            first = int(name[:-4])
    if first < 0:
        return None
    terms = _terms(disk, f"{directory}/{first:020d}.seg")
    return terms[index - first] if index - first < len(terms) else None


def _terms(disk: FaultyDisk, path: str) -> list[int]:
    """Of all frames that were written to a segment. What was read once is read again only where the medium changed."""
    inode = disk.durable(path)
    assert inode is not None
    ends, terms = inode.frame_ends, inode.frame_terms
    while ends and ends[-1] > inode.changed_from:
        ends.pop()
        terms.pop()
    if inode.changed_from == len(inode.medium):
        return terms
    medium, at = inode.as_written(), ends[-1] if ends else 0
    while at + _HEADER_BYTES <= len(medium):
        magic, length, _, term = _FRAME.unpack_from(medium, at)
        end = at + _HEADER_BYTES + (length + 7) // 8 * 8
        if magic != b"QV" or end > len(medium) or not _is_whole(medium, at, length):
            break
        ends.append(end)
        terms.append(term)
        at = end
    inode.changed_from = len(medium)
    return terms


def _is_whole(medium: bytearray, at: int, length: int) -> bool:
    header = bytes(medium[at : at + _HEADER_BYTES])
    header_crc, payload_crc = struct.unpack_from("<II", header, 12)
    if crc32c(header[16:], crc32c(header[:12])) != header_crc:
        return False
    start = at + _HEADER_BYTES
    return bool(crc32c(medium[start : start + length]) == payload_crc)


def durable_hard_state(disk: FaultyDisk, directory: str) -> HardState:
    """The term and vote that a restart after a power cut would find."""
    inode = disk.durable(f"{directory}/hardstate")
    found = _copies(inode.medium) if inode is not None else ()
    _, term, vote = max(found, default=(0, 0, 0))
    return HardState(term, vote)


def hard_state_places(disk: FaultyDisk, directory: str) -> list[int]:
    """The bytes of the two copies of term and vote; none while the copies differ."""
    found = _copies(disk.content(f"{directory}/hardstate"))
    same = len(found) == 2 and found[0] == found[1]
    return [start + at for start in _SLOT_STARTS for at in range(_SLOT.size)] if same else []


def has_sound_facts(disk: FaultyDisk, directory: str) -> bool:
    """True when both copies of term and vote, and the check-point, have the right checksums."""
    path = f"{directory}/{STATE_FILE}"
    try:
        if state := disk.content(path):
            decode_checkpoint(state, path)
    except CorruptLogError:
        return False
    written = disk.content(f"{directory}/hardstate")
    return len(_copies(written)) == sum(any(written[start : start + _SLOT.size]) for start in _SLOT_STARTS)


def _copies(image: bytes | bytearray) -> list[tuple[int, int, int]]:
    """(version, term, vote) of each slot whose checksum is right."""
    found = []
    for start in _SLOT_STARTS:
        raw = bytes(image[start : start + _SLOT.size])
        if len(raw) == _SLOT.size:
            checksum, version, term, vote = _SLOT.unpack(raw)
            if checksum == crc32c(raw[4:]):
                found.append((version, term, vote))
    return found
