"""A group of pure replicas in a bad world, from one seed: loss, delay, doubling, reordering, cuts, crashes, full disks.

    python -m tests.raft.chaos 0 1000        runs the seeds from 0 to 999
    python -m tests.raft.chaos 17            runs one seed and prints all that happened

After every event the ledger (ledger.py) checks what Raft promises. At the end the world is healed, and the group must
have a leader, catch up, go quiet, wake and get over the loss of its leader, each in bounded time.
"""

from __future__ import annotations

import contextlib
import heapq
import random
import sys
from collections.abc import Callable
from typing import Any

from quiver.config import RaftSettings
from quiver.errors import NotLeaderError
from quiver.raft import AnyMessage, Membership
from tests.raft.kit import Disk
from tests.raft.ledger import Ledger, Violation, WatchedNode
from tests.raft.trouble import Trouble

SETTINGS = RaftSettings(heartbeat_ms=50, election_ms=250, append_bytes_max=3, appends_in_flight_max=3, quiesce_ms=600)
TROUBLE_MS = 10_000
HEAL_MS = 15_000  # for each thing that must come about at the end
TRACE_LINES = 80


class Chaos:
    def __init__(self, seed: int, trace_lines_max: int = 1000) -> None:
        self._trace_lines_max = trace_lines_max
        self.rng = random.Random(seed)
        self.now_ms = 0
        self.trace: list[str] = []
        self.events = 0
        self.ledger = Ledger()
        self.nodes: dict[int, WatchedNode] = {}
        self.crashed: dict[int, Disk] = {}
        self.lives: dict[int, int] = {}  # how often a replica was started
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._links: dict[tuple[int, int], int] = {}  # (a, b) -> life of b that a is connected to, 0 when not
        self.cuts: set[tuple[int, int]] = set()
        self._flushing: dict[int, int] = {}
        self.paused: dict[int, int] = {}  # replica -> until when it does nothing
        self._rates: dict[int, float] = {}  # of the replicas' clocks
        self._values = 0
        self.ids = self.rng.choice((1, 3, 3, 3, 5))
        self._loss = self.rng.choice((0.0, 0.02, 0.1))
        self._doubling = self.rng.choice((0.0, 0.05))
        self._late = self.rng.choice((0.0, 0.05, 0.3))
        self._delay_ms = self.rng.choice((5, 10, 60))
        self._busy = self.rng.choice((0.1, 0.5, 1.0))  # how often clients ask
        self.healing = False
        first = Membership(tuple(range(1, self.ids + 1)))
        for replica in first.voters:
            self.start(replica, Disk(base=first))

    # -- the run -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        self.after(0, self._ask)
        self.after(500, Trouble(self).happen)
        self.after(50, self._watch_links)
        while self.now_ms < TROUBLE_MS:
            self._one_event()
        self._heal()
        self._until(self._is_whole, "no leader with all members caught up")
        for act in self.rng.sample((self._end_propose, self._end_add, self._end_transfer, self._end_lose), 3):
            self._until(self._settle_learners, "a learner is left")
            self._until(self._is_quiet, "not quiet")
            act(self._leader())
            self._until(self._is_whole, f"not whole after {act.__name__}")

    def _until(self, is_reached: Callable[[], bool], complaint: str) -> None:
        until_ms = self.now_ms + HEAL_MS
        while not is_reached():
            if self.now_ms > until_ms:
                raise Violation(f"{complaint}; {self._summary()}")
            self._one_event()

    def _one_event(self) -> None:
        self.now_ms, _, action, arguments = heapq.heappop(self._heap)
        self.events += 1
        action(*arguments)

    def after(self, delay_ms: int, action: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._heap, (self.now_ms + delay_ms, self._number, action, arguments))

    def say(self, text: str) -> None:
        self.trace.append(f"{self.now_ms:6} {text}")
        if len(self.trace) > self._trace_lines_max:
            del self.trace[: self._trace_lines_max // 2]

    def pump(self, node: WatchedNode) -> None:
        """Does what the core says, and checks."""
        if node.me not in self.nodes or self.nodes[node.me] is not node:
            return
        while (ready := node.ready()) is not None:
            for context, index in ready.reads:
                self.ledger.check_read(context, index)
            for message in ready.messages:
                self._send(message)
        for line in self.ledger.check(node, self._disk_of):
            self.say(line)
        if node.me not in self._flushing and node.clean < len(node.entries):
            self._flushing[node.me] = node.truncations
            slow = self.rng.random() < 0.1
            self.after(self.rng.randint(1, 200 if slow else 8), self._flushed, node, node.last, node.truncations)

    def _disk_of(self, replica: int) -> Disk | None:
        return self.nodes[replica].disk if replica in self.nodes else self.crashed.get(replica)

    # -- nodes ---------------------------------------------------------------------------------------------------

    def start(self, replica: int, disk: Disk) -> None:
        self.lives[replica] = self.lives.get(replica, 0) + 1
        self._rates.setdefault(replica, self.rng.choice((1.0, 1.0, 0.9, 1.1)))
        node = WatchedNode(replica, SETTINGS, disk, self._clock_of(replica), self.rng.getrandbits(20))
        node.ledger = self.ledger
        self.nodes[replica] = node
        self._flushing.pop(replica, None)
        self.after(self.rng.randint(1, 50), self._tick, node)
        self.pump(node)

    def _clock_of(self, replica: int) -> int:
        return int(self.now_ms * self._rates[replica])

    def _is_paused(self, replica: int, action: Callable[..., None], *arguments: Any) -> bool:
        """True: it will happen later."""
        until_ms = self.paused.get(replica, 0)
        if until_ms <= self.now_ms:
            return False
        self.after(until_ms - self.now_ms, action, *arguments)
        return True

    def _tick(self, node: WatchedNode) -> None:
        if self.nodes.get(node.me) is not node or self._is_paused(node.me, self._tick, node):
            return
        if not node.raft.quiet and self._clock_of(node.me) >= node.raft.due_ms:
            node.raft.tick(self._clock_of(node.me), self.rng.getrandbits(20))
            self.pump(node)
        self.after(self.rng.randint(10, 30), self._tick, node)

    def _flushed(self, node: WatchedNode, last: int, truncations: int) -> None:
        if self.nodes.get(node.me) is not node or self._is_paused(node.me, self._flushed, node, last, truncations):
            return
        del self._flushing[node.me]
        if node.truncations == truncations and last > node.start:
            node.sync(last)
        self.pump(node)

    def crash(self, replica: int) -> None:
        node = self.nodes.pop(replica)
        if self.rng.random() < 0.5:  # a truncation may have reached the disk, or not
            del node.disk.entries[node.clean :]
        known = min(node.raft.commit, node.disk.last)
        node.disk.commit = self.rng.randint(min(node.disk.commit, known), known)
        self.crashed[replica] = node.disk
        self.say(f"{replica} crashes with {node.disk.last} on disk")
        for link in [link for link in self._links if link[0] == replica]:
            del self._links[link]

    def restart(self, replica: int) -> None:
        if replica not in self.crashed:
            return
        self.say(f"{replica} restarts")
        self.start(replica, self.crashed.pop(replica))

    # -- network -------------------------------------------------------------------------------------------------

    def _send(self, message: AnyMessage) -> None:
        if self.healing:
            self.after(self.rng.randint(1, 5), self._deliver, message)
            return
        if (message.sender, message.to) in self.cuts or self.rng.random() < self._loss:
            return
        for _ in range(1 + (self.rng.random() < self._doubling)):
            late = self.rng.random() < self._late
            self.after(self.rng.randint(1, 400 if late else self._delay_ms), self._deliver, message)

    def _deliver(self, message: AnyMessage) -> None:
        node = self.nodes.get(message.to)
        if node is None or (message.sender, message.to) in self.cuts:
            return
        if self._is_paused(node.me, self._deliver, message):
            return
        self.say(f"> {message}")
        node.raft.step(message, self._clock_of(node.me))
        self.pump(node)

    def _watch_links(self) -> None:
        """Who can reach whom changes; the cores are told."""
        for a, node in list(self.nodes.items()):
            for b in self.lives:
                cut = (a, b) in self.cuts or (b, a) in self.cuts
                life = self.lives[b] if b in self.nodes and not cut else 0
                known = self._links.get((a, b))
                if a == b or known == life:
                    continue
                if known != 0:
                    node.raft.peer_down(b)
                if life != 0:
                    node.raft.peer_up(b)
                self._links[a, b] = life
                self.pump(node)
        self.after(self.rng.randint(10, 150), self._watch_links)

    # -- clients -------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        if self.healing:
            return
        for node in list(self.nodes.values()):
            if node.raft.leader is not None and self.rng.random() < self._busy:
                for _ in range(self.rng.randint(1, 6)):
                    self._propose(node)
            if node.raft.leader is not None and self.rng.random() < self._busy:
                self._values += 1
                node.raft.read(f"r{self._values}")
                self.ledger.reads[f"r{self._values}"] = len(self.ledger.committed)
                self.pump(node)
        idle = self.rng.random() < 0.02  # long enough to go quiet
        self.after(1200 if idle else self.rng.randint(5, 60), self._ask)

    def _propose(self, node: WatchedNode) -> None:
        self._values += 1
        try:
            node.propose(f"v{self._values}")
        except NotLeaderError:
            return
        self.pump(node)

    # -- the end -------------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        self.say("all is healed")
        self.healing = True
        self.cuts.clear()
        self.paused.clear()
        for replica in list(self.crashed):
            self.restart(replica)
        for node in self.nodes.values():
            node.raft.may_lead = node.raft.may_vote = True

    def _leader(self) -> WatchedNode:
        return max((node for node in self.nodes.values() if node.raft.leader is not None), key=lambda n: n.raft.term)

    def _members(self) -> list[WatchedNode]:
        members = self.ledger.membership().members
        return [node for replica, node in self.nodes.items() if replica in members]

    def _settle_learners(self) -> bool:
        """Somebody lets them vote or puts them out: before that a group does not go quiet. True when none is left."""
        learners = self.ledger.membership().learners
        if learners and self._is_whole():
            leader, learner = self._leader(), self.rng.choice(learners)
            old = leader.raft.membership
            with contextlib.suppress(NotLeaderError):  # while it hands over
                leader.propose_membership(old.with_voter(learner) if self.rng.random() < 0.5 else old.without(learner))
                self.pump(leader)
        return not learners

    def _end_propose(self, leader: WatchedNode) -> None:
        self._propose(leader)

    def _end_add(self, leader: WatchedNode) -> None:
        self.ids += 1
        leader.propose_membership(leader.raft.membership.with_learner(self.ids))
        self.pump(leader)
        self.start(self.ids, Disk())

    def _end_transfer(self, leader: WatchedNode) -> None:
        leader.raft.transfer(self.rng.choice(leader.raft.membership.voters))
        self.pump(leader)

    def _end_lose(self, leader: WatchedNode) -> None:
        """It dies, or its disk fails while its connections stay."""
        dies = self.rng.random() < 0.5
        if dies:
            self.crash(leader.me)
        else:
            leader.raft.fail()
            self.pump(leader)
        if len(leader.raft.membership.voters) > 2:
            self._until(lambda: any(node.raft.leader for node in self._members()), "the lost leader was not replaced")
        if not dies:
            self.crash(leader.me)
        self.restart(leader.me)

    def _is_whole(self) -> bool:
        members = self._members()
        leaders = [node for node in members if node.raft.leader is not None]
        if len(leaders) != 1:
            return False
        last = leaders[0].last
        return all(node.last == node.raft.commit == last == node.start + node.clean for node in members)

    def _is_quiet(self) -> bool:
        return self._is_whole() and all(node.raft.quiet for node in self._members())

    def _summary(self) -> str:
        return "; ".join(
            f"{node.me} {node.raft.role.value} t{node.raft.term} last {node.last} commit {node.raft.commit}"
            f"{' quiet' if node.raft.quiet else ''} of {node.raft.membership.voters}+{node.raft.membership.learners}"
            for node in self.nodes.values()
        )


def run_seed(seed: int, trace_lines: int = TRACE_LINES) -> Chaos:
    """Raises Violation; its text names the seed and says what happened before."""
    chaos = Chaos(seed, 2 * trace_lines)
    try:
        chaos.run()
    except Exception as error:
        tail = "\n".join(chaos.trace[-trace_lines:])
        raise Violation(f"seed {seed} at {chaos.now_ms} ms: {error!r}\n{tail}") from error
    return chaos


def main() -> int:
    numbers = [int(text) for text in sys.argv[1:]]
    failed = 0
    events = 0
    for seed in range(*numbers) if len(numbers) == 2 else numbers:
        try:
            chaos = run_seed(seed, TRACE_LINES if len(numbers) > 1 else 1_000_000)
        except Violation as error:
            failed += 1
            print(str(error) if len(numbers) == 1 else str(error).splitlines()[0])
        else:
            events += chaos.events
            if len(numbers) == 1:
                print("\n".join(chaos.trace))
    print(f"{failed} failed, {events} events in those that passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
