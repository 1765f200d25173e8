"""What transcripts do not show of the core: how it is called, and what it says of itself."""

from __future__ import annotations

import pytest

from quiver.config import RaftSettings
from quiver.raft import Append, Membership, Raft, Role, Snapshot, TermRuns, decode_message, encode_message
from quiver.raft.messages import AppendReply, Heartbeat, HeartbeatReply, Message, TimeoutNow, Vote, VoteReply
from quiver.types import HardState

THREE = Membership((1, 2, 3))


def replica(me: int = 1, membership: Membership = THREE, log: int = 0) -> Raft:
    terms = TermRuns(0, 0, ((1, 1),), log)
    return Raft(me, RaftSettings(), HardState(1, 0), terms, [(0, membership)], 0, lambda first, _: first, 0, 0)


def follower_with_entries(last: int) -> Raft:
    raft = replica()
    raft.step(Append(2, 1, 1, 0, 0, last, 0, ((1, 1),)), 0)
    raft.ready()
    return raft


def elected() -> Raft:
    raft = replica()
    raft.campaign()
    raft.step(VoteReply(2, 1, 2, granted=True, pre=True), 0)
    raft.step(VoteReply(2, 1, 2, granted=True), 0)
    return raft


def test_nothing_to_do_is_none() -> None:
    assert replica().ready() is None


def test_the_hard_state_is_told_once() -> None:
    raft = replica()
    raft.step(Heartbeat(2, 1, 5, 0), 0)
    ready = raft.ready()
    assert ready is not None
    assert ready.hard_state == HardState(5, 0)
    raft.step(Heartbeat(2, 1, 5, 0), 0)
    ready = raft.ready()
    assert ready is not None
    assert ready.hard_state is None


def test_a_sync_of_an_entry_that_was_replaced_is_not_believed() -> None:
    raft = follower_with_entries(3)
    raft.step(Append(3, 1, 2, 2, 1, 3, 0, ((3, 2),)), 0)
    raft.ready()
    raft.synced(3, 1)
    assert raft.synced_index == 0
    raft.synced(3, 2)
    assert raft.synced_index == 3


def test_a_sync_that_comes_late_takes_nothing_back() -> None:
    raft = follower_with_entries(3)
    raft.synced(3, 1)
    raft.synced(2, 1)
    assert raft.synced_index == 3


def test_a_committed_entry_that_differs_is_refused_loudly() -> None:
    raft = replica(log=2)
    raft.step(Append(2, 1, 1, 2, 1, 2, 2), 0)
    assert raft.commit == 2
    with pytest.raises(AssertionError, match="committed"):
        raft.step(Append(2, 1, 1, 1, 1, 3, 2, ((2, 9),)), 0)


def test_an_acknowledgement_of_what_was_never_made_is_refused_loudly() -> None:
    raft = replica(membership=Membership((1,), (2,)))
    raft.campaign()
    with pytest.raises(AssertionError, match="has not made"):
        raft.step(AppendReply(2, 1, raft.term, 99), 0)


def test_an_acknowledgement_is_plain_when_nothing_comes_of_it_but_a_note_or_a_commit() -> None:
    raft = elected()
    assert raft.ready() is not None and raft.leader is not None
    is_plain = raft.leader.is_plain
    for peer in (2, 3):  # the first append to each is a probe
        assert not is_plain(AppendReply(peer, 1, 2, 1))
        raft.step(AppendReply(peer, 1, 2, 1), 0)
    raft.synced(1, 2)
    raft.propose()
    raft.ready()
    raft.synced(2, 2)
    second, third = AppendReply(2, 1, 2, 2), AppendReply(3, 1, 2, 2)
    assert is_plain(second)
    raft.step(second, 0)
    assert raft.commit == 2 and raft.ready() is None
    assert is_plain(third)
    assert not is_plain(AppendReply(3, 1, 2, 2, accepted=False))
    assert not is_plain(AppendReply(3, 1, 1, 2)), "of another term"
    assert not is_plain(AppendReply(4, 1, 2, 2)), "of a stranger"
    raft.propose()
    assert not is_plain(third), "the next entry can go with it"
    raft.ready()
    assert is_plain(third)
    raft.step(third, 0)
    assert raft.leader.progress[3].match == 2 and raft.ready() is None
    last = AppendReply(3, 1, 2, 3)
    raft.step(last, 0)
    assert is_plain(last)
    raft.quiet = True
    assert not is_plain(last), "a quiet leader looks at the time first"
    raft.quiet, raft.woken = False, True
    assert not is_plain(last), "and one that has just woken"
    raft.woken = False
    raft.peer_down(3)
    assert not is_plain(last), "what it has is to be found out anew"
    raft.peer_up(3)
    raft.step(last, 0)
    raft.transfer(3)
    assert not is_plain(last), "it may have all that it needs to take over"


def test_a_commit_makes_more_to_do_when_somebody_reads_or_the_leader_leaves_or_time_is_up() -> None:
    raft = elected()
    assert raft.leader is not None
    early_ms = raft.leader.due_ms - 1
    assert not raft.leader.has_more(early_ms)
    assert raft.leader.has_more(early_ms + 1)
    raft.read("somebody")
    assert raft.leader.has_more(early_ms)
    raft.leader._new_reads.clear()
    assert not raft.leader.has_more(early_ms)
    raft.memberships.append((2, Membership((2, 3))))
    assert raft.leader.has_more(early_ms)


def test_a_second_leader_of_the_same_term_is_not_believed() -> None:
    raft = replica(membership=Membership((1,), (2,)))
    raft.campaign()
    raft.step(Heartbeat(2, 1, raft.term, 0), 0)
    assert raft.role is Role.LEADER


def test_an_answer_from_who_is_not_a_member_is_not_counted() -> None:
    raft = replica(membership=Membership((1,), (2,)))
    raft.campaign()
    raft.step(AppendReply(9, 1, raft.term, 1), 0)
    assert raft.leader is not None
    assert 9 not in raft.leader.progress


def test_before_it_is_due_a_tick_changes_nothing() -> None:
    raft = replica()
    raft.tick(raft.due_ms - 1, 5)
    assert raft.ready() is None
    raft.tick(raft.due_ms, 5)
    assert raft.role is Role.PRE_CANDIDATE


def test_a_leader_is_due_when_its_next_heartbeat_is() -> None:
    raft = replica(membership=Membership((1,), (2,)))
    raft.campaign()
    raft.tick(0, 0)
    raft.ready()
    assert raft.due_ms == RaftSettings().heartbeat_ms
    raft.tick(raft.due_ms - 1, 0)
    assert raft.ready() is None
    raft.tick(raft.due_ms, 0)
    assert raft.ready() is not None


def test_one_entry_that_is_longer_than_an_append_may_be_travels_alone() -> None:
    raft = replica(membership=Membership((1,), (2,)), log=3)
    raft.campaign()
    ready = raft.ready()
    assert ready is not None
    (append,) = ready.messages
    assert isinstance(append, Append)
    assert append.last == append.prev_index + 1


@pytest.mark.parametrize(
    "message",
    [
        Vote(1, 2, 3, 4, 5, pre=True, transfer=True),
        VoteReply(1, 2, 3, granted=True, pre=True),
        Append(1, 2, 3, 4, 5, 6, 7, ((5, 3),), ((6, Membership((1, 2), (3,))),)),
        AppendReply(1, 2, 3, 4, accepted=False, hint_index=5, hint_term=6),
        Heartbeat(1, 2, 3, 4, 5, quiesce=True),
        HeartbeatReply(1, 2, 3, 4, 5),
        Snapshot(1, 2, 3, 4, 5, Membership((1,), (2,))),
        TimeoutNow(1, 2, 3),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_is_the_same_after_its_journey(message: Message) -> None:
    assert decode_message(encode_message(message)) == message
