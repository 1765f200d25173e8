"""Processes with the real SDK in them: members of a consumer group, and an administrator who sets it back.

Rule: each has a loop of its own, so that it can die or be paused at any event.
"""

from __future__ import annotations

import random
from collections.abc import Coroutine
from typing import Any

from quiver.client.admin import AsyncAdmin
from quiver.client.async_consumer import AsyncConsumer
from quiver.errors import QuiverError
from quiver.testing.sim.group_ledger import GroupLedger, Pair
from quiver.testing.sim.plan import GroupPlan
from quiver.testing.sim.trace import Trace
from quiver.testing.sim.world import Violation, VirtualLoop, World

GROUP = "g"


class Process:
    def __init__(self, name: str, world: World, trace: Trace, ledger: GroupLedger, chance: random.Random) -> None:
        self.name = name
        self.world = world
        self.trace = trace
        self.ledger = ledger
        self.chance = chance
        self.loop = VirtualLoop(world, name, 1 + chance.uniform(-0.05, 0.05), chance.uniform(0, 1000))
        self.loop.owner = self
        self.is_done = False

    @property
    def is_alive(self) -> bool:
        return not self.loop.is_dead and not self.is_done

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self.loop.turn(self.loop.create_task, (self._watch(work),))

    async def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Violation as violation:
            self.ledger.found.append(violation)
        except Exception as error:
            mistake = Violation("no mistakes", f"{self.name} ends with {error!r}")
            mistake.__cause__ = error
            self.ledger.found.append(mistake)
        self.is_done = True

    async def pause(self, mean_s: float) -> None:
        future = self.loop.create_future()
        self.loop.call_later(self.chance.expovariate(1 / mean_s), future.set_result, None)
        await future

    def kill(self) -> None:
        self.trace.say(self.name, "is killed")
        self.loop.die()

    def freeze(self) -> None:
        self.trace.say(self.name, "is paused")
        self.loop.is_frozen = True

    def thaw(self) -> None:
        if self.loop.is_frozen:
            self.trace.say(self.name, "goes on")
            self.world.thaw(self.loop)


class Member(Process):
    """Reads, deals with what it gets, stores that by itself or by hand, until it is told to stop."""

    def __init__(self, *common: Any, servers: str, plan: GroupPlan) -> None:
        super().__init__(*common)
        self._plan = plan
        self._servers = servers
        self._consumer: AsyncConsumer | None = None
        self.stopping = False

    def begin(self) -> None:
        self.trace.say(self.name, "joins")
        self.start(self._run())

    @property
    def owned(self) -> dict[Pair, int]:
        """What it reads, with the epoch of each."""
        engine = None if self._consumer is None else self._consumer._engine
        return {} if engine is None else engine._owned

    async def _run(self) -> None:
        plan = self._plan
        self._consumer = consumer = AsyncConsumer(
            self._servers,
            [self.ledger.topic],
            group=GROUP,
            start=plan.start,
            session_timeout=plan.session_s,
            assignment=plan.strategy,
            commit_interval=plan.commit_interval_s,
            request_timeout=2.0,
            client_id=self.name,
            on_revoked=None if plan.commit_interval_s else self._revoked,
        )
        while not self.stopping:
            try:
                await self._step(consumer)
            except QuiverError as error:
                self.trace.say(self.name, f"meets {error.code}: {error.message}")
                await self.pause(0.1)
        await self._leave(consumer)

    async def _leave(self, consumer: AsyncConsumer) -> None:
        try:
            if self._plan.commit_interval_s is None:
                await self._commit(consumer)
        except QuiverError as error:
            self.trace.say(self.name, f"leaves with {error.code}: {error.message}")
        try:
            await consumer.close()
        except QuiverError as error:
            self.trace.say(self.name, f"leaves with {error.code}: {error.message}")
        self.trace.say(self.name, "has left")

    async def _revoked(self, pairs: list[Pair]) -> None:
        """With commits by hand it has to see to that itself."""
        assert self._consumer is not None
        await self._commit(self._consumer)

    async def _step(self, consumer: AsyncConsumer) -> None:
        chance = self.chance
        records = await consumer.poll(chance.choice((1, 3, 20)), timeout=chance.choice((0.05, 0.3)))
        owned, touched = self.owned, dict[Pair, int]()
        for record in records:
            pair = (record.topic, record.partition)
            touched[pair] = owned[pair]
            self.ledger.handed(self.name, pair, owned[pair], record.offset, record.offset + 1)
        if chance.random() < 0.3:
            await self.pause(chance.choice((0.01, 0.05, 0.3)))
        for pair, epoch in touched.items():
            self.ledger.done(pair, epoch)
        if self._plan.commit_interval_s is None and chance.random() < 0.3:
            await self._commit(consumer)

    async def _commit(self, consumer: AsyncConsumer) -> None:
        engine = consumer._engine
        if engine is None:
            return
        asked = {pair: (epoch, engine.positions[pair]) for pair, epoch in engine._owned.items()}
        await engine.stored.commit()
        for pair, (epoch, offset) in asked.items():
            self.ledger.committed(self.name, pair, epoch, offset)


class Administrator(Process):
    """Sets the group to another place, or deletes it, whenever it is let."""

    def __init__(self, *common: Any, servers: str) -> None:
        super().__init__(*common)
        self._servers = servers
        self.stopping = False
        self.moved = 0  # how often it was let

    def begin(self) -> None:
        self.start(self._run())

    async def _run(self) -> None:
        admin = AsyncAdmin(self._servers, request_timeout=2.0)
        while not self.stopping:
            try:
                if self.chance.random() < 0.3:
                    await admin.groups.delete(GROUP)
                else:
                    await admin.groups.reset(GROUP, to=self.chance.choice(("earliest", "latest")))
                self.moved += 1
                self.trace.say(self.name, "has set the group to another place")
            except QuiverError as error:
                self.trace.say(self.name, f"meets {error.code}: {error.message}")
            await self.pause(0.1)
        await admin.close()
