"""A broker's place in a cluster: it joins by any manager, says every second that it is there, and asks for clients.

Rule: the managers may be away. Partitions go on without them: the addresses of the others are kept on disk, metadata is
answered from what was last known and from the broker's own catalog, with the leaders this broker knows itself. Only
changes of topics have to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from quiver.errors import (
    BrokerRemovedError,
    ConnectionLostError,
    InvalidRequestError,
    QuiverError,
    RequestTimeoutError,
    UnavailableError,
)
from quiver.log.disk import Disk, write_atomically
from quiver.net.any_link import AnyLink
from quiver.net.peers import Peers
from quiver.net.server import Flow, Reply
from quiver.types import NodeInfo, PartitionInfo, TopicInfo
from quiver.wire.admin_messages import (
    MANAGER_KINDS,
    AddPartitions,
    AlterTopic,
    GetConsumers,
    GetMoves,
    Rebalance,
    RemoveBroker,
    TakeIn,
    TakenIn,
)
from quiver.wire.group_messages import GROUP_REQUESTS
from quiver.wire.messages import CreateTopic, DeleteTopic, GetMetadata, JoinCluster, JoinReply, MetadataReply

logger = logging.getLogger("quiver.broker")

_FILE: Final = "members.json"
_METADATA_TIMEOUT_S: Final = 1.0  # then what was last known has to do, until the manager is heard again
_RETRY_S: Final = 0.1
_HURRY_S: Final = 2.0


class Members(msgspec.Struct, frozen=True):
    """What is kept on disk: the cluster this broker belongs to, and where its brokers and managers were last."""

    cluster_id: str = ""
    brokers: list[NodeInfo] = []
    managers: list[str] = []


def load_members(disk: Disk, directory: str) -> Members:
    """What a broker remembers of its cluster; nothing when it never was in one."""
    path = f"{directory}/{_FILE}"
    if not disk.exists(path):
        return Members()
    file = disk.open(path)
    try:
        return msgspec.json.decode(file.pread(file.size(), 0), type=Members)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}") from error


class Membership:
    """`manager`: addresses to begin with, joined by commas; those that are remembered are asked too. `serve` is the
    broker's own answer to a request; it knows `leaders`, and was told of `topics`. `on_removed` is called when the
    manager no longer wants it."""

    def __init__(
        self,
        manager: str,
        me: int,
        peers: Peers,
        disk: Disk,
        directory: str,
        *,
        heartbeat_s: float,
        serve: Callable[[Any, memoryview, Flow], Any],
        leaders: Callable[[], dict[tuple[str, int], int]],
        topics: Callable[[], list[TopicInfo]] = list,
        on_removed: Callable[[BrokerRemovedError], None] = lambda error: None,
    ) -> None:
        self._me = me
        self._peers = peers
        self._disk = disk
        self._path = f"{directory}/{_FILE}"
        self._heartbeat_s = heartbeat_s
        self._serve = serve
        self._leaders = leaders
        self._topics = topics
        self._on_removed = on_removed
        self._members = load_members(disk, directory)
        self._link = AnyLink(filter(None, (*manager.split(","), *self._members.managers)), f"broker-{me}")
        self._address = ""
        self._known = MetadataReply("", [], [])  # what the manager last said of all topics
        self._known_at = -1  # the change of metadata that `_known` was asked after
        self._manager_is_here = False
        self._beating: asyncio.Task[None] | None = None
        self.joined = asyncio.Event()

    @property
    def cluster_id(self) -> str:
        """Empty until this broker has joined a cluster for the first time."""
        return self._members.cluster_id

    @property
    def handlers(self) -> dict[type[msgspec.Struct], Any]:
        """What is asked of this broker and known by the manager."""
        return {
            GetMetadata: self._get_metadata,
            CreateTopic: self._change_topics,
            DeleteTopic: self._change_topics,
            AddPartitions: self._pass_on,
            AlterTopic: self._pass_on,
            GetConsumers: self._pass_on,
            RemoveBroker: self._pass_on,
            Rebalance: self._pass_on,
            GetMoves: self._pass_on,
            TakeIn: self._take_in,
            **dict.fromkeys(MANAGER_KINDS.values(), self._pass_on),
            **dict.fromkeys(GROUP_REQUESTS, self._pass_on),
        }

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self, address: str, disk_id: int, adopt: Callable[[str], None]) -> None:
        """Joins, or goes on with what is known of an earlier time. `adopt` is told to which cluster we belong.

        Raises InvalidRequestError when the manager refuses us.
        """
        self._adopt = adopt
        self._address = address
        self._disk_id = disk_id
        if self._members.cluster_id:
            self._use(self._members)
        while not self.joined.is_set():
            try:
                await self._join_any()
            except InvalidRequestError:
                raise
            except QuiverError as error:
                if self._members.cluster_id:
                    logger.warning("manager_away error=%r", error.message)
                    break
                await asyncio.sleep(_RETRY_S)
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    async def stop(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beating
        await self._link.close()

    async def _beat(self) -> None:
        told = ""
        loop = asyncio.get_running_loop()
        hurry_until_s = loop.time() + _HURRY_S
        while True:
            # Brokers that start together should not wait a whole heartbeat to hear of each other.
            await asyncio.sleep(min(_RETRY_S, self._heartbeat_s) if loop.time() < hurry_until_s else self._heartbeat_s)
            try:
                await self._join_any()
                told = ""
            except BrokerRemovedError as error:
                self._manager_is_here = False
                logger.error("removed error=%r", error.message)
                self._on_removed(error)
                return
            except QuiverError as error:
                self._manager_is_here = False
                if error.message != told:
                    told = error.message
                    logger.warning("manager_away error=%r", told)

    async def _join_any(self) -> None:
        """Each manager is asked once."""
        for left in reversed(range(len(self._link.addresses))):
            try:
                await self._join()
                return
            except UnavailableError:
                if not left:
                    raise

    async def _join(self) -> None:
        request = JoinCluster(self._me, self._address, self._disk_id, self._members.cluster_id)
        reply, _ = await self._link.call(request)
        assert isinstance(reply, JoinReply)
        self._manager_is_here = True
        self._link.add(reply.managers)
        members = Members(reply.cluster_id, sorted(reply.brokers, key=lambda node: node.id), sorted(reply.managers))
        if members != self._members or not self.joined.is_set():
            self._use(members)
        if members != self._members:
            self._members = members
            self._save()
        if not self.joined.is_set():
            logger.info("joined cluster=%s brokers=%d", members.cluster_id, len(members.brokers))
            self.joined.set()
        if reply.transaction != self._known_at:
            self._known = await self._ask_metadata(GetMetadata())
            self._known_at = reply.transaction

    def _use(self, members: Members) -> None:
        self._adopt(members.cluster_id)
        self._peers.cluster_id = members.cluster_id
        self._peers.set_addresses({node.id: node.address for node in members.brokers})

    def _save(self) -> None:
        try:
            write_atomically(self._disk, self._path, msgspec.json.encode(self._members))
        except OSError as error:  # only a start without the manager needs it; the next change is written again
            logger.warning("members_not_saved error=%r", str(error))

    # -- what clients ask ----------------------------------------------------------------------------------------

    async def _ask_metadata(self, request: GetMetadata) -> MetadataReply:
        reply, _ = await self._link.call(request, timeout_s=_METADATA_TIMEOUT_S)
        assert isinstance(reply, MetadataReply)
        return reply

    async def _get_metadata(self, request: GetMetadata, payload: memoryview, flow: Flow) -> Reply:
        await flow.until_writable()
        found: MetadataReply | None = None
        for _ in self._link.addresses if self._manager_is_here else ():
            try:
                found = await self._ask_metadata(request)
                break
            except UnavailableError:
                continue
        self._manager_is_here = found is not None
        if found is None:
            wanted = None if request.topics is None else set(request.topics)
            # The catalog also has what was made since the manager was last asked, and outlives a restart.
            known = {topic.name: topic for topic in (*self._topics(), *self._known.topics)}
            topics = [topic for name, topic in known.items() if wanted is None or name in wanted]
            if wanted is not None and len(topics) < len(wanted):
                # To say that a topic does not exist would make clients give up; it may have been made just now.
                raise UnavailableError("the manager is away, and not all of these topics were known before")
            nodes, managers = self._known.nodes or self._members.brokers, self._known.managers
            all_names = list(known) if request.names else []
            found = MetadataReply(self._members.cluster_id, nodes, topics, managers, names=all_names)
        return msgspec.structs.replace(found, topics=self._with_leaders(found.topics)), ()

    def _with_leaders(self, topics: list[TopicInfo]) -> list[TopicInfo]:
        leaders = self._leaders()
        return [
            msgspec.structs.replace(
                topic,
                partitions=tuple(
                    PartitionInfo(part.id, leaders.get((topic.name, part.id), part.leader), part.replicas)
                    for part in topic.partitions
                ),
            )
            for topic in topics
        ]

    async def _take_in(self, request: TakeIn, payload: memoryview, flow: Flow) -> Reply:
        """It has managers already, and goes on with these."""
        return TakenIn(self._me, self._address, self._members.cluster_id), ()

    async def _change_topics(self, request: CreateTopic | DeleteTopic, payload: memoryview, flow: Flow) -> Reply:
        from_manager = request.uids if isinstance(request, CreateTopic) else request.uid
        if from_manager:
            reply: Reply = await self._serve(request, payload, flow)
            return reply
        return await self._pass_on(request, payload, flow)

    async def _pass_on(self, request: msgspec.Struct, payload: memoryview, flow: Flow) -> Reply:
        if not self._manager_is_here:
            raise UnavailableError("topics and brokers cannot be changed now: the manager is away")
        try:
            return await self._link.call(request)
        except (ConnectionLostError, RequestTimeoutError) as error:
            raise type(error)(f"the manager may or may not have done it: {error.message}") from error
