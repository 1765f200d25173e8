"""Snapshots that are longer than a message."""

from __future__ import annotations

import random

import msgspec
import pytest

from quiver.raft import Snapshot
from quiver.replication.snapshot_parts import PARTS_MAX, SnapshotParts, cut

MESSAGE = Snapshot(1, 2, 3, 40, 3)
BODY = bytes(range(256)) * 10


@pytest.mark.parametrize("seed", range(20))
def test_parts_in_any_order_and_twice_are_the_snapshot_once_all_are_there(seed: int) -> None:
    chance = random.Random(seed)
    sent = cut(MESSAGE, BODY, chance.choice([1, 100, 255, 256, 1000]))
    missing = chance.randrange(len(sent))
    parts = SnapshotParts()
    others = [part for part in sent if part[0].part != missing] * 2
    chance.shuffle(others)
    assert all(parts.add(*part) is None for part in others)
    whole = parts.add(*sent[missing])
    assert whole is not None
    assert (bytes(whole.body), whole.parts) == (BODY, 1)
    assert msgspec.structs.replace(whole, body=None, checksum=0) == MESSAGE


def test_parts_of_different_snapshots_are_never_mixed() -> None:
    parts = SnapshotParts()
    first, second = cut(MESSAGE, BODY, 1000), cut(MESSAGE, BODY[::-1], 1000)
    assert parts.add(*first[0]) is None
    assert parts.add(*first[1]) is None
    assert parts.add(*second[2]) is None
    assert parts.add(*second[0]) is None
    found = parts.add(*second[1])
    assert found is not None and bytes(found.body) == BODY[::-1]


def test_what_fits_one_message_is_taken_as_it_is_and_nonsense_is_not_taken() -> None:
    parts = SnapshotParts()
    ((message, piece),) = cut(MESSAGE, BODY, len(BODY))
    found = parts.add(message, piece)
    assert found is not None and bytes(found.body) == BODY
    for part, count in ((5, 5), (-1, 5), (0, PARTS_MAX + 1)):
        assert parts.add(msgspec.structs.replace(MESSAGE, part=part, parts=count), b"x") is None
