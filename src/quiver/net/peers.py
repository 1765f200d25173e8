"""The links between brokers: one connection for each pair, carrying the Raft messages of all their partitions.

The broker with the lower id dials, with a growing back-off; both sides send. What is said to one broker in one turn of
the loop leaves together, so that the heartbeats of a thousand groups are one packet. A link that has nothing to carry
says that it is there; one that is silent too long is lost, and groups that are quiet learn it from `on_link`.

Rule: a link may lose messages, whole ones, and never waits. What cannot be sent now is dropped; Raft sends it again.
Trouble on one link is that link's alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from quiver.config import NetSettings
from quiver.errors import InvalidRequestError, ProtocolError, QuiverError, UnavailableError
from quiver.net.connection import Connection, shake_hands
from quiver.net.protocol import Buffer, PacketProtocol
from quiver.raft.messages import AnyMessage, decode_message, encode_message
from quiver.wire.messages import KIND_OF, NODE_CLIENT, Done, decode_request
from quiver.wire.packet import FLAG_REPLY, Packet
from quiver.wire.peer_messages import PeerHello, PeerMessages, PeerPing

logger = logging.getLogger("quiver.peers")

_MESSAGE_OVERHEAD_BYTES: Final = 24  # of one message in a packet's header, beside its uid and itself
_HANDSHAKE_TIMEOUT_S: Final = 2.0
_CHECKS_PER_PING: Final = 4
_MESSAGES_KIND: Final = KIND_OF[PeerMessages]

_Entry = tuple[str, bytes, int]


class PeerLink:
    """One side of a connection between two brokers. `up` once both have agreed on it."""

    def __init__(self, peers: Peers, broker: int, carrier: PacketProtocol, address: str = "") -> None:
        self._peers = peers
        self._carrier = carrier
        self._loop = asyncio.get_running_loop()
        self._entries: list[_Entry] = []
        self._frames: list[Buffer] = []
        self._pending_bytes = 0
        self._flushing = False
        self.broker = broker
        self.address = address  # that was dialled; empty when the other side did
        self.up = False
        self.ended = asyncio.Event()
        self.heard_at_s = self.sent_at_s = self._loop.time()

    # -- out -----------------------------------------------------------------------------------------------------

    def send(self, uid: str, message: AnyMessage, frames: Sequence[Buffer], now: bool) -> bool:
        encoded = encode_message(message)
        frames_bytes = sum(map(len, frames)) if frames else 0
        size = len(encoded) + len(uid) + _MESSAGE_OVERHEAD_BYTES + frames_bytes
        settings = self._peers.settings
        transport = self._carrier.transport
        if transport is None or transport.is_closing():
            return False
        if transport.get_write_buffer_size() + self._pending_bytes + size > settings.peer_buffer_bytes_max:
            return False
        if size > settings.frame_bytes_max:
            name = type(message).__name__
            logger.warning("peer_message_too_large broker=%d uid=%s kind=%s bytes=%d", self.broker, uid, name, size)
            return False
        if self._entries and self._pending_bytes + size > settings.peer_packet_bytes_max:
            self._flush_now()
        if now and not self._entries:
            self.sent_at_s = self._loop.time()
            self._carrier.send_packet(_MESSAGES_KIND, 0, 0, PeerMessages([(uid, encoded, frames_bytes)]), frames)
            return True
        self._entries.append((uid, encoded, frames_bytes))
        self._frames.extend(frames)
        self._pending_bytes += size
        if now:
            self._flush_now()
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)
        return True

    def _flush(self) -> None:
        self._flushing = False
        if self._entries and self._carrier.is_open:
            self._flush_now()

    def _flush_now(self) -> None:
        entries, frames = self._entries, self._frames
        self._entries, self._frames, self._pending_bytes = [], [], 0
        self.sent_at_s = self._loop.time()
        self._carrier.send_packet(_MESSAGES_KIND, 0, 0, PeerMessages(entries), frames)

    def check(self, now_s: float) -> None:
        """Says that we are there when nothing else did; ends a link on which nothing was heard."""
        settings = self._peers.settings
        if now_s - self.heard_at_s >= settings.peer_silence_s:
            self.close(f"silent for {settings.peer_silence_s:g} s")
        elif now_s - self.sent_at_s >= settings.peer_ping_s and self._carrier.is_open:
            self.sent_at_s = now_s
            self._carrier.send_packet(KIND_OF[PeerPing], 0, 0, PeerPing())

    # -- in ------------------------------------------------------------------------------------------------------

    def heard(self) -> None:
        self.heard_at_s = self._loop.time()

    def received(self, packet: Packet) -> None:
        """Raises ProtocolError or InvalidRequestError for what no broker sends."""
        self.heard_at_s = self._loop.time()
        request = decode_request(packet.kind, packet.header)
        if type(request) is not PeerMessages:
            if type(request) is not PeerPing:
                raise ProtocolError(f"{type(request).__name__} on a link between brokers")
            return
        if not self.up:
            self._peers.link_up(self)
        payload, start = packet.payload, 0
        for uid, encoded, frames_bytes in request.messages:
            end = start + frames_bytes
            if end > len(payload):
                break
            try:
                message = decode_message(encoded)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ProtocolError(f"a raft message that cannot be read: {error}") from error
            try:
                self._peers.on_message(uid, message, payload[start:end])
            except Exception:
                # One group's mistake; the messages behind this one are for others.
                logger.exception("on_message_failed uid=%s", uid)
            start = end
        else:
            if start == len(payload):
                return
        raise ProtocolError("the frames of a packet are not as long as it says")

    def close(self, reason: str) -> None:
        """Ends the link, with what was not yet sent."""
        if self._carrier.is_open and self._carrier.transport is not None:
            logger.info("peer_link_closed broker=%d reason=%r", self.broker, reason)
            self._carrier.transport.abort()
        self.lost()

    def lost(self) -> None:
        """The connection has ended, or is about to: nothing more comes from it."""
        self.ended.set()
        self._peers.link_down(self)


class _Dialled(Connection):
    """The client's end of a link: replies first, then what the other broker says."""

    link: PeerLink | None = None

    def carry(self, link: PeerLink, read_ended: Callable[[], None]) -> PeerLink:
        self.link, self._read_ended = link, read_ended
        return link

    def packet_received(self, packet: Packet) -> None:
        if self.link is None or packet.flags & FLAG_REPLY:
            super().packet_received(packet)
            return
        try:
            self.link.received(packet)
        except QuiverError as error:
            self.link.close(f"not our protocol: {error}")

    def part_received(self) -> None:
        if self.link is not None:
            self.link.heard()

    def protocol_failed(self, error: ProtocolError) -> None:
        if self.link is not None:
            self.link.close(f"not our protocol: {error}")
        super().protocol_failed(error)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.link is not None:
            self.link.lost()


class Peers:
    """All links of broker `me`. `Server(..., peers=...)` takes those that others dial.

    `on_message` and `on_link` are called on the loop, `on_link(broker, True)` before the first message of a link;
    `on_read` after the last message that came together.
    """

    def __init__(self, me: int, settings: NetSettings, node_id_of: Callable[[int], int] = int) -> None:
        """`node_id_of` says what a peer calls itself in its hello: managers are no brokers."""
        self.me = me
        self._node_id_of = node_id_of
        self.settings = settings
        self.cluster_id = ""  # known once the broker has joined; until then nobody is let in
        self.on_message: Callable[[str, AnyMessage, memoryview], None] = lambda uid, message, frames: None
        self.on_read: Callable[[], None] = lambda: None
        self.on_link: Callable[[int, bool], None] = lambda broker, connected: None
        self._addresses: dict[int, str] = {}
        self._links: dict[int, PeerLink] = {}
        self._dialers: dict[int, asyncio.Task[None]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def connected(self) -> list[int]:
        """The brokers that can be reached now."""
        return list(self._links)

    def set_addresses(self, addresses: dict[int, str]) -> None:
        """Where all brokers are. New ones are dialled, those that are gone or have moved are dropped."""
        if self._closed:
            return
        old, self._addresses = self._addresses, {broker: at for broker, at in addresses.items() if broker != self.me}
        for broker, address in old.items():
            if self._addresses.get(broker) == address:
                continue
            link = self._links.get(broker)
            if link is not None and (broker not in self._addresses or link.address):
                link.close("it is no longer there")
            if (dialer := self._dialers.pop(broker, None)) is not None:
                dialer.cancel()
        loop = asyncio.get_running_loop()
        for broker in self._addresses:
            if self.me < broker and broker not in self._dialers:
                self._dialers[broker] = loop.create_task(self._dial(broker), name=f"peer {broker}")
        self._watch()

    def send(
        self, broker: int, uid: str, message: AnyMessage, frames: Sequence[Buffer] = (), *, now: bool = False
    ) -> bool:
        """False: there is no link or it is full, and the message is dropped. Frames must not change until they left.

        `now`: somebody waits for it, and it goes with what was said to that broker in this turn before."""
        link = self._links.get(broker)
        return link is not None and link.send(uid, message, frames, now)

    async def close(self) -> None:
        self._closed = True
        tasks = [*self._dialers.values(), *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in list(self._links.values()):
            link.close("this broker stops")

    # -- links come and go ---------------------------------------------------------------------------------------

    def accept(self, hello: PeerHello, carrier: PacketProtocol) -> PeerLink:
        """The server's end of a link that another broker dialled. Raises when it may not."""
        if self._closed or not self.cluster_id:
            raise UnavailableError(f"broker {self.me} is not part of a cluster now")
        if hello.cluster_id != self.cluster_id:
            raise InvalidRequestError(
                f"broker {hello.broker_id} belongs to cluster {hello.cluster_id}, "
                f"broker {self.me} to cluster {self.cluster_id}"
            )
        if hello.broker_id >= self.me:
            raise InvalidRequestError(f"broker {hello.broker_id} does not dial broker {self.me}: the lower id does")
        link = PeerLink(self, hello.broker_id, carrier)
        self.link_up(link)
        self._watch()
        return link

    def link_up(self, link: PeerLink) -> None:
        if link.up or self._closed:
            return
        if (old := self._links.get(link.broker)) is not None:
            old.close("there is a newer connection")
        link.up = True
        self._links[link.broker] = link
        logger.info("peer_connected broker=%d", link.broker)
        self._tell(link.broker, True)

    def link_down(self, link: PeerLink) -> None:
        if self._links.get(link.broker) is link:
            del self._links[link.broker]
            logger.info("peer_lost broker=%d", link.broker)
            self._tell(link.broker, False)

    def _tell(self, broker: int, connected: bool) -> None:
        try:
            self.on_link(broker, connected)
        except Exception:
            logger.exception("on_link_failed broker=%d", broker)

    def read_ended(self) -> None:
        try:
            self.on_read()
        except Exception:
            logger.exception("on_read_failed")

    # -- the lower id dials --------------------------------------------------------------------------------------

    async def _dial(self, broker: int) -> None:
        settings = self.settings
        pause_s, told = settings.peer_backoff_s_min, ""
        while True:
            try:
                link = await self._connect(broker)
            except QuiverError as error:
                if error.message != told:  # said once, not at every try
                    logger.info("peer_not_reached broker=%d error=%r", broker, error.message)
                    told = error.message
            else:
                pause_s, told = settings.peer_backoff_s_min, ""
                try:
                    await link.ended.wait()
                finally:
                    link.close("it is no longer dialled")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, settings.peer_backoff_s_max)

    async def _connect(self, broker: int) -> PeerLink:
        address = self._addresses[broker]
        timeout_s = min(_HANDSHAKE_TIMEOUT_S, self.settings.handshake_timeout_s)
        connection = await shake_hands(_Dialled(address), f"{NODE_CLIENT}broker-{self.me}", timeout_s=timeout_s)
        try:
            found = connection.limits.node_id
            if found != self._node_id_of(broker):
                raise UnavailableError(f"{address} is broker {found}, not broker {broker}")
            # Before the reply: the other side may send at once, and its first words may come in the same read.
            link = connection.carry(PeerLink(self, broker, connection, address), self.read_ended)
            await connection.call(PeerHello(self.me, self.cluster_id), Done, timeout_s=timeout_s)
        except BaseException:
            connection.abort()
            raise
        if not connection.is_open:
            raise UnavailableError(f"the connection to broker {broker} ended at once")
        self.link_up(link)
        return link

    # -- silence -------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._check_links(), name="peer watch")

    async def _check_links(self) -> None:
        loop = asyncio.get_running_loop()
        step_s = self.settings.peer_ping_s / _CHECKS_PER_PING
        while True:
            before_s = loop.time()
            await asyncio.sleep(step_s)
            now_s = loop.time()
            late = now_s - before_s > step_s + self.settings.peer_silence_s / 2
            for link in list(self._links.values()):
                if late:
                    link.heard_at_s = now_s  # it was we who did not listen; what came meanwhile waits in the socket
                link.check(now_s)
