"""Drives the Raft core for one partition: its log, its disk, its peers. Takes the place of `SoloReplica`.

It does the duties that `quiver.raft` lists. Rule: everything here runs in the partition's owner, but for disk work in
threads; messages, ticks and finished disk work only wake the owner, but for what `steady.py` takes at once. While the
core waits for the disk (term and vote, a truncation behind a write), inputs wait too.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from quiver.clock import Clock
from quiver.errors import CorruptLogError, DiskFullError, LogFailedError, NotLeaderError
from quiver.log.disk import Disk
from quiver.log.flusher import Flusher, FlushPolicy, HardStateSaver
from quiver.log.partition_log import PartitionLog
from quiver.log.slots import HardStateFile
from quiver.raft import AnyMessage, Install, Membership, Raft, Ready, Truncate
from quiver.raft.messages import Join, Outdated, Repair
from quiver.replication.admission import Admission, HandOver, Step
from quiver.replication.append_sender import AppendSender, with_body
from quiver.replication.applicant import Applicant
from quiver.replication.group import LogView, broker_of
from quiver.replication.log_work import LogWork
from quiver.replication.seat import Owner, RaftSetup
from quiver.replication.snapshot_parts import SnapshotParts
from quiver.replication.steady import Settle, Steady
from quiver.replication.waiting import refuse, settle
from quiver.wire.frame import Entry, FrameHeader

logger = logging.getLogger("quiver.replication")

_FULL_S = 5.0  # a replica whose disk was full does not stand for election for so long
_FIRST_ELECTION_S = 0.05


class RaftReplica(Steady):
    def __init__(
        self,
        setup: RaftSetup,
        log: PartitionLog,
        disk: Disk,
        writers: Executor,
        readers: Executor,
        clock: Clock,
        wake: Callable[[], None],
        owner: Owner,
        policy: FlushPolicy | None,
    ) -> None:
        seat, directory, settings, transport, self._on_damage, begins_anew = setup
        self.seat = seat
        self._log = log
        self._clock = clock
        self._wake = wake
        self._owner = owner
        self.transport = transport
        self._sender = AppendSender(seat.uid, log, disk, readers, transport, self._damaged, settings.append_bytes_max)
        self._parts = SnapshotParts(seat.me)
        self._work = LogWork(seat.uid, log, self._sender.cache, clock, owner, self._damaged)
        self._flusher = Flusher(writers, policy, wake)
        hard_state = HardStateFile(disk, directory)
        self._saver = HardStateSaver(hard_state, writers, wake)
        self._inputs: deque[AnyMessage] = deque()
        self._links: deque[tuple[int, bool]] = deque()
        self._todo: Ready | None = None
        self._end_before = 0  # `commit_end` before the inputs that led to it
        self._led_term = self._settled_term = 0  # in which the owner was told that it leads; knows what was committed
        self._full: DiskFullError | None = None  # what the disk said, until it takes something
        self._full_until_s = self._campaign_at_s = 0.0
        self.admission = Admission(seat.admits)
        self._applicant = Applicant(log, transport, clock, self._on_damage if begins_anew else None)
        self._deposed: asyncio.Future[None] | None = None  # who waits for that
        # A log without a past is that of a new group, or of a newcomer who is none of its voters.
        member = seat.me in seat.voters or log.checkpoint.group
        view = LogView(log, Membership(seat.voters) if member else Membership())
        for _, header, payload in log.scan(max(log.checkpoint.index + 1, log.first_index)):
            view.add(header, payload)
            owner.entry_appended(header, payload)
        applied = min(log.checkpoint.index, log.next_index - 1)
        found = (hard_state.value, view.terms, view.memberships, applied)
        self.raft = Raft(seat.me, settings, *found, self._sender.fit, self._now_ms(), random.getrandbits(30))

    # -- for the owner -------------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """True when proposals are taken: it leads and has applied all that earlier leaders committed."""
        raft = self.raft
        if raft.leader is None or self._todo is not None or self._led_term != raft.term or self._log.failure:
            return False
        if self._settled_term != raft.term and self.commit_end > raft.leader.first_index:
            self._settled_term = raft.term
        return self._settled_term == raft.term

    @property
    def is_settling(self) -> bool:
        """True while a new leader finds out what is committed: what is asked of it now is answered in a moment."""
        return self.raft.leader is not None and not self.leads

    @property
    def trouble(self) -> DiskFullError | LogFailedError | None:
        """Why it cannot lead, where that is its own disk."""
        return self._log.failure or (self._full if self.raft.leader is None else None)

    @property
    def leader(self) -> int:
        """The broker that leads, 0 when that is not known."""
        return broker_of(self.raft.leader_id)

    @property
    def is_replacing(self) -> bool:
        """A snapshot waits for the disk: what the group knows is of another log than the one that is still here."""
        return self._todo is not None and any(isinstance(work, Install) for work in self._todo.work)

    @property
    def commit_end(self) -> int:
        """End, exclusive, of what is committed and can be read here."""
        raft = self.raft
        # While a truncation or a snapshot waits for the disk, the log still has what they replace.
        if raft.failed or (self._todo is not None and self.is_replacing):
            return self._end_before
        return min(raft.commit + 1, raft.synced_index + 1, self._log.synced_index)

    def check_leads(self) -> None:
        if not self.leads:
            me, why = broker_of(self.seat.me), "" if self.trouble is None else f": {self.trouble.message}"
            raise NotLeaderError(f"broker {me} does not lead this partition{why}", leader=self.leader, done=False)

    def propose(self, entry: Entry) -> FrameHeader:
        self.check_leads()
        return self._work.append(self.raft.propose()[1], entry)

    def read(self) -> asyncio.Future[int]:
        """The index up to which one must have applied to answer as of now; proves that this replica still leads."""
        self.check_leads()
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.raft.read(future)
        self._wake()
        return future

    def transfer(self) -> bool:
        """Hands leadership to the follower that has most. False: there is none."""
        if self.raft.leader is None or not (best := self.raft.leader.best_voter()):
            return False
        self.raft.transfer(best)
        self._wake()
        return True

    async def hand_over(self, timeout_s: float) -> None:
        """Lets another replica lead, if one can; returns when it does, or when that has taken too long."""
        if self.leads and self.transfer():
            if self._deposed is None or self._deposed.done():
                self._deposed = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._deposed], timeout=timeout_s)

    # -- inputs, from the broker's loop --------------------------------------------------------------------------

    def receive(self, message: AnyMessage, frames: memoryview, settle: Settle | None = None) -> bool:
        """A message of a peer; True when the owner is to have a turn for it. Else `settle` is told what came of it."""
        raft = self.raft
        if type(message) is Repair:
            self._sender.answer_repair(message, raft.commit)
        elif raft.failed or self._work.is_full:
            return False  # it would only be kept: the owner may have no more turns, or nothing to take it in with
        elif self._takes_at_once(message, frames, settle):
            return False
        elif isinstance(message, Outdated):
            if self._applicant.told(message, self.seat):
                self.fail()
        elif (whole := with_body(message, frames, self.seat.uid, self._parts)) is not None:
            self._inputs.append(whole)
            self._wake()
            return True
        return False

    def link_changed(self, broker: int, up: bool) -> None:
        self._links.append((broker, up))
        self._wake()

    def tick(self) -> bool:
        """Called every few milliseconds; wakes the owner when something is due. False: quiet, it needs no ticks."""
        raft = self.raft
        new = raft.term == 0 or raft.me not in raft.membership.voters
        if self._work.is_full or (not raft.quiet and (new or self._now_ms() >= raft.due_ms)):
            self._wake()
        return self._work.is_full or not raft.quiet

    def _now_ms(self) -> int:
        return int(self._clock.monotonic_s() * 1000)

    # -- the owner's turn ----------------------------------------------------------------------------------------

    def step(self) -> DiskFullError | LogFailedError | None:
        """Takes in what came, does what the core says, starts disk work. An error says that the tail is gone."""
        failure: DiskFullError | LogFailedError | None = None
        fed = False
        while True:
            if self._flusher.ended is not None or self._log.failure is not None:
                failure = self._take_flush() or failure
            if self._todo is None:
                if not fed:
                    fed, self._end_before = True, self.commit_end
                    self._feed()
                self._todo = self.raft.ready()
            if self._todo is not None:
                try:
                    if not self._perform(self._todo):
                        break
                except (DiskFullError, LogFailedError) as error:
                    failure = error
                    if isinstance(error, DiskFullError):
                        break  # a snapshot waits for space
                    self.fail()
                self._todo = None
                self._watch_leadership()
                if not fed:
                    continue  # with what waited meanwhile
            if self._flusher.is_busy or (job := self._log.begin_flush()) is None:
                break
            self._flusher.start(job)
        self._sender.tidy(self.raft)
        return failure

    def _take_flush(self) -> DiskFullError | LogFailedError | None:
        finished = self._flusher.finished()
        if finished is None and self.raft.failed:
            return None
        try:
            if finished is None:  # the mark of the last flush could not be written
                assert self._log.failure is not None
                raise self._log.failure
            self._log.finish_flush(*finished)
        except DiskFullError as error:
            self._rewind(error)
            return error
        except LogFailedError as error:
            self.fail()
            self._watch_leadership()
            return error
        self._tell_synced()
        return None

    def fail(self) -> None:
        """Ends this replica. What the core still wanted to say, a vote perhaps, is not said, only a leader's last
        words: where the broker lives on, nobody would miss it."""
        self._end_before = self.commit_end
        todo, self._todo = self._todo, None
        self.raft.fail()
        last_words = self.raft.ready()
        for found in [found for found in (todo, last_words) if found is not None]:
            reads = [*found.reads, *((future, None) for future in found.lost_reads)]
            refuse(reads, NotLeaderError("this replica stopped leading", leader=0))
        if last_words is not None and last_words.hard_state is None:  # a term that is not on disk is not spoken of
            self._sender.send_all(last_words.messages)

    def _tell_synced(self) -> None:
        last = self._log.synced_index - 1
        term = self.raft.terms.term_at(last)
        # A truncation that waits would take entries of this write away: then nothing of them is said.
        overtaken = self._todo is not None and any(isinstance(work, (Truncate, Install)) for work in self._todo.work)
        if term is not None and not overtaken:
            self.raft.synced(last, term)
        self._full = None

    def _rewind(self, error: DiskFullError) -> None:
        """The disk took nothing of the tail: this replica is shorter now and must not lead."""
        todo, replaced = self._todo, self.is_replacing
        if todo is not None and not replaced:
            for work in todo.work:
                if isinstance(work, Truncate):
                    self._work.do(work, self.raft.leader_id)
            todo.work = []
        first = self._log.next_index
        self._sender.cache.drop_from(first)
        self._owner.entries_removed(first, error)
        self._full, self._full_until_s = DiskFullError(error.message), self._clock.monotonic_s() + _FULL_S
        self.raft.may_lead = False
        if not replaced:
            self.raft.rewound(first - 1)

    def _feed(self) -> None:
        raft = self.raft
        raft.tick(self._now_ms(), random.getrandbits(30))
        while self._links:
            broker, up = self._links.popleft()
            for peer in raft.membership.members:
                if broker_of(peer) == broker:
                    (raft.peer_up if up else raft.peer_down)(peer)
        while self._inputs:
            message = self._inputs.popleft()
            if isinstance(message, Join):
                self.admission.asked(message, raft)
            else:
                raft.step(message, raft.now_ms)
        if not raft.may_lead and self._clock.monotonic_s() >= self._full_until_s:
            raft.may_lead = True
        if raft.term == 0 and self.seat.prefers_to_lead and self._clock.monotonic_s() >= self._campaign_at_s:
            # A new group need not wait for a time-out, only until the others have been made too.
            self._campaign_at_s = self._clock.monotonic_s() + _FIRST_ELECTION_S
            raft.campaign()
        if raft.me not in raft.membership.voters or (raft.term and not raft.leader_id):
            self._applicant.ask(self.seat, raft)  # without a leader too: it may have been left behind
        if self.leads and (step := self.admission.next_step(raft)) is not None:
            self._change(step)

    def _perform(self, todo: Ready) -> bool:
        """False: it must wait for the disk, and goes on when woken."""
        if todo.hard_state is not None:
            try:
                if not self._saver.save(todo.hard_state):
                    return False
            except Exception as error:
                raise self._log.stop(error) from error
            todo.hard_state = None
        while todo.work:
            work = todo.work[0]
            if isinstance(work, (Truncate, Install)) and not self._is_flushed():
                return False
            if isinstance(work, Install) and (self._log.is_checkpointing or self._log.is_rewriting):
                return False  # the owner wakes us when it is written
            if not self._work.do(work, self.raft.leader_id):
                return False  # ticks wake us until there is space
            todo.work.pop(0)  # only now: a snapshot that the disk refused still replaces nothing
        self._sender.send_all(todo.messages)
        for future, index in todo.reads:
            settle(future, index)
        if todo.lost_reads:
            lost = NotLeaderError("this replica stopped leading", leader=self.leader)
            refuse([(future, None) for future in todo.lost_reads], lost)
        return True

    def _is_flushed(self) -> bool:
        """Nothing is on its way to the disk. Otherwise the owner is woken when that has changed."""
        if self._flusher.is_busy:
            return False
        if (job := self._log.begin_flush()) is None:
            return True
        self._flusher.start(job)
        self._wake()
        return False

    def _damaged(self, error: CorruptLogError) -> None:
        """A frame of ours is bad: it cannot judge other logs, and what it has must not become the group's truth."""
        logger.error("frame_corrupt uid=%s error=%r", self.seat.uid, error.message)
        self.raft.may_vote = False
        self._on_damage(error)

    def _watch_leadership(self) -> None:
        term = self.raft.term if self.raft.leader is not None else 0
        if self._led_term not in (0, term):
            self.admission.forget()
            self._owner.leadership_lost()
            if self._deposed is not None:
                settle(self._deposed, None)
        if term != self._led_term and term:
            logger.info("leading uid=%s term=%d", self.seat.uid, term)
        self._led_term = term

    # -- membership ----------------------------------------------------------------------------------------------

    def set_replicas(self, epoch: int, brokers: Sequence[int]) -> tuple[Membership, bool]:
        """Orders which brokers are to hold this partition. Gives who does now, and whether that is done."""
        self.check_leads()
        self.admission.order(epoch, brokers)
        self._wake()
        return self.raft.membership, self.admission.is_done(self.raft)

    def _change(self, step: Step) -> None:
        if isinstance(step, HandOver):
            self.raft.transfer(step.to)
        elif isinstance(step, Outdated):
            self.transport.send(broker_of(step.to), self.seat.uid, step)
        else:
            self._work.change(self.raft, step)

    async def close(self) -> None:
        """Waits for the disk work under way. What was not committed by then was not acknowledged."""
        if self.raft.leader is not None:  # nobody took over
            self.fail()
        await self._sender.close()
        await self._flusher.wait()
        await self._saver.wait()
