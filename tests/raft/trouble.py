"""What goes wrong in a run of chaos.py: one thing after another, by chance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quiver.errors import InvalidRequestError, NotLeaderError
from tests.raft.kit import Disk

if TYPE_CHECKING:
    from tests.raft.chaos import Chaos

MEMBERS_MAX = 5


class Trouble:
    def __init__(self, world: Chaos) -> None:
        self._world = world
        often = (self._crash, self._cut)
        seldom = (self._mend, self._full, self._trim, self._transfer, self._fitness, self._pause, self._membership)
        self._kinds = (*often, *often, *often, *seldom)

    def happen(self) -> None:
        world = self._world
        if not world.healing:
            world.rng.choice(self._kinds)()
            world.after(world.rng.randint(10, 600), self.happen)

    def _victim(self) -> int | None:
        """Anyone, but a leader with preference."""
        world, rng = self._world, self._world.rng
        leaders = [node.me for node in world.nodes.values() if node.raft.leader is not None]
        among = leaders if leaders and rng.random() < 0.5 else list(world.nodes)
        return rng.choice(among) if among else None

    def _crash(self) -> None:
        """One replica, sometimes all; now and then because its disk failed. It comes back after a while."""
        world, rng = self._world, self._world.rng
        victim = self._victim()
        for replica in list(world.nodes) if rng.random() < 0.1 else [victim] if victim else []:
            if rng.random() < 0.2:
                world.nodes[replica].raft.fail()
                world.pump(world.nodes[replica])
            world.crash(replica)
            world.after(rng.choice((1, 100, 1500)) + rng.randint(0, 100), world.restart, replica)

    def _cut(self) -> None:
        """One replica from some others, in one direction or both, for a while."""
        world, rng = self._world, self._world.rng
        victim = self._victim()
        if victim is None:
            return
        share = rng.choice((0.5, 1.0))
        for other in world.lives:
            if other != victim and rng.random() < share:
                world.cuts |= {(victim, other), (other, victim)} if rng.random() < 0.7 else {(victim, other)}
        world.say(f"cut {sorted(world.cuts)}")
        if rng.random() < 0.8:
            world.after(rng.randint(100, 1200), self._mend)

    def _mend(self) -> None:
        self._world.cuts.clear()

    def _full(self) -> None:
        world, rng = self._world, self._world.rng
        for node in list(world.nodes.values()):
            if node.clean < len(node.entries) and rng.random() < 0.5:
                world.say(f"{node.me} has a full disk, {node.start + node.clean} stay")
                node.full()
                world.pump(node)

    def _trim(self) -> None:
        world, rng = self._world, self._world.rng
        for node in world.nodes.values():
            end = min(node.raft.commit, node.start + node.clean)
            if end > node.start and rng.random() < 0.7:
                node.trim(rng.randint(node.start + 1, end))
                world.say(f"{node.me} trims to {node.start}")
                world.pump(node)

    def _transfer(self) -> None:
        world, rng = self._world, self._world.rng
        for node in list(world.nodes.values()):
            if node.raft.leader is not None:
                to = rng.choice(node.raft.membership.voters)
                world.say(f"{node.me} hands over to {to}")
                node.raft.transfer(to)
                world.pump(node)

    def _membership(self) -> None:
        world, rng = self._world, self._world.rng
        for node in list(world.nodes.values()):
            if node.raft.leader is None:
                continue
            old = node.raft.membership
            choice = rng.random()
            small = len(old.voters) < 3
            if old.learners and choice < (0.9 if small else 0.4):
                new = old.with_voter(rng.choice(old.learners))
            elif len(old.members) < MEMBERS_MAX and choice < (0.95 if small else 0.6):
                new = old.with_learner(world.ids + 1)
            else:
                new = old.without(rng.choice(old.members))
            try:
                node.propose_membership(new)
            except (InvalidRequestError, NotLeaderError):
                continue
            world.say(f"{node.me} proposes {new}")
            world.pump(node)
            if world.ids + 1 in new.members:
                world.ids += 1
                world.start(world.ids, Disk())
        gone = set(world.lives) - world.ledger.needed()
        for replica in gone if rng.random() < 0.5 else ():
            if replica in world.nodes:
                world.crash(replica)
            if world.crashed.pop(replica, None):
                world.say(f"{replica} is thrown away")
                del world.lives[replica]

    def _pause(self) -> None:
        world, victim = self._world, self._victim()
        if victim is not None:
            world.paused[victim] = world.now_ms + world.rng.randint(50, 1000)
            world.say(f"{victim} is paused until {world.paused[victim]}")

    def _fitness(self) -> None:
        world, rng = self._world, self._world.rng
        for node in world.nodes.values():
            node.raft.may_lead = rng.random() < 0.9
            node.raft.may_vote = rng.random() < 0.95
