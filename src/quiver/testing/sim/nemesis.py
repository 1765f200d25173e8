"""Breaks things, as the plan of the run says: which fault comes next, whom it meets, and when it passes.

Rule: no fault beyond what the cluster promises to survive. A minority at most loses what it had acknowledged.
"""

from __future__ import annotations

import errno
import random
from typing import Final

from quiver.log.partition_log import PartitionLog
from quiver.log.recovery import STATE_FILE
from quiver.log.segment import index_path
from quiver.testing.sim.cluster import Cluster
from quiver.testing.sim.disk import hard_state_places, has_sound_facts
from quiver.testing.sim.manager_node import ManagerNode
from quiver.testing.sim.node import Node

# Where bits flip, and how often: most of what is on a disk is segments.
_FLIP_WEIGHTS: Final = {"segment": 12, "index": 1, STATE_FILE: 1, "hardstate": 1}


class Nemesis:
    def __init__(self, cluster: Cluster, chance: random.Random) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._chance = chance
        self._active = False
        self._came_from: dict[str, list[int]] = {}  # by uid: the brokers that had it before
        self._faults = {
            "kill": self._kill,
            "power cut": self._power_cut,
            "restart all": self._restart_all,
            "stop": self._stop,
            "pause": self._pause,
            "split": self._split,
            "cut one way": self._cut_one_way,
            "slow disk": self._slow_disk,
            "fsync error": self._fsync_error,
            "full disk": self._full_disk,
            "lost disk": self._lost_disk,
            "lost partition": self._lost_partition,
            "bit flip": self._bit_flip,
            "transfer": self._transfer,
            "move": self._move,
            "lost database": self._lost_database,
            "database away": self._database_away,
        }

    def start(self) -> None:
        self._active = True
        self._plan_next()

    def stop(self) -> None:
        self._active = False

    def _plan_next(self) -> None:
        interval_s = self._cluster.plan.fault_interval_s
        self._world.after(self._chance.expovariate(1 / interval_s), None, self._strike)

    def _strike(self) -> None:
        if not self._active:
            return
        weights = self._cluster.plan.weights
        fault = self._chance.choices([*weights], [*weights.values()])[0]
        self._faults[fault]()
        self._plan_next()

    # -- processes -----------------------------------------------------------------------------------------------

    def _victim(self) -> Node | None:
        """One that is up; the leader more often than chance would have it."""
        alive = [node for node in self._cluster.alive() if not node.loop.is_frozen]
        if not alive:
            return None
        if self._chance.random() < 0.5:
            leader = self._cluster.leader(self._chance.choice([*self._cluster.uids.values()]))
            if leader is not None and leader[0] in alive:
                return leader[0]
        return self._chance.choice(alive)

    def _later(self, node: Node) -> None:
        self._world.after(self._chance.choice((0.02, 0.3, 1.0, 3.0)), None, self._start_again, node)

    def _start_again(self, node: Node) -> None:
        if self._active:
            self._cluster.start_node(node)

    def _kill(self) -> None:
        if (node := self._victim()) is not None:
            node.die(power_cut=False)
            self._later(node)

    def _power_cut(self) -> None:
        if (node := self._victim()) is not None:
            node.die(power_cut=True)
            self._later(node)

    def _restart_all(self) -> None:
        power_cut = self._chance.random() < 0.7
        for node in self._cluster.alive():
            node.thaw()
            node.die(power_cut)
            self._later(node)

    def _stop(self) -> None:
        if (node := self._victim()) is not None and not node.is_stopping:
            node.stop(lambda: self._later(node))

    def _pause(self) -> None:
        if (node := self._victim()) is not None:
            node.freeze()
            loop = node.loop
            self._world.after(self._chance.choice((0.1, 0.5, 1.5, 3.0)), None, self._go_on, node, loop)

    def _go_on(self, node: Node, loop: object) -> None:
        if node.loop is loop:
            node.thaw()

    def _transfer(self) -> None:
        leader = self._cluster.leader(self._chance.choice([*self._cluster.uids.values()]))
        if leader is not None and not leader[0].loop.is_frozen:
            node, partition, _ = leader
            assert partition.raft is not None
            self._cluster.trace.say(node.name, "is told to hand over")
            node.loop.turn(partition.raft.transfer, ())

    def _move(self) -> None:
        """Orders a partition to other brokers, or back; now and then while it is on its way: most should arrive."""
        cluster = self._cluster
        uid = self._chance.choice([*cluster.uids.values()])
        now = cluster.placement.of(uid)
        brokers = self._chance.sample([*cluster.nodes], cluster.plan.replicas)
        if self._chance.random() < 0.5:
            brokers = self._came_from.get(uid, brokers)
        if not now.moving or self._chance.random() < 0.3:
            self._came_from[uid] = [*now.replicas]
            cluster.placement.move(uid, brokers)

    # -- network -------------------------------------------------------------------------------------------------

    def _split(self) -> None:
        nodes = [*self._cluster.nodes]
        self._chance.shuffle(nodes)
        at = self._chance.randint(1, len(nodes) - 1)
        for a in nodes[:at]:
            for b in nodes[at:]:
                self._cluster.network.cut(a, b)
                self._cluster.network.cut(b, a)
        self._cluster.trace.say("-", f"network split: {nodes[:at]} from {nodes[at:]}")
        self._join_later()

    def _cut_one_way(self) -> None:
        a, b = self._chance.sample([*self._cluster.nodes], 2)
        others = [b] if self._chance.random() < 0.5 else [node for node in self._cluster.nodes if node != a]
        outward = self._chance.random() < 0.5
        for other in others:
            self._cluster.network.cut(*((a, other) if outward else (other, a)))
        self._cluster.trace.say("-", f"network cut one way: {a} {'to' if outward else 'from'} {others}")
        self._join_later()

    def _join_later(self) -> None:
        self._world.after(self._chance.choice((0.2, 1.0, 3.0)), None, self._join)

    def _join(self) -> None:
        if self._cluster.network.cuts:
            self._cluster.trace.say("-", "network joined again")
            self._cluster.network.heal()

    # -- disks ---------------------------------------------------------------------------------------------------

    def _slow_disk(self) -> None:
        if (node := self._victim()) is not None:
            node.slowness = self._chance.choice((10.0, 100.0, 500.0))
            self._cluster.trace.say(node.name, f"has a disk {node.slowness:g} times slower")
            self._world.after(self._chance.choice((0.5, 2.0)), None, self._quicken, node)

    def _quicken(self, node: Node) -> None:
        node.slowness = 1.0

    def _fsync_error(self) -> None:
        if (node := self._victim()) is not None:
            uid = self._chance.choice([*self._cluster.uids.values()])
            path = f"{node.directory(uid)}/{self._chance.choice(('', '', '', 'hardstate', '0'))}"
            operation = self._chance.choice(("datasync", "datasync", "datasync", "pwrite"))
            node.disk.fail(operation, errno.EIO, self._chance.randint(1, 3), path)
            self._cluster.trace.say(node.name, f"will fail {operation} of {path}")
            self._world.after(self._chance.choice((0.5, 2.0, 4.0)), None, self._end_fsync_error, node)

    def _end_fsync_error(self, node: Node) -> None:
        node.disk.heal()
        if self._active and node.is_alive and self._cluster.is_broken(node) and not node.loop.is_frozen:
            if self._chance.random() < 0.3 and self._cluster.may_lose_data(node):
                self._lose_disk(node)
            else:
                node.die(power_cut=self._chance.random() < 0.5)
            self._later(node)

    def _full_disk(self) -> None:
        if (node := self._victim()) is not None:
            used = node.disk._root.used_bytes()
            node.disk.capacity_bytes = used + self._chance.choice((0, 200, 2000))
            self._cluster.trace.say(node.name, "has a full disk")
            self._world.after(self._chance.choice((0.3, 1.0, 3.0)), None, self._empty, node)

    def _empty(self, node: Node) -> None:
        node.disk.capacity_bytes = None

    def _lost_disk(self) -> None:
        if (node := self._victim()) is not None and self._cluster.may_lose_data(node):
            self._lose_disk(node)
            self._later(node)

    def _lose_disk(self, node: Node) -> None:
        self._cluster.at_risk[node.id] = None
        node.die(power_cut=False)
        node.replace_disk()

    def _lost_partition(self) -> None:
        if (node := self._victim()) is not None and self._cluster.may_lose_data(node):
            self._cluster.at_risk[node.id] = None
            node.die(power_cut=self._chance.random() < 0.5)
            self._cluster.lose_partition(node, self._chance.choice([*self._cluster.uids.values()]))
            self._later(node)

    def _lost_database(self) -> None:
        if isinstance(node := self._victim(), ManagerNode):
            node.die(power_cut=False)
            node.lose_database()
            self._later(node)

    def _database_away(self) -> None:
        if isinstance(node := self._victim(), ManagerNode):
            node.database.is_away = True
            self._cluster.trace.say(node.name, "cannot write to its database")
            self._world.after(self._chance.choice((0.5, 2.0)), None, self._give_back, node)

    def _give_back(self, node: ManagerNode) -> None:
        node.database.is_away = False

    def _bit_flip(self) -> None:
        """In a file where damage is found, and in one of them at a time: two could hide each other."""
        if (node := self._victim()) is None or not self._cluster.may_lose_data(node):
            return
        uid = self._chance.choice([*self._cluster.uids.values()])
        partition = node.partitions.get(uid)
        if partition is None or not has_sound_facts(node.disk, node.directory(uid)):
            return
        kind = self._chance.choices([*_FLIP_WEIGHTS], [*_FLIP_WEIGHTS.values()])[0]
        if kind == "segment":
            self._flip_in_segment(node, partition._log)
        elif kind == "index":
            self._flip_in_index(node, partition._log)
        elif node.id not in self._cluster.at_risk:
            self._flip_in_facts(node, node.directory(uid), kind)

    def _flip_in_segment(self, node: Node, log: PartitionLog) -> None:
        """Where a check-point says that all was stored: above it, after a power cut, damage looks like a torn write."""
        on_disk = [s for s in log._segments if 0 < s.size_bytes == s.synced_bytes]
        checkpoint = log.checkpoint
        covered = checkpoint.start.index if checkpoint.catching_up else checkpoint.index
        segments = [s for s in on_disk if s.next_index <= covered + 1]
        if segments:
            segment = self._chance.choice(segments)
            self._flip(node, segment.path, self._chance.randrange(segment.size_bytes))

    def _flip_in_index(self, node: Node, log: PartitionLog) -> None:
        """It is made again from its segment: nothing is lost, and nobody may call it damage."""
        paths = [index_path(segment.path) for segment in log._segments]
        found = [path for path in paths if node.disk.content(path)]
        if found:
            path = self._chance.choice(found)
            byte = self._chance.randrange(len(node.disk.content(path)))
            self._cluster.trace.say(node.name, f"has a flipped bit in {path} at {byte}")
            node.disk.flip(path, byte, self._chance.randrange(8), counts=False)

    def _flip_in_facts(self, node: Node, directory: str, name: str) -> None:
        """Read only when a process starts, so it often does. Of term and vote there are two copies: one is hit, when
        the system has written both back."""
        path = f"{directory}/{name}"
        is_state = name == STATE_FILE
        places = range(len(node.disk.content(path))) if is_state else hard_state_places(node.disk, directory)
        if places:
            node.disk.write_back(path)
            self._flip(node, path, self._chance.choice(places))
            if self._chance.random() < 0.7:
                node.die(power_cut=self._chance.random() < 0.5)
                self._later(node)

    def _flip(self, node: Node, path: str, byte: int) -> None:
        self._cluster.at_risk[node.id] = None
        self._cluster.flipped[node.id] = None
        self._cluster.trace.say(node.name, f"has a flipped bit in {path} at {byte}")
        node.disk.flip(path, byte, self._chance.randrange(8))
