"""The other side of admission: a replica that its group does not have asks to be taken in.

One that was put out of its group may be wanted again before anybody told it to delete its files. What the group did
without it is not known here: records that say 'deleted' may be gone from the others' logs, and what they deleted would
be back with this one. So it begins anew, under another id, as after the loss of its disk.

Rule: only if nothing came in since it asked. Otherwise somebody has taken it in meanwhile and may count on what it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from quiver.clock import Clock
from quiver.errors import CorruptLogError
from quiver.log.partition_log import PartitionLog
from quiver.raft import Raft
from quiver.raft.messages import Join, Outdated
from quiver.replication.append_sender import Transport
from quiver.replication.group import broker_of
from quiver.replication.seat import Seat

_ASK_S: Final = 0.5


class Applicant:
    """`begin_anew` None: its owner cannot, and need not."""

    def __init__(
        self,
        log: PartitionLog,
        transport: Transport,
        clock: Clock,
        begin_anew: Callable[[CorruptLogError], None] | None,
    ) -> None:
        self._log = log
        self._transport = transport
        self._clock = clock
        self._begin_anew = begin_anew
        self._ask_at_s = 0.0

    @property
    def _end(self) -> tuple[int, int]:
        return self._log.next_index - 1, self._log.last_term

    def ask(self, seat: Seat, raft: Raft) -> None:
        """Now and then; whoever leads hears it."""
        now_s = self._clock.monotonic_s()
        if now_s >= self._ask_at_s:
            self._ask_at_s = now_s + _ASK_S
            end = (0, 0) if self._begin_anew is None else self._end
            for broker in seat.to_ask(raft.membership.voters):
                self._transport.send(broker, seat.uid, Join(seat.me, 0, raft.term, *end))

    def told(self, answer: Outdated, seat: Seat) -> bool:
        """True: it begins anew, and may take in nothing more."""
        if self._begin_anew is None or answer.to != seat.me or (answer.index, answer.index_term) != self._end:
            return False
        message = f"broker {broker_of(answer.sender)} leads the group, which went on without this replica"
        self._begin_anew(CorruptLogError(message, verdict="outdated"))
        return True
