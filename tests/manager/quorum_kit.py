"""Several managers, and brokers if asked for, in one process: real sockets and files, quick elections."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from quiver.cli.cluster_nodes import BrokerNode, ManagerNode
from quiver.config import NetSettings, NodeSettings, RaftSettings
from quiver.errors import UnavailableError
from quiver.manager.http_server import HttpRequest
from quiver.manager.manager import Manager
from quiver.manager.quorum import MetadataQuorum
from quiver.net.remote_link import RemoteLink
from tests.manager.kit import until

QUICK = {
    "heartbeat_s": 0.05,
    "raft": RaftSettings(heartbeat_ms=20, election_ms=600),
    "net": NetSettings(peer_ping_s=0.05, peer_silence_s=2.0, peer_backoff_s_min=0.01, peer_backoff_s_max=0.05),
}


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        taken = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in taken]


class Managers:
    """Managers 1 to `count` on one data directory; `brokers` join them."""

    def __init__(self, path: Path, count: int = 3, **settings: Any) -> None:
        self.path = path
        self.settings = QUICK | settings
        self.ports = dict(enumerate(free_ports(count), 1))
        self.nodes: dict[int, ManagerNode] = {}
        self.brokers: dict[int, BrokerNode] = {}
        self.removed: dict[int, str] = {}  # those that learned so, and in which words

    def settings_of(self, number: int, **more: Any) -> NodeSettings:
        peers = ",".join(f"{other}=127.0.0.1:{port}" for other, port in self.ports.items())
        given = {"port": self.ports[number], "http_port": 0, "peers": peers} | self.settings | more
        return NodeSettings(str(self.path / "data"), number, **given)

    async def start(self, *numbers: int) -> None:
        """Returns when all of these are in touch with a primary."""
        starting = [asyncio.ensure_future(self.start_one(number)) for number in numbers or self.ports]
        await asyncio.wait_for(asyncio.gather(*starting), 20)

    async def start_one(self, number: int, **more: Any) -> None:
        told = functools.partial(self.removed.__setitem__, number)
        node = ManagerNode(self.settings_of(number, **more), lambda error: told(error.message))
        await node.start()
        self.nodes[number] = node

    async def start_brokers(self, count: int = 3) -> None:
        managers = ",".join(f"127.0.0.1:{port}" for port in self.ports.values())
        for number in range(1, count + 1):
            given = {"port": 0, "manager": managers} | self.settings
            broker = self.brokers[number] = BrokerNode(NodeSettings(str(self.path / "data"), number, **given))
            await broker.start()
        await until(lambda: all(len(self.quorum(one).state.brokers) >= count for one in self.nodes))

    async def stop(self, *numbers: int) -> None:
        await asyncio.gather(*(self.nodes.pop(number).stop() for number in numbers or list(self.nodes)))

    async def kill(self, number: int) -> None:
        """As if the process died: its connections end, nothing more is written."""
        node = self.nodes.pop(number)
        quorum = self.quorum_of(node)
        quorum.replica.raft.fail()
        for task in (quorum._owner, quorum.database._task, *quorum._tasks):
            if task is not None:
                task.cancel()
        quorum._stopping = True
        gone = UnavailableError("the connection ended")
        quorum._send_away(gone)
        for _, asker in quorum._inbox:
            asker.set_exception(gone)
        quorum._inbox.clear()
        quorum._owner = quorum.database._task = None
        await node.stop()

    def manager(self, number: int) -> Manager:
        return self.nodes[number]._manager

    @staticmethod
    def quorum_of(node: ManagerNode) -> MetadataQuorum:
        quorum = node._manager._quorum
        assert quorum is not None
        return quorum

    def quorum(self, number: int) -> MetadataQuorum:
        return self.quorum_of(self.nodes[number])

    @property
    def primary(self) -> int:
        leading = [number for number in self.nodes if self.quorum(number).leads]
        return leading[0] if len(leading) == 1 else 0

    async def until_led(self) -> int:
        await until(lambda: self.primary)
        return self.primary

    @property
    def secondaries(self) -> list[int]:
        return [number for number in self.nodes if number != self.primary]

    async def until_equal(self) -> None:
        """Until all have applied, and written to their databases, the same transactions."""

        def is_equal() -> bool:
            quorums = [self.quorum(number) for number in self.nodes]
            return len({one.state.applied for one in quorums}) == 1 and all(
                one.database.stored == one.state.applied for one in quorums
            )

        await until(is_equal)

    async def http(self, number: int, method: str, target: str, body: bytes = b"") -> tuple[int, bytes]:
        answer = await self.manager(number)._door.answer(
            HttpRequest(method, target.encode(), body, True, {b"content-type": b"application/json"})
        )
        return answer.status, answer.body

    async def ask(self, number: int, request: Struct) -> Any:
        link = RemoteLink(f"127.0.0.1:{self.ports[number]}", "test")
        try:
            return (await link.call(request))[0]
        finally:
            await link.close()

    async def close(self) -> None:
        """Brokers last, as everywhere: what a manager does at its end needs them."""
        await self.stop()
        await asyncio.gather(*(broker.stop() for broker in self.brokers.values()))


@contextlib.asynccontextmanager
async def managers(path: Path, count: int = 3, brokers: int = 0, **settings: Any) -> AsyncIterator[Managers]:
    made = Managers(path, count, **settings)
    try:
        await made.start()
        if brokers:
            await made.start_brokers(brokers)
        yield made
    finally:
        await made.close()


async def retried(call: Callable[[], Awaitable[Any]]) -> Any:
    """As a client does that knows that nothing was done, or that doing it twice does no harm."""
    deadline_s = asyncio.get_running_loop().time() + 60
    while True:
        try:
            return await call()
        except UnavailableError:
            assert asyncio.get_running_loop().time() < deadline_s
            await asyncio.sleep(0.02)
