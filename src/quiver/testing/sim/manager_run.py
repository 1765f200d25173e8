"""One run of a quorum of managers: made from a seed, broken for a while, healed, and judged."""

from __future__ import annotations

from quiver.manager.quorum import METADATA_UID
from quiver.testing.sim.clients import Clients
from quiver.testing.sim.manager_cluster import ManagerCluster
from quiver.testing.sim.metadata_ledger import MetadataLedger
from quiver.testing.sim.nemesis import Nemesis
from quiver.testing.sim.plan import plan_managers
from quiver.testing.sim.proposers import Answers, Proposer
from quiver.testing.sim.run import Play

_PROPOSERS = 3


class ManagersPlay(Play):
    def __init__(self, seed: int) -> None:
        super().__init__(seed, "managers ")
        self.plan = plan_managers(self._chance("plan"))
        ledger = MetadataLedger(self.plan.brokers)
        uids = {("metadata", 0): METADATA_UID}
        chance = self._chance("cluster")
        self.ledger = ledger
        self.cluster = ManagerCluster(self.plan, self.world, self.trace, ledger, uids, chance)
        self.clients = Clients(self.world, self.cluster.network, ledger, uids, self._chance("clients"))
        self.nemesis = Nemesis(self.cluster, self._chance("nemesis"))
        self._answers = Answers(ledger)

    @property
    def acknowledged(self) -> int:
        return self._answers.acknowledged

    def _begin_clients(self) -> None:
        for number in range(1, _PROPOSERS + 1):
            self._begin(Proposer(self.clients, self._answers, number))

    def _close(self) -> None:
        self._settle()
        self._answers.check_undone()
