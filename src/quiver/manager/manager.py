"""A manager of one: metadata, the gateway, health, for an embedded node.

Rule: it starts before its broker serves, so that topics are known; it stops after the last request is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from msgspec import Struct

from quiver.clock import Clock, SystemClock
from quiver.config import NodeSettings
from quiver.errors import InvalidRequestError, QuiverError, TopicExistsError, UnknownTopicError
from quiver.log.disk import Disk, SystemDisk
from quiver.manager.classic import ClassicApi
from quiver.manager.http import ClassicHttp, failure
from quiver.manager.http_server import HttpServer, listen
from quiver.manager.links import BrokerLink, Buffer
from quiver.manager.quorum import MetadataQuorum
from quiver.manager.registry import Registry
from quiver.metadata.state import Broker
from quiver.metadata.store import Store, sqlite_url
from quiver.types import NodeInfo, PartitionInfo, TopicInfo
from quiver.wire.messages import CreateTopic, DeleteTopic, Done, GetMetadata, MetadataReply

logger = logging.getLogger("quiver.manager")

Reply = tuple[Struct, Sequence[Buffer]]

# A call is over so long after it was seen; later nobody looks whether it moved a position.
_CALL_US_MAX = 30_000_000


class Manager:
    def __init__(self, settings: NodeSettings, disk: Disk | None = None, clock: Clock | None = None) -> None:
        self._settings = settings
        self._disk: Disk = disk or SystemDisk()
        self._clock: Clock = clock or SystemClock()
        self._directory = f"{settings.data_dir}/manager-1"
        self._writers = ThreadPoolExecutor(2, "quiver-metadata")
        self._http: HttpServer | None = None
        self._reporter: asyncio.Task[None] | None = None
        self._cluster_id = ""
        self._attached = asyncio.Event()
        self._read_counts: dict[int, int] = {}
        self.http_address = ""

    async def start(self) -> None:
        """Recovers the metadata."""
        self._disk.make_directory(self._directory)
        url = self._settings.metadata_url or sqlite_url(Path(self._directory) / "metadata.db")
        log_directory = f"{self._directory}/log"
        try:
            self._store = Store(url)
            self._quorum = MetadataQuorum(self._disk, log_directory, self._store, self._clock, self._writers)
            await self._quorum.start()
            seen = await self._quorum.in_store(self._store.load_seen)
        except (sa.exc.SQLAlchemyError, ImportError) as error:
            # What the database said, without the statement and the advice that SQLAlchemy adds in more lines.
            reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
            raise InvalidRequestError(f"the metadata database cannot be used: {reason}") from error
        self._registry = Registry(self._quorum, self._clock)
        self._registry.producers_seen, self._registry.consumers_seen = seen

    async def serve(self, broker_id: int, endpoint: str, cluster_id: str, link: BrokerLink) -> None:
        """Takes the node's broker in and opens the HTTP port."""
        self._cluster_id = cluster_id
        await self._registry.attach_broker(Broker(broker_id, endpoint), link)
        listener = listen(self._settings.host, self._settings.http_port or 0)
        host, port = listener.getsockname()[:2]
        self._classic = ClassicApi(
            self._quorum,
            self._registry,
            self._clock,
            message_bytes_max=self._settings.message_bytes_max,
            address=(host, port),
        )
        self._attached.set()
        settings = self._settings
        door = ClassicHttp(self._classic)
        self._http = HttpServer(door.answer, failure, settings.http_body_bytes_max, settings.http_body_timeout_s)
        await self._http.start(listener)
        self.http_address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._reporter = asyncio.get_running_loop().create_task(self._report())
        logger.info("manager_started http=%s transaction=%d", self.http_address, self._quorum.last_transaction)

    async def stop_serving(self) -> None:
        """Answers what is under way and closes the HTTP port."""
        if self._http is not None:
            await self._http.stop()
        if self._reporter is not None:
            self._reporter.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reporter
            await self._try_to_observe()  # a clean stop forgets nobody's last call

    async def stop(self) -> None:
        await self._quorum.stop()
        self._writers.shutdown()
        logger.info("manager_stopped")

    # -- requests of the SDK -------------------------------------------------------------------------------------

    @property
    def handlers(self) -> dict[type[Struct], Any]:
        """What this manager serves on the node's framed port."""
        return {GetMetadata: self._get_metadata, CreateTopic: self._create_topic, DeleteTopic: self._delete_topic}

    async def _get_metadata(self, request: GetMetadata, payload: memoryview, flow: object) -> Reply:
        await self._attached.wait()  # the port opens a moment before the broker is taken in
        state = self._quorum.state
        names = list(state.topics) if request.topics is None else request.topics
        for name in request.topics or ():
            with contextlib.suppress(UnknownTopicError):
                await self._registry.topic(name)  # who asks for one by name will use it at once
        topics = [
            TopicInfo(name, tuple(PartitionInfo(p.number, p.replicas[0], p.replicas) for p in topic.partitions))
            for name in names
            if (topic := state.topics.get(name)) is not None
        ]
        nodes = [NodeInfo(broker.id, broker.endpoint) for broker in state.brokers.values()]
        return MetadataReply(self._cluster_id, nodes, topics), ()

    async def _create_topic(self, request: CreateTopic, payload: memoryview, flow: object) -> Reply:
        await self._attached.wait()
        try:
            await self._registry.create_topic(request.name, request.partitions, request.replication_factor)
        except TopicExistsError as error:
            raise TopicExistsError(f"topic {request.name} already exists", topic=request.name) from error
        return Done(), ()

    async def _delete_topic(self, request: DeleteTopic, payload: memoryview, flow: object) -> Reply:
        await self._attached.wait()
        await self._classic.delete_topic(request.name)
        return Done(), ()

    # -- what is observed and not replicated ---------------------------------------------------------------------

    async def _report(self) -> None:
        """Asks the broker how it is and writes what was seen to the database, in bulk."""
        while True:
            await asyncio.sleep(self._settings.heartbeat_s)
            await self._try_to_observe()

    async def _try_to_observe(self) -> None:
        try:
            await self._observe()
        except (QuiverError, sa.exc.SQLAlchemyError, OSError) as error:
            logger.warning("report_failed error=%r", str(error))

    async def _observe(self) -> None:
        state, registry = self._quorum.state, self._registry
        sizes: dict[int, int] = {}
        for broker_id in registry.attached:
            for status in await registry.broker_status(broker_id):
                topic = state.topics.get(status.topic)
                if topic is not None and status.partition < len(topic.partitions):
                    sizes[topic.partitions[status.partition].id] = status.next_offset - status.start_offset
        await self._count_read()
        reports: dict[tuple[str, str], dict[int, Any]] = {
            ("partition_metadata", "size"): sizes,
            ("broker_metadata", "last_heartbeat"): dict(registry.brokers_seen),
            ("broker_metadata", "status"): {known: registry.broker_state(known) for known in state.brokers},
            ("producer_metadata", "last_seen"): dict(registry.producers_seen),
            ("consumer_metadata", "last_seen"): dict(registry.consumers_seen),
            ("consumer_metadata", "offset"): dict(self._read_counts),
        }
        await self._quorum.in_store(self._store.record, reports)

    async def _count_read(self) -> None:
        """Asks how far consumers got, those that called lately."""
        consumers, since_us = self._quorum.state.consumers, self._clock.now_us() - _CALL_US_MAX
        for consumer in list(consumers.values()):
            seen_us = self._registry.consumers_seen.get(consumer.id, 0)
            if consumer.id not in self._read_counts or seen_us >= since_us:
                with contextlib.suppress(QuiverError):  # deleted meanwhile, or a partition is out of order
                    self._read_counts[consumer.id] = await self._classic.messages_read(consumer)
        self._read_counts = {known: count for known, count in self._read_counts.items() if known in consumers}
