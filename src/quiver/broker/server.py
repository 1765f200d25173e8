"""A broker node: opens its data directory, serves the protocol, stops cleanly.

Rule: each request is judged here before it touches a partition; a bad one is answered with a typed error and changes
nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec
from crc32c import crc32c
from msgspec import Struct

from quiver.broker.catalog import Catalog, CatalogTopic
from quiver.broker.partition import Partition
from quiver.broker.partition_state import OFFSET_UNKNOWN
from quiver.clock import Clock, SystemClock
from quiver.config import BrokerSettings, check_listen_address
from quiver.errors import (
    CorruptLogError,
    DiskFullError,
    InvalidBatchError,
    InvalidRequestError,
    LogFailedError,
    MessageTooLargeError,
    QuiverError,
    ShuttingDownError,
    UnknownPartitionError,
    UnknownTopicError,
)
from quiver.log.disk import Disk, SystemDisk
from quiver.log.flusher import FlushPolicy
from quiver.log.partition_log import PartitionLog
from quiver.net.server import Flow, Reply, Server
from quiver.types import NodeInfo, PartitionInfo, PartitionStatus, TopicInfo, check_topic_name
from quiver.wire.batch_check import check_batch
from quiver.wire.frame import FLAG_CLIENT, Entry, Kind
from quiver.wire.messages import (
    KIND_OF,
    OFFSET_EARLIEST,
    OFFSET_LATEST,
    PROTOCOL_VERSION,
    CommitPosition,
    CountClient,
    CountReply,
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
    ProduceReply,
    StatusReply,
)

logger = logging.getLogger("quiver.broker")

Handle = Callable[[Any, memoryview, Flow], Awaitable[Reply]]
Unusable = CorruptLogError | LogFailedError  # why a partition could not be opened

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
    ) -> None:
        check_listen_address(settings.host, settings.insecure)
        self._settings = settings
        self._disk: Disk = disk or SystemDisk()
        self._clock: Clock = clock or SystemClock()
        self._policy = FlushPolicy(self._clock)
        self._directory = f"{settings.data_dir}/broker-{settings.node_id}"
        self._partitions: dict[str, list[Partition | Unusable]] = {}
        self._writers = ThreadPoolExecutor(_WRITER_THREADS, "quiver-write")
        self._readers = ThreadPoolExecutor(_READER_THREADS, "quiver-read")
        self._reading = asyncio.Semaphore(_READER_THREADS)
        self._catalog_lock = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        self._retention: asyncio.Task[None] | None = None
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
            CommitPosition: self._commit_position,
            GetPosition: self._get_position,
            GetStatus: self._get_status,
            CountClient: self._count_client,
        }

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Recovers every partition, then listens. A damaged partition is reported and does not stop the others."""
        self._catalog = Catalog(self._disk, self._directory)
        self._catalog.remove_leftovers()
        for topic in self._catalog.topics.values():
            self._partitions[topic.name] = [self._recover(topic, number) for number in range(len(topic.partitions))]
        settings = self._settings
        hello = HelloReply(
            PROTOCOL_VERSION,
            settings.node_id,
            self._catalog.cluster_id,
            settings.message_bytes_max,
            settings.batch_bytes_max,
            settings.net.frames_in_flight_max,
        )
        server = Server(settings.net, hello, self._handle, {KIND_OF[Produce]: self._produce_quickly})
        try:
            port = await server.start(settings.host, settings.port)
        except OSError:
            await self.stop()
            raise
        self._server = server
        self.address = f"[{settings.host}]:{port}" if ":" in settings.host else f"{settings.host}:{port}"
        self._retention = asyncio.get_running_loop().create_task(self._keep_retention())
        topics = len(self._partitions)
        logger.info("broker_started node=%d address=%s topics=%d", settings.node_id, self.address, topics)

    async def stop(self) -> None:
        """Answers what is under way, puts everything on disk, closes."""
        self._stopping = True
        if self._retention is not None:
            self._retention.cancel()
        async with self._catalog_lock:  # a topic that is being made or deleted is finished first
            await asyncio.gather(*(partition.stop() for partition in self._usable()))
        if self._server is not None:
            await self._server.stop(_DRAIN_S)
        self._writers.shutdown()
        self._readers.shutdown()
        logger.info("broker_stopped node=%d", self._settings.node_id)

    def _open(self, topic: CatalogTopic, number: int) -> Partition:
        directory = self._catalog.directory_of(topic.partitions[number])
        log = PartitionLog(self._disk, directory, self._settings.log)
        if log.cut_bytes:
            logger.info("torn_tail_cut partition=%s-%d bytes=%d", topic.name, number, log.cut_bytes)
        return Partition(topic.name, number, log, self._disk, self._writers, self._readers, self._clock, self._policy)

    def _recover(self, topic: CatalogTopic, number: int) -> Partition | Unusable:
        try:
            partition = self._open(topic, number)
        except CorruptLogError as error:
            logger.error("partition_corrupt partition=%s-%d error=%r", topic.name, number, error.message)
            return error
        except OSError as error:
            logger.error("partition_failed partition=%s-%d error=%r", topic.name, number, str(error))
            return LogFailedError(f"{topic.name}-{number} cannot be opened: {error}")
        partition.start()
        return partition

    def _usable(self) -> list[Partition]:
        return [p for found in self._partitions.values() for p in found if isinstance(p, Partition)]

    async def _keep_retention(self) -> None:
        while True:
            await asyncio.sleep(self._settings.retention_check_s)
            for partition in self._usable():
                try:
                    await partition.apply_retention()
                except QuiverError as error:  # this partition's trouble; the others still need it
                    logger.warning("retention_failed topic=%s error=%r", partition.topic, error.message)

    # -- requests ------------------------------------------------------------------------------------------------

    async def _handle(self, request: Struct, payload: memoryview, flow: Flow) -> Reply:
        other = self._others.get(type(request))
        if other is not None and not self._stopping:
            return await other(request, payload, flow)
        return await self.serve(request, payload, flow)

    async def serve(self, request: Struct, payload: memoryview, flow: Flow) -> Reply:
        """Answers one request; also for callers in this process, who need no connection."""
        handler = self._handlers.get(type(request))
        if handler is None:
            raise InvalidRequestError(f"{type(request).__name__} is not a request a broker serves")
        if self._stopping:
            raise ShuttingDownError("the broker is stopping")
        return await handler(request, payload, flow)

    @property
    def cluster_id(self) -> str:
        return self._catalog.cluster_id

    def _partition(self, topic: str, number: int) -> Partition:
        found = self._partitions.get(topic)
        if found is None:
            raise UnknownTopicError(f"topic {check_topic_name(topic)} does not exist", topic=topic)
        if number >= len(found):
            raise UnknownPartitionError(
                f"topic {topic} has partitions 0 to {len(found) - 1}, not {number}", topic=topic, partition=number
            )
        partition = found[number]
        if not isinstance(partition, Partition):
            # Without the old traceback: each raise would make it longer, and it holds every request's payload.
            raise partition.with_traceback(None)
        return partition

    async def _get_metadata(self, request: GetMetadata, payload: memoryview, flow: Flow) -> Reply:
        await flow.until_writable()
        names = self._partitions if request.topics is None else dict.fromkeys(request.topics)
        topics = [self._topic_info(name) for name in names if name in self._partitions]
        nodes = [NodeInfo(self._settings.node_id, self.address)]
        return MetadataReply(self._catalog.cluster_id, nodes, topics), ()

    def _topic_info(self, name: str) -> TopicInfo:
        me = self._settings.node_id
        return TopicInfo(name, tuple(PartitionInfo(number, me, (me,)) for number in range(len(self._partitions[name]))))

    async def _create_topic(self, request: CreateTopic, payload: memoryview, flow: Flow) -> Reply:
        check_topic_name(request.name)
        if request.uids and len(request.uids) != request.partitions:
            raise InvalidRequestError(f"{len(request.uids)} uids for {request.partitions} partitions")
        await self._finish(self._make_topic(request))
        return Done(), ()

    async def _make_topic(self, request: CreateTopic) -> None:
        async with self._catalog_lock:
            topic = self._catalog.new_topic(request.name, request.partitions, request.uids)
            try:
                # In a thread: thousands of directories take seconds, and the others are served meanwhile.
                partitions = await asyncio.get_running_loop().run_in_executor(self._writers, self._store_topic, topic)
            except OSError as error:
                raise DiskFullError(f"topic {topic.name} cannot be stored: {error}") from error
            for partition in partitions:
                partition.start()
            self._partitions[topic.name] = [*partitions]
        logger.info("topic_created topic=%s partitions=%d", topic.name, len(topic.partitions))

    def _store_topic(self, topic: CatalogTopic) -> list[Partition]:
        try:
            partitions = [self._open(topic, number) for number in range(len(topic.partitions))]
            self._catalog.add(topic)
        except OSError:
            self._catalog.remove_leftovers()
            raise
        return partitions

    async def _finish(self, change: Coroutine[Any, Any, None]) -> None:
        """Waits for a change that goes on when the asker does not: half a deletion would leave owners and files."""
        task = asyncio.get_running_loop().create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)

    async def _delete_topic(self, request: DeleteTopic, payload: memoryview, flow: Flow) -> Reply:
        check_topic_name(request.name)
        await self._finish(self._drop_topic(request.name))
        return Done(), ()

    async def _drop_topic(self, name: str) -> None:
        async with self._catalog_lock:
            try:
                self._catalog.remove(name)
            except OSError as error:
                raise DiskFullError(f"the deletion of {name} cannot be stored: {error}") from error
            for partition in self._partitions.pop(name):
                if isinstance(partition, Partition):
                    await partition.stop()
            await asyncio.get_running_loop().run_in_executor(self._writers, self._catalog.remove_leftovers)
        logger.info("topic_deleted topic=%s", name)

    def _produce_quickly(self, request: Produce, payload: memoryview) -> asyncio.Future[Any] | None:
        """The future reply, without a task for it; None where more than the partition's answer is needed."""
        if self._stopping or request.flags & FLAG_CLIENT:
            return None
        return self._partition(request.topic, request.partition).submit(self._entry(request, payload))

    async def _produce(self, request: Produce, payload: memoryview, flow: Flow) -> Reply:
        partition = self._partition(request.topic, request.partition)
        entry = self._entry(request, payload)
        reply = await partition.produce(entry)
        if reply.base_offset == OFFSET_UNKNOWN and request.flags & FLAG_CLIENT:
            # A client that numbers its messages is promised the first offset, however old.
            found = await partition.find_batch(entry.producer_id, entry.producer_epoch, entry.sequence)
            reply = ProduceReply(found, duplicate=True)
        return reply, ()

    def _entry(self, request: Produce, payload: memoryview) -> Entry:
        """The batch as a log entry, once it is known to be whole and what it says it is."""
        size = len(payload)
        limit = self._settings.batch_bytes_max
        if request.record_count == 1:
            limit = min(limit, self._settings.message_bytes_max + _BATCH_OVERHEAD_BYTES)
        if size > limit:
            raise MessageTooLargeError(f"a batch of {size} bytes is over the limit of {limit}", size=size, limit=limit)
        if crc32c(payload) != request.payload_crc:
            raise InvalidBatchError("the batch does not match its checksum: it changed on the way")
        check_batch(payload, request.record_count, request.schema_id)
        return Entry(
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
            request.flags,
        )

    async def _fetch(self, request: Fetch, payload: memoryview, flow: Flow) -> Reply:
        partition = self._partition(request.topic, request.partition)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(request.wait_ms, self._settings.fetch_wait_ms_max) / 1000
        bytes_max = min(request.bytes_max, self._settings.fetch_bytes_max)
        bytes_min = min(request.bytes_min, bytes_max)
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
        partition = self._partition(request.topic, request.partition)
        position = partition.position(request.consumer)
        return PositionReply(position, partition.start_offset, partition.high_watermark), ()

    async def _count_client(self, request: CountClient, payload: memoryview, flow: Flow) -> Reply:
        return CountReply(sum(partition.client_count(request.client) for partition in self._usable())), ()

    async def _get_status(self, request: GetStatus, payload: memoryview, flow: Flow) -> Reply:
        if request.topic is not None and request.topic not in self._partitions:
            raise UnknownTopicError(f"topic {check_topic_name(request.topic)} does not exist")
        await flow.until_writable()
        names = self._partitions if request.topic is None else [request.topic]
        found = [
            msgspec.structs.replace(partition.status(), uid=uid)
            if isinstance(partition, Partition)
            else PartitionStatus(name, number, _state_of(partition), 0, 0, 0, 0, partition.message, uid)
            for name in names
            for number, (partition, uid) in enumerate(
                zip(self._partitions[name], self._catalog.topics[name].partitions, strict=True)
            )
        ]
        return StatusReply(found), ()


def _state_of(error: Unusable) -> str:
    return "corrupt" if isinstance(error, CorruptLogError) else "failed"
