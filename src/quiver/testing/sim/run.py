"""One run: a cluster of brokers made from a seed, broken for a while, healed, and judged."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Protocol

from quiver.testing.sim.clients import Clients, Producer
from quiver.testing.sim.cluster import TOPIC, Cluster, partition_uids
from quiver.testing.sim.compaction import gone_after
from quiver.testing.sim.consumers import Asker, Consumer, fill_in_trimmed, read_all
from quiver.testing.sim.director import Director
from quiver.testing.sim.environment import simulated
from quiver.testing.sim.ledger import Ledger
from quiver.testing.sim.nemesis import Nemesis
from quiver.testing.sim.plan import Plan, plan_run
from quiver.testing.sim.trace import LogHandler, Trace
from quiver.testing.sim.world import Violation, VirtualLoop, World

_HEAL_S_MAX = 60.0  # a healed cluster must be whole within this time
_STEP_S = 0.1
_ABSENT_CHECKS = 3  # of retention and compaction, that a broker misses
_REST = 4.0  # how much more clients rest while it heals


class Actor(Protocol):
    """A client, until the end."""

    is_done: bool

    async def run(self) -> None: ...


@dataclasses.dataclass(slots=True)
class Outcome:
    seed: int
    events: int
    simulated_s: float
    digest: int
    committed: int
    acknowledged: int
    violation: Violation | None
    plan: Plan
    trace: Trace
    state: list[str]


class Play:
    """What all runs have in common. Who inherits makes plan, ledger, cluster, clients and nemesis."""

    plan: Plan
    ledger: Ledger
    cluster: Cluster
    clients: Clients
    nemesis: Nemesis

    def __init__(self, seed: int, name: str) -> None:
        self.seed = seed
        self._name = name
        self.world = World()
        self.trace = Trace(self.world)
        self.actors: list[Actor] = []
        self._log: LogHandler | None = None

    @property
    def acknowledged(self) -> int:
        raise NotImplementedError

    def _begin_clients(self) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        """Judges it."""
        raise NotImplementedError

    def _chance(self, name: str) -> random.Random:
        return random.Random(f"{self._name}{self.seed} {name}")

    def run(self) -> None:
        with simulated(self.ledger, self.trace, self._chance("product"), self.plan) as log:
            self._log = log
            try:
                self._play()
            finally:
                for node in self.cluster.alive():
                    node.loop.die()
                self.clients.loop.die()

    def _play(self) -> None:
        plan, cluster = self.plan, self.cluster
        cluster.start()
        self._pass(1.0)
        network = cluster.network
        network.loss, network.doubling, network.straggler = plan.loss, plan.doubling, plan.straggler
        network.ordered = plan.ordered
        network.delay_s, network.spread_s = plan.delay_s, plan.delay_s * 2
        self._begin_clients()
        self.nemesis.start()
        self._pass(plan.duration_s)
        self.nemesis.stop()
        self._close()

    def _begin(self, actor: Actor) -> None:
        self.actors.append(actor)
        self.clients.begin(actor)

    def _pass(self, seconds: float) -> None:
        self.world.run(self.world.now_s + seconds, self._check)

    def _until(self, settled: Callable[[], str]) -> None:
        deadline_s = self.world.now_s + _HEAL_S_MAX
        while why := settled():
            if self.world.now_s > deadline_s:
                raise Violation("liveness", f"{_HEAL_S_MAX:g} s after all was healed: {why}")
            self._pass(_STEP_S)
            self.cluster.tend()

    def _check(self, loop: VirtualLoop | None) -> None:
        if self.ledger.found:
            raise self.ledger.found[0]
        if loop is not None:
            if loop.owner is not None:
                self.ledger.check(loop.owner)
            if loop.unhandled:
                context = loop.unhandled.pop()
                error = context.get("exception")
                raise Violation("no mistakes", f"{loop.name}: {context['message']}: {error!r}") from error
        if self.clients.found:
            raise self.clients.found[0]
        if self._log is not None and self._log.failures:
            text, error = self._log.failures[0]
            raise Violation("no mistakes", text) from error

    def _settle(self) -> None:
        """No more faults: all must be well again, and all clients have their answers."""
        cluster = self.cluster
        cluster.heal()
        # Where each append has one entry and waits for the one before, who is behind is not quicker than the clients.
        self.clients.rest = _REST
        self._until(cluster.unsettled_groups)
        self._at_work()
        self.clients.stopping = True
        self._until(lambda: "" if all(actor.is_done for actor in self.actors) else "clients wait for answers")
        self._until(cluster.unsettled)
        cluster.compare_logs()

    def _at_work(self) -> None:
        """What is to happen in peace, while clients are still there."""


class BrokersPlay(Play):
    def __init__(self, seed: int) -> None:
        super().__init__(seed, "")
        self.plan = plan_run(self._chance("plan"))
        uids = partition_uids(self.plan)
        self.ledger = Ledger([*uids.values()], self.plan.replicas)
        self.cluster = Cluster(self.plan, self.world, self.trace, self.ledger, uids, self._chance("cluster"))
        self.clients = Clients(self.world, self.cluster.network, self.ledger, uids, self._chance("clients"))
        self.clients.compacts = self.plan.compacts
        self.nemesis = Nemesis(self.cluster, self._chance("nemesis"))

    @property
    def acknowledged(self) -> int:
        return self.clients.history.acknowledged_count

    def _begin_clients(self) -> None:
        for number in range(self.plan.partitions):
            for place in range(self.plan.producers):
                self._begin(Producer(self.clients, 100 * (number + 1) + place, TOPIC, number))
            for place in range(2):
                self._begin(Consumer(self.clients, f"c{number}{place}", TOPIC, number))
            self._begin(Asker(self.clients, self.cluster, TOPIC, number))
        self._begin(Director(self.clients, self.cluster.placement))

    def _check(self, loop: VirtualLoop | None) -> None:
        super()._check(loop)
        if loop is not None and loop.owner is not None:
            self.cluster.check_orders(loop.owner)

    def _close(self) -> None:
        self._settle()
        self._wander()
        cluster = self.cluster
        for (topic, number), uid in cluster.uids.items():
            for node in cluster.placement.of(uid).replicas:
                task = read_all(self.clients, node, topic, number)
                done: list[int] = []
                self.clients.begin(_Once(task, done))
                self._until(lambda done=done: "" if done else "the logs cannot be read")  # type: ignore[misc]
        self._until(cluster.unsettled)
        cluster.compare_logs()
        for place, uid in cluster.uids.items():
            self.clients.history.may_be_gone(*place, self._compacted(uid))
        starts = {place: self._start_of(uid) for place, uid in cluster.uids.items()}
        fill_in_trimmed(self.clients, starts)
        violations = self.clients.history.judge()
        if violations:
            raise Violation(violations[0].kind, "; ".join(map(str, violations[:5])))

    def _at_work(self) -> None:
        """Where there is a broker to spare, one that is off misses that its partition went there, what was compacted
        or trimmed since, and that it is wanted back."""
        cluster, placement, chance = self.cluster, self.cluster.placement, self._chance("absence")
        uid = chance.choice([*cluster.uids.values()])
        home = [*placement.of(uid).replicas]
        absent = cluster.nodes[chance.choice(home)]
        if self.plan.brokers == self.plan.replicas or not cluster.may_lose_data(absent):
            return
        absent.die(power_cut=chance.random() < 0.5)
        cluster.away = absent
        spare = next(broker for broker in cluster.nodes if broker not in home)
        placement.move(uid, [broker for broker in home if broker != absent.id] + [spare])
        self._until(lambda: cluster.unsettled_group(uid))  # another may wait for who is off
        self._pass(_ABSENT_CHECKS * self.plan.retention_check_s)
        placement.move(uid, home)
        cluster.away = None
        self._until(cluster.unsettled_groups)

    def _wander(self) -> None:
        """Where there is a broker to spare, one replica of each partition goes there and comes back, in peace: while
        other things break few get as far as that."""
        cluster, placement = self.cluster, self.cluster.placement
        if self.plan.brokers == self.plan.replicas:
            return
        cluster.network.delay_s, cluster.network.spread_s = 0.0005, 0.001
        self.clients.stopping = False
        self._begin(director := Director(self.clients, placement))
        for uid in cluster.uids.values():
            home = [*placement.of(uid).replicas]
            spare = next(broker for broker in cluster.nodes if broker not in home)
            for brokers in ([*home[1:], spare], home):
                placement.move(uid, brokers)
                self._until(cluster.unsettled)
        self.clients.stopping = True
        self._until(lambda: "" if director.is_done else "the director is at work")

    def _compacted(self, uid: str) -> set[int]:
        orders = {partition.state.order for _, partition, _ in self.cluster.replicas(uid)}
        return gone_after(self.ledger, self.ledger.group(uid), max(orders))

    def _start_of(self, uid: str) -> int:
        return max(partition.start_offset for _, partition, _ in self.cluster.replicas(uid))


class _Once:
    def __init__(self, task: object, done: list[int]) -> None:
        self._task = task
        self._done = done

    async def run(self) -> None:
        await self._task  # type: ignore[misc]
        self._done.append(1)


def run_seed(seed: int) -> Outcome:
    """Runs the brokers of a seed to their end or to the first violation."""
    return play(BrokersPlay(seed))


def play(run: Play) -> Outcome:
    violation: Violation | None = None
    try:
        run.run()
    except Violation as found:
        violation = found
    except Exception as error:  # a mistake of the product or of the simulator: both must be looked at
        violation = Violation("no mistakes", f"{type(error).__name__}: {error}")
        violation.__cause__ = error
    if violation is not None:
        run.trace.say("-", f"VIOLATION {violation}")
    return Outcome(
        run.seed,
        run.world.events,
        run.world.now_s,
        run.trace.digest,
        sum(group.commit for group in run.ledger.groups.values()),
        run.acknowledged,
        violation,
        run.plan,
        run.trace,
        run.cluster.describe(),
    )
