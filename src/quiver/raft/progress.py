"""What a leader knows of one follower, and how much it may send it.

Three ways: `probing` sends one append and waits, to find where the logs agree; `replicating` sends ahead of the
replies, up to a window; `installing` sends nothing while a snapshot is under way.

Rule: on a path that changes the order, replies to what was sent before a refusal still arrive after it, and must not
make the leader send all of it again, again and again. So a probe ends with its own answer only, and after a refusal
the window begins small and grows with what is accepted.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Final

_WINDOW_AFTER_REFUSAL: Final = 2


class Way(enum.Enum):
    PROBING = "probing"
    REPLICATING = "replicating"
    INSTALLING = "installing"


class Progress:
    __slots__ = (
        "_allowed",
        "_probe",
        "_window",
        "active",
        "installing_index",
        "match",
        "next",
        "round",
        "waits",
        "way",
    )

    def __init__(self, next_index: int) -> None:
        self.match = 0  # on its disk and equal to ours
        self.next = next_index  # the next entry to send
        self.way = Way.PROBING
        self.waits = False  # probing: an append is out and not answered
        self.active = True  # heard from since the last check of the quorum
        self.round = 0  # the last round of heartbeats it answered
        self.installing_index = 0
        self._probe = (0, 0)  # probing: what the append that is out follows, and its last index
        self._allowed: int | None = None  # replicating: this many may be out after a refusal; None: as many as ever
        self._window: deque[int] = deque()  # replicating: last index of each append that is out

    @property
    def in_flight(self) -> int:
        return len(self._window)

    def may_send(self, in_flight_max: int) -> bool:
        if self.way is Way.REPLICATING:
            if self._allowed is not None:
                if self._allowed < in_flight_max:
                    return len(self._window) < self._allowed
                self._allowed = None
            return len(self._window) < in_flight_max
        return self.way is Way.PROBING and not self.waits

    def sent(self, last: int) -> None:
        if self.way is Way.REPLICATING:
            if last >= self.next:
                self._window.append(last)
                self.next = last + 1
        else:
            self.waits, self._probe = True, (self.next - 1, last)

    def accepted(self, match: int) -> bool:
        """True when this is news."""
        while self._window and self._window[0] <= match:
            self._window.popleft()
        news = match > self.match
        if news:
            self.match = match
            if self._allowed is not None:
                self._allowed += 1
        if self.next <= match:
            self.next = match + 1
        awaited = self.installing_index if self.way is Way.INSTALLING else self._probe[1]
        if self.way is not Way.REPLICATING and match >= awaited:
            self._become(Way.REPLICATING)
        return news

    def refused(self, prev_index: int, next_index: int) -> bool:
        """An append after `prev_index` did not fit; go on with `next_index`. False when the reply is out of date."""
        if self.way is Way.PROBING:
            if prev_index == self._probe[0]:
                self.waits = False
            if prev_index != self.next - 1:
                return False
        elif self.way is Way.INSTALLING:
            return False
        if prev_index <= self.match:
            return False
        if self.way is Way.REPLICATING:
            self._allowed = _WINDOW_AFTER_REFUSAL
        self._become(Way.PROBING)
        self.next = max(self.match + 1, min(prev_index, next_index))
        return True

    def probe(self) -> None:
        """What was sent may be lost: find out, beginning from what is certain. If nothing is, the place found so far
        is a better guess than the log's beginning."""
        self._become(Way.PROBING)
        self.next = self.match + 1 if self.match else max(self.next - 1, 1)

    def install(self, index: int) -> None:
        self._become(Way.INSTALLING)
        self.installing_index = index
        self.next = index + 1

    def _become(self, way: Way) -> None:
        self.way = way
        self.waits, self._probe = False, (0, 0)
        self._window.clear()
