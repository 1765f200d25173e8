"""A link between two nodes, over real sockets: one connection at a time, made anew when it was lost."""

from __future__ import annotations

import asyncio

import pytest

from quiver.config import NetSettings
from quiver.errors import ConnectionLostError, QuiverError, RequestTimeoutError
from quiver.net.remote_link import RemoteLink
from quiver.net.server import Server
from quiver.wire.messages import PositionReply
from tests.net.kit import HELLO_REPLY, Puppet, Run, ask, serving, until


def test_requests_share_one_connection(run: Run) -> None:
    async def main() -> None:
        async with serving() as (_, address):
            link = RemoteLink(address, "test")
            assert not link.is_open
            answers = await asyncio.gather(*(link.call(ask("echo", number), b"%d" % number) for number in range(1, 20)))
            assert [(reply, bytes(payload[0])) for reply, payload in answers] == [
                (PositionReply(number), b"%d" % number) for number in range(1, 20)
            ]
            assert (link.connections, link.is_open) == (1, True)
            await link.close()

    run(main())


def test_what_the_other_end_says_no_to_is_told_and_breaks_nothing(run: Run) -> None:
    async def main() -> None:
        async with serving() as (puppet, address):
            link = RemoteLink(address, "test")
            puppet.error = QuiverError("no")
            with pytest.raises(QuiverError, match="no"):
                await link.call(ask("fail", 1))
            assert (await link.call(ask("echo", 2)))[0] == PositionReply(2)
            assert link.connections == 1
            await link.close()

    run(main())


def test_a_new_connection_is_made_after_a_loss_and_counted(run: Run) -> None:
    async def main() -> None:
        async with serving() as (puppet, address):
            link = RemoteLink(address, "test")
            lost = asyncio.create_task(link.call(ask("wait", 1)))
            await until(lambda: puppet.started)
            link.drop()
            with pytest.raises(ConnectionLostError):
                await lost
            assert (await link.call(ask("echo", 2)))[0] == PositionReply(2)
            assert link.connections == 2
            await link.close()
            with pytest.raises(ConnectionLostError):
                await link.call(ask("echo", 3))

    run(main())


def test_nobody_there_is_told_at_once_and_found_when_it_comes(run: Run) -> None:
    async def main() -> None:
        server = Server(NetSettings(), HELLO_REPLY, Puppet())
        port = await server.start("127.0.0.1", 0)
        await server.stop(0.0)
        link = RemoteLink(f"127.0.0.1:{port}", "test")
        answers = await asyncio.gather(*(link.call(ask("echo", 1)) for _ in range(5)), return_exceptions=True)
        assert all(isinstance(answer, ConnectionLostError) for answer in answers)
        server = Server(NetSettings(), HELLO_REPLY, Puppet())
        await server.start("127.0.0.1", port)
        assert (await link.call(ask("echo", 2)))[0] == PositionReply(2)
        await link.close()
        await server.stop(0.0)

    run(main())


def test_a_frozen_other_end_costs_one_time_out_and_the_others_are_told(run: Run) -> None:
    async def main() -> None:
        async with serving() as (puppet, address):
            link = RemoteLink(address, "test")
            patient = asyncio.create_task(link.call(ask("wait", 1)))
            await until(lambda: puppet.started)
            with pytest.raises(RequestTimeoutError):
                await link.call(ask("wait", 2), timeout_s=0.05)
            with pytest.raises(ConnectionLostError):
                await patient
            assert (await link.call(ask("echo", 3)))[0] == PositionReply(3)
            await link.close()

    run(main())


def test_another_node_at_that_address_is_not_taken_for_the_right_one(run: Run) -> None:
    async def main() -> None:
        async with serving() as (_, address):
            link = RemoteLink(address, "test", HELLO_REPLY.node_id + 1)
            with pytest.raises(ConnectionLostError, match="is broker 7, not broker 8"):
                await link.call(ask("echo", 1))
            assert not link.is_open
            await link.close()

    run(main())


def test_one_who_gives_up_does_not_break_the_connection_of_the_others(run: Run) -> None:
    async def main() -> None:
        async with serving() as (_, address):
            link = RemoteLink(address, "test")
            calls = [asyncio.create_task(link.call(ask("echo", number))) for number in (1, 2)]
            await asyncio.sleep(0)
            calls[0].cancel()
            assert (await calls[1])[0] == PositionReply(2)
            await link.close()

    run(main())
