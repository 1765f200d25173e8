"""The terms of a log's entries, as runs: what the core must know of a log, in a few integers.

Rule: index 0 is before the first entry and has term 0. `start` is the last index whose entry is gone (trimmed, or
covered by a snapshot); its own term is known, terms below it are not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class TermRuns:
    __slots__ = ("_firsts", "_terms", "last", "start")

    def __init__(
        self, start: int = 0, start_term: int = 0, runs: Sequence[tuple[int, int]] = (), last: int = 0
    ) -> None:
        self.start = start
        self._firsts = [start]
        self._terms = [start_term]
        self.last = start
        self.extend(runs, last)

    @property
    def last_term(self) -> int:
        return self._terms[-1]

    def term_at(self, index: int) -> int | None:
        """None where nothing is known: beyond the end, or below the start."""
        if not self.start <= index <= self.last:
            return None
        if index >= self._firsts[-1]:
            return self._terms[-1]
        return self._terms[bisect_right(self._firsts, index) - 1]

    def append(self, term: int) -> int:
        """One more entry; returns its index."""
        self.last += 1
        if term != self._terms[-1]:
            self._firsts.append(self.last)
            self._terms.append(term)
        return self.last

    def extend(self, runs: Sequence[tuple[int, int]], last: int) -> None:
        """Entries up to `last`, of which those beyond the end are new."""
        for place, (first, term) in enumerate(runs):
            run_last = runs[place + 1][0] - 1 if place + 1 < len(runs) else last
            if run_last <= self.last:
                continue
            if term != self._terms[-1]:
                self._firsts.append(max(first, self.last + 1))
                self._terms.append(term)
            self.last = run_last

    def truncate(self, index: int) -> None:
        """Removes the entries from `index` on."""
        assert index > self.start
        while self._firsts[-1] >= index and len(self._firsts) > 1:
            self._firsts.pop()
            self._terms.pop()
        self.last = min(self.last, index - 1)

    def trim(self, start: int) -> None:
        """Forgets the entries up to and including `start`."""
        if start <= self.start:
            return
        assert start <= self.last
        keep = bisect_right(self._firsts, start) - 1
        self._firsts, self._terms = self._firsts[keep:], self._terms[keep:]
        self._firsts[0] = self.start = start

    def runs(self, first: int, last: int) -> tuple[tuple[int, int], ...]:
        """The runs that cover first..last."""
        if first > last:
            return ()
        if first >= self._firsts[-1]:
            return ((first, self._terms[-1]),)
        at = bisect_right(self._firsts, first) - 1
        found = [(first, self._terms[at])]
        for run_first, term in zip(self._firsts[at + 1 :], self._terms[at + 1 :], strict=True):
            if run_first > last:
                break
            found.append((run_first, term))
        return tuple(found)

    def conflict(self, runs: tuple[tuple[int, int], ...], last: int) -> int | None:
        """The first index up to `last` where those entries differ from these; beyond our end counts as different."""
        for place, (first, term) in enumerate(runs):
            if first > self.last:
                return first
            run_last = runs[place + 1][0] - 1 if place + 1 < len(runs) else last
            index = max(first, self.start)
            while index <= run_last:
                if self.term_at(index) != term:
                    return index
                index = self._run_end(index) + 1
        return None

    def _run_end(self, index: int) -> int:
        at = bisect_right(self._firsts, index)
        return self._firsts[at] - 1 if at < len(self._firsts) else self.last

    def last_not_above(self, index: int, term: int) -> int:
        """The last index up to `index` whose term is at most `term`: below a conflict, logs may agree there."""
        index = min(index, self.last)
        while index > self.start:
            at = bisect_right(self._firsts, index) - 1
            if self._terms[at] <= term:
                return index
            index = self._firsts[at] - 1
        return max(index, 0)
