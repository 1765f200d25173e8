"""A TCP proxy between clients and one node that cuts connections at a chosen step of an exchange.

It knows packets: a cut is asked for by the kind of request and the step, so that "the reply got lost" is a fact and not
a matter of timing. Addresses in metadata are rewritten, so that clients come back through the proxy.

Rule: it forwards bytes as they are, or cuts; it never changes what a request or a reply says, metadata apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import struct
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
from msgspec import Struct

from quiver.types import NodeInfo
from quiver.wire.messages import KIND_OF, GetMetadata, MetadataReply, Produce
from quiver.wire.packet import FLAG_ERROR, PREFIX_BYTES, encode_prefix

_PREFIX = struct.Struct("<IIQBB")


class Step(enum.Enum):
    BEFORE_REQUEST = "before the request is forwarded"
    IN_REQUEST = "in the middle of the request"
    AFTER_REQUEST = "right after the request, whatever the node makes of it"
    BEFORE_REPLY = "after the node has answered, before the reply is forwarded"
    IN_REPLY = "in the middle of the reply"
    AFTER_REPLY = "right after the reply, with others under way"


@dataclasses.dataclass(slots=True)
class _Cut:
    step: Step
    kind: int
    skip: int
    before: Callable[[], object]


class _Packet(NamedTuple):
    kind: int
    flags: int
    correlation: int
    header_bytes: int
    raw: bytes

    @classmethod
    async def read(cls, stream: asyncio.StreamReader) -> _Packet:
        prefix = await stream.readexactly(PREFIX_BYTES)
        length, header_bytes, correlation, kind, flags = _PREFIX.unpack_from(prefix)
        return cls(kind, flags, correlation, header_bytes, prefix + await stream.readexactly(length))

    def produce(self) -> Produce:
        return msgspec.msgpack.decode(self.raw[PREFIX_BYTES : PREFIX_BYTES + self.header_bytes], type=Produce)


class _Link:
    """One client's connection and its twin to the node. Whichever pump ends first ends both."""

    def __init__(
        self, proxy: Proxy, client: tuple[asyncio.StreamReader, asyncio.StreamWriter], upstream: tuple[str, int]
    ) -> None:
        self._proxy = proxy
        self._client_reader, self._client_writer = client
        self._upstream = upstream
        self._pending: dict[int, _Cut] = {}
        self.passing = asyncio.Event()
        self.passing.set()

    async def run(self) -> None:
        writers = [self._client_writer]
        pumps: list[asyncio.Task[None]] = []
        try:
            reader, writer = await asyncio.open_connection(*self._upstream)
            writers.append(writer)
            pumps = [asyncio.create_task(self._up(writer)), asyncio.create_task(self._down(reader))]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # no node: the client sees its connection end
        finally:
            self._proxy.put_back(self._pending.values())
            for pump in pumps:
                pump.cancel()
            for each in writers:
                each.close()  # what was written before still goes out
            await asyncio.gather(*pumps, return_exceptions=True)
            for each in writers:
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    async def _up(self, node: asyncio.StreamWriter) -> None:
        while True:
            await self.passing.wait()
            packet = await _Packet.read(self._client_reader)
            await self.passing.wait()
            if packet.kind == KIND_OF[Produce] and self._proxy.held(packet.produce()):
                await asyncio.Event().wait()  # until the proxy ends
            cut = self._proxy.match(packet.kind)
            if cut is not None and cut.step is Step.BEFORE_REQUEST:
                cut.before()
                return
            half = cut is not None and cut.step is Step.IN_REQUEST
            node.write(packet.raw[: len(packet.raw) // 2] if half else packet.raw)
            await node.drain()
            if cut is not None and cut.step in (Step.IN_REQUEST, Step.AFTER_REQUEST):
                cut.before()
                return
            if cut is not None:
                self._pending[packet.correlation] = cut

    async def _down(self, node: asyncio.StreamReader) -> None:
        while True:
            await self.passing.wait()
            packet = await _Packet.read(node)
            await self.passing.wait()
            if self._proxy.delay_s:
                await asyncio.sleep(self._proxy.delay_s)
            raw = packet.raw
            if packet.kind == KIND_OF[GetMetadata] and not packet.flags & FLAG_ERROR:
                raw = self._rewritten(packet)
            cut = self._pending.pop(packet.correlation, None)
            if cut is None or cut.step is Step.AFTER_REPLY:
                self._proxy.bytes_to_client += len(raw)  # first: the client may have read them before the next line
                self._client_writer.write(raw)
            elif cut.step is Step.IN_REPLY:
                self._client_writer.write(raw[: len(raw) // 2])
            if cut is not None:
                cut.before()
                return
            await self._client_writer.drain()

    def _rewritten(self, packet: _Packet) -> bytes:
        reply = msgspec.msgpack.decode(packet.raw[PREFIX_BYTES:], type=MetadataReply)
        nodes = [NodeInfo(node.id, self._proxy.address) for node in reply.nodes]
        managers = [msgspec.structs.replace(one, address=self._proxy.address) for one in reply.managers]
        header = msgspec.msgpack.encode(msgspec.structs.replace(reply, nodes=nodes, managers=managers))
        return encode_prefix(packet.kind, packet.flags, packet.correlation, header, 0)


class Proxy:
    """Runs in a thread of its own until its `with` block ends."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.rpartition(":")
        self._upstream = (host, int(port))
        self._cuts: list[_Cut] = []
        self._links: dict[_Link, asyncio.Task[None]] = {}
        self.requests: list[int] = []  # the kinds of the requests that came, in order
        self.connections = 0
        self.bytes_to_client = 0
        self.delay_s = 0.0  # each reply is kept so long
        self.held: Callable[[Produce], bool] = lambda _: False  # such batches, and what follows them, never pass
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname())

    # -- orders, from the test's thread --------------------------------------------------------------------------

    def cut(
        self, step: Step, request: type[Struct] = Produce, skip: int = 0, before: Callable[[], object] = lambda: None
    ) -> None:
        """Cuts the connection of the next such request, `skip` others later, at that step. Cuts queue up.

        `before` is called when the step is reached, as to kill the node.
        """
        self._cuts.append(_Cut(step, KIND_OF[request], skip, before))

    @property
    def cuts_left(self) -> int:
        return len(self._cuts)

    def is_cut_left(self, request: type[Struct]) -> bool:
        return any(cut.kind == KIND_OF[request] for cut in list(self._cuts))

    def count(self, request: type[Struct]) -> int:
        return self.requests.count(KIND_OF[request])

    def silence(self) -> None:
        """Connections that are open now stay open, and nothing is read or passed on them. New ones work."""

        async def silence() -> None:
            for link in self._links:
                link.passing.clear()

        asyncio.run_coroutine_threadsafe(silence(), self._loop).result(10)

    # -- on its loop ---------------------------------------------------------------------------------------------

    def match(self, kind: int) -> _Cut | None:
        self.requests.append(kind)
        for cut in self._cuts:
            if cut.kind == kind:
                if cut.skip:
                    cut.skip -= 1
                    return None
                self._cuts.remove(cut)
                return cut
        return None

    def put_back(self, cuts: Iterable[_Cut]) -> None:
        """These wait for a reply on a connection that another cut ended."""
        self._cuts[:0] = cuts

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        link = _Link(self, (reader, writer), self._upstream)
        task = asyncio.create_task(link.run())
        self._links[link] = task
        task.add_done_callback(lambda _: self._links.pop(link, None))

    async def _stop(self) -> None:
        self._server.close()
        links = list(self._links.values())
        for task in links:
            task.cancel()
        await asyncio.gather(*links, return_exceptions=True)
        await asyncio.sleep(0)  # the transports' own last callbacks

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
