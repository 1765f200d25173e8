"""A manager of one: metadata, the gateway, health; for an embedded node, or for brokers that join over the network.

Rule: it starts before its broker serves, so that topics are known; it stops after the last request is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
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
from quiver.manager.gateway import Gateway
from quiver.manager.http import refuse
from quiver.manager.http_server import HttpServer, listen
from quiver.manager.identity import Identity
from quiver.manager.joining import Joining
from quiver.manager.links import BrokerLink, Reply
from quiver.manager.moves import Moves
from quiver.manager.quorum import METADATA_UID, MetadataQuorum
from quiver.manager.registry import Registry
from quiver.metadata.state import Broker
from quiver.metadata.store import Store, sqlite_url
from quiver.replication.seat import Seat
from quiver.types import NodeInfo, PartitionInfo, TopicInfo
from quiver.wire.messages import (
    AddPartitions,
    CreateTopic,
    DeleteTopic,
    Done,
    GetMetadata,
    GetMoves,
    JoinCluster,
    MetadataReply,
    MovesReply,
    Rebalance,
    RemoveBroker,
)

logger = logging.getLogger("quiver.manager")

# A call is over so long after it was seen; later nobody looks whether it moved a position.
_CALL_US_MAX = 30_000_000
# So many replicas a broker is asked about in one heartbeat, on average.
_STATUSES_PER_HEARTBEAT = 200


class Manager:
    """`embedded`: its only broker is on this node, and is given to it by `serve`."""

    def __init__(
        self, settings: NodeSettings, disk: Disk | None = None, clock: Clock | None = None, *, embedded: bool = True
    ) -> None:
        self._settings = settings
        self._disk: Disk = disk or SystemDisk()
        self._clock: Clock = clock or SystemClock()
        self._id = 1 if embedded else settings.node_id
        self._directory = f"{settings.data_dir}/manager-{self._id}"
        self._writers = ThreadPoolExecutor(2, "quiver-metadata")
        self._http: HttpServer | None = None
        self._reporter: asyncio.Task[None] | None = None
        self._recorder: asyncio.Task[None] | None = None
        self._polls: dict[int, asyncio.Task[None]] = {}
        self._poll_due_s: dict[int, float] = {}
        self._silence_s = math.inf if embedded else settings.broker_silence_s
        self._joining: Joining | None = None
        self._attached = asyncio.Event()
        self._sizes: dict[int, int] = {}
        self._read_counts: dict[int, int] = {}
        self.cluster_id = ""
        self.http_address = ""

    async def start(self) -> None:
        """Recovers the metadata."""
        self._identity = identity = Identity(self._disk, self._directory, self._id)
        if not identity.voters:
            identity.found((identity.replica_id,))
        url = self._settings.metadata_url or sqlite_url(Path(self._directory) / "metadata.db")
        try:
            self._store = Store(url)
            seat = Seat(METADATA_UID, identity.replica_id, identity.voters)
            self._quorum = MetadataQuorum(
                self._disk, identity.log_directory, self._store, self._clock, self._writers, seat
            )
            await self._quorum.start(identity.cluster_id)
            await self._quorum.until_led()
            seen = await self._quorum.database.run(self._store.load_seen)
        except (sa.exc.SQLAlchemyError, ImportError) as error:
            # What the database said, without the statement and the advice that SQLAlchemy adds in more lines.
            reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
            raise InvalidRequestError(f"the metadata database cannot be used: {reason}") from error
        self._registry = Registry(self._quorum, self._clock, self._silence_s)
        self._registry.producers_seen, self._registry.consumers_seen = seen
        self._moves = Moves(
            self._quorum, self._registry, self._clock, self._settings.broker_away_s, self._forget_broker
        )

    async def serve(self, broker_id: int, endpoint: str, cluster_id: str, link: BrokerLink) -> None:
        """Takes the node's broker in and opens the HTTP port."""
        self.cluster_id = cluster_id
        await self._registry.attach_broker(Broker(broker_id, endpoint), link)
        self._registry.brokers.heard(broker_id)
        await self._open()

    async def serve_cluster(self) -> None:
        """Opens the HTTP port; brokers join by themselves."""
        self.cluster_id = self._identity.cluster_id
        self._joining = Joining(self._quorum, self._registry, self.cluster_id)
        self._joining.reconnect()
        await self._open()
        self._moves.start()

    async def _open(self) -> None:
        settings = self._settings
        listener = listen(settings.host, settings.http_port or 0)
        host, port = listener.getsockname()[:2]
        self._classic = ClassicApi(
            self._quorum,
            self._registry,
            self._moves,
            self._clock,
            message_bytes_max=settings.message_bytes_max,
            address=(host, port),
        )
        self._attached.set()
        door = Gateway(self._quorum, self._registry, self._moves, self._classic, self._clock, settings)
        self._http = HttpServer(door.answer, refuse, settings.http_body_bytes_max, settings.http_body_timeout_s)
        await self._http.start(listener)
        self.http_address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._reporter = asyncio.get_running_loop().create_task(self._report())
        logger.info("manager_started http=%s transaction=%d", self.http_address, self._quorum.last_transaction)

    async def stop_serving(self) -> None:
        """Answers what is under way and closes the HTTP port."""
        if self._http is not None:
            await self._http.stop()
        if self._reporter is not None:
            tasks = [self._reporter, *self._polls.values(), *([self._recorder] if self._recorder else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._poll_all()
            await self._try_to_record()  # a clean stop forgets nobody's last call
        await self._moves.stop()
        if self._joining is not None:
            await self._joining.close()

    async def stop(self) -> None:
        await self._quorum.stop()
        self._writers.shutdown()
        logger.info("manager_stopped")

    # -- requests of the SDK -------------------------------------------------------------------------------------

    @property
    def handlers(self) -> dict[type[Struct], Any]:
        """What this manager serves on the node's framed port."""
        return {
            GetMetadata: self._get_metadata,
            CreateTopic: self._create_topic,
            DeleteTopic: self._delete_topic,
            JoinCluster: self._join_cluster,
            AddPartitions: self._add_partitions,
            RemoveBroker: self._remove_broker,
            Rebalance: self._rebalance,
            GetMoves: self._get_moves,
        }

    async def _join_cluster(self, request: JoinCluster, payload: memoryview, flow: object) -> Reply:
        await self._attached.wait()
        if self._joining is None:
            raise InvalidRequestError("this node is a cluster of its own; no broker can join it")
        return await self._joining.join(request), ()

    async def _get_metadata(self, request: GetMetadata, payload: memoryview, flow: object) -> Reply:
        await self._attached.wait()  # the port opens a moment before the broker is taken in
        state = self._quorum.state
        names = list(state.topics) if request.topics is None else request.topics
        for name in request.topics or ():
            with contextlib.suppress(UnknownTopicError):
                await self._registry.topic(name)  # who asks for one by name will use it at once
        leader_of = self._registry.brokers.leader_of
        topics = [
            TopicInfo(name, tuple(PartitionInfo(p.number, leader_of(p), p.replicas) for p in topic.partitions))
            for name in names
            if (topic := state.topics.get(name)) is not None
        ]
        nodes = [NodeInfo(broker.id, broker.endpoint) for broker in state.brokers.values()]
        return MetadataReply(self.cluster_id, nodes, topics), ()

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

    async def _add_partitions(self, request: AddPartitions, payload: memoryview, flow: object) -> Reply:
        await self._attached.wait()
        await self._registry.add_partitions(request.name, request.partitions)
        return Done(), ()

    async def _remove_broker(self, request: RemoveBroker, payload: memoryview, flow: object) -> Reply:
        await self._attached.wait()
        await self._moves.remove_broker(request.broker_id)
        return Done(), ()

    async def _rebalance(self, request: Rebalance, payload: memoryview, flow: object) -> Reply:
        await self._attached.wait()
        return MovesReply(await self._moves.rebalance(), self._moves.draining()), ()

    async def _get_moves(self, request: GetMoves, payload: memoryview, flow: object) -> Reply:
        return MovesReply(self._moves.moves(), self._moves.draining()), ()

    async def _forget_broker(self, broker_id: int) -> None:
        if self._joining is not None:
            await self._joining.forget(broker_id)

    # -- what is observed and not replicated ---------------------------------------------------------------------

    async def _report(self) -> None:
        """Asks the brokers how they are, and writes what was seen to the database, in bulk."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._settings.heartbeat_s)
            await self._poll_all()
            if self._recorder is None or self._recorder.done():  # a slow database holds up nothing else
                self._recorder = loop.create_task(self._try_to_record())

    async def _poll_all(self) -> None:
        """One that does not answer is not waited for; what it says later still counts."""
        now_s = self._clock.monotonic_s()
        for broker_id in self._registry.brokers.attached:
            if broker_id not in self._polls and self._poll_due_s.get(broker_id, 0.0) <= now_s:
                task = self._polls[broker_id] = asyncio.get_running_loop().create_task(self._poll(broker_id))
                task.add_done_callback(lambda _, done=broker_id: self._polls.pop(done, None))  # type: ignore[misc]
        if self._polls:
            await asyncio.wait(self._polls.values(), timeout=self._settings.heartbeat_s)

    async def _poll(self, broker_id: int) -> None:
        with contextlib.suppress(QuiverError):  # it is away; that it was not seen is told elsewhere
            statuses = await self._registry.brokers.status(broker_id)
            # A broker with thousands of replicas would spend its time on telling of them.
            rest_s = self._settings.heartbeat_s * (len(statuses) // _STATUSES_PER_HEARTBEAT)
            self._poll_due_s[broker_id] = self._clock.monotonic_s() + rest_s
            for status in statuses:
                topic = self._quorum.state.topics.get(status.topic)
                if topic is not None and status.partition < len(topic.partitions) and status.role == "leader":
                    size = status.next_offset - status.start_offset
                    self._sizes[topic.partitions[status.partition].id] = size

    async def _try_to_record(self) -> None:
        try:
            await self._record()
        except (QuiverError, sa.exc.SQLAlchemyError, OSError) as error:
            logger.warning("report_failed error=%r", str(error))

    async def _record(self) -> None:
        state, registry = self._quorum.state, self._registry
        sizes, self._sizes = self._sizes, {}
        await self._count_read()
        reports: dict[tuple[str, str], dict[int, Any]] = {
            ("partition_metadata", "size"): sizes,
            ("broker_metadata", "last_heartbeat"): dict(registry.brokers.seen),
            ("broker_metadata", "status"): {known: registry.broker_state(known) for known in state.brokers},
            ("producer_metadata", "last_seen"): dict(registry.producers_seen),
            ("consumer_metadata", "last_seen"): dict(registry.consumers_seen),
            ("consumer_metadata", "offset"): dict(self._read_counts),
        }
        await self._quorum.database.run(self._store.record, reports)

    async def _count_read(self) -> None:
        """Asks how far consumers got, those that called lately."""
        consumers, since_us = self._quorum.state.consumers, self._clock.now_us() - _CALL_US_MAX
        for consumer in list(consumers.values()):
            seen_us = self._registry.consumers_seen.get(consumer.id, 0)
            if consumer.id not in self._read_counts or seen_us >= since_us:
                with contextlib.suppress(QuiverError):  # deleted meanwhile, or a partition is out of order
                    self._read_counts[consumer.id] = await self._classic.messages_read(consumer)
        self._read_counts = {known: count for known, count in self._read_counts.items() if known in consumers}
