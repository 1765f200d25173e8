"""The simulated managers, and what an operator would do to them."""

from __future__ import annotations

from quiver.manager.quorum import METADATA_UID
from quiver.replication.group import broker_of
from quiver.testing.sim.cluster import Cluster
from quiver.testing.sim.database import image_of
from quiver.testing.sim.manager_node import ManagerNode
from quiver.testing.sim.metadata_ledger import MetadataLedger
from quiver.testing.sim.node import Node


class ManagerCluster(Cluster):
    ledger: MetadataLedger
    nodes: dict[int, ManagerNode]  # type: ignore[assignment]  # made by `_make_node`

    def _make_node(self, node_id: int) -> ManagerNode:
        ledger = self.ledger
        return ManagerNode(
            node_id, self.world, self.network, self.trace, self.plan, self.chance, ledger.leaving, ledger.stored
        )

    def start(self) -> None:
        founders = tuple(node.identity().replica_id for node in self.nodes.values())
        for node in self.nodes.values():
            node.founders = founders
            node.start()

    def start_node(self, node: Node) -> None:
        if not node.is_alive:
            node.start()

    def is_broken(self, node: Node) -> bool:
        view = node.partition(METADATA_UID)
        return view is None or view._log.failure is not None

    def heal(self) -> None:
        for node in self.nodes.values():
            node.database.is_away = False
        super().heal()

    def tend(self) -> None:
        for node in self.nodes.values():
            if node.is_alive and self.is_broken(node):
                node.die(power_cut=False)
            self.start_node(node)

    def unsettled_groups(self) -> str:
        leader = self.leader(METADATA_UID)
        if leader is None or leader[1].raft is None or not leader[1].raft.leads:
            return "the managers have no primary"
        membership = leader[2].membership
        if sorted(map(broker_of, membership.voters)) != [*self.nodes] or membership.learners:
            return f"the managers are {membership}"
        return ""

    def unsettled(self) -> str:
        if why := self.unsettled_groups():
            return why
        leader = self.leader(METADATA_UID)
        assert leader is not None
        last = leader[2].terms.last
        for node in self.nodes.values():
            view = node.partition(METADATA_UID)
            applied, rows = view.quorum.state.applied, node.database.rows
            if view.raft.raft.commit != last or applied != last:
                return f"{node.name} has applied {applied} of {last}"
            if rows.applied != last:
                return f"the database of {node.name} has {rows.applied} of {last}"
            self.ledger.check_image(node, last, image_of(rows.counters, rows.entities.values()), "rows")
        return ""
