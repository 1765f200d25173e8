"""The simulated cluster: its nodes, its partitions, and what an operator would do to it."""

from __future__ import annotations

import random
from typing import Any

from quiver.broker.partition import Partition
from quiver.errors import CorruptLogError, LogFailedError
from quiver.raft import Raft
from quiver.replication.group import broker_of
from quiver.testing.sim.compaction import check_left
from quiver.testing.sim.director import Placement
from quiver.testing.sim.disk import has_sound_facts
from quiver.testing.sim.ledger import Ledger
from quiver.testing.sim.network import Network
from quiver.testing.sim.node import Node
from quiver.testing.sim.plan import Plan
from quiver.testing.sim.trace import Trace
from quiver.testing.sim.world import Violation, World
from quiver.wire.frame import encode_frame

TOPIC = "logs"
COMPACTED: dict[str, bool | int | str] = {"cleanup": "compact", "tombstone.ms": 300}


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
        self.away: Node | None = None  # it is off, and nobody starts it
        self.placement = Placement(trace)
        self._heard: dict[tuple[int, int], Any] = {}  # node and life -> what it knows of the topic
        for node_id in range(1, plan.brokers + 1):
            node = self._make_node(node_id)
            node.clock_rate = 1 + chance.uniform(-plan.clock_spread, plan.clock_spread)
            self.nodes[node_id] = ledger.nodes[node_id] = node
            self.network.add(node)

    def _make_node(self, node_id: int) -> Node:
        settings = self.plan.settings(node_id)
        return Node(node_id, self.world, self.network, self.trace, settings, self.chance, self.ledger.leaving)

    def start(self) -> None:
        for node in self.nodes.values():
            node.start()
        disks = {node.id: node.broker.disk_id for node in self.nodes.values()}
        settings = COMPACTED if self.plan.compacts else {}
        self.placement.create(TOPIC, [*self.uids.values()], self.plan.replicas, disks, settings)
        for node in self.nodes.values():
            node.host(self.placement.word)

    def start_node(self, node: Node) -> None:
        if not node.is_alive and node is not self.away:
            node.start()
            node.host(self.placement.word)

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

    def leading(self, uid: str) -> list[tuple[Node, Partition, Raft]]:
        """All that believe to lead that group."""
        return [found for found in self.replicas(uid) if found[2].leader is not None and not found[2].failed]

    def leader(self, uid: str) -> tuple[Node, Partition, Raft] | None:
        return max(self.leading(uid), key=lambda found: found[2].term, default=None)

    def is_whole(self, node: Node) -> bool:
        """In each group that counts it, it has what is committed; and no group lacks a voter."""
        if not node.is_alive:
            return False
        for uid in self.uids.values():
            leader = self.leader(uid)
            if leader is None or leader[2].membership_index > leader[2].commit:
                return False
            voters = leader[2].membership.voters
            if len(voters) < self.plan.replicas:
                return False
            if any(broker_of(voter) == node.id for voter in voters) and not self._has_all(node, uid, voters):
                return False
        return True

    def _has_all(self, node: Node, uid: str, voters: tuple[int, ...]) -> bool:
        partition = node.partitions.get(uid)
        if partition is None or partition.raft is None or partition._log.failure is not None:
            return False
        raft = partition.raft.raft
        if raft.me not in voters or raft.failed or not raft.may_vote:
            return False
        if raft.synced_index < self.ledger.group(uid).commit:
            return False
        if node.id not in self.flipped:
            return True
        return has_sound_facts(node.disk, node.directory(uid)) and not _is_damaged(partition)

    def may_lose_data(self, node: Node) -> bool:
        """A minority at most may have lost anything at one time."""
        for other in list(self.at_risk):
            if self.is_whole(self.nodes[other]):
                del self.at_risk[other]
        return len({**self.at_risk, node.id: None}) <= (self.plan.replicas - 1) // 2

    def check_orders(self, node: Node) -> None:
        """What a broker was told of where replicas should be is never replaced by what was said before."""
        now = node.hosting.catalog.topics.get(TOPIC)
        before = self._heard.get((node.id, node.life))
        if now is before or now is None:
            return
        self._heard[node.id, node.life] = now
        if before is not None and any(new < old for old, new in zip(before.epochs, now.epochs, strict=False)):
            raise Violation("newest word", f"{node.name} goes back from the epochs {before.epochs} to {now.epochs}")

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
        """It cannot use a partition that it has."""
        topic = node.hosting.catalog.topics.get(TOPIC)
        for uid in topic.replicas if topic is not None else self.uids.values():
            partition = node.partitions.get(uid)
            if partition is None or partition._log.failure is not None:
                return True
        return False

    def tend(self) -> None:
        """Every now and then a manager tells a node what it is to have, and an operator restarts one that failed."""
        for node in self.nodes.values():
            self.start_node(node)
            if node is self.away:
                continue
            node.host(self.placement.word)
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
        """Which group has no leader or is not where it should be; empty when all are well."""
        return next(filter(None, map(self.unsettled_group, self.uids.values())), "")

    def unsettled_group(self, uid: str) -> str:
        leader = self.leader(uid)
        if leader is None or leader[1].raft is None or not leader[1].raft.leads:
            return f"{uid} has no leader"
        membership, wanted = leader[2].membership, self.placement.of(uid)
        if sorted(map(broker_of, membership.voters)) != sorted(wanted.replicas) or membership.learners:
            return f"{uid} has the members {membership}, wanted are {wanted.replicas}"
        return f"{uid} is moving" if wanted.moving else ""

    def unsettled(self) -> str:
        """What keeps the cluster from being whole; empty when it is."""
        if why := self.unsettled_groups():
            return why
        for uid in self.uids.values():
            leader = self.leader(uid)
            assert leader is not None
            raft = leader[2]
            wanted = self.placement.of(uid).replicas
            for node in self.nodes.values():
                partition = node.partitions.get(uid) if node.is_alive else None
                if node.id not in wanted:
                    if node.disk.exists(node.directory(uid)):
                        return f"{node.name} still has {uid}"
                    continue
                if partition is None or partition.raft is None:
                    return f"{node.name} does not have {uid}"
                mine = partition.raft.raft
                if mine.terms.last != raft.terms.last or mine.commit != raft.terms.last:
                    return f"{node.name} has {uid} up to {mine.terms.last}/{mine.commit} of {raft.terms.last}"
                if partition.state.applied_index != raft.terms.last or mine.synced_index != raft.terms.last:
                    return f"{node.name} has applied {partition.state.applied_index} of {raft.terms.last} in {uid}"
                if self.ledger.keys and partition.compactor.completed != partition.state.order.index:
                    return f"{node.name} has not compacted {uid} up to {partition.state.order.index}"
        return ""

    def compare_logs(self) -> None:
        """Replicas are equal, byte for byte, in what is committed and both have; also in what compaction left."""
        for uid in self.uids.values():
            frames: dict[int, bytes] = {}
            for node, partition, _ in self.replicas(uid):
                log = partition._log
                try:
                    for _, header, payload in log.scan(log.first_index):
                        if self.ledger.keys:
                            check_left(self.ledger, uid, partition.state.order, node.name, header, payload)
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
