"""Which step of membership a leader takes next, for orders, newcomers and brokers that do not answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quiver.errors import ConflictError
from quiver.raft import Membership
from quiver.raft.messages import Join, Outdated
from quiver.replication.admission import Admission, HandOver
from quiver.replication.group import replica_id

R1, R2, R3, R4 = (replica_id(broker, 7) for broker in (1, 2, 3, 4))
NEW_2 = replica_id(2, 8)
COMMIT = 10


def leading(
    voters: tuple[int, ...] = (R1, R2, R3), learners: tuple[int, ...] = (), *, behind: Any = (), silent: Any = ()
) -> Any:
    """What `Admission` sees of a leader R1: the replicas of `behind` lack an entry, those of `silent` do not answer."""
    progress = {
        peer: SimpleNamespace(match=COMMIT - (peer in behind), active=peer not in silent)
        for peer in (*voters, *learners)
        if peer != R1
    }
    return SimpleNamespace(
        me=R1,
        membership=Membership(voters, learners),
        membership_index=1,
        commit=COMMIT,
        now_ms=0,
        settings=SimpleNamespace(election_ms=600),
        down=set(silent),
        leader=SimpleNamespace(progress=progress),
        quiet=False,
    )


def ordered(*brokers: int, newcomer: int = 0) -> Admission:
    admission = Admission()
    admission.order(1, brokers)
    if newcomer:
        admission.asked(Join(newcomer, 0, 1), leading())
    return admission


def test_without_an_order_nothing_changes_and_strangers_stay_outside() -> None:
    admission = Admission()
    admission.asked(Join(R4, 0, 1), leading())
    assert admission.next_step(leading()) is None


def test_wanted_broker_learns_catches_up_and_votes() -> None:
    admission = ordered(1, 2, 4, newcomer=R4)
    assert admission.next_step(leading()) == Membership((R1, R2, R3), (R4,))
    assert admission.next_step(leading(learners=(R4,), behind=(R4,))) is None
    assert admission.next_step(leading(learners=(R4,))) == Membership((R1, R2, R3, R4))
    assert admission.next_step(leading((R1, R2, R3, R4))) == Membership((R1, R2, R4))
    assert not admission.is_done(leading((R1, R2, R3, R4)))
    assert admission.is_done(leading((R1, R2, R4)))


def test_learner_votes_under_load_when_it_is_never_far_behind() -> None:
    admission, raft = ordered(1, 2, 3, 4, newcomer=R4), leading(learners=(R4,))

    def learner_is_at(match: int, commit: int, now_ms: int) -> bool:
        raft.commit, raft.now_ms, raft.leader.progress[R4].match = commit, now_ms, match
        return admission.next_step(raft) is not None

    assert not learner_is_at(10, 100, 0)
    assert not learner_is_at(100, 900, 700), "it took too long for what was there when it began"
    assert not learner_is_at(899, 1200, 900)
    assert learner_is_at(900, 1300, 1000)


def test_next_step_waits_for_the_commit_of_the_one_before() -> None:
    raft = leading((R1, R2, R3, R4))
    raft.membership_index = COMMIT + 1
    admission = ordered(1, 2, 4)
    assert admission.next_step(raft) is None
    done = leading((R1, R2, R4))
    done.membership_index = COMMIT + 1
    assert not admission.is_done(done)


def test_unwanted_learner_and_unwanted_newcomer_go() -> None:
    admission = ordered(1, 2, 3, newcomer=R4)
    assert admission.next_step(leading(learners=(R4,))) == Membership((R1, R2, R3))
    assert admission.next_step(leading()) is None


def test_the_silent_leave_first_and_nobody_when_the_rest_would_be_no_majority() -> None:
    assert ordered(1, 4).next_step(leading((R1, R2, R3, R4), silent=(R3,))) == Membership((R1, R2, R4))
    assert ordered(1, 2).next_step(leading(silent=(R2,))) is None


def test_leader_that_is_to_leave_hands_over_to_one_that_has_everything() -> None:
    assert ordered(2, 3).next_step(leading(behind=(R2,))) == HandOver(R3)
    assert ordered(2, 3).next_step(leading(silent=(R2,))) == HandOver(R3)
    assert ordered(4, 2, 3).next_step(leading()) is None, "until broker 4 votes"


def test_hand_over_is_tried_a_few_times_with_pauses_and_then_counts_as_done() -> None:
    admission, raft = ordered(2, 1, 3), leading()
    for _ in range(3):
        assert not admission.is_done(raft)
        assert admission.next_step(raft) == HandOver(R2)
        assert admission.next_step(raft) is None
        raft.now_ms += 3000
    assert admission.next_step(raft) is None
    assert admission.is_done(raft)
    admission.order(1, (2, 1, 3))
    assert admission.next_step(raft) is None, "the same order again begins nothing anew"
    admission.order(2, (2, 1, 3))
    assert admission.next_step(raft) == HandOver(R2)


def test_replica_on_a_new_disk_takes_the_place_of_its_predecessor() -> None:
    for admission in (Admission(), ordered(1, 2, 3)):
        admission.asked(Join(NEW_2, 0, 1), leading())
        silent = (R2,)
        assert admission.next_step(leading(silent=silent)) == Membership((R1, R2, R3), (NEW_2,))
        assert admission.next_step(leading(learners=(NEW_2,), silent=silent)) == Membership((R1, R3), (NEW_2,))
        assert admission.next_step(leading((R1, R3), (NEW_2,))) == Membership((R1, R3, NEW_2))


def test_new_replica_of_the_broker_that_led_wakes_a_quiet_group() -> None:
    woken: list[int] = []
    for leader, quiet in ((R2, True), (R2, False), (R3, True), (0, True)):
        raft = leading()
        raft.leader, raft.leader_id, raft.quiet, raft.wake = None, leader, quiet, lambda: woken.append(1)
        Admission().asked(Join(NEW_2, 0, 1), raft)
        assert bool(woken) == (leader == R2 and quiet)
        woken.clear()


def test_older_order_is_refused_and_none_holds_when_another_leads() -> None:
    admission = ordered(1, 2, 4, newcomer=R4)
    with pytest.raises(ConflictError):
        admission.order(0, (1, 2, 3))
    admission.forget()
    assert admission.next_step(leading()) is None
    admission.order(0, (1, 2, 3))


def test_who_was_put_out_and_has_a_log_is_told_to_begin_anew() -> None:
    admission = ordered(1, 2, 4)
    admission.asked(Join(R4, 0, 3, 9, 2), leading())
    raft = leading()
    raft.term = 5
    assert admission.next_step(raft) == Outdated(R1, R4, 5, 9, 2)
    assert admission.next_step(raft) is None, "it is told once for each time it asks"
    admission.asked(Join(R4, 0, 3, 9, 2), leading())
    assert admission.next_step(leading(learners=(R4,), behind=(R4,))) is None, "a member catches up with what it has"


def test_what_a_newcomer_said_is_forgotten_when_another_leads() -> None:
    admission = ordered(1, 2, 4, newcomer=R4)
    admission.forget()
    admission.order(1, (1, 2, 4))
    assert admission.next_step(leading()) is None
    follower = leading()
    follower.leader = None
    admission.asked(Join(R4, 0, 1), follower)
    assert admission.next_step(leading()) is None
