"""The partitions this broker has: opened, made, deleted, driven.

Rule: one change of topics at a time, and a change that has begun is finished, whoever asked for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final

import msgspec

from quiver.broker.catalog import Catalog
from quiver.broker.catalog_file import CatalogTopic
from quiver.broker.compactor import completed_order
from quiver.broker.consumers import Consumers, ConsumersOf
from quiver.broker.partition import HAND_OVER_S, Partition
from quiver.clock import Clock
from quiver.config import BrokerSettings
from quiver.errors import (
    CorruptLogError,
    DiskFullError,
    LogFailedError,
    NotLeaderError,
    QuiverError,
    UnknownPartitionError,
    UnknownTopicError,
)
from quiver.log.disk import Disk
from quiver.log.flusher import FlushPolicy
from quiver.log.partition_log import PartitionLog
from quiver.net.peers import Peers
from quiver.raft import AnyMessage
from quiver.raft.messages import Compacted, Repair
from quiver.replication.group import broker_of
from quiver.replication.repair import Repairer, UnrepairableError
from quiver.replication.seat import RaftSetup, Seat
from quiver.topic_settings import COMPACT, CONSUMED, TopicRules, rules_of
from quiver.types import check_topic_name
from quiver.wire.messages import CreateTopic, HostTopic, Position

logger = logging.getLogger("quiver.broker")

Unusable = CorruptLogError | LogFailedError  # why a partition could not be opened

_TICK_S: Final = 0.02
_QUIET_TICKS: Final = 5


class Hosting:
    def __init__(
        self,
        settings: BrokerSettings,
        disk: Disk,
        clock: Clock,
        writers: Executor,
        readers: Executor,
        peers: Peers | None,
        consumers_of: ConsumersOf,
    ) -> None:
        self._settings = settings
        self._consumers_of = consumers_of
        self._disk = disk
        self._clock = clock
        self._writers = writers
        self._readers = readers
        self._peers = peers
        self._policy = FlushPolicy(clock)
        self._lock = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._by_uid: dict[str, Partition] = {}
        # Those that get ticks, with how many found them quiet. Whoever is asked or told anything is one of them.
        self._awake: dict[Partition, int] = {}
        self._told: dict[Partition, None] = {}  # those with messages they have not looked at
        self._repairs: dict[str, Repairer] = {}
        self.catalog = Catalog(disk, f"{settings.data_dir}/broker-{settings.node_id}")
        self.partitions: dict[str, dict[int, Partition | Unusable]] = {}

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Recovers every partition. A damaged one is reported and does not stop the others."""
        self.catalog.remove_leftovers()
        for topic in list(self.catalog.topics.values()):
            self.partitions[topic.name] = {number: self._recover(topic, number) for number in topic.hosted()}
        loop = asyncio.get_running_loop()
        self._tasks += [loop.create_task(self._keep_retention()), loop.create_task(self._keep_compacting())]
        if self._peers is not None:
            self._peers.on_message = self._receive
            self._peers.on_read = self._take_messages
            self._peers.on_link = self._link_changed
            self._tasks.append(loop.create_task(self._keep_ticking()))

    async def stop(self) -> None:
        async with self._lock:  # a topic that is being made or deleted is finished first
            replicas = [partition.raft for partition in self.usable() if partition.raft is not None]
            await asyncio.gather(*(replica.hand_over(HAND_OVER_S) for replica in replicas))
            await asyncio.gather(*(partition.stop() for partition in self.usable()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _open(self, topic: CatalogTopic, number: int) -> Partition:
        uid = topic.partitions[number]
        directory = self.catalog.directory_of(uid)
        rules = self._rules_of(topic)
        log = PartitionLog(self._disk, directory, rules.log)
        if log.cut_bytes:
            logger.info("torn_tail_cut partition=%s-%d bytes=%d", topic.name, number, log.cut_bytes)
        setup: RaftSetup | None = None
        if topic.voters and self._peers is not None:
            voters, me = topic.founders_of(number), topic.replicas[uid]
            seat = Seat(uid, me, tuple(voters), tuple(topic.voters[number]), prefers_to_lead=voters[0] == me)
            on_damage = partial(self._mend, topic.name, number)
            setup = RaftSetup(seat, directory, self._settings.raft, self._peers, on_damage, begins_anew=True)
        partition = Partition(
            topic.name, number, log, self._disk, self._writers, self._readers, self._clock, self._policy, setup
        )
        partition.use(rules)
        return partition

    def _rules_of(self, topic: CatalogTopic) -> TopicRules:
        return rules_of(topic.settings, self._settings.log, self._settings.message_bytes_max)

    def _recover(self, topic: CatalogTopic, number: int) -> Partition | Unusable:
        uid = topic.partitions[number]
        try:
            if topic.voters and not self._disk.exists(f"{self.catalog.directory_of(uid)}/hardstate"):
                logger.error("partition_lost partition=%s-%d uid=%s", topic.name, number, uid)
                topic = self.catalog.renew_replica(self.catalog.topics[topic.name], uid, self._settings.node_id)
            partition = self._open(topic, number)
        except CorruptLogError as error:
            logger.error("partition_corrupt partition=%s-%d error=%r", topic.name, number, error.message)
            if topic.voters:
                self._mend(topic.name, number, error)
            return error
        except OSError as error:
            logger.error("partition_failed partition=%s-%d error=%r", topic.name, number, str(error))
            return LogFailedError(f"{topic.name}-{number} cannot be opened: {error}")
        self._start(uid, partition)
        return partition

    def _start(self, uid: str, partition: Partition) -> None:
        partition.start()
        if partition.raft is not None:
            self._by_uid[uid] = partition
            self._awake[partition] = 0

    # -- damage --------------------------------------------------------------------------------------------------

    def _mend(self, name: str, number: int, error: CorruptLogError) -> None:
        """Takes a damaged replica out of its group's work and repairs it from its peers."""
        topic = self.catalog.topics.get(name)
        if topic is None or self._peers is None or topic.partitions[number] in self._repairs:
            return
        uid, running = topic.partitions[number], self.partitions.get(name, {}).get(number)
        me, voters = topic.replicas[uid], list(topic.voters[number])
        if isinstance(running, Partition) and running.raft is not None:
            voters += [voter for voter in running.raft.raft.membership.voters if voter not in voters]
        if all(broker_of(voter) == self._settings.node_id for voter in voters):
            return  # the only copy: what is damaged of it is not served, and all else is
        done = completed_order(self._disk, self.catalog.directory_of(uid))
        compacted = done.values[0] if done is not None else 0
        self._repairs[uid] = repairer = Repairer(uid, me, voters, self._disk, self._writers, self._peers, compacted)
        loop = asyncio.get_running_loop()
        self._tasks.append(loop.create_task(self._repair(topic, number, repairer, error)))

    async def _repair(self, topic: CatalogTopic, number: int, repairer: Repairer, error: CorruptLogError) -> None:
        uid, running = topic.partitions[number], self.partitions.get(topic.name, {}).get(number)
        if isinstance(running, Partition):
            if running.raft is not None:
                await running.raft.hand_over(HAND_OVER_S)
            self._by_uid.pop(uid, None)
            self._awake.pop(running, None)
            await running.stop()
            here = self.partitions.get(topic.name, {})
            if here.get(number) is running:  # else it was deleted or moved away meanwhile
                here[number] = error
        directory = self.catalog.directory_of(uid)

        def open_again() -> CorruptLogError | None:
            try:
                PartitionLog(self._disk, directory, self._settings.log)
            except CorruptLogError as found:
                return found
            return None

        try:
            await repairer.run(error, open_again)
        except (UnrepairableError, OSError) as why:
            what = (error.facts.get("verdict", "rebuilt"), topic.name, number, str(why))
            logger.error("replica_%s partition=%s-%d reason=%r", *what)
            if self._disk.exists(directory):
                self._disk.remove_tree(directory)
        async with self._lock:
            del self._repairs[uid]
            now = self.catalog.topics.get(topic.name)
            if now is not None and uid in now.replicas:  # else it was deleted or moved away meanwhile
                self.partitions[topic.name][number] = self._recover(now, number)

    # -- what is here --------------------------------------------------------------------------------------------

    def usable(self) -> list[Partition]:
        return [p for found in self.partitions.values() for p in found.values() if isinstance(p, Partition)]

    def partition(self, topic: str, number: int) -> Partition:
        found = self.partitions.get(topic)
        if found is None:
            raise UnknownTopicError(f"topic {check_topic_name(topic)} does not exist", topic=topic)
        partition = found.get(number)
        if isinstance(partition, Partition):
            self._awake[partition] = 0
            return partition
        count = len(self.catalog.topics[topic].partitions)
        if number >= count:
            raise UnknownPartitionError(
                f"topic {topic} has partitions 0 to {count - 1}, not {number}", topic=topic, partition=number
            )
        known = self.catalog.topics[topic]
        is_failed = isinstance(partition, LogFailedError) and known.voters and len(known.voters[number]) > 1
        if partition is None or is_failed or known.partitions[number] in self._repairs:
            why = "" if partition is None else f": {partition.message}"
            message = f"broker {self._settings.node_id} does not have {topic}-{number} now{why}"
            raise NotLeaderError(message, leader=0, done=False)
        # Without the old traceback: each raise would make it longer, and it holds every request's payload.
        raise partition.with_traceback(None)

    # -- topics --------------------------------------------------------------------------------------------------

    async def create(self, request: CreateTopic) -> None:
        await self._finish(self._make_topic(request))

    async def host(self, request: HostTopic) -> None:
        """Makes what is here of a topic what a manager says it is to be."""
        await self._finish(self._change_topic(request))

    async def delete(self, name: str, uid: str) -> None:
        await self._finish(self._drop_topic(name, uid))

    async def _make_topic(self, request: CreateTopic) -> None:
        async with self._lock:
            topic = self.catalog.new_topic(request, self._settings.node_id)
            await self._put(topic, topic.hosted())
        logger.info("topic_created topic=%s partitions=%d", topic.name, len(topic.partitions))

    async def _change_topic(self, request: HostTopic) -> None:
        me = self._settings.node_id
        async with self._lock:
            known = self.catalog.topics.get(request.name)
            if known is None:
                topic, before = self.catalog.new_topic(request, me), set()
            else:
                topic, before = self.catalog.changed_topic(known, request, me), set(known.hosted())
            if topic == known:
                return
            hosted = set(topic.hosted())
            await self._put(topic, sorted(hosted - before))
            here = self.partitions[topic.name]
            await self._close(topic, {number: here.pop(number) for number in before - hosted})
            for number, partition in here.items():
                if isinstance(partition, Partition):
                    partition.use(self._rules_of(topic))
                    if partition.raft is not None:  # a newcomer asks where the group is now, not where it was
                        partition.raft.seat = partition.raft.seat._replace(named=tuple(topic.voters[number]))
        logger.info("topic_changed topic=%s new=%d gone=%d", topic.name, len(hosted - before), len(before - hosted))

    async def _put(self, topic: CatalogTopic, new: list[int]) -> None:
        """The topic is as given from now on; `new` of its partitions are made."""
        try:
            # In a thread: thousands of directories take seconds, and the others are served meanwhile.
            store = partial(self._store_topic, topic, new)
            partitions = await asyncio.get_running_loop().run_in_executor(self._writers, store)
        except OSError as error:
            raise DiskFullError(f"topic {topic.name} cannot be stored: {error}") from error
        for number, partition in partitions.items():
            self._start(topic.partitions[number], partition)
        self.partitions[topic.name] = self.partitions.get(topic.name, {}) | partitions

    def _store_topic(self, topic: CatalogTopic, new: list[int]) -> dict[int, Partition]:
        try:
            partitions = {number: self._open(topic, number) for number in new}
            self.catalog.add(topic)
        except OSError:
            self.catalog.remove_leftovers()
            raise
        return partitions

    async def _close(self, topic: CatalogTopic, gone: dict[int, Partition | Unusable]) -> None:
        """Ends partitions that neither the catalog nor `partitions` have any more, and removes their files."""
        for number, partition in gone.items():
            self._by_uid.pop(topic.partitions[number], None)
            if isinstance(partition, Partition):
                self._awake.pop(partition, None)
                await partition.stop()
        if gone:
            await asyncio.get_running_loop().run_in_executor(self._writers, self.catalog.remove_leftovers)

    async def _finish(self, change: Coroutine[Any, Any, None]) -> None:
        """Waits for a change that goes on when the asker does not: half a deletion would leave owners and files."""
        task = asyncio.get_running_loop().create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)

    async def _drop_topic(self, name: str, uid: str) -> None:
        async with self._lock:
            topic = self.catalog.topics.get(name)
            try:
                self.catalog.remove(name, uid)
            except OSError as error:
                raise DiskFullError(f"the deletion of {name} cannot be stored: {error}") from error
            assert topic is not None
            await self._close(topic, self.partitions.pop(name))
        logger.info("topic_deleted topic=%s", name)

    # -- what drives them ----------------------------------------------------------------------------------------

    def _receive(self, uid: str, message: AnyMessage, frames: memoryview) -> None:
        partition = self._by_uid.get(uid)
        if partition is None or partition.raft is None:
            if (repairer := self._repairs.get(uid)) is not None:
                repairer.receive(message, frames)
            return
        self._awake[partition] = 0
        if type(message) is Compacted:
            partition.compactor.receive(message, partition.raft)
        elif type(message) is not Repair:
            if partition.raft.receive(message, frames, partition.settle):
                self._told[partition] = None
        elif message.compacted <= (here := partition.compactor.completed):
            partition.raft.receive(msgspec.structs.replace(message, compacted=here), frames)
        # else our frame has records that are to be gone there

    def _take_messages(self) -> None:
        """Those who got messages have their turn as soon as all that came together are there."""
        if self._told:
            told, self._told = self._told, {}
            for partition in told:
                partition.turns.now()

    def _link_changed(self, broker: int, up: bool) -> None:
        for partition in self._by_uid.values():
            assert partition.raft is not None
            self._awake[partition] = 0
            partition.raft.link_changed(broker, up)

    async def _keep_ticking(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            for partition, quiet in list(self._awake.items()):
                if partition.raft is not None and partition.raft.tick():
                    self._awake[partition] = 0
                elif quiet < _QUIET_TICKS:  # what was asked of it may not have reached its owner yet
                    self._awake[partition] = quiet + 1
                else:
                    del self._awake[partition]

    async def _keep_retention(self) -> None:
        while True:
            await asyncio.sleep(self._settings.retention_check_s)
            consumers: dict[str, Consumers | None] = {}
            for partition in [one for one in self.usable() if one.leads]:
                topic = partition.topic
                try:
                    if partition.rules.cleanup == CONSUMED and topic not in consumers:
                        consumers[topic] = None  # until it is known who reads
                        consumers[topic] = await self._consumers_of(topic)
                    known = consumers.get(topic)
                    self._awake[partition] = 0
                    for name in [] if known is None else known.gone(list(partition.state.positions)):
                        await partition.commit_position(Position(name, 0, act="forget"))
                    await partition.apply_retention(None if known is None else known.of(partition.number))
                except QuiverError as error:  # this partition's trouble; the others still need it
                    logger.warning("retention_failed topic=%s error=%r", topic, error.message)

    async def _keep_compacting(self) -> None:
        """One partition after the other: it is work for idle hands."""
        while True:
            await asyncio.sleep(self._settings.retention_check_s)
            for partition in self.usable():
                if partition.rules.cleanup == COMPACT or partition.state.order.index:
                    self._awake[partition] = 0
                    try:
                        await partition.compact()
                    except QuiverError as error:
                        name = f"{partition.topic}-{partition.number}"
                        logger.warning("compaction_failed partition=%s error=%r", name, error.message)
