"""Reads the metadata log of a manager, which may be running, and changes nothing.

Rule: only what is whole is told. What comes after the last whole entry is a write under way, or room for the next.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from quiver.errors import CorruptLogError
from quiver.log.checkpoint import read_checkpoint
from quiver.log.disk import SystemDisk
from quiver.log.recovery import STATE_FILE
from quiver.log.segment import SUFFIX, scan_frames
from quiver.metadata.commands import decode_command
from quiver.replication.group import decode_membership
from quiver.wire.frame import FrameHeader, Kind


class Transaction(NamedTuple):
    """`kind` is that of the command; `noop` is a new primary's first word, `membership` says who votes."""

    id: int
    term: int
    kind: str
    payload: dict[str, Any]


def checkpoint_index(directory: str) -> int:
    """The last transaction of the check-point: those up to it may not be in the log any more."""
    return read_checkpoint(SystemDisk(), f"{directory}/{STATE_FILE}").index


def read_wal(directory: str) -> Iterator[Transaction]:
    """The transactions of the log in `directory`, in their order."""
    disk = SystemDisk()
    names = sorted((name for name in os.listdir(directory) if name.endswith(SUFFIX)), key=lambda name: int(name[:-4]))
    expected = int(names[0].removesuffix(SUFFIX)) if names else 0
    for name in names:
        path = f"{directory}/{name}"
        with contextlib.suppress(CorruptLogError, FileNotFoundError):  # the end, or trimmed meanwhile
            file = disk.open(path)
            for _, header, payload in scan_frames(file, path, 0, file.size()):
                if header.index == expected:
                    yield _transaction(header, payload)
                    expected += 1


def _transaction(header: FrameHeader, payload: memoryview) -> Transaction:
    found: dict[str, Any] = {}
    kind = Kind(header.kind).name.lower()
    if header.kind == Kind.COMMAND:
        found = msgspec.to_builtins(decode_command(payload))
        kind = found.pop("type")
    elif header.kind == Kind.MEMBERSHIP:
        membership = decode_membership(payload)
        found = {"voters": list(membership.voters), "learners": list(membership.learners)}
    return Transaction(header.index, header.term, kind, found)
