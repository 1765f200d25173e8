"""One manager of the simulated quorum, through all its lives: the real `MetadataQuorum` on a virtual loop and disk."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from quiver.config import RaftSettings
from quiver.errors import CorruptLogError, QuiverError
from quiver.manager.identity import Identity
from quiver.manager.quorum import METADATA_UID, MetadataQuorum
from quiver.metadata.commands import Command
from quiver.replication.seat import Seat
from quiver.testing.sim.database import Database, SimulatedStore
from quiver.testing.sim.network import Network
from quiver.testing.sim.node import Node, OnSend, QuorumView, SimulatedPeers, clock_of
from quiver.testing.sim.plan import Plan
from quiver.testing.sim.trace import Trace
from quiver.testing.sim.world import World

_CLUSTER = "sim"


class Propose(NamedTuple):
    """What another manager hands on to the primary."""

    command: Command


class Confirm(NamedTuple):
    """Asks how far the metadata is, as of now."""


class ManagerNode(Node):
    def __init__(
        self,
        node_id: int,
        world: World,
        network: Network,
        trace: Trace,
        plan: Plan,
        chance: random.Random,
        on_send: OnSend,
        on_write: Callable[[ManagerNode, int, int], None],
    ) -> None:
        super().__init__(node_id, world, network, trace, plan.settings(node_id), chance, on_send)
        self.name = f"m{node_id}"
        self.database = Database()
        self.founders: tuple[int, ...] = ()  # the replicas that the quorum begins with
        self._plan = plan
        self._on_write = on_write
        self._store = SimulatedStore(self.database, lambda applied, image: None)
        self._view: QuorumView | None = None

    def identity(self) -> Identity:
        return Identity(self.disk, self._home, self.id)

    @property
    def _home(self) -> str:
        return f"{self.settings.data_dir}/manager-{self.id}"

    def directory(self, uid: str) -> str:
        return f"{self._home}/log"

    def uid_of(self, directory: str) -> str:
        return METADATA_UID

    # -- life ----------------------------------------------------------------------------------------------------

    def _boot(self) -> None:
        self._view, self.is_stopping = None, False
        self._peers = peers = SimulatedPeers(self)
        self._store = SimulatedStore(self.database, lambda applied, image: self._on_write(self, applied, image))
        try:
            quorum = self._open(peers)
        except OSError as error:
            self._trace.say(self.name, f"cannot start: {error}")
            return
        self._view = QuorumView(quorum)
        peers.on_message, peers.on_link = quorum.receive, quorum.link_changed
        self._begin(self._start(quorum))

    async def _start(self, quorum: MetadataQuorum) -> None:
        await quorum.start(_CLUSTER)

    def _open(self, peers: Any) -> MetadataQuorum:
        """As `Manager.start` does it, with a quorum that is there already."""
        identity = Identity(self._life_disk, self._home, self.id)
        if not identity.voters:
            identity.belong(_CLUSTER, self.founders)
        try:
            return self._make(identity, peers)
        except CorruptLogError as error:
            self._trace.say(self.name, f"metadata_log_damaged {error.message}")
            identity.renew()
            return self._make(identity, peers)

    def _make(self, identity: Identity, peers: Any) -> MetadataQuorum:
        first = identity.voters[0] == identity.replica_id
        admits = tuple(self._network.nodes)
        seat = Seat(METADATA_UID, identity.replica_id, identity.voters, prefers_to_lead=first, admits=admits)
        store: Any = self._store
        return MetadataQuorum(
            self._life_disk,
            identity.log_directory,
            store,
            clock_of(self.loop),
            self.new_executor(),
            seat,
            peers,
            self._raft_settings(),
            self._plan.log,
        )

    def _raft_settings(self) -> RaftSettings:
        return self._plan.raft

    async def _end(self) -> None:
        if self._view is not None:
            await self._view.quorum.stop()

    def gone(self) -> None:
        self._store.alive = False
        super().gone()

    def die(self, power_cut: bool) -> None:
        super().die(power_cut)
        if power_cut:
            self.database.lose_power(self._chance)

    def replace_disk(self) -> None:
        super().replace_disk()
        self.lose_database()

    def lose_database(self) -> None:
        """Nothing of it is left; a process that uses it goes on with an empty one."""
        assert not self.is_alive
        self._trace.say(self.name, "loses its database")
        self.database = Database()

    # -- what it has ---------------------------------------------------------------------------------------------

    @property
    def partitions(self) -> dict[str, Any]:
        return {} if self._view is None else {METADATA_UID: self._view}

    def partition(self, uid: str) -> Any:
        return self._view

    # -- what reaches it -----------------------------------------------------------------------------------------

    def request(self, request: Any, payload: bytes, reply: Callable[[Any, bytes], None]) -> None:
        if self._view is not None:
            self._begin(self._answer(self._view.quorum, request, reply))

    async def _answer(self, quorum: MetadataQuorum, request: Any, reply: Callable[[Any, bytes], None]) -> None:
        answer: Any
        try:
            answer = await self._do(quorum, request)
        except QuiverError as error:
            answer = error
        reply(answer, b"")

    async def _do(self, quorum: MetadataQuorum, request: Any) -> Any:
        if isinstance(request, Propose):
            return await quorum.propose(request.command)
        assert isinstance(request, Confirm)
        return await quorum.confirm()
