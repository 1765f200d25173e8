"""A broker node: opens its data directory, serves the protocol, stops cleanly.

Rule: each request is judged here before it touches a partition; a bad one is answered with a typed error and changes
nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from crc32c import crc32c
from msgspec import Struct

from quiver.broker.catalog import Catalog, CatalogTopic
from quiver.broker.partition import Partition
from quiver.clock import Clock, SystemClock
from quiver.config import BrokerSettings, check_listen_address
from quiver.errors import (
    CorruptLogError,
    DiskFullError,
    InvalidBatchError,
    InvalidRequestError,
    MessageTooLargeError,
    ShuttingDownError,
    UnknownPartitionError,
    UnknownTopicError,
)
from quiver.log.disk import Disk, SystemDisk
from quiver.log.partition_log import PartitionLog
from quiver.net.server import Flow, Reply, Server
from quiver.types import NodeInfo, PartitionInfo, PartitionStatus, TopicInfo, check_topic_name
from quiver.wire.batch_check import check_batch
from quiver.wire.frame import Entry, Kind
from quiver.wire.messages import (
    OFFSET_EARLIEST,
    OFFSET_LATEST,
    PROTOCOL_VERSION,
    CommitPosition,
    CreateTopic,
    DeleteTopic,
    Done,
    Fetch,
    FetchReply,
    GetMetadata,
    GetPosition,
    GetStatus,
    HelloReply,
    ListOffset,
    ListOffsetReply,
    MetadataReply,
    PositionReply,
    Produce,
    StatusReply,
)

logger = logging.getLogger("quiver.broker")

_WRITER_THREADS: Final = 16
_READER_THREADS: Final = 4
_DRAIN_S: Final = 5.0
# Room for the Arrow metadata of a batch of one record, beside the record itself.
_BATCH_OVERHEAD_BYTES: Final = 4096


class Broker:
    def __init__(self, settings: BrokerSettings, disk: Disk | None = None, clock: Clock | None = None) -> None:
        check_listen_address(settings.host, settings.insecure)
        self._settings = settings
        self._disk: Disk = disk or SystemDisk()
        self._clock: Clock = clock or SystemClock()
        self._directory = f"{settings.data_dir}/broker-{settings.node_id}"
        self._partitions: dict[str, list[Partition | CorruptLogError]] = {}
        self._writers = ThreadPoolExecutor(_WRITER_THREADS, "quiver-write")
        self._readers = ThreadPoolExecutor(_READER_THREADS, "quiver-read")
        self._reading = asyncio.Semaphore(_READER_THREADS)
        self._catalog_lock = asyncio.Lock()
        self._retention: asyncio.Task[None] | None = None
        self._stopping = False
        self._server: Server | None = None
        self.address = ""
        self._handlers: dict[type[Struct], Callable[[Any, memoryview, Flow], Awaitable[Reply]]] = {
            GetMetadata: self._get_metadata,
            CreateTopic: self._create_topic,
            DeleteTopic: self._delete_topic,
            Produce: self._produce,
            Fetch: self._fetch,
            ListOffset: self._list_offset,
            CommitPosition: self._commit_position,
            GetPosition: self._get_position,
            GetStatus: self._get_status,
        }

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Recovers every partition, then listens. A damaged partition is reported and does not stop the others."""
        self._disk.make_directory(f"{self._directory}/partitions")
        self._catalog = Catalog(self._disk, self._directory)
        self._remove_leftovers()
        for topic in self._catalog.topics.values():
            self._partitions[topic.name] = self._open(topic)
        settings = self._settings
        hello = HelloReply(
            PROTOCOL_VERSION,
            settings.node_id,
            self._catalog.cluster_id,
            settings.message_bytes_max,
            settings.batch_bytes_max,
            settings.net.frames_in_flight_max,
        )
        self._server = Server(settings.net, hello, self._handle)
        port = await self._server.start(settings.host, settings.port)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.address = f"{host}:{port}"
        self._retention = asyncio.get_running_loop().create_task(self._keep_retention())
        logger.info(
            "broker_started node=%d address=%s topics=%d", settings.node_id, self.address, len(self._partitions)
        )

    async def stop(self) -> None:
        """Answers what is under way, puts everything on disk, closes."""
        self._stopping = True
        if self._retention is not None:
            self._retention.cancel()
        partitions = [p for found in self._partitions.values() for p in found if isinstance(p, Partition)]
        await asyncio.gather(*(partition.stop() for partition in partitions))
        if self._server is not None:
            await self._server.stop(_DRAIN_S)
        self._writers.shutdown()
        self._readers.shutdown()
        logger.info("broker_stopped node=%d", self._settings.node_id)

    def _remove_leftovers(self) -> None:
        known = {uid for topic in self._catalog.topics.values() for uid in topic.partitions}
        for uid in self._disk.list(f"{self._directory}/partitions"):
            if uid not in known:
                logger.info("leftover_removed uid=%s", uid)
                self._disk.remove_tree(self._partition_directory(uid))

    def _partition_directory(self, uid: str) -> str:
        return f"{self._directory}/partitions/{uid}"

    def _open(self, topic: CatalogTopic) -> list[Partition | CorruptLogError]:
        found: list[Partition | CorruptLogError] = []
        for number, uid in enumerate(topic.partitions):
            try:
                log = PartitionLog(self._disk, self._partition_directory(uid), self._settings.log)
                partition = Partition(topic.name, number, log, self._disk, self._writers, self._readers, self._clock)
            except CorruptLogError as error:
                logger.error("partition_corrupt partition=%s-%d error=%r", topic.name, number, error.message)
                found.append(error)
                continue
            if log.cut_bytes:
                logger.info("torn_tail_cut partition=%s-%d bytes=%d", topic.name, number, log.cut_bytes)
            partition.start()
            found.append(partition)
        return found

    async def _keep_retention(self) -> None:
        while True:
            await asyncio.sleep(self._settings.retention_check_s)
            for found in list(self._partitions.values()):
                for partition in found:
                    if isinstance(partition, Partition):
                        try:
                            await partition.apply_retention()
                        except (DiskFullError, ShuttingDownError, CorruptLogError) as error:
                            logger.warning("retention_failed topic=%s error=%r", partition.topic, error.message)

    # -- requests ------------------------------------------------------------------------------------------------

    async def _handle(self, request: Struct, payload: memoryview, flow: Flow) -> Reply:
        handler = self._handlers.get(type(request))
        if handler is None:
            raise InvalidRequestError(f"{type(request).__name__} is not a request a broker serves")
        if self._stopping:
            raise ShuttingDownError("the broker is stopping")
        return await handler(request, payload, flow)

    def _partition(self, topic: str, number: int) -> Partition:
        found = self._partitions.get(topic)
        if found is None:
            raise UnknownTopicError(f"topic {check_topic_name(topic)} does not exist", topic=topic)
        if number >= len(found):
            raise UnknownPartitionError(
                f"topic {topic} has partitions 0 to {len(found) - 1}, not {number}", topic=topic, partition=number
            )
        partition = found[number]
        if isinstance(partition, CorruptLogError):
            raise partition
        return partition

    async def _get_metadata(self, request: GetMetadata, payload: memoryview, flow: Flow) -> Reply:
        names = self._partitions if request.topics is None else request.topics
        topics = [self._topic_info(name) for name in names if name in self._partitions]
        nodes = [NodeInfo(self._settings.node_id, self.address)]
        return MetadataReply(self._catalog.cluster_id, nodes, topics), ()

    def _topic_info(self, name: str) -> TopicInfo:
        me = self._settings.node_id
        return TopicInfo(name, tuple(PartitionInfo(number, me, (me,)) for number in range(len(self._partitions[name]))))

    async def _create_topic(self, request: CreateTopic, payload: memoryview, flow: Flow) -> Reply:
        check_topic_name(request.name)
        async with self._catalog_lock:
            topic = self._catalog.new_topic(request.name, request.partitions)
            try:
                partitions = self._open(topic)
                self._disk.sync_directory(f"{self._directory}/partitions")
                self._catalog.add(topic)
            except OSError as error:
                raise DiskFullError(f"topic {topic.name} cannot be stored: {error}") from error
            self._partitions[topic.name] = partitions
        logger.info("topic_created topic=%s partitions=%d", topic.name, len(topic.partitions))
        return Done(), ()

    async def _delete_topic(self, request: DeleteTopic, payload: memoryview, flow: Flow) -> Reply:
        check_topic_name(request.name)
        async with self._catalog_lock:
            topic = self._catalog.remove(request.name)
            partitions = self._partitions.pop(topic.name)
            for partition in partitions:
                if isinstance(partition, Partition):
                    await partition.stop()
            for uid in topic.partitions:
                self._disk.remove_tree(self._partition_directory(uid))
        logger.info("topic_deleted topic=%s", topic.name)
        return Done(), ()

    async def _produce(self, request: Produce, payload: memoryview, flow: Flow) -> Reply:
        partition = self._partition(request.topic, request.partition)
        size = len(payload)
        limit = self._settings.batch_bytes_max
        if request.record_count == 1:
            limit = min(limit, self._settings.message_bytes_max + _BATCH_OVERHEAD_BYTES)
        if size > limit:
            raise MessageTooLargeError(f"a batch of {size} bytes is over the limit of {limit}", size=size, limit=limit)
        if crc32c(payload) != request.payload_crc:
            raise InvalidBatchError("the batch does not match its checksum: it changed on the way")
        check_batch(payload, request.record_count, request.schema_id)
        entry = Entry(
            Kind.DATA,
            payload,
            request.payload_crc,
            request.record_count,
            request.timestamp_min,
            request.timestamp_max,
            request.schema_id,
            request.producer_epoch,
            request.producer_id,
            request.sequence,
        )
        return await partition.produce(entry), ()

    async def _fetch(self, request: Fetch, payload: memoryview, flow: Flow) -> Reply:
        partition = self._partition(request.topic, request.partition)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(request.wait_ms, self._settings.fetch_wait_ms_max) / 1000
        bytes_max = min(request.bytes_max, self._settings.fetch_bytes_max)
        bytes_min = min(request.bytes_min, bytes_max)
        partition.check_offset(request.offset)
        while True:
            data = memoryview(b"")
            if request.offset < partition.high_watermark:
                await flow.until_writable()
                async with self._reading:
                    data = await partition.read(request.offset, bytes_max)
            left_s = deadline - loop.time()
            if len(data) >= bytes_min or left_s <= 0 or not await partition.until_commit(left_s):
                reply = FetchReply(partition.start_offset, partition.high_watermark)
                return reply, (data,) if data else ()

    async def _list_offset(self, request: ListOffset, payload: memoryview, flow: Flow) -> Reply:
        partition = self._partition(request.topic, request.partition)
        if request.timestamp == OFFSET_EARLIEST:
            return ListOffsetReply(partition.start_offset), ()
        if request.timestamp == OFFSET_LATEST:
            return ListOffsetReply(partition.high_watermark), ()
        return ListOffsetReply(await partition.offset_at(request.timestamp)), ()

    async def _commit_position(self, request: CommitPosition, payload: memoryview, flow: Flow) -> Reply:
        partition = self._partition(request.topic, request.partition)
        return PositionReply(await partition.commit_position(request.position)), ()

    async def _get_position(self, request: GetPosition, payload: memoryview, flow: Flow) -> Reply:
        return PositionReply(self._partition(request.topic, request.partition).position(request.consumer)), ()

    async def _get_status(self, request: GetStatus, payload: memoryview, flow: Flow) -> Reply:
        if request.topic is not None and request.topic not in self._partitions:
            raise UnknownTopicError(f"topic {check_topic_name(request.topic)} does not exist")
        names = self._partitions if request.topic is None else [request.topic]
        found = [
            partition.status()
            if isinstance(partition, Partition)
            else PartitionStatus(name, number, "corrupt", 0, 0, 0, 0, partition.message)
            for name in names
            for number, partition in enumerate(self._partitions[name])
        ]
        return StatusReply(found), ()
