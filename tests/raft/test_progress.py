"""What a leader knows of a follower never goes wrong, whatever answers come, in whatever order."""

from __future__ import annotations

import heapq
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quiver.raft.progress import Progress, Way

IN_FLIGHT_MAX = 3


class ProgressMachine(RuleBasedStateMachine):
    """Sends as a leader does. Answers are about anything that was ever sent: late, doubled or in any order."""

    @initialize(last=st.integers(1, 20))
    def begin(self, last: int) -> None:
        self.last = last  # of the leader's log
        self.progress = Progress(last)
        self.highest_match = 0
        self.asked: list[tuple[int, int]] = []  # (prev, last) of every append

    @rule(more=st.integers(1, 5))
    def propose(self, more: int) -> None:
        self.last += more

    @rule(size=st.integers(1, 3))
    def send(self, size: int) -> None:
        progress = self.progress
        while progress.next <= self.last and progress.may_send(IN_FLIGHT_MAX):
            before, last = progress.next, min(self.last, progress.next + size - 1)
            self.asked.append((before - 1, last))
            progress.sent(last)
            assert progress.next == (last + 1 if progress.way is Way.REPLICATING else before)

    @rule(data=st.data())
    def accepted(self, data: st.DataObject) -> None:
        if self.asked:
            match = data.draw(st.sampled_from(self.asked))[1]
            assert self.progress.accepted(match) == (match > self.highest_match)
            self.highest_match = max(self.highest_match, match)

    @rule(data=st.data())
    def refused(self, data: st.DataObject) -> None:
        if not self.asked:
            return
        prev = data.draw(st.sampled_from(self.asked))[0]
        hint = data.draw(st.integers(0, prev))
        before = (self.progress.way, self.progress.next)
        if self.progress.refused(prev, hint + 1):
            assert self.progress.way is Way.PROBING
            assert self.progress.next <= max(prev, self.highest_match + 1)
            assert prev > self.highest_match
        else:
            assert (self.progress.way, self.progress.next) == before

    @rule()
    def link_changed(self) -> None:
        self.progress.probe()
        assert self.progress.may_send(IN_FLIGHT_MAX)
        assert self.progress.way is Way.PROBING

    @rule()
    def heartbeat_answered(self) -> None:
        self.progress.waits = False

    @rule(data=st.data())
    def install(self, data: st.DataObject) -> None:
        if self.progress.next <= self.last:
            index = data.draw(st.integers(self.progress.next, self.last))
            self.progress.install(index)
            assert not self.progress.may_send(IN_FLIGHT_MAX)
            self.asked.append((index, index))

    @invariant()
    def never_sends_what_is_known_to_be_there(self) -> None:
        progress = self.progress
        assert progress.match == self.highest_match <= self.last
        assert progress.match < progress.next <= self.last + 1
        assert progress.in_flight <= IN_FLIGHT_MAX
        if progress.way is not Way.REPLICATING:
            assert progress.in_flight == 0

    @invariant()
    def always_has_a_way_to_go_on(self) -> None:
        """Something is out whose answer is awaited, or there is something to send, or all is there."""
        progress = self.progress
        awaited = progress.in_flight > 0 or progress.waits or progress.way is Way.INSTALLING
        assert awaited or progress.next <= self.last or progress.match == self.last


TestProgress = ProgressMachine.TestCase
TestProgress.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("seed", range(20))
def test_catching_up_on_a_path_that_changes_the_order_does_not_send_the_same_ever_more_often(seed: int) -> None:
    """A follower that is 300 entries behind. Messages are under way for up to five milliseconds, so that most appends
    arrive before the one they follow and are refused."""
    random = Random(seed)
    progress, log_last, behind, sends = Progress(300), 300, 0, 0
    due: list[tuple[float, int, str, int, int]] = []  # when, a tie-breaker, what, previous or hint, last

    def put(now: float, what: str, first: int, last: int) -> None:
        heapq.heappush(due, (now + random.uniform(0, 5), random.getrandbits(30), what, first, last))

    now = 0.0
    while progress.match < log_last:
        while progress.next <= log_last and progress.may_send(64):
            last = min(log_last, progress.next + 1)
            put(now, "append", progress.next - 1, last)
            progress.sent(last)
            sends += 1
        if not due:  # what a heartbeat's answer leads to
            progress.waits = False
            put(now, "append", progress.next - 1, progress.next - 1)
            continue
        now, _, what, first, last = heapq.heappop(due)
        if what == "append":
            if first <= behind:
                behind = max(behind, last)
                put(now, "accepted", 0, last)
            else:
                put(now, "refused", behind, first)
        elif what == "accepted":
            progress.accepted(last)
        else:
            progress.refused(last, first + 1)
    assert sends < 10 * log_last
