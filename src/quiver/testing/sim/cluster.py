"""The simulated cluster: its nodes, its partitions, and what an operator would do to it."""

from __future__ import annotations

import random

from quiver.broker.partition import Partition
from quiver.errors import CorruptLogError, LogFailedError
from quiver.raft import Raft
from quiver.replication.group import replica_id
from quiver.testing.sim.ledger import Ledger
from quiver.testing.sim.network import Network
from quiver.testing.sim.node import Node
from quiver.testing.sim.plan import Plan
from quiver.testing.sim.trace import Trace
from quiver.testing.sim.world import Violation, World
from quiver.wire.frame import encode_frame
from quiver.wire.messages import CreateTopic

TOPIC = "logs"


def partition_uids(plan: Plan) -> dict[tuple[str, int], str]:
    return {(TOPIC, number): f"u{number}" for number in range(plan.partitions)}


class Cluster:
    def __init__(
        self,
        plan: Plan,
        world: World,
        trace: Trace,
        ledger: Ledger,
        uids: dict[tuple[str, int], str],
        chance: random.Random,
    ) -> None:
        self.plan = plan
        self.world = world
        self.trace = trace
        self.ledger = ledger
        self.chance = chance
        self.network = Network(world, chance, plan.notices)
        self.nodes: dict[int, Node] = {}
        self.uids = uids
        self.at_risk: dict[int, None] = {}  # nodes that lost something they had acknowledged, and are not whole again
        self.flipped: dict[int, None] = {}  # nodes with a flipped bit
        self._topic: CreateTopic | None = None
        for node_id in range(1, plan.brokers + 1):
            node = Node(node_id, world, self.network, trace, plan.settings(node_id), chance, ledger.leaving)
            node.clock_rate = 1 + chance.uniform(-plan.clock_spread, plan.clock_spread)
            self.nodes[node_id] = ledger.nodes[node_id] = node
            self.network.add(node)

    def start(self) -> None:
        for node in self.nodes.values():
            node.start()
        voters = [replica_id(node.id, node.broker.disk_id) for node in self.nodes.values()]
        groups = [voters[number:] + voters[:number] for number in range(self.plan.partitions)]
        self._topic = CreateTopic(TOPIC, self.plan.partitions, uids=[*self.uids.values()], voters=groups)
        for node in self.nodes.values():
            node.host(self._topic)

    def start_node(self, node: Node) -> None:
        if not node.is_alive:
            node.start()
            assert self._topic is not None
            node.host(self._topic)

    # -- what is there -------------------------------------------------------------------------------------------

    def alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_alive]

    def replicas(self, uid: str) -> list[tuple[Node, Partition, Raft]]:
        """The usable ones of nodes that are up."""
        found = []
        for node in self.alive():
            partition = node.partitions.get(uid)
            if partition is not None and partition.raft is not None:
                found.append((node, partition, partition.raft.raft))
        return found

    def leader(self, uid: str) -> tuple[Node, Partition, Raft] | None:
        leading = [found for found in self.replicas(uid) if found[2].leader is not None and not found[2].failed]
        return max(leading, key=lambda found: found[2].term, default=None)

    def is_whole(self, node: Node) -> bool:
        """It has all its partitions, votes in each group, and has what is committed."""
        if not node.is_alive:
            return False
        for uid in self.uids.values():
            partition = node.partitions.get(uid)
            if partition is None or partition.raft is None or partition._log.failure is not None:
                return False
            raft, leader = partition.raft.raft, self.leader(uid)
            if leader is None or raft.me not in leader[2].membership.voters or raft.failed or not raft.may_vote:
                return False
            if leader[2].membership_index > leader[2].commit or raft.synced_index < self.ledger.group(uid).commit:
                return False
            if node.id in self.flipped and _is_damaged(partition):
                return False
        return True

    def may_lose_data(self, node: Node) -> bool:
        """A minority at most may have lost anything at one time."""
        for other in list(self.at_risk):
            if self.is_whole(self.nodes[other]):
                del self.at_risk[other]
        return len({**self.at_risk, node.id: None}) <= (self.plan.brokers - 1) // 2

    # -- the end -------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """No more faults; what is broken is repaired as an operator would."""
        self.trace.say("-", "all is healed")
        self.network.heal()
        self.network.loss = self.network.doubling = self.network.straggler = 0.0
        for node in self.nodes.values():
            node.thaw()
            node.slowness = 1.0
            node.disk.heal()
            node.disk.capacity_bytes = None
            if node.is_alive and self.is_broken(node):
                node.die(power_cut=False)
            self.start_node(node)

    def is_broken(self, node: Node) -> bool:
        for uid in self.uids.values():
            partition = node.partitions.get(uid)
            if partition is None or partition._log.failure is not None:
                return True
        return False

    def tend(self) -> None:
        """Every now and then a manager tells a node what it is to have, and an operator restarts one that failed."""
        for node in self.nodes.values():
            assert self._topic is not None
            if not node.is_alive:
                self.start_node(node)
            node.host(self._topic)
            failed = [p for p in node.partitions.values() if p._log.failure is not None]
            if failed or any(isinstance(p, LogFailedError) for p in node.hosting.partitions.get(TOPIC, {}).values()):
                node.die(power_cut=False)
                self.start_node(node)

    def lose_partition(self, node: Node, uid: str) -> None:
        self.trace.say(node.name, f"loses the directory of {uid}")
        directory = node.directory(uid)
        if node.disk.exists(directory):
            node.disk.remove_tree(directory)
            node.disk.sync_directory(directory.rpartition("/")[0])

    def unsettled_groups(self) -> str:
        """Which group has no leader or not all its members; empty when all have."""
        for uid in self.uids.values():
            leader = self.leader(uid)
            if leader is None or leader[1].raft is None or not leader[1].raft.leads:
                return f"{uid} has no leader"
            raft = leader[2]
            if len(raft.membership.voters) != self.plan.brokers or raft.membership.learners:
                return f"{uid} has the members {raft.membership}"
        return ""

    def unsettled(self) -> str:
        """What keeps the cluster from being whole; empty when it is."""
        if why := self.unsettled_groups():
            return why
        for uid in self.uids.values():
            leader = self.leader(uid)
            assert leader is not None
            raft = leader[2]
            for node in self.nodes.values():
                partition = node.partitions.get(uid) if node.is_alive else None
                if partition is None or partition.raft is None:
                    return f"{node.name} does not have {uid}"
                mine = partition.raft.raft
                if mine.terms.last != raft.terms.last or mine.commit != raft.terms.last:
                    return f"{node.name} has {uid} up to {mine.terms.last}/{mine.commit} of {raft.terms.last}"
                if partition.state.applied_index != raft.terms.last or mine.synced_index != raft.terms.last:
                    return f"{node.name} has applied {partition.state.applied_index} of {raft.terms.last} in {uid}"
        return ""

    def compare_logs(self) -> None:
        """Replicas are equal, byte for byte, in what is committed and both have."""
        for uid in self.uids.values():
            frames: dict[int, bytes] = {}
            for node, partition, _ in self.replicas(uid):
                log = partition._log
                try:
                    for _, header, payload in log.scan(log.first_index):
                        frame = bytes(encode_frame(header, payload))
                        if frames.setdefault(header.index, frame) != frame:
                            raise Violation("equal replicas", f"{node.name} has another entry {header.index} of {uid}")
                except CorruptLogError as error:
                    if node.id not in self.flipped:  # what nobody reads nobody repairs
                        raise Violation("9 no bad frame", f"{node.name} is damaged: {error.message}") from error

    def describe(self) -> list[str]:
        lines = []
        for uid in self.uids.values():
            for node, partition, raft in self.replicas(uid):
                leader = f"{raft.leader_id >> 32}.{raft.leader_id & 0xFFFF}"
                lines.append(
                    f"{node.name}.{raft.me & 0xFFFF} {uid} {raft.role.value} term {raft.term} of {leader} "
                    f"log {partition._log.first_index}..{raft.terms.last} synced {raft.synced_index} "
                    f"commit {raft.commit} applied {partition.state.applied_index}{' quiet' if raft.quiet else ''}"
                    f"{' failed' if raft.failed else ''}{'' if raft.may_vote else ' damaged'} "
                    f"voters {[v >> 32 for v in raft.membership.voters]}"
                )
        return lines


def _is_damaged(partition: Partition) -> bool:
    """Looks at every frame: a flipped bit may not have been met yet."""
    try:
        for _ in partition._log.scan(partition._log.first_index):
            pass
    except (CorruptLogError, OSError):
        return True
    return False
