"""One more entry, told by `follow`, leaves a follower as `step` and `synced` would."""

from __future__ import annotations

import random

import msgspec
import pytest

from quiver.config import RaftSettings
from quiver.raft import Append, Membership
from quiver.raft.messages import AppendReply, Heartbeat
from tests.raft.kit import Disk, Entry, PureNode

VOTERS = Membership((1, 2, 3))


def _follower() -> PureNode:
    node = PureNode(2, RaftSettings(), Disk(base=VOTERS), random=5)
    node.raft.step(_append(0, 0), 10)
    while node.ready() is not None:
        node.sync()
    return node


def _append(last: int, commit: int) -> Append:
    """Entry `last` of term 1; the very first message has none."""
    prev = max(0, last - 1)
    terms = ((last, 1),) if last else ()
    return Append(1, 2, 1, prev, 1 if prev else 0, last, commit, terms, (), (Entry(1, str(last)),) * (last > 0))


def _facts(node: PureNode) -> dict[str, object]:
    raft = node.raft
    return {
        "term": raft.term,
        "leader": raft.leader_id,
        "terms": list(raft.terms.runs(1, raft.terms.last)) if raft.terms.last else [],
        "last": raft.terms.last,
        "synced": raft.synced_index,
        "verified": raft._verified,
        "commit": raft.commit,
        "now": raft.now_ms,
        "heard": raft._heard_ms,
        "deadline": raft._deadline_ms,
        "due": raft.due_ms,
    }


@pytest.mark.parametrize("seed", range(20))
def test_it_makes_no_difference_how_a_follower_was_told(seed: int) -> None:
    chance = random.Random(seed)
    slow, quick = _follower(), _follower()
    now_ms, commit = 10, 0
    for index in range(1, 30):
        now_ms += chance.randint(0, 5)
        commit = chance.randint(commit, index)
        message = _append(index, commit)
        slow.raft.step(message, now_ms)
        assert slow.ready() is not None
        slow.sync()
        ready = slow.ready()
        assert ready is not None
        assert quick.raft.is_next(message)
        quick._append(index, message.body[0])
        quick.disk.entries.append(message.body[0])
        quick.clean += 1
        assert [quick.raft.follow(message, now_ms)] == ready.messages == [AppendReply(2, 1, 1, index)]
        assert quick.ready() is None
        assert _facts(slow) == _facts(quick)
        if chance.random() < 0.2:
            beat = Heartbeat(1, 2, 1, commit)
            for node in (slow, quick):
                node.raft.step(beat, now_ms)
                node.ready()
            assert _facts(slow) == _facts(quick)


def test_an_entry_is_next_only_to_a_follower_whose_disk_has_all_before_it() -> None:
    node = _follower()
    first, second = _append(1, 0), _append(2, 0)
    assert node.raft.is_next(first)
    assert not node.raft.is_next(second), "a gap"
    node.raft.step(first, 11)
    assert not node.raft.is_next(second), "the one before it is not written yet"
    node.ready()
    assert not node.raft.is_next(second), "nor is it on disk"
    node.sync()
    assert not node.raft.is_next(second), "an acknowledgement has to leave first"
    node.ready()
    assert node.raft.is_next(second)
    assert not node.raft.is_next(first), "once more"
    for change in (
        {"term": 2},
        {"term": 0},
        {"sender": 3},
        {"to": 3},
        {"prev_term": 2},
        {"prev_index": 0},
        {"last": 3},
    ):
        assert not node.raft.is_next(msgspec.structs.replace(second, **change)), change
    node.raft.failed = True
    assert not node.raft.is_next(second)
