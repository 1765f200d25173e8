"""What happens to a consumer group: members come, go, die and are paused, partitions grow, their broker is killed.

Rule: what is asked of managers and the broker goes over the network, and is asked again until it is done.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from crc32c import crc32c

from quiver.errors import QuiverError, TopicExistsError
from quiver.manager.brokers import creation_of
from quiver.metadata.commands import AddPartitions, Command, CreateTopic, RegisterBroker
from quiver.testing.sim.clients import Clients, leader_after
from quiver.testing.sim.group_ledger import GroupLedger
from quiver.testing.sim.manager_node import Propose
from quiver.testing.sim.members import Member
from quiver.testing.sim.node import Node
from quiver.testing.sim.plan import GroupPlan
from quiver.wire.batch_check import SCHEMA_ID_V1
from quiver.wire.messages import Produce
from quiver.wire.records import encode_single

_EPOCH_US = 1_700_000_000_000_000
BROKER = 1
BROKER_ADDRESS = "b1:9400"
_PARTITIONS_MAX = 8


class Operator:
    """Makes the topic and sees to it that the broker has what the managers say. `hosted` is what it has."""

    def __init__(self, managers: Clients, brokers: Clients, ledger: GroupLedger, hosted: dict[str, int]) -> None:
        self._managers = managers
        self._brokers = brokers
        self._ledger = ledger
        self._hosted = hosted
        self._asked = managers.any_node()
        self._stamp = 0
        self.wanted = 0  # partitions
        self.is_done = False

    async def run(self) -> None:
        while not self._managers.stopping or self._hosted.get(self._ledger.topic, 0) < self.wanted:
            topic = self._ledger.state.topics.get(self._ledger.topic)
            if topic is None or len(topic.partitions) < self.wanted:
                await self._propose(self._next_command(0 if topic is None else len(topic.partitions)))
            elif self._hosted.get(topic.name, 0) < len(topic.partitions):
                try:
                    await self._brokers.call(BROKER, creation_of(topic))
                except TopicExistsError:
                    pass
                except QuiverError:
                    continue
                self._hosted[topic.name] = len(topic.partitions)
            await self._managers.pause(0.1)
        self.is_done = True

    def _next_command(self, count: int) -> Command:
        self._stamp += 1
        uids = [f"u{self._stamp}-{number}" for number in range(count, self.wanted)]
        if BROKER not in self._ledger.state.brokers:
            return RegisterBroker(BROKER, BROKER_ADDRESS, self._stamp)
        if count == 0:
            return CreateTopic(self._ledger.topic, uids, 1, self._stamp)
        return AddPartitions(self._ledger.topic, count, uids)

    async def _propose(self, command: Command) -> None:
        try:
            await self._managers.call(self._asked, Propose(command))
        except QuiverError as error:
            self._asked = leader_after(self._managers, error, self._asked)


class Feeder:
    """Appends records to all partitions; what comes of one does not matter: what is stored is to be read."""

    def __init__(self, brokers: Clients, ledger: GroupLedger, hosted: dict[str, int]) -> None:
        self._brokers = brokers
        self._ledger = ledger
        self._hosted = hosted
        self._count = 0
        self.is_done = False

    async def run(self) -> None:
        brokers, topic = self._brokers, self._ledger.topic
        while not brokers.stopping:
            if count := self._hosted.get(topic, 0):
                self._count += 1
                stamp = _EPOCH_US + self._count
                payload = bytes(encode_single(stamp, b"%d" % self._count))
                partition = brokers.chance.randrange(count)
                request = Produce(topic, partition, 1, stamp, stamp, crc32c(payload), SCHEMA_ID_V1)
                try:
                    await brokers.call(BROKER, request, payload, timeout_s=0.5)
                except QuiverError:
                    await brokers.pause(0.1)
            await brokers.pause(0.02)
        self.is_done = True


class Crowd:
    """Draws what happens next, as the plan of the run says."""

    def __init__(
        self, plan: GroupPlan, broker: Node, operator: Operator, make: Callable[[int], Member], chance: random.Random
    ) -> None:
        self._plan = plan
        self._broker = broker
        self._operator = operator
        self._make = make
        self._chance = chance
        self._world = broker.world
        self._active = False
        self._count = 0
        self.members: list[Member] = []
        self._events: dict[str, Callable[[], None]] = {
            "join": self._join,
            "leave": self._leave,
            "kill": self._kill,
            "pause": self._pause,
            "all leave": self._all_leave,
            "more partitions": self._more_partitions,
            "kill broker": lambda: self._kill_broker(power_cut=False),
            "cut power of broker": lambda: self._kill_broker(power_cut=True),
        }

    def start(self) -> None:
        self._active = True
        self._operator.wanted = self._plan.partitions
        for _ in range(self._plan.members_max):
            self._join()
        self._plan_next()

    def heal(self) -> None:
        """No more of it; somebody is there to read."""
        self._active = False
        self._broker.thaw()
        self._start_broker()
        for member in self.alive():
            member.thaw()
        if all(member.stopping for member in self.alive()):
            self._add()

    def alive(self) -> list[Member]:
        return [member for member in self.members if member.is_alive]

    def _plan_next(self) -> None:
        self._world.after(self._chance.expovariate(1 / self._plan.event_interval_s), None, self._strike)

    def _strike(self) -> None:
        if self._active:
            weights = self._plan.weights
            self._events[self._chance.choices([*weights], [*weights.values()])[0]]()
            self._plan_next()

    def _one(self) -> Member | None:
        found = [member for member in self.alive() if not member.loop.is_frozen and not member.stopping]
        return self._chance.choice(found) if found else None

    def _join(self) -> None:
        if len(self.alive()) < self._plan.members_max:
            self._add()

    def _add(self) -> None:
        self._count += 1
        member = self._make(self._count)
        self.members.append(member)
        member.begin()

    def _leave(self) -> None:
        if (member := self._one()) is not None:
            member.stopping = True

    def _kill(self) -> None:
        if (member := self._one()) is not None:
            member.kill()

    def _pause(self) -> None:
        """Often for longer than its session."""
        if (member := self._one()) is not None:
            member.freeze()
            self._world.after(self._plan.session_s * self._chance.choice((0.5, 1.5, 3.0)), None, member.thaw)

    def _all_leave(self) -> None:
        for member in self.alive():
            member.stopping = True

    def _more_partitions(self) -> None:
        self._operator.wanted = min(_PARTITIONS_MAX, self._operator.wanted + self._chance.randint(1, 2))

    def _kill_broker(self, power_cut: bool) -> None:
        if self._broker.is_alive:
            self._broker.die(power_cut)
            self._world.after(self._chance.choice((0.02, 0.3, 1.0)), None, self._start_broker)

    def _start_broker(self) -> None:
        if not self._broker.is_alive:
            self._broker.start()
