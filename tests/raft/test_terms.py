"""Terms as runs say the same as a plain list of terms."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quiver.raft import TermRuns

TERMS = st.integers(1, 6)


def runs_of(first: int, terms: list[int]) -> tuple[tuple[int, int], ...]:
    """(first index with this term, term) for entries that begin at `first`."""
    found = []
    for index, term in enumerate(terms, first):
        if not found or found[-1][1] != term:
            found.append((index, term))
    return tuple(found)


class TermRunsMachine(RuleBasedStateMachine):
    """`known[index]` is the term; what is below `start` is forgotten. A log's terms never fall."""

    @initialize(start=st.integers(0, 5), terms=st.lists(TERMS, max_size=8))
    def begin(self, start: int, terms: list[int]) -> None:
        terms.sort()
        self.start = start
        start_term = min(terms, default=1) if start else 0
        self.known = {start: start_term} | dict(enumerate(terms, start + 1))
        self.runs = TermRuns(start, start_term, runs_of(start + 1, terms), self.last)

    @property
    def last(self) -> int:
        return max(self.known)

    @rule(more=st.integers(0, 2))
    def append(self, more: int) -> None:
        term = max(self.known[self.last], 1) + more
        assert self.runs.append(term) == self.last + 1
        self.known[self.last + 1] = term

    @rule(overlap=st.integers(0, 4), steps=st.lists(st.integers(0, 2), max_size=5))
    def extend_with_some_that_are_there(self, overlap: int, steps: list[int]) -> None:
        first = max(self.start + 1, self.last + 1 - overlap)
        terms = [self.known[index] for index in range(first, self.last + 1)]
        for step in steps:
            terms.append(max(terms[-1] if terms else self.known[self.last], 1) + step)
        last = first + len(terms) - 1
        self.runs.extend(runs_of(first, terms), last)
        self.known |= dict(enumerate(terms, first))

    @precondition(lambda self: self.last > self.start)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(self.start + 1, self.last + 1))
        self.runs.truncate(index)
        self.known = {at: term for at, term in self.known.items() if at < index}

    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, self.last))
        self.runs.trim(start)
        self.start = max(self.start, start)
        self.known = {at: term for at, term in self.known.items() if at >= self.start}

    @rule(data=st.data())
    def compare_with_another_log(self, data: st.DataObject) -> None:
        first = data.draw(st.integers(1, self.last + 1))
        terms = data.draw(st.lists(TERMS, max_size=8))
        if data.draw(st.booleans()):  # mostly the same
            terms = [self.known.get(at, term) for at, term in enumerate(terms, first)]
        last = first + len(terms) - 1
        differs = [at for at, term in enumerate(terms, first) if at >= self.start and self.known.get(at) != term]
        assert self.runs.conflict(runs_of(first, terms), last) == min(differs, default=None)

    @rule(data=st.data())
    def cover_a_range(self, data: st.DataObject) -> None:
        first = data.draw(st.integers(self.start + 1, self.last + 1))
        last = data.draw(st.integers(first - 1, self.last))
        assert self.runs.runs(first, last) == runs_of(first, [self.known[at] for at in range(first, last + 1)])

    @rule(index=st.integers(0, 30), term=st.integers(0, 12))
    def step_back_to_a_term(self, index: int, term: int) -> None:
        found = self.runs.last_not_above(index, term)
        fitting = [at for at, known in self.known.items() if at <= index and known <= term and at > self.start]
        if fitting:
            assert found == max(fitting)
        else:  # below what is known, logs may still agree
            assert min(index, self.start) - 1 <= found <= min(index, self.start)

    @invariant()
    def same_terms(self) -> None:
        assert (self.runs.start, self.runs.last) == (self.start, self.last)
        assert self.runs.last_term == self.known[self.last]
        for index in range(-1, self.last + 3):
            assert self.runs.term_at(index) == self.known.get(index)


TestTermRuns = TermRunsMachine.TestCase
TestTermRuns.settings = settings(max_examples=80, stateful_step_count=20, deadline=None)
