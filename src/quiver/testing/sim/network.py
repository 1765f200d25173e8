"""The network between nodes: it loses, delays, doubles and reorders messages, and is cut, also in one direction only.

Rule: nothing is shared by reference. A message is bytes on the way and may reach a later life of the node it was for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from quiver.raft.messages import AnyMessage, Snapshot, encode_message
from quiver.replication.frame_cache import Buffer
from quiver.testing.sim.world import World

if TYPE_CHECKING:
    from quiver.testing.sim.node import Node

STRAGGLE_S_MAX = 2.0  # what a straggler takes longer than others
_SILENCE_S = 1.0  # a link on which nothing arrives is given up after this, as `peer_silence_s` says


class Network:
    """`notices`: nodes are told when a link is lost and back, as `quiver.net.peers` tells them."""

    def __init__(self, world: World, chance: random.Random, notices: bool) -> None:
        self._world = world
        self._chance = chance
        self._notices = notices
        self._connected: dict[tuple[int, int], bool] = {}
        self.nodes: dict[int, Node] = {}
        self.cuts: dict[tuple[int, int], None] = {}  # from, to
        self.loss = 0.0
        self.doubling = 0.0
        self.delay_s = 0.001
        self.spread_s = 0.002
        self.straggler = 0.0  # the share of messages that take very long
        self.ordered = False  # as on one connection: what was sent first arrives first
        self._arrivals_s: dict[tuple[int, int], float] = {}  # of the last message on each way
        self.on_death: Callable[[Node], None] = lambda node: None

    def add(self, node: Node) -> None:
        for other in self.nodes:
            self._connected[_pair(node.id, other)] = False
        self.nodes[node.id] = node

    # -- messages ------------------------------------------------------------------------------------------------

    def delay(self) -> float:
        chance = self._chance
        delay_s = self.delay_s + chance.random() * self.spread_s
        if self.straggler and chance.random() < self.straggler:
            delay_s += chance.random() * STRAGGLE_S_MAX
        return delay_s

    def send(self, sender: int, to: int, uid: str, message: AnyMessage, frames: Sequence[Buffer]) -> bool:
        target = self.nodes.get(to)
        if target is None or to == sender or (self._notices and not self._connected[_pair(sender, to)]):
            return False
        chance = self._chance
        encoded, body = encode_message(message), b"".join(frames)
        copies = 2 if self.doubling and chance.random() < self.doubling else 1
        for _ in range(copies):
            if (sender, to) in self.cuts or (self.loss and chance.random() < self.loss):
                continue
            arrival_s = self._world.now_s + self.delay()
            if self.ordered:
                arrival_s = max(arrival_s, self._arrivals_s.get((sender, to), 0.0))
                self._arrivals_s[sender, to] = arrival_s
            self._world.at(arrival_s, target, target.receive, sender, uid, encoded, body)
        if isinstance(message, Snapshot) and (self.doubling or self.straggler) and not self.ordered:
            # Few are sent, and few of those would come late enough to meet a log that has more.
            late_s = chance.random() * STRAGGLE_S_MAX
            self._world.after(late_s, target, target.receive, sender, uid, encoded, body)
        return True

    def carry(self, node: Node, callback: Callable[..., Any], *args: Any) -> None:
        """Something of a client, to that node; clients reach every node, but not always."""
        if not (self.loss and self._chance.random() < self.loss):
            self._world.after(self.delay(), node, callback, *args)

    # -- links ---------------------------------------------------------------------------------------------------

    def cut(self, sender: int, to: int) -> None:
        self.cuts[sender, to] = None
        self._expect_change(sender, to, _SILENCE_S)

    def heal(self) -> None:
        cuts, self.cuts = self.cuts, {}
        for sender, to in cuts:
            self._expect_change(sender, to, self._chance.uniform(0.05, 1.0))

    def node_died(self, node: Node) -> None:
        self.on_death(node)
        for other in self.nodes:
            if other != node.id:
                self._expect_change(node.id, other, self._chance.uniform(0.001, 0.1))

    def node_started(self, node: Node) -> None:
        for other in self.nodes:
            if other != node.id:
                self._world.after(self._chance.uniform(0.01, 0.5), None, self._reconnect, node, node.life, other)

    def _expect_change(self, a: int, b: int, delay_s: float) -> None:
        if self._notices:
            self._world.after(delay_s, None, self._look, a, b)

    def _possible(self, a: int, b: int) -> bool:
        alive = self.nodes[a].is_alive and self.nodes[b].is_alive
        return alive and (a, b) not in self.cuts and (b, a) not in self.cuts

    def _look(self, a: int, b: int) -> None:
        possible = self._possible(a, b)
        if possible != self._connected[_pair(a, b)]:
            self._tell(a, b, possible)

    def _reconnect(self, node: Node, life: int, other: int) -> None:
        """A new process dials; the other side may not have noticed yet that the old one is gone."""
        if not self._notices or node.life != life or not self._possible(node.id, other):
            return
        if self._connected[_pair(node.id, other)]:
            self._tell(node.id, other, False)
        self._tell(node.id, other, True)

    def _tell(self, a: int, b: int, up: bool) -> None:
        self._connected[_pair(a, b)] = up
        for me, other in ((a, b), (b, a)):
            if self.nodes[me].is_alive:
                self._world.after(0.0, self.nodes[me].loop, self.nodes[me].link_changed, other, up)


def _pair(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)
