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
        often = (self._crash, self._restart, self._membership)
        seldom = (self._cut, self._mend, self._full, self._trim, self._transfer, self._fitness, self._pause)
        self._kinds = (*often, *often, *seldom)

    def happen(self) -> None:
        world = self._world
        if not world.healing:
            world.rng.choice(self._kinds)()
            world.after(world.rng.randint(20, 1000), self.happen)

    def _crash(self) -> None:
        """One replica, sometimes all; now and then because its disk failed."""
        world, rng = self._world, self._world.rng
        victims = list(world.nodes)
        if victims and rng.random() < 0.9:
            victims = [rng.choice(victims)]
        for victim in victims:
            if rng.random() < 0.2:
                world.nodes[victim].raft.fail()
                world.pump(world.nodes[victim])
            world.crash(victim)

    def _restart(self) -> None:
        world, rng = self._world, self._world.rng
        for replica in list(world.crashed):
            if rng.random() < 0.7:
                world.restart(replica)

    def _cut(self) -> None:
        """One replica from some others, in one direction or both."""
        world, rng = self._world, self._world.rng
        victim = rng.choice([*world.lives])
        for other in world.lives:
            if other != victim and rng.random() < 0.7:
                world.cuts |= {(victim, other), (other, victim)} if rng.random() < 0.7 else {(victim, other)}
        world.say(f"cut {sorted(world.cuts)}")

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
            if old.learners and choice < 0.5:
                new = old.with_voter(rng.choice(old.learners))
            elif len(old.members) < MEMBERS_MAX and choice < 0.7:
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
        world, rng = self._world, self._world.rng
        if world.nodes:
            victim = rng.choice([*world.nodes])
            world.paused[victim] = world.now_ms + rng.randint(100, 2000)
            world.say(f"{victim} is paused until {world.paused[victim]}")

    def _fitness(self) -> None:
        world, rng = self._world, self._world.rng
        for node in world.nodes.values():
            node.raft.may_lead = rng.random() < 0.8
            node.raft.may_vote = rng.random() < 0.9
