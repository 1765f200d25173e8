"""A broker node: opens its data directory, serves the protocol, stops cleanly.

Rule: each request is judged here before it touches a partition; a bad one is answered with a typed error and changes
nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
from crc32c import crc32c
from msgspec import Struct

from quiver.broker.consumers import ConsumerCheck, Consumers
from quiver.broker.hosting import Hosting, Unusable
from quiver.broker.partition import Partition
from quiver.broker.partition_state import OFFSET_UNKNOWN
from quiver.broker.position_requests import PositionRequests, know
from quiver.clock import Clock, SystemClock
from quiver.config import BrokerSettings, check_listen_address
from quiver.errors import (
    CorruptLogError,
    InvalidBatchError,
    InvalidRequestError,
    MessageTooLargeError,
    ShuttingDownError,
    UnknownTopicError,
)
from quiver.log.disk import Disk, SystemDisk
from quiver.net.answer import LocalFlow
from quiver.net.peers import Peers
from quiver.net.server import Flow, Reply, Server
from quiver.replication.group import broker_of
from quiver.replication.waiting import Asker
from quiver.topic_settings import COMPACT, TopicRules, check_settings, missing_key
from quiver.types import NodeInfo, PartitionInfo, PartitionStatus, TopicInfo, check_topic_name
from quiver.wire.admin_messages import ConsumersReply, GetConsumers, ReplicasReply, SetReplicas
from quiver.wire.batch_check import check_batch, count_missing_keys
from quiver.wire.frame import FLAG_CLIENT, Entry, Kind
from quiver.wire.messages import (
    KIND_OF,
    OFFSET_AFTER,
    OFFSET_EARLIEST,
    OFFSET_LATEST,
    PROTOCOL_VERSION,
    CreateTopic,
    DeleteTopic,
    Done,
    Fetch,
    FetchReply,
    GetMetadata,
    GetStatus,
    HelloReply,
    HostTopic,
    ListOffset,
    ListOffsetReply,
    MetadataReply,
    Produce,
    ProduceReply,
    StatusReply,
)

logger = logging.getLogger("quiver.broker")

Handle = Callable[[Any, memoryview, Flow], Awaitable[Reply]]

_WRITER_THREADS: Final = 16
_READER_THREADS: Final = 4
_DRAIN_S: Final = 5.0
# Room for the Arrow metadata of a batch of one record, beside the record itself.
_BATCH_OVERHEAD_BYTES: Final = 4096


class Broker:
    """`others` are requests that someone else on this node serves, on the same port: its manager."""

    def __init__(
        self,
        settings: BrokerSettings,
        disk: Disk | None = None,
        clock: Clock | None = None,
        others: Mapping[type[Struct], Handle] | None = None,
        peers: Peers | None = None,
    ) -> None:
        check_listen_address(settings.host, settings.insecure)
        self._settings = settings
        self._disk: Disk = disk or SystemDisk()
        self._clock: Clock = clock or SystemClock()
        self._peers = peers
        self._writers = ThreadPoolExecutor(_WRITER_THREADS, "quiver-write")
        self._readers = ThreadPoolExecutor(_READER_THREADS, "quiver-read")
        self._hosting = Hosting(
            settings, self._disk, self._clock, self._writers, self._readers, peers, self._consumers_of
        )
        self._check_consumers = ConsumerCheck(self._consumers_of, self._clock)
        self._reading = asyncio.Semaphore(_READER_THREADS)
        self._stopping = False
        self._server: Server | None = None
        self.address = ""
        self._others: Mapping[type[Struct], Handle] = others or {}
        self._handlers: dict[type[Struct], Handle] = {
            GetMetadata: self._get_metadata,
            CreateTopic: self._create_topic,
            DeleteTopic: self._delete_topic,
            Produce: self._produce,
            Fetch: self._fetch,
            ListOffset: self._list_offset,
            GetStatus: self._get_status,
            **PositionRequests(self._hosting).handlers,
            HostTopic: self._host_topic,
            SetReplicas: self._set_replicas,
        }

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Recovers every partition, then listens. A damaged partition is reported and does not stop the others."""
        self._hosting.start()
        settings = self._settings
        hello = HelloReply(
            PROTOCOL_VERSION,
            settings.node_id,
            self._hosting.catalog.cluster_id,
            settings.message_bytes_max,
            settings.batch_bytes_max,
            settings.net.frames_in_flight_max,
        )
        quick = {KIND_OF[Produce]: self._produce_quickly}
        server = Server(settings.net, hello, self._handle, quick, self._peers)
        try:
            port = await server.start(settings.host, settings.port)
        except OSError:
            await self.stop()
            raise
        self._server = server
        self.address = f"[{settings.host}]:{port}" if ":" in settings.host else f"{settings.host}:{port}"
        topics = len(self._hosting.partitions)
        logger.info("broker_started node=%d address=%s topics=%d", settings.node_id, self.address, topics)

    async def stop(self) -> None:
        """Answers what is under way, puts everything on disk, closes."""
        self._stopping = True
        await self._hosting.stop()
        if self._peers is not None:
            await self._peers.close()
        if self._server is not None:
            await self._server.stop(_DRAIN_S)
        self._writers.shutdown()
        self._readers.shutdown()
        logger.info("broker_stopped node=%d", self._settings.node_id)

    # -- requests ------------------------------------------------------------------------------------------------

    async def _handle(self, request: Struct, payload: memoryview, flow: Flow) -> Reply:
        other = self._others.get(type(request))
        if other is not None and not self._stopping:
            return await other(request, payload, flow)
        return await self.serve(request, payload, flow)

    async def serve(self, request: Struct, payload: memoryview, flow: Flow) -> Reply:
        """Answers one request; also for callers in this process, who need no connection."""
        if self._stopping:
            raise ShuttingDownError("the broker is stopping")
        handler = self._handlers.get(type(request))
        if handler is None:
            raise InvalidRequestError(f"{type(request).__name__} is not a request a broker serves")
        return await handler(request, payload, flow)

    @property
    def cluster_id(self) -> str:
        return self._hosting.catalog.cluster_id

    def join_cluster(self, cluster_id: str) -> None:
        """What a manager said of where this broker belongs."""
        self._hosting.catalog.adopt_cluster(cluster_id)

    @property
    def disk_id(self) -> int:
        return self._hosting.catalog.disk_id

    def leaders(self) -> dict[tuple[str, int], int]:
        """(topic, partition) -> broker, of the partitions it has and whose leader it knows."""
        found = [p for p in self._hosting.usable() if p.raft is not None and p.raft.leader]
        return {(p.topic, p.number): p.raft.leader for p in found if p.raft is not None}

    def topics(self) -> list[TopicInfo]:
        """The replicated topics that it was told of, as they were made."""
        found = []
        for topic in self._hosting.catalog.topics.values():
            groups = [tuple(map(broker_of, voters)) for voters in topic.voters]
            if groups and all(groups):
                infos = tuple(PartitionInfo(number, group[0], group) for number, group in enumerate(groups))
                found.append(TopicInfo(topic.name, infos, topic.settings, 0, topic.partitions[0]))
        return found

    async def _get_metadata(self, request: GetMetadata, payload: memoryview, flow: Flow) -> Reply:
        await flow.until_writable()
        names = self._hosting.partitions if request.topics is None else dict.fromkeys(request.topics)
        topics = [self._topic_info(name) for name in names if name in self._hosting.partitions]
        nodes = [NodeInfo(self._settings.node_id, self.address)]
        all_names = list(self._hosting.partitions) if request.names else []
        return MetadataReply(self._hosting.catalog.cluster_id, nodes, topics, names=all_names), ()

    def _topic_info(self, name: str) -> TopicInfo:
        me = self._settings.node_id
        infos = tuple(PartitionInfo(number, me, (me,)) for number in self._hosting.partitions[name])
        topic = self._hosting.catalog.topics[name]
        return TopicInfo(name, infos, topic.settings, 1, topic.partitions[0])

    async def _create_topic(self, request: CreateTopic, payload: memoryview, flow: Flow) -> Reply:
        check_topic_name(request.name)
        if request.uids and len(request.uids) != request.partitions:
            raise InvalidRequestError(f"{len(request.uids)} uids for {request.partitions} partitions")
        if request.voters and len(request.voters) != request.partitions:
            raise InvalidRequestError(f"{len(request.voters)} groups of voters for {request.partitions} partitions")
        check_settings(request.settings)
        await self._hosting.create(request)
        return Done(), ()

    async def _delete_topic(self, request: DeleteTopic, payload: memoryview, flow: Flow) -> Reply:
        check_topic_name(request.name)
        await self._hosting.delete(request.name, request.uid)
        return Done(), ()

    async def _host_topic(self, request: HostTopic, payload: memoryview, flow: Flow) -> Reply:
        check_topic_name(request.name)
        count = len(request.uids)
        if len(request.voters) not in (0, count) or len(request.epochs) != count or not all(request.voters):
            raise InvalidRequestError(f"each of the {count} partitions needs its replicas and its epoch")
        check_settings(request.settings)
        await self._hosting.host(request)
        return Done(), ()

    async def _set_replicas(self, request: SetReplicas, payload: memoryview, flow: Flow) -> Reply:
        partition = self._hosting.partition(request.topic, request.partition)
        if self._hosting.catalog.topics[request.topic].partitions[request.partition] != request.uid:
            raise InvalidRequestError(f"{request.topic}-{request.partition} is another partition here")
        if len(set(request.brokers)) < len(request.brokers):
            raise InvalidRequestError("a broker cannot hold two replicas of one partition")
        if partition.raft is None:
            raise InvalidRequestError(f"{request.topic}-{request.partition} is on this node alone and cannot be moved")
        membership, done = partition.raft.set_replicas(request.epoch, request.brokers)
        voters, learners = map(broker_of, membership.voters), map(broker_of, membership.learners)
        return ReplicasReply(list(voters), list(learners), done), ()

    def _produce_quickly(self, request: Produce, payload: memoryview, asker: Asker) -> bool:
        """Without a task for it; False where more than the partition's answer is needed."""
        if self._stopping or request.flags & FLAG_CLIENT:
            return False
        partition = self._hosting.partition(request.topic, request.partition)
        rules = partition.rules
        if rules.require_consumers:
            return False
        partition.submit(self._entry(request, payload, rules), asker)
        return True

    async def _produce(self, request: Produce, payload: memoryview, flow: Flow) -> Reply:
        partition = self._hosting.partition(request.topic, request.partition)
        entry = self._entry(request, payload, partition.rules)
        if partition.rules.require_consumers and not partition.state.positions:
            await self._check_consumers(request.topic)
        reply = await partition.produce(entry)
        if reply.base_offset == OFFSET_UNKNOWN and request.flags & FLAG_CLIENT:
            # A client that numbers its messages is promised the first offset, however old.
            found = await partition.reader.find_batch(entry.producer_id, entry.producer_epoch, entry.sequence)
            reply = ProduceReply(found, duplicate=True)
        return reply, ()

    async def _consumers_of(self, topic: str) -> Consumers:
        """Asks the managers. A broker without any has no registered consumers either."""
        ask = self._others.get(GetConsumers)
        if ask is None:
            return Consumers(ConsumersReply([]))
        reply, _ = await ask(GetConsumers(topic), memoryview(b""), LocalFlow())
        assert isinstance(reply, ConsumersReply)
        return Consumers(reply)

    def _entry(self, request: Produce, payload: memoryview, rules: TopicRules) -> Entry:
        """The batch as a log entry, once it is known to be whole and what it says it is."""
        size, limit = len(payload), self._settings.batch_bytes_max
        if request.record_count == 1 and rules.message_bytes_max + _BATCH_OVERHEAD_BYTES < limit:
            limit = rules.message_bytes_max + _BATCH_OVERHEAD_BYTES
        if size > limit:
            raise MessageTooLargeError(f"a batch of {size} bytes is over the limit of {limit}", size=size, limit=limit)
        if crc32c(payload) != request.payload_crc:
            raise InvalidBatchError("the batch does not match its checksum: it changed on the way")
        check_batch(payload, request.record_count, request.schema_id)
        if rules.cleanup == COMPACT and count_missing_keys(payload):
            raise InvalidRequestError(missing_key(request.topic))
        count, schema_id = request.record_count, request.schema_id
        what = (Kind.DATA, payload, request.payload_crc, count, request.timestamp_min, request.timestamp_max, schema_id)
        who = (request.producer_epoch, request.producer_id, request.sequence, request.flags)
        return tuple.__new__(Entry, (*what, *who))  # quicker than by its own name

    async def _fetch(self, request: Fetch, payload: memoryview, flow: Flow) -> Reply:
        partition = self._hosting.partition(request.topic, request.partition)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(request.wait_ms, self._settings.fetch_wait_ms_max) / 1000
        bytes_max = min(request.bytes_max, self._settings.fetch_bytes_max)
        bytes_min = min(request.bytes_min, bytes_max)
        await know(partition, request.offset)
        partition.check_offset(request.offset)
        while True:
            data = memoryview(b"")
            seen = partition.high_watermark
            if request.offset < seen:
                data = await self._read(partition, request.offset, bytes_max, flow)
            left_s = deadline - loop.time()
            if len(data) >= bytes_min or left_s <= 0:
                reply = FetchReply(partition.start_offset, partition.high_watermark)
                return reply, (data,) if data else ()
            del data  # read again when there is more: a thousand fetches that wait would hold it a thousand times
            if partition.high_watermark == seen:  # else more was committed during the read: nobody would wake us
                await partition.until_commit(left_s)

    async def _read(self, partition: Partition, offset: int, bytes_max: int, flow: Flow) -> memoryview:
        while True:
            await flow.until_writable()
            async with self._reading:
                # Asked again: those who waited here together must not fill a slow connection's buffer together.
                if flow.is_writable:
                    return await partition.read(offset, bytes_max)

    async def _list_offset(self, request: ListOffset, payload: memoryview, flow: Flow) -> Reply:
        partition = self._hosting.partition(request.topic, request.partition)
        await partition.confirm()
        if request.timestamp == OFFSET_EARLIEST:
            return ListOffsetReply(partition.start_offset), ()
        if request.timestamp == OFFSET_LATEST:
            return ListOffsetReply(partition.high_watermark), ()
        if request.timestamp == OFFSET_AFTER:
            partition.check_offset(request.offset)
            end, size_bytes = await partition.reader.offset_after(request.offset, request.bytes_max)
            return ListOffsetReply(min(end, partition.high_watermark), size_bytes), ()
        return ListOffsetReply(await partition.offset_at(request.timestamp)), ()

    async def _get_status(self, request: GetStatus, payload: memoryview, flow: Flow) -> Reply:
        if request.topic is not None and request.topic not in self._hosting.partitions:
            raise UnknownTopicError(f"topic {check_topic_name(request.topic)} does not exist")
        await flow.until_writable()
        names = self._hosting.partitions if request.topic is None else [request.topic]
        found = []
        for name in names:
            uids = self._hosting.catalog.topics[name].partitions
            for number, partition in self._hosting.partitions[name].items():
                if isinstance(partition, Partition):
                    found.append(msgspec.structs.replace(partition.status(), uid=uids[number]))
                else:
                    state, why = _state_of(partition), partition.message
                    found.append(PartitionStatus(name, number, state, 0, 0, 0, 0, why, uids[number]))
        return StatusReply(found), ()


def _state_of(error: Unusable) -> str:
    return "corrupt" if isinstance(error, CorruptLogError) else "failed"
