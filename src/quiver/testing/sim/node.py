"""One broker of the cluster, through all its lives: the real `Broker` on a virtual loop and a simulated disk.

Rule: everything that reaches a broker comes through here as an event of its loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from quiver.broker.partition import Partition
from quiver.broker.server import Broker
from quiver.config import BrokerSettings
from quiver.errors import DiskFullError, QuiverError
from quiver.log.flush import CheckpointJob
from quiver.log.segment import read_chunk
from quiver.manager.quorum import MetadataQuorum
from quiver.raft.messages import AnyMessage, decode_message
from quiver.replication.frame_cache import Buffer
from quiver.testing.faulty_disk import FaultyDisk
from quiver.testing.sim.disk import LifeDisk
from quiver.testing.sim.executor import SimulatedExecutor
from quiver.testing.sim.network import Network
from quiver.testing.sim.trace import Trace
from quiver.testing.sim.world import VirtualClock, VirtualLoop, World
from quiver.wire.messages import CreateTopic, HostTopic, Produce

_EPOCH_US = 1_700_000_000_000_000
_LONG_S_MAX = 0.5  # of a disk job: much may happen meanwhile

OnSend = Callable[["Node", str, AnyMessage, Sequence[Buffer]], None]


class Flow:
    """A connection that always takes more."""

    is_writable = True

    async def until_writable(self) -> None:
        pass


class SimulatedPeers:
    """What `quiver.net.peers.Peers` is to a broker, for one life of a node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._life = node.life
        self.on_message: Callable[[str, AnyMessage, memoryview], None] = lambda uid, message, frames: None
        self.on_read: Callable[[], None] = lambda: None
        self.on_link: Callable[[int, bool], None] = lambda broker, up: None

    def send(
        self, broker: int, uid: str, message: AnyMessage, frames: Sequence[Buffer] = (), *, now: bool = False
    ) -> bool:
        node = self._node
        return node.life == self._life and node.is_alive and node.send(broker, uid, message, frames)

    async def close(self) -> None:
        pass


class Applied(NamedTuple):
    applied_index: int


class QuorumView:
    """A manager's replica as those see it who look at partitions."""

    def __init__(self, quorum: MetadataQuorum) -> None:
        self.quorum = quorum
        self.raft = quorum.replica
        self._log = quorum._log

    @property
    def _full(self) -> bool:
        return not self.raft.raft.may_lead

    @property
    def state(self) -> Applied:
        return Applied(self.quorum.state.applied)


def _share_of_long(job: Callable[..., Any]) -> float:
    """How many of such jobs take long. Check-points are large, and readers want what is not in memory any more."""
    if isinstance(getattr(job, "__self__", None), CheckpointJob):
        return 0.2
    return 0.03 if getattr(job, "func", None) is read_chunk else 0.0


def clock_of(loop: VirtualLoop) -> VirtualClock:
    return VirtualClock(loop, _EPOCH_US - int(loop.offset_s * 1_000_000))


class Node:
    def __init__(
        self,
        node_id: int,
        world: World,
        network: Network,
        trace: Trace,
        settings: BrokerSettings,
        chance: random.Random,
        on_send: OnSend,
    ) -> None:
        self.id = node_id
        self.name = f"n{node_id}"
        self.world = world
        self.life = 0
        self.is_alive = False
        self.settings = settings
        self.disk = FaultyDisk(chance.getrandbits(32))
        self.slowness = 1.0
        self.clock_rate = 1.0
        self.loop = VirtualLoop(world, self.name)
        self.loop.is_dead = True
        self._network = network
        self._trace = trace
        self._chance = chance
        self._on_send = on_send
        self._executors: list[SimulatedExecutor] = []
        self._life_disk = LifeDisk(self.disk)
        self._broker: Broker | None = None
        self._peers = SimulatedPeers(self)
        self.is_stopping = False
        self._faults_before: dict[str, int] = {}  # how many there had been when a partition was opened
        self._faults_at_start = 0

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A new process on the disk as it is."""
        self.life += 1
        self.is_alive = True
        self._trace.say(self.name, "starts")
        self._faults_before, self._faults_at_start = {}, len(self.disk.met)
        self.loop = VirtualLoop(self.world, self.name, self.clock_rate, self._chance.uniform(0, 1000))
        self.loop.owner = self
        self._executors = []
        self._life_disk = LifeDisk(self.disk)
        self.loop.turn(self._boot, ())
        self._network.node_started(self)

    def _boot(self) -> None:
        self.is_stopping = False
        self._peers = peers = SimulatedPeers(self)
        given: Any = peers
        self._broker = Broker(self.settings, self._life_disk, clock_of(self.loop), peers=given)
        self.hosting.start()

    def new_executor(self) -> SimulatedExecutor:
        """For the broker that is being made."""
        executor = SimulatedExecutor(self.loop, self._disk_latency_s)
        self._executors.append(executor)
        return executor

    def _disk_latency_s(self, job: Callable[..., Any]) -> float:
        latency_s = (0.0002 + self._chance.random() * 0.002) * self.slowness
        if (share := _share_of_long(job)) and self._chance.random() < share:
            latency_s += self._chance.random() * _LONG_S_MAX
        return latency_s

    def die(self, power_cut: bool) -> None:
        """The process ends where it is; with a power cut the page cache goes too."""
        self._trace.say(self.name, "loses power" if power_cut else "is killed")
        for executor in self._executors:
            executor.interrupt(self.disk, self._chance)
        self.gone()
        if power_cut:
            self.disk.crash()
        else:
            self.disk.kill()

    def gone(self) -> None:
        self._life_disk.alive = False
        self.is_alive = False
        self.loop.die()
        self._network.node_died(self)

    def stop(self, done: Callable[[], None]) -> None:
        """A graceful stop; `done` is called when the process has ended."""
        self._trace.say(self.name, "stops")
        self.loop.turn(self._begin, (self._stop(done),))

    async def _stop(self, done: Callable[[], None]) -> None:
        self.is_stopping = True
        await self._end()
        self.world.after(0.0, None, self._stopped, self.life, done)

    async def _end(self) -> None:
        await self.broker.stop()

    def _stopped(self, life: int, done: Callable[[], None]) -> None:
        if life == self.life and self.is_alive:
            self._trace.say(self.name, "has stopped")
            self.gone()
            self.disk.kill()
            done()

    def freeze(self) -> None:
        self._trace.say(self.name, "is paused")
        self.loop.is_frozen = True

    def thaw(self) -> None:
        if self.loop.is_frozen:
            self._trace.say(self.name, "goes on")
            self.world.thaw(self.loop)

    def replace_disk(self) -> None:
        """The old one is gone, with everything on it."""
        assert not self.is_alive
        self._trace.say(self.name, "gets an empty disk")
        self.disk = FaultyDisk(self._chance.getrandbits(32))

    def host(self, request: CreateTopic | HostTopic) -> None:
        """Tells the broker what it is to have."""
        if isinstance(request, HostTopic):
            self.loop.turn(self._begin, (self.hosting.host(request),))
        elif request.name not in self.hosting.catalog.topics:
            self.loop.turn(self._begin, (self.hosting.create(request),))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self.loop.create_task(self._watch(work))

    async def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        """Work whose mistakes nobody else would see."""
        try:
            await work
        except DiskFullError as error:
            self._trace.say(self.name, f"refused: {error.message}")
        except Exception as error:
            self.loop.unhandled.append({"message": "it failed", "exception": error})

    # -- what it has ---------------------------------------------------------------------------------------------

    @property
    def broker(self) -> Broker:
        assert self._broker is not None
        return self._broker

    @property
    def hosting(self) -> Any:
        return self.broker._hosting

    @property
    def partitions(self) -> dict[str, Any]:
        """The usable ones, by uid: `Partition` or `QuorumView`."""
        found: dict[str, Partition] = self.hosting._by_uid
        return found

    def partition(self, uid: str) -> Any:
        """That one, also while it is being stopped and takes nothing in any more; None where it cannot be used."""
        for name, topic in self.hosting.catalog.topics.items():
            for number, found in self.hosting.partitions.get(name, {}).items():
                if topic.partitions[number] == uid and isinstance(found, Partition):
                    return found
        return self.partitions.get(uid)

    def directory(self, uid: str) -> str:
        return f"{self.settings.data_dir}/broker-{self.id}/partitions/{uid}"

    def uid_of(self, directory: str) -> str:
        return directory.rpartition("/")[2]

    def failed_syncs(self, uid: str) -> bool:
        """True once a sync of that partition's log or vote has failed since it was opened."""
        where = self.directory(uid)
        return any(
            operation == "datasync" and path.startswith(where) and not path.endswith((".tmp", "/compacted"))
            for operation, path in self.disk.met[self._faults_before.get(uid, self._faults_at_start) :]
        )

    def forget_failures(self, uid: str) -> None:
        """That partition was opened anew: recovery has looked at what a failed sync left."""
        self._faults_before[uid] = len(self.disk.met)

    # -- what reaches it and leaves it ---------------------------------------------------------------------------

    def send(self, to: int, uid: str, message: AnyMessage, frames: Sequence[Buffer]) -> bool:
        self._on_send(self, uid, message, frames)
        return self._network.send(self.id, to, uid, message, frames)

    def receive(self, sender: int, uid: str, encoded: bytes, frames: bytes) -> None:
        message = decode_message(encoded)
        self._trace.message(self.name, sender, encoded, message)
        self._peers.on_message(uid, message, memoryview(frames))
        self._peers.on_read()

    def link_changed(self, other: int, up: bool) -> None:
        self._trace.say(self.name, f"link to n{other} {'up' if up else 'down'}")
        self._peers.on_link(other, up)

    def request(self, request: Any, payload: bytes, reply: Callable[[Any, bytes], None]) -> None:
        """A client's request has arrived; `reply` gets what the broker says, value or error."""
        self._begin(self._serve(request, memoryview(payload), reply))

    async def _serve(self, request: Any, payload: memoryview, reply: Callable[[Any, bytes], None]) -> None:
        try:
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            quick = False
            if isinstance(request, Produce):  # as the server does it
                with contextlib.suppress(QuiverError):
                    quick = self.broker._produce_quickly(request, payload, future)
            if quick:
                answer, frames = await future, b""
            else:
                answer, parts = await self.broker.serve(request, payload, Flow())
                frames = b"".join(parts)
        except QuiverError as error:
            answer, frames = error, b""
        reply(answer, frames)
