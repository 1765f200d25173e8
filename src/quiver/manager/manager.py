"""A manager: metadata, the gateway, health; in an embedded node, or one of a quorum for brokers that join over the
network.

Rule: it starts before its broker serves, so that topics are known; it stops after the last request is answered. Changes
of metadata are the primary's: another manager hands them over.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from msgspec import Struct
from msgspec.structs import replace

from quiver.clock import Clock, SystemClock
from quiver.config import NodeSettings
from quiver.errors import (
    CorruptLogError,
    InvalidRequestError,
    ManagerRemovedError,
    UnavailableError,
)
from quiver.log.disk import Disk, SystemDisk
from quiver.manager.classic import ClassicApi
from quiver.manager.duties import Duties
from quiver.manager.founding import Founding, parse_peers
from quiver.manager.gateway import Gateway
from quiver.manager.groups import Groups
from quiver.manager.http import refuse
from quiver.manager.http_server import HttpServer, listen
from quiver.manager.identity import Identity
from quiver.manager.joining import Joining
from quiver.manager.links import BrokerLink, Reply
from quiver.manager.moves import Moves
from quiver.manager.newcomers import Newcomers
from quiver.manager.observer import Observer
from quiver.manager.primary import Primary
from quiver.manager.quorum import METADATA_UID, MetadataQuorum
from quiver.manager.registry import Registry
from quiver.manager.seats import Seats
from quiver.manager.sightings import SeenTimes
from quiver.manager.standing import Standing
from quiver.metadata.manager_table import Manager as ManagerRow
from quiver.metadata.state import Broker
from quiver.metadata.store import Store, make_schema, schema_url, sqlite_url
from quiver.net.peers import Peers
from quiver.replication.group import replica_id
from quiver.replication.seat import Seat
from quiver.wire.admin_messages import (
    MANAGER_KINDS,
    AddPartitions,
    AlterTopic,
    GetConsumers,
    GetMoves,
    Rebalance,
    RemoveBroker,
)
from quiver.wire.group_messages import GROUP_REQUESTS
from quiver.wire.messages import (
    CreateTopic,
    DeleteTopic,
    GetMetadata,
    JoinCluster,
    decode_request,
    encode,
)
from quiver.wire.quorum_messages import ForPrimary, FromPrimary, GetQuorum, QuorumReply

logger = logging.getLogger("quiver.manager")

Handle = Callable[[Any, memoryview, Any], Awaitable[Reply]]

_FOLLOW_S: Final = 1.0
# Requests of clients and brokers that only the primary can answer.
_FOR_PRIMARY: Final[tuple[type[Struct], ...]] = (
    *(CreateTopic, DeleteTopic, JoinCluster, AddPartitions, AlterTopic, GetConsumers, RemoveBroker, Rebalance),
    GetMoves,
    *MANAGER_KINDS.values(),
    *GROUP_REQUESTS,
)


class Manager:
    """`embedded`: its only broker is on this node, and is given to it by `serve`. `peers` links it to the others."""

    def __init__(
        self,
        settings: NodeSettings,
        disk: Disk | None = None,
        clock: Clock | None = None,
        *,
        embedded: bool = True,
        peers: Peers | None = None,
        on_removed: Callable[[ManagerRemovedError], None] = lambda error: None,
    ) -> None:
        self._settings = settings
        self._disk: Disk = disk or SystemDisk()
        self._clock: Clock = clock or SystemClock()
        self._id = 1 if embedded else settings.node_id
        self._directory = f"{settings.data_dir}/manager-{self._id}"
        self._managers = {} if embedded else parse_peers(settings.peers)
        self._peers = peers
        self._on_removed = on_removed
        self._writers = ThreadPoolExecutor(2, "quiver-metadata")
        self._silence_s = math.inf if embedded else settings.broker_silence_s
        self._identity: Identity | None = None
        self._quorum: MetadataQuorum | None = None
        self._http: HttpServer | None = None
        self._observer: Observer | None = None
        self._standing: Standing | None = None
        self._joining: Joining | None = None
        self._follower: asyncio.Task[None] | None = None
        self._attached = asyncio.Event()
        self._primary: Primary | None = None
        self._address = ""
        self.cluster_id = ""
        self.http_address = ""
        if self._managers and self._id not in self._managers:
            raise InvalidRequestError(f"manager {self._id} is not in the list of managers: {settings.peers}")

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self, address: str = "") -> None:
        """Finds its quorum and recovers the metadata. `address`: where this manager is reached."""
        self._address = address
        self._identity = identity = Identity(self._disk, self._directory, self._id)
        if not identity.voters and len(self._managers) > 1:
            await Founding(self._id, self._managers, identity).run()
        elif not identity.voters:
            identity.found((identity.replica_id,))
        try:
            self._store = Store(self._database_url())
            self._quorum = quorum = self._open_quorum(identity)
            await quorum.start(identity.cluster_id)
            if not self._is_one_of_several:
                await quorum.until_led()
            seen = await quorum.database.run(self._store.load_seen)
        except (sa.exc.SQLAlchemyError, ImportError) as error:
            # What the database said, without the statement and the advice that SQLAlchemy adds in more lines.
            reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
            raise InvalidRequestError(f"the metadata database cannot be used: {reason}") from error
        self.cluster_id = identity.cluster_id
        self._registry = Registry(quorum, self._clock, self._silence_s)
        self._registry.producers_seen, self._registry.consumers_seen = (
            SeenTimes(seen.producers),
            SeenTimes(seen.consumers),
        )
        self._registry.brokers.seen |= seen.brokers
        self._managers_seen = seen.managers
        self._groups = Groups(quorum, self._clock, self._settings.group_release_s)
        away_s = self._settings.broker_away_s
        self._moves = Moves(quorum, self._registry, self._clock, away_s, self._forget_broker)
        self._seats = Seats(quorum, identity, self._managers, self._peers, self._on_removed)

    @property
    def _is_one_of_several(self) -> bool:
        assert self._identity is not None
        return len(self._managers) > 1 or len(self._identity.voters) > 1

    def _database_url(self) -> str:
        url = self._settings.metadata_url
        if not url:
            return sqlite_url(Path(self._directory) / "metadata.db")
        if not self._is_one_of_several:
            return url
        make_schema(url, self._id)
        return schema_url(url, self._id)

    def _open_quorum(self, identity: Identity) -> MetadataQuorum:
        try:
            return self._make_quorum(identity)
        except CorruptLogError as error:
            if identity.voters == (identity.replica_id,):
                raise  # nobody else has it
            # Cut where it is damaged, it could elect a leader that lacks what it had acknowledged.
            logger.error("metadata_log_damaged error=%r", error.message)
            identity.renew()
            return self._make_quorum(identity)

    def _make_quorum(self, identity: Identity) -> MetadataQuorum:
        settings, peers = self._settings, self._peers
        first = bool(identity.voters) and identity.voters[0] == identity.replica_id
        admits = tuple(self._managers)
        named = tuple(replica_id(manager, 0) for manager in {**self._managers, **identity.addresses})
        seat = Seat(METADATA_UID, identity.replica_id, identity.voters, named, prefers_to_lead=first, admits=admits)
        # Never quiet: a manager that hears nothing must know at once that it is cut off.
        raft = dataclasses.replace(settings.raft, quiesce_ms=2**62)
        quorum = MetadataQuorum(
            self._disk, identity.log_directory, self._store, self._clock, self._writers, seat, peers, raft
        )
        if peers is not None:
            peers.on_message, peers.on_link = quorum.receive, quorum.link_changed
            peers.cluster_id = identity.cluster_id
        return quorum

    async def serve(self, broker_id: int, endpoint: str, cluster_id: str, link: BrokerLink) -> None:
        """Takes the node's broker in and opens the HTTP port."""
        self.cluster_id = cluster_id
        await self._registry.attach_broker(Broker(broker_id, endpoint), link)
        self._registry.brokers.heard(broker_id)
        self._address = endpoint
        await self._open()

    async def serve_cluster(self) -> None:
        """Opens the HTTP port; brokers join by themselves. Returns when this manager knows what the quorum knows."""
        assert self._quorum is not None
        if self._is_one_of_several:
            self._primary = Primary(self._quorum, self._seats.addresses, self.cluster_id)
        self._joining = Joining(self._quorum, self._registry, self.cluster_id)
        self._joining.follow()
        self._follower = asyncio.get_running_loop().create_task(self._follow(self._quorum, self._joining))
        standing = await self._open()
        if self._is_one_of_several:
            self._seats.start(lambda: standing.is_fresh)
        await standing.until_fresh()

    async def _open(self) -> Standing:
        settings, quorum, registry = self._settings, self._quorum, self._registry
        assert quorum is not None and self._identity is not None
        listener = listen(settings.host, settings.http_port or 0)
        host, port = listener.getsockname()[:2]
        self.http_address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        me = ManagerRow(self._id, self._address, self.http_address, self._identity.replica_id)
        times = {"heartbeat_s": settings.heartbeat_s, "stale_s": settings.metadata_stale_s}
        self._standing = standing = Standing(quorum, registry, self._primary, self._clock, me, **times)
        standing.seen |= self._managers_seen
        registry.others = standing
        self._classic = ClassicApi(
            quorum, registry, self._moves, standing, self._clock, message_bytes_max=settings.message_bytes_max
        )
        if self._joining is not None:
            self._classic.newcomers = Newcomers(quorum, registry, self.cluster_id)
        parts = (quorum, registry, self._moves, standing, self._primary, self._classic)
        self._door = Gateway(*parts, self._clock, settings)
        parts_of_primary = (quorum, registry, self._moves, self._groups, self._classic, standing, self._door)
        self._duties = Duties(*parts_of_primary, self._joining, self._seats, self.cluster_id)
        self._http = HttpServer(self._door.answer, refuse, settings.http_body_bytes_max, settings.http_body_timeout_s)
        self._attached.set()
        await self._http.start(listener)
        standing.start()
        self._groups.start()
        self._observer = Observer(
            quorum, registry, standing, self._classic, self._store, self._clock, settings.heartbeat_s
        )
        self._observer.start()
        logger.info("manager_started http=%s transaction=%d", self.http_address, quorum.last_transaction)
        return standing

    async def _follow(self, quorum: MetadataQuorum, joining: Joining) -> None:
        """Does what a change of brokers or of the primary asks for."""
        moves = False
        while True:
            joining.follow()
            if self._is_one_of_several:
                self._seats.follow()
            if quorum.leads is not moves:
                moves = quorum.leads
                if moves:
                    self._moves.start()
                else:
                    await self._moves.stop()
            await quorum.until_changed(_FOLLOW_S)

    async def stop_serving(self) -> None:
        """Answers what is under way and closes the HTTP port."""
        if self._http is not None:
            await self._http.stop()
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        if self._identity is not None and self._quorum is not None:
            await self._moves.stop()
            await self._groups.close()
        if self._observer is not None:
            await self._observer.close()
        if self._standing is not None:
            await self._standing.close()
        if self._joining is not None:
            await self._joining.close()
            await self._seats.close()

    async def stop(self) -> None:
        if self._quorum is not None:
            await self._quorum.stop()
        if self._primary is not None:
            await self._primary.close()
        self._writers.shutdown()
        logger.info("manager_stopped")

    @property
    def primary(self) -> int:
        """The manager that leads, 0 when that is not known."""
        return 0 if self._quorum is None else self._quorum.primary

    # -- requests of SDKs, brokers and other managers ------------------------------------------------------------

    @property
    def handlers(self) -> dict[type[Struct], Handle]:
        """What this manager serves on the node's framed port."""
        passed_on: dict[type[Struct], Handle] = dict.fromkeys(_FOR_PRIMARY, self._on_primary)
        return {
            GetMetadata: self._get_metadata,
            GetQuorum: self._get_quorum,
            ForPrimary: self._for_primary,
            **passed_on,
        }

    async def _on_primary(self, request: Struct, payload: memoryview, flow: Any) -> Reply:
        await self._attached.wait()  # the port opens a moment before the broker is taken in
        found = None if self._primary is None else await self._primary.ask(request, payload)
        return await self._duties.do(request, payload) if found is None else found

    async def _for_primary(self, request: ForPrimary, payload: memoryview, flow: Any) -> Reply:
        await self._attached.wait()
        assert self._quorum is not None
        if request.cluster_id != self.cluster_id:
            raise InvalidRequestError(f"this manager belongs to cluster {self.cluster_id}, not {request.cluster_id}")
        await self._quorum.until_leading()
        reply, data = await self._duties.do(decode_request(request.kind, memoryview(request.request)), payload)
        return FromPrimary(encode(reply), self._quorum.state.applied), data

    async def _forget_broker(self, broker_id: int) -> None:
        if self._joining is not None:
            await self._joining.forget(broker_id)

    async def _get_quorum(self, request: GetQuorum, payload: memoryview, flow: Any) -> Reply:
        identity, quorum = self._identity, self._quorum
        if identity is None:
            raise UnavailableError("this manager is starting")
        found = QuorumReply(self._id, identity.replica_id, identity.cluster_id, list(identity.voters))
        if quorum is None:
            return found, ()
        raft, removed = quorum.replica.raft, sorted(quorum.state.managers.removed)
        members = list(raft.membership.members) if quorum.leads and raft.membership_index <= raft.commit else []
        return replace(found, primary=quorum.primary, term=quorum.term, members=members, removed=removed), ()

    async def _get_metadata(self, request: GetMetadata, payload: memoryview, flow: Any) -> Reply:
        await self._attached.wait()
        assert self._standing is not None
        await self._standing.check()
        return await self._duties.metadata(request), ()
