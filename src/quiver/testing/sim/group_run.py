"""One run of a consumer group: managers that coordinate it, a broker, members that come, go and die; then it is judged.

Managers, broker and members are the real ones, down to the SDK's cluster; connections, disks and time are simulated.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

from quiver.client import cluster as client_cluster
from quiver.client import group_member
from quiver.manager.quorum import METADATA_UID
from quiver.testing.sim.clients import Clients
from quiver.testing.sim.connections import Connections
from quiver.testing.sim.crowd import BROKER, BROKER_ADDRESS, Crowd, Feeder, Operator
from quiver.testing.sim.group_ledger import GroupLedger
from quiver.testing.sim.group_manager import GroupBroker, GroupManagerCluster, manager_address
from quiver.testing.sim.members import GROUP, Administrator, Member
from quiver.testing.sim.nemesis import Nemesis
from quiver.testing.sim.network import STRAGGLE_S_MAX, Network
from quiver.testing.sim.plan import plan_groups
from quiver.testing.sim.run import Play
from quiver.testing.sim.world import Violation, VirtualLoop

TOPIC = "logs"


class GroupsPlay(Play):
    def __init__(self, seed: int) -> None:
        super().__init__(seed, "groups ")
        self.plan, self._group_plan = plan_groups(self._chance("plan"))
        ledger = self.ledger = self._group_ledger = GroupLedger(self.plan.brokers, TOPIC, self._group_plan.start)
        uids = {("metadata", 0): METADATA_UID}
        world, chance = self.world, self._chance("cluster")
        self.cluster = managers = GroupManagerCluster(self.plan, world, self.trace, ledger, uids, chance)
        self.clients = Clients(world, managers.network, ledger, uids, self._chance("clients"))
        self.nemesis = Nemesis(managers, self._chance("nemesis"))
        self._network = Network(world, chance, notices=False)  # to the broker
        settings = self.plan.settings(BROKER)
        self._broker = GroupBroker(BROKER, world, self._network, self.trace, settings, chance, lambda *_: None)
        self._broker.name = "b1"
        self._network.add(self._broker)
        self._connections = Connections(world, self._chance("connections"))
        self._connections.add(BROKER_ADDRESS, self._network, self._broker)
        for node in managers.nodes.values():
            self._connections.add(manager_address(node.id), managers.network, node)
        self._servers = ",".join(map(manager_address, managers.nodes))
        hosted: dict[str, int] = {}
        managers.equip(self._group_plan.release_s, hosted, ledger.told)
        brokers = self._broker_clients = Clients(world, self._network, ledger, {}, self._chance("feed"))
        brokers.loop = self.clients.loop
        self._operator = Operator(self.clients, brokers, ledger, hosted)
        self._feeder = Feeder(brokers, ledger, hosted)
        crowd_chance = self._chance("crowd")
        self._crowd = Crowd(self._group_plan, self._broker, self._operator, self._make_member, crowd_chance)
        self._admin: Administrator | None = None

    @property
    def acknowledged(self) -> int:
        """Records that were read."""
        return sum(one.end for one in self._group_ledger.shared.values())

    def _make_member(self, number: int) -> Member:
        return Member(*self._common(f"c{number}"), servers=self._servers, plan=self._group_plan)

    def _common(self, name: str) -> tuple[object, ...]:
        return name, self.world, self.trace, self._group_ledger, self._chance(name)

    def run(self) -> None:
        with self._sdk_simulated():
            try:
                super().run()
            finally:
                for loop in (self._broker.loop, *(one.loop for one in self._processes())):
                    loop.die()

    def _processes(self) -> list[Member | Administrator]:
        return [*self._crowd.members, *([self._admin] if self._admin else [])]

    @contextlib.contextmanager
    def _sdk_simulated(self) -> Iterator[None]:
        """What the SDK takes from its surroundings."""
        numbers, chance = itertools.count(1), self._chance("sdk")
        uuids = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{next(numbers):032x}"[::-1]))
        with (
            mock.patch.object(client_cluster, "open_connection", self._connections.open),
            mock.patch.object(client_cluster, "random", chance),
            mock.patch.object(group_member, "uuid", uuids),
        ):
            yield

    # -- the course ----------------------------------------------------------------------------------------------

    def _begin_clients(self) -> None:
        network = self._network
        network.loss, network.straggler = self.plan.loss, self.plan.straggler
        network.delay_s, network.spread_s = self.plan.delay_s, self.plan.delay_s * 2
        self._broker.start()
        self._begin(self._operator)
        self._begin(self._feeder)
        self._crowd.start()
        if self._group_plan.resets:
            self._admin = Administrator(*self._common("admin"), servers=self._servers)
            self._admin.begin()

    def _check(self, loop: VirtualLoop | None) -> None:
        owner = None if loop is None else loop.owner
        if isinstance(owner, Member):
            self._group_ledger.owned(owner.name, owner.owned)
        if loop is None or not isinstance(owner, (Member, Administrator)):
            super()._check(loop)
            return
        loop.owner = None
        super()._check(loop)
        loop.owner = owner

    def _close(self) -> None:
        network = self._network
        network.loss = network.straggler = 0.0
        self._broker_clients.stopping = True
        self._crowd.heal()
        if self._admin is not None:
            self._admin.stopping = True
        self._settle()
        self._pass(STRAGGLE_S_MAX + self.plan.delay_s * 3)  # what the feeder gave up may arrive until then
        self._until(lambda: "" if self._admin is None or self._admin.is_done else "the administrator waits")
        self._until(self._unshared)
        self._until(self._unread)
        for member in self._crowd.alive():
            member.stopping = True
        self._until(self._unleft)
        for shared in self._group_ledger.shared.values():
            if (first := shared.unread()) is not None:
                raise Violation("nothing lost", f"nobody has read {shared.pair} at {first} of {shared.end}")
        self._until(self.cluster.unsettled)

    def _unshared(self) -> str:
        """Everyone reads what the managers say, and nothing is on its way."""
        group = self._group_ledger.state.groups.get(GROUP)
        given = {} if group is None else {(one.topic, one.partition): one for one in group.shares}
        owned = {pair: epoch for member in self._crowd.alive() for pair, epoch in member.owned.items()}
        if len(given) < self._operator.wanted or any(one.owner != one.target for one in given.values()):
            return f"{group} is on its way"
        return "" if owned == {pair: one.epoch for pair, one in given.items()} else f"{owned} are read of {given}"

    def _unread(self) -> str:
        for shared in self._group_ledger.shared.values():
            reading = shared.readings.get(shared.epoch)
            if reading is None or reading.done < shared.end:
                return f"{shared.pair} is read up to {reading and reading.done} of {shared.end}"
        return ""

    def _unleft(self) -> str:
        if left := [member.name for member in self._crowd.alive()]:
            return f"{left} do not leave"
        group = self._group_ledger.state.groups.get(GROUP)
        if group is not None and group.members:
            return f"{group} still has members"
        behind = [one for one in self._group_ledger.shared.values() if one.position != one.end]
        return f"{behind[0].pair} is stored at {behind[0].position} of {behind[0].end}" if behind else ""
