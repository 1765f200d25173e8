"""What a replica takes at once, without a turn of its owner: what comes all the time while nothing goes wrong.

To a follower that is the next entry, to a leader an acknowledgement of which nothing but a commit comes. Rule: taken is
only what a turn would do no more with; where anything waits, or anything else is to be done, it takes a turn. What
others wait for is done first: the write, the sync, the answer. What nobody waits for comes after it.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final, Protocol

from quiver.clock import Clock
from quiver.errors import LogFailedError
from quiver.log.flusher import Flusher
from quiver.log.partition_log import PartitionLog
from quiver.raft import AnyMessage, Append, Raft, Ready
from quiver.raft.messages import AppendReply
from quiver.replication.admission import Admission
from quiver.replication.append_sender import AppendSender
from quiver.wire.frame import Entry, FrameError, FrameHeader, Kind, decode_frame

# Of entries that change nothing but the owner's state.
_PLAIN_KINDS: Final = frozenset((Kind.DATA, Kind.POSITIONS))


class Settle(Protocol):
    """The owner's: takes in an entry that was stored, and what is committed now."""

    def __call__(self, header: FrameHeader | None = None, payload: Any = None, /) -> None: ...


class Steady:
    raft: Raft
    admission: Admission
    _log: PartitionLog
    _clock: Clock
    _sender: AppendSender
    _flusher: Flusher
    _inputs: deque[AnyMessage]
    _links: deque[tuple[int, bool]]
    _todo: Ready | None

    @property
    def leads(self) -> bool:
        raise NotImplementedError

    def spread(self, entry: Entry) -> FrameHeader | None:
        """Proposes an entry and sends it to the followers before anything else is done. For who leads. None: nothing
        was done, as they lack more than this."""
        raft, leader = self.raft, self.raft.leader
        if leader is None or self._inputs or self._links or not leader.is_even():
            return None
        header, frame = self._log.stamp_entry(raft.term, entry)
        index = leader.propose()
        for message in leader.spread(index):
            self._sender.send_frame(message, frame)
        leader.sent(index)
        self._log.append_frame(header, frame, self._clock.monotonic_s())
        self._sender.cache.add(frame)
        return header

    def _takes_at_once(self, message: AnyMessage, frames: memoryview, settle: Settle | None) -> bool:
        if type(message) is AppendReply:
            return self._take_reply(message, settle)
        return type(message) is Append and settle is not None and self._take_entry(message, frames, settle)

    def _take_entry(self, message: Append, frames: memoryview, settle: Settle) -> bool:
        """Stores the next entry of a leader and acknowledges it. False: nothing was done."""
        raft = self.raft
        if self._todo or self._inputs or self._links or not (raft.may_lead and raft.is_next(message)):
            return False
        try:
            header, payload = decode_frame(frames)
            if header.frame_length != len(frames) or header.term != message.term or header.kind not in _PLAIN_KINDS:
                return False
            now_s = self._clock.monotonic_s()
            if not self._flusher.store(self._log, header, frames, now_s):
                return False
        except (FrameError, LogFailedError):
            return False  # a turn meets it again, and says so
        # The leader waits for this, and nobody for the rest.
        self._sender.send(raft.follow(message, int(now_s * 1000)))
        self._flusher.stored(self._log, header, len(frames), now_s)
        self._sender.cache.pass_over(frames)
        settle(header, payload)
        return True

    def _take_reply(self, reply: AppendReply, settle: Settle | None) -> bool:
        """Notes an acknowledgement, and what it commits. False: nothing was done."""
        raft, leader = self.raft, self.raft.leader
        if leader is None or self._todo or self._inputs or not leader.is_plain(reply):
            return False
        if reply.match <= raft.commit:
            leader.note(reply, raft.now_ms)
            return True
        now_ms = int(self._clock.monotonic_s() * 1000)
        busy = self._links or self._flusher.ended or leader.has_more(now_ms) or self.admission.has_more(raft)
        if settle is None or busy or not (self.leads and raft.may_lead):
            return False
        leader.note(reply, now_ms)
        settle()
        self._sender.tidy(raft)
        return True
