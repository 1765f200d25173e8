"""Connections of the real SDK to simulated nodes: what `quiver.net.connection` opens, without sockets.

Rule: a request ends as on a real one: in a reply, an error, a lost connection or silence.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from quiver.errors import ConnectionLostError, QuiverError, RequestTimeoutError, error_from_wire
from quiver.testing.sim.network import Network
from quiver.testing.sim.node import Node
from quiver.testing.sim.world import VirtualLoop, World
from quiver.wire.messages import Done, Ping
from quiver.wire.packet import Memory


class Connections:
    """All that are open, and what stands behind each address."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self.world = world
        self.chance = chance
        self.nodes: dict[str, tuple[Network, Node]] = {}
        self._open: dict[SimulatedConnection, None] = {}

    def add(self, address: str, network: Network, node: Node) -> None:
        self.nodes[address] = network, node
        network.on_death = self._died

    async def open(
        self, address: str, client: str, *, timeout_s: float, memory: Memory = bytearray
    ) -> SimulatedConnection:
        """As `quiver.net.connection.open_connection`."""
        connection = SimulatedConnection(self, address)
        await connection.call(Ping(), Done, timeout_s=timeout_s)
        self._open[connection] = None
        return connection

    def closed(self, connection: SimulatedConnection) -> None:
        self._open.pop(connection, None)

    def _died(self, node: Node) -> None:
        for connection in [one for one in self._open if one.node is node]:
            self.closed(connection)
            self.world.after(self.chance.uniform(0.001, 0.1), connection.loop, connection.lost)


class SimulatedConnection:
    def __init__(self, connections: Connections, address: str) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.address = address
        self.loop = loop
        self.is_open = True
        self.heard = 0
        self._connections = connections
        self._network, self.node = connections.nodes[address]
        self._life = self.node.life
        self._waiting: dict[int, asyncio.Future[tuple[Any, bytes]]] = {}
        self._count = 0

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def submit(self, request: Any, payload: Sequence[Any] = ()) -> asyncio.Future[tuple[Any, bytes]]:
        future: asyncio.Future[tuple[Any, bytes]] = self.loop.create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, whoever still waits
        if self.node.life != self._life or not self.node.is_alive:
            self.close()  # what is sent to a process that is gone comes back
        if not self.is_open:
            future.set_exception(ConnectionLostError(f"the connection to {self.address} is closed"))
            return future
        self._count += 1
        number = self._count
        self._waiting[number] = future

        def reply(answer: Any, frames: bytes) -> None:
            network = self._network
            if not (network.loss and self._connections.chance.random() < network.loss):
                self._connections.world.after(network.delay(), self.loop, self._arrived, number, answer, frames)

        if isinstance(request, Ping):
            self._network.carry(self.node, reply, Done(), b"")
        else:
            self._network.carry(self.node, self.node.request, request, b"".join(payload), reply)
        return future

    def _arrived(self, number: int, answer: Any, frames: bytes) -> None:
        self.heard += 1
        future = self._waiting.pop(number, None)
        if future is None or future.done():
            return
        if isinstance(answer, QuiverError):
            future.set_exception(error_from_wire(answer.code, answer.message, answer.facts))
        else:
            future.set_result((answer, frames))

    async def call(
        self, request: Any, reply_type: type[Any], payload: Sequence[Any] = (), *, timeout_s: float
    ) -> tuple[Any, memoryview]:
        future = self.submit(request, payload)
        try:
            async with asyncio.timeout(timeout_s):
                answer, frames = await future
        except TimeoutError as error:
            raise RequestTimeoutError(f"no reply from {self.address} to {type(request).__name__}") from error
        return answer, memoryview(frames)

    def lost(self) -> None:
        """Nobody is at the other end any more."""
        self.is_open = False
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(ConnectionLostError(f"the connection to {self.address} was lost"))

    def close(self) -> None:
        self._connections.closed(self)
        self.lost()

    abort = close
