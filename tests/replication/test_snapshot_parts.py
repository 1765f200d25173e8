"""Snapshots that are longer than a message, and snapshots that are not whole."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from quiver.log.checkpoint import encode_checkpoint
from quiver.raft import Snapshot
from quiver.replication.snapshot_parts import PARTS_MAX, SnapshotParts, cut
from tests.broker.kit import settle
from tests.manager.kit import until
from tests.replication.replica_kit import GROUP, LEADER, ME, SNAPSHOT, Follower, Held

MESSAGE = Snapshot(1, 2, 3, 40, 3)
BODY = bytes(range(256)) * 10


@pytest.mark.parametrize("seed", range(20))
def test_parts_in_any_order_and_twice_are_the_snapshot_once_all_are_there(seed: int) -> None:
    chance = random.Random(seed)
    sent = cut(MESSAGE, BODY, chance.choice([1, 100, 255, 256, 1000]))
    missing = chance.randrange(len(sent))
    parts = SnapshotParts(2)
    others = [part for part in sent if part[0].part != missing] * 2
    chance.shuffle(others)
    assert all(parts.add(*part) is None for part in others)
    whole = parts.add(*sent[missing])
    assert whole is not None
    assert (bytes(whole.body), whole.parts) == (BODY, 1)
    assert msgspec.structs.replace(whole, body=None, checksum=0) == MESSAGE


def test_parts_of_different_snapshots_are_never_mixed() -> None:
    parts = SnapshotParts(2)
    first, second = cut(MESSAGE, BODY, 1000), cut(MESSAGE, BODY[::-1], 1000)
    assert parts.add(*first[0]) is None
    assert parts.add(*first[1]) is None
    assert parts.add(*second[2]) is None
    assert parts.add(*second[0]) is None
    found = parts.add(*second[1])
    assert found is not None and bytes(found.body) == BODY[::-1]


def test_parts_for_the_replica_that_was_here_before_do_not_end_those_for_this_one() -> None:
    """While both are members the leader sends to both, and both ways lead here."""
    parts = SnapshotParts(2)
    before = cut(msgspec.structs.replace(MESSAGE, to=7), BODY, 1000)
    found = [parts.add(*part) for pair in zip(before, cut(MESSAGE, BODY, 1000), strict=True) for part in pair]
    assert [one is not None for one in found] == [False] * 5 + [True]
    assert found[-1] is not None and bytes(found[-1].body) == BODY


def test_what_fits_one_message_is_taken_as_it_is_and_nonsense_is_not_taken() -> None:
    parts = SnapshotParts(2)
    ((message, piece),) = cut(MESSAGE, BODY, len(BODY))
    found = parts.add(message, piece)
    assert found is not None and bytes(found.body) == BODY
    for part, count in ((5, 5), (-1, 5), (0, PARTS_MAX + 1)):
        assert parts.add(msgspec.structs.replace(MESSAGE, part=part, parts=count), b"x") is None


@pytest.mark.parametrize("kind", ["partition", "manager"])
def test_snapshot_of_one_part_that_is_damaged_is_dropped_like_any_other_message(kind: str, tmp_path: Path) -> None:
    """Not taken until the owner installs it: that would end the owner."""

    async def scenario() -> None:
        follower = Follower(kind, tmp_path, Held(None))
        leader, replica = follower.leader, follower.replica
        await follower.start()
        message = Snapshot(LEADER, ME, 3, SNAPSHOT.start.index, SNAPSHOT.start.term, GROUP)
        body = encode_checkpoint(SNAPSHOT)
        for damaged in (b"", body[:-1], body[:20] + b"\xff" + body[21:], b"nonsense" * 20):
            assert not replica.receive(message, memoryview(damaged))
        await settle()
        assert replica._log.failure is None and not replica.raft.failed and replica.raft.commit == 0
        leader.snapshot(replica)
        await until(lambda: leader.was_told(SNAPSHOT.start.index))
        await follower.owner.stop()

    asyncio.run(scenario())
