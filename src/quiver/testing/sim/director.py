"""The manager of the simulated cluster: it knows where partitions should be, tells the brokers, and has them moved.

What it knows is the real state of the metadata, changed by the real commands; only the log below it is missing. What it
says goes over the network as a client's requests do: late, twice, or not at all.

Rule: it repeats itself until all is as it should be, and never believes that a word has arrived.
"""

from __future__ import annotations

import contextlib

from quiver.errors import NotLeaderError, QuiverError
from quiver.manager.brokers import creation_of
from quiver.metadata.commands import CreateTopic, Place, PlaceReplicas, RegisterBroker, Settled, SettleReplicas
from quiver.metadata.state import Partition, State
from quiver.testing.sim.clients import Clients
from quiver.testing.sim.trace import Trace
from quiver.wire.admin_messages import SetReplicas
from quiver.wire.messages import CreateTopic as Creation
from quiver.wire.messages import HostTopic

_EPOCH_US = 1_700_000_000_000_000
_REPEAT_S = 0.2


class Placement:
    """Where the partitions of the only topic should be."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._state = State()
        self.topic = ""

    def create(
        self, topic: str, uids: list[str], replicas: int, disks: dict[int, int], settings: dict[str, bool | int | str]
    ) -> None:
        for broker, disk_id in disks.items():
            self._state.apply(RegisterBroker(broker, "", _EPOCH_US, disk_id))
        self._state.apply(CreateTopic(topic, uids, replicas, _EPOCH_US, [*disks], settings))
        self.topic = topic

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return self._state.topics[self.topic].partitions if self.topic else ()

    @property
    def word(self) -> Creation | HostTopic:
        """What every broker is told."""
        return creation_of(self._state.topics[self.topic])

    def of(self, uid: str) -> Partition:
        return next(partition for partition in self.partitions if partition.uid == uid)

    def move(self, uid: str, brokers: list[int]) -> None:
        one = self.of(uid)
        self._trace.say("-", f"{uid} is to be on {brokers} in epoch {one.epoch + 1}")
        self._state.apply(PlaceReplicas([Place(one.topic, one.number, uid, one.epoch, brokers)]))

    def settle(self, one: Partition) -> None:
        self._trace.say("-", f"{one.uid} is on {[*one.replicas]}, as ordered in epoch {one.epoch}")
        self._state.apply(SettleReplicas([Settled(one.topic, one.number, one.uid, one.epoch)]))


class Director:
    def __init__(self, clients: Clients, placement: Placement) -> None:
        self._clients = clients
        self._placement = placement
        self._asked: dict[str, int] = {}  # by uid: who may lead it
        self._words: list[HostTopic] = []  # the last ones
        self.is_done = False

    async def run(self) -> None:
        clients = self._clients
        while not clients.stopping:
            for one in self._placement.partitions:
                if one.moving:
                    await self._order(one)
            await self._tell(clients.any_node())
            await clients.pause(_REPEAT_S)
        self.is_done = True

    async def _tell(self, node: int) -> None:
        word = self._placement.word
        if isinstance(word, HostTopic):
            if [word] != self._words[-1:]:
                self._words = [*self._words[-4:], word]
            if self._clients.chance.random() < 0.2:
                word = self._clients.chance.choice(self._words)  # of a manager that has not heard that another leads
            with contextlib.suppress(QuiverError):  # it is told again
                await self._clients.call(node, word)

    async def _order(self, one: Partition) -> None:
        clients = self._clients
        asked = self._asked.get(one.uid, 0) or clients.chance.choice(one.holders)
        order = SetReplicas(one.topic, one.number, one.uid, one.epoch, [*one.replicas])
        try:
            reply, _ = await clients.call(asked, order, timeout_s=0.5)
        except NotLeaderError as error:
            self._asked[one.uid] = int(error.facts.get("leader", 0))
            return
        except QuiverError:
            self._asked[one.uid] = 0
            return
        self._asked[one.uid] = asked
        if reply.done and self._placement.of(one.uid).epoch == one.epoch:
            self._placement.settle(one)
