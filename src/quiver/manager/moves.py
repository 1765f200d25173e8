"""Brings partitions to the brokers where the metadata says they should be, and says so when they are there.

The metadata is the intent: it says which brokers are to hold a partition, and which leave it. Each step here compares
that with what the leaders of the groups say, and orders what is missing: brokers that leave or stayed away too long
lose their replicas to others, leaders are told whom to take in and let go, a group that is where it should be is
settled, and a broker that has nothing any more is forgotten.

Rule: nothing is remembered that a crash could lose. Whoever is primary next goes on from the metadata alone, and every
order may be given twice. Only one runs at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from quiver.clock import Clock
from quiver.errors import InvalidRequestError, NotLeaderError, QuiverError, RequestError
from quiver.manager.quorum import MetadataQuorum
from quiver.manager.registry import Registry
from quiver.metadata.commands import DrainBroker, Place, PlaceReplicas, RemoveBroker, Settled, SettleReplicas
from quiver.metadata.placement import Held, Key, Places, plan_rebalance, plan_refuge, plan_resize
from quiver.metadata.state import DRAINING, Partition, Topic
from quiver.types import PartitionMove
from quiver.wire.admin_messages import ReplicasReply, SetReplicas

logger = logging.getLogger("quiver.manager")

MOVES_AT_ONCE: Final = 16  # partitions that are being copied; the others wait for their turn
_STUCK_S: Final = 30.0  # one that takes longer lets others have its turn, and goes on beside them
_HEAR_S: Final = 3.0  # after so long all that are well have called; a request is answered in less than 5
_BUSY_S: Final = 0.1  # between two steps while there is something to do ...
_IDLE_S: Final = 1.0  # ... and while there is not


class Moves:
    """`away_s`: a broker that was not heard of for so long loses its replicas to others."""

    def __init__(
        self,
        quorum: MetadataQuorum,
        registry: Registry,
        clock: Clock,
        away_s: float,
        forget: Callable[[int], Awaitable[None]],
    ) -> None:
        self._quorum = quorum
        self._registry = registry
        self._brokers = registry.brokers
        self._clock = clock
        self._away_s = away_s
        self._forget = forget
        self._began_s = clock.monotonic_s()
        self._under_way: dict[str, float] = {}  # by uid: since when
        self._asked: dict[str, int] = {}  # by uid: the broker that was asked last and did not know
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Called when this manager becomes the primary."""
        self._began_s = self._clock.monotonic_s()  # who was silent before was not listened to
        self._task = asyncio.get_running_loop().create_task(self._run(), name="moves")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        told = ""
        while True:
            busy = True
            try:
                busy = await self.step()
                told = ""
            except QuiverError as error:  # the next step begins where this one ended
                if error.message != told:
                    told = error.message
                    logger.warning("moves_wait error=%r", told)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_BUSY_S if busy else _IDLE_S):
                    await self._woken.wait()
            self._woken.clear()

    # -- what is asked -------------------------------------------------------------------------------------------

    def moves(self) -> list[PartitionMove]:
        return [PartitionMove(one.topic, one.number, one.replicas, one.leaving) for one in self._moving()]

    def draining(self) -> list[int]:
        return [broker.id for broker in self._quorum.state.brokers.values() if broker.phase == DRAINING]

    async def remove_broker(self, broker_id: int) -> bool:
        """Begins to move everything away from a broker; True when there was nothing, and it is forgotten already.

        Refused when its partitions could not be kept by the others."""
        state = self._quorum.state
        if state.broker(broker_id).phase != DRAINING:
            await self._usable()
            self._check_may_leave(broker_id)
            await self._quorum.propose(DrainBroker(broker_id))
        if not state.held_by(broker_id):
            await self._remove(broker_id)
            return True
        self._woken.set()
        return False

    def _check_may_leave(self, broker_id: int) -> None:
        others = [known for known in self._staying() if known != broker_id]
        if not others:
            raise InvalidRequestError(f"Broker {broker_id} is the only one: nothing could take its partitions")
        takers = [known for known in others if self._brokers.is_active(known)]
        held = {key: one for key, one in self._held().items() if broker_id in one.replicas}
        places = plan_refuge(held, others, [broker_id], takers)
        for (topic, number), one in held.items():
            rest = places.get((topic, number)) or tuple(known for known in one.replicas if known != broker_id)
            if not self._has_majority(one.replicas) or not self._has_majority(rest):
                raise InvalidRequestError(
                    f"Broker {broker_id} cannot be removed now: too few of the brokers that hold {topic}-{number} "
                    "or could take it are active"
                )

    def _has_majority(self, brokers: tuple[int, ...]) -> bool:
        return sum(map(self._brokers.is_active, brokers)) * 2 > len(brokers)

    async def rebalance(self) -> list[PartitionMove]:
        """Gives every broker its share of replicas and leaders; what is on its way then."""
        await self._place(plan_rebalance(self._held(), await self._usable()))
        return self.moves()

    async def resize(self, topic: Topic) -> None:
        """Gives the partitions of a topic as many replicas as it wants, as far as there are brokers for them."""
        await self._place(plan_resize(self._held(), await self._usable(), topic.name))

    # -- one step ------------------------------------------------------------------------------------------------

    async def step(self) -> bool:
        """Does what can be done now. False when nothing is on its way."""
        await self._find_refuge()
        moving = self._moving()
        at_work = self._choose(moving)
        replies = await asyncio.gather(*map(self._order, at_work))
        await self._settle([one for one, done in zip(at_work, replies, strict=True) if done])
        for broker_id in self.draining():
            if not self._quorum.state.held_by(broker_id):
                await self._remove(broker_id)
        return bool(moving)

    async def _find_refuge(self) -> None:
        draining, staying = self.draining(), self._staying()
        known = [broker.id for broker in self._quorum.state.brokers.values() if broker.disk_id]
        usable = [broker_id for broker_id in staying if not self._is_away(broker_id)]
        if len(usable) < len(known) and usable:
            takers = [broker_id for broker_id in usable if self._brokers.is_active(broker_id)]
            await self._place(plan_refuge(self._held(), usable, draining, takers))

    def _choose(self, moving: list[Partition]) -> list[Partition]:
        """Those that were begun, and as many more as may be."""
        now_s = self._clock.monotonic_s()
        uids = {one.uid for one in moving}
        self._under_way = {uid: since for uid, since in self._under_way.items() if uid in uids}
        self._asked = {uid: asked for uid, asked in self._asked.items() if uid in uids}
        room = MOVES_AT_ONCE - sum(now_s - since < _STUCK_S for since in self._under_way.values())
        for one in moving:
            if room > 0 and one.uid not in self._under_way:
                self._under_way[one.uid] = now_s
                room -= 1
        return [one for one in moving if one.uid in self._under_way]

    async def _order(self, partition: Partition) -> bool:
        """Tells the leader where the group is to be. True when it is there."""
        found = self._brokers.to_ask(partition, self._asked.get(partition.uid, 0))
        if found is None:
            return False
        asked, link = found
        order = SetReplicas(partition.topic, partition.number, partition.uid, partition.epoch, list(partition.replicas))
        try:
            reply, _ = await link.call(order)
        except NotLeaderError as error:
            leader = error.facts.get("leader", 0)
            self._brokers.learn_leader(partition, leader)
            self._asked[partition.uid] = 0 if leader else asked
            return False
        except QuiverError as error:
            self._asked[partition.uid] = asked
            if isinstance(error, RequestError):
                logger.warning("order_refused uid=%s broker=%d error=%r", partition.uid, asked, error.message)
            return False
        assert isinstance(reply, ReplicasReply)
        return reply.done

    async def _settle(self, done: list[Partition]) -> None:
        if done:
            settled = [Settled(one.topic, one.number, one.uid, one.epoch) for one in done]
            async with self._registry.changing:
                await self._tell(await self._quorum.propose(SettleReplicas(settled)))

    async def _place(self, places: Places) -> None:
        if not places:
            return
        topics = self._quorum.state.topics
        planned = [(topics[topic].partitions[number], replicas) for (topic, number), replicas in places.items()]
        command = PlaceReplicas(
            [Place(one.topic, one.number, one.uid, one.epoch, list(replicas)) for one, replicas in planned]
        )
        logger.info("moving partitions=%d", len(places))
        async with self._registry.changing:
            await self._tell(await self._quorum.propose(command))
        self._woken.set()

    async def _tell(self, changed: list[Topic]) -> None:
        topics = self._quorum.state.topics
        await self._brokers.tell([topics[topic.name] for topic in changed if topic.name in topics])

    async def _remove(self, broker_id: int) -> None:
        await self._quorum.propose(RemoveBroker(broker_id))
        await self._forget(broker_id)
        logger.info("broker_removed broker=%d", broker_id)

    # -- what is known -------------------------------------------------------------------------------------------

    def _moving(self) -> list[Partition]:
        topics = self._quorum.state.topics.values()
        return [partition for topic in topics for partition in topic.partitions if partition.moving]

    def _held(self) -> dict[Key, Held]:
        """What can be moved, the broker that leads it first."""
        held: dict[Key, Held] = {}
        for topic in self._quorum.state.topics.values():
            for one in topic.partitions:
                if one.voters:
                    leader = self._brokers.leader_of(one)
                    first = leader if leader in one.replicas else one.replicas[0]
                    order = (first, *(replica for replica in one.replicas if replica != first))
                    held[topic.name, one.number] = Held(order, topic.replication_factor)
        return held

    def _staying(self) -> list[int]:
        brokers = self._quorum.state.brokers.values()
        return [broker.id for broker in brokers if broker.disk_id and broker.phase != DRAINING]

    async def _usable(self) -> list[int]:
        """Those that are heard of. Who manages since a moment ago has not heard of all, and waits for them."""
        until_s = self._began_s + min(self._brokers.silence_s, _HEAR_S)
        while True:
            usable = [known for known in self._staying() if self._brokers.is_active(known)]
            if len(usable) == len(self._staying()) or self._clock.monotonic_s() >= until_s:
                return usable
            await asyncio.sleep(_BUSY_S)

    def _is_away(self, broker_id: int) -> bool:
        listened_s = self._clock.monotonic_s() - self._began_s
        return min(self._brokers.silent_s(broker_id), listened_s) > self._away_s
