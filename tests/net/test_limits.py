"""What happens at each limit of `NetSettings`: to the connection that reaches it, and to nobody else."""

from __future__ import annotations

import asyncio
import logging

import pytest

from quiver.config import NetSettings
from quiver.errors import OverloadedError
from quiver.net.connection import open_connection
from quiver.wire.messages import PositionReply
from tests.net.kit import TIMEOUT_S, RawClient, Run, ask, connected, echo, encode_request, serving, until

KIB = 1024
READ_BYTES = 64 * KIB  # what the server may take in with one read before it can stop


async def open_slow(address: str) -> RawClient:
    return await RawClient.open(address, receive_buffer_bytes=4096)


async def let_the_server_work(address: str) -> None:
    """Long enough for a server that reads on to show it."""
    async with connected(address) as other:
        for _ in range(20):
            await echo(other)


# -- requests in flight ----------------------------------------------------------------------------------------------


def test_server_stops_reading_at_the_limit_of_frames_and_goes_on_later(run: Run) -> None:
    async def main() -> None:
        async with serving(NetSettings(frames_in_flight_max=8)) as (puppet, address), connected(address) as connection:
            payload = bytes(READ_BYTES)  # larger than a read: the server sees one request at a time
            calls = [
                asyncio.ensure_future(
                    connection.call(ask("wait", number), PositionReply, (payload,), timeout_s=TIMEOUT_S)
                )
                for number in range(100)
            ]
            await until(lambda: len(puppet.waiting) == 8)
            await let_the_server_work(address)
            assert len(puppet.waiting) == 8
            for number in range(100):
                await until(lambda number=number: number in puppet.waiting)
                assert len(puppet.waiting) <= 8
                puppet.release(number)
            assert [reply.offset for reply, _ in await asyncio.gather(*calls)] == list(range(100))

    run(main())


def test_small_frames_pass_the_limit_by_one_read_at_most(run: Run) -> None:
    async def main() -> None:
        settings = NetSettings(frames_in_flight_max=4)
        async with serving(settings) as (puppet, address), await RawClient.open(address) as client:
            await client.hello()
            size = len(encode_request(ask("wait", 50_000), 1))
            flood = b"".join(encode_request(ask("wait", number), number) for number in range(50_000, 65_000))
            sending = asyncio.ensure_future(client.send(flood))
            most = 4 + READ_BYTES // size + 1
            released = 0
            while released < 2000:
                # One at a time: each answer is a chance to read on too early.
                await until(lambda: puppet.waiting)
                assert len(puppet.waiting) <= most
                puppet.release(min(puppet.waiting))
                released += 1
                packet = await client.packet()
                assert packet is not None and packet.correlation == 50_000 + released - 1
            sending.cancel()

    run(main())


def test_server_stops_reading_at_the_limit_of_bytes_and_goes_on_later(run: Run) -> None:
    async def main() -> None:
        settings = NetSettings(bytes_in_flight_max=1024 * KIB)
        async with serving(settings) as (puppet, address), connected(address) as connection:
            payload = bytes(300 * KIB)
            calls = [
                asyncio.ensure_future(
                    connection.call(ask("wait", number), PositionReply, (payload,), timeout_s=TIMEOUT_S)
                )
                for number in range(20)
            ]
            await until(lambda: len(puppet.waiting) == 4)
            await let_the_server_work(address)
            assert len(puppet.waiting) == 4, "the fourth request passed the limit"
            for number in range(20):
                await until(lambda number=number: number in puppet.waiting)
                assert len(puppet.waiting) <= 4
                puppet.release(number)
            await asyncio.gather(*calls)

    run(main())


def test_frame_over_the_limit_closes_only_its_connection(run: Run) -> None:
    async def main() -> None:
        async with serving(NetSettings(frame_bytes_max=10_000)) as (_, address), connected(address) as other:
            async with await RawClient.open(address) as client:
                await client.hello()
                await client.send(encode_request(ask("echo", 1), 1, bytes(9000)))
                assert await client.packet() is not None
                await client.send(encode_request(ask("echo", 1), 2, bytes(10_000))[:24])
                assert await client.packet() is None, "closed at the prefix, before the body is sent"
            await echo(other)

    run(main())


# -- connections -----------------------------------------------------------------------------------------------------


def test_connection_over_the_limit_is_told_so_and_others_go_on(run: Run) -> None:
    async def main() -> None:
        async with serving(NetSettings(connections_max=3)) as (_, address):
            kept = [await open_connection(address, "test", timeout_s=TIMEOUT_S) for _ in range(3)]
            for _ in range(50):
                with pytest.raises(OverloadedError, match="maximum of 3 connections"):
                    await open_connection(address, "test", timeout_s=TIMEOUT_S)
            for connection in kept:
                await echo(connection)
            kept.pop().close()
            while True:
                try:
                    kept.append(await open_connection(address, "test", timeout_s=TIMEOUT_S))
                    break
                except OverloadedError:
                    continue
            for connection in kept:
                await echo(connection)
                connection.close()

    run(main())


def test_clients_cannot_lock_other_nodes_out(run: Run) -> None:
    async def main() -> None:
        async with serving(NetSettings(connections_max=2, node_connections_max=2)) as (_, address):
            kept = [await open_connection(address, "test", timeout_s=TIMEOUT_S) for _ in range(2)]
            nodes = [await open_connection(address, "node:broker-2", timeout_s=TIMEOUT_S) for _ in range(2)]
            for name in ("test", "node:broker-3"):
                with pytest.raises(OverloadedError, match="maximum of 2 connections"):
                    await open_connection(address, name, timeout_s=TIMEOUT_S)
            for connection in (*kept, *nodes):
                await echo(connection)
                connection.close()

    run(main())


def test_many_that_come_at_once_are_admitted_up_to_the_limit(run: Run) -> None:
    async def main() -> None:
        async with serving(NetSettings(connections_max=10)) as (_, address):
            attempts = [open_connection(address, "test", timeout_s=TIMEOUT_S) for _ in range(40)]
            found = await asyncio.gather(*attempts, return_exceptions=True)
            admitted = [connection for connection in found if not isinstance(connection, BaseException)]
            refused = [error for error in found if isinstance(error, BaseException)]
            assert len(admitted) == 10
            assert {type(error) for error in refused} == {OverloadedError}
            for connection in admitted:
                connection.close()

    run(main())


# -- time-outs -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fast_sweep")
def test_connection_that_says_nothing_is_closed(run: Run) -> None:
    async def main() -> None:
        settings = NetSettings(handshake_timeout_s=0.5, idle_timeout_s=1000)
        async with serving(settings) as (_, address), connected(address) as other:
            async with await RawClient.open(address) as silent, await RawClient.open(address) as slow:
                await slow.send(b"\x20")
                assert await silent.packet() is None
                assert await slow.packet() is None
            await echo(other)  # who has said hello may be quiet

    run(main())


@pytest.mark.usefixtures("fast_sweep")
def test_idle_connection_is_closed_but_not_one_with_a_request_under_way(run: Run) -> None:
    async def main() -> None:
        async with serving(NetSettings(idle_timeout_s=0.5)) as (puppet, address), connected(address) as busy:
            call = asyncio.ensure_future(busy.call(ask("wait", 1), PositionReply, timeout_s=TIMEOUT_S))
            async with await RawClient.open(address) as idle, await RawClient.open(address) as dripping:
                await idle.hello()
                await dripping.hello()
                await dripping.send(encode_request(ask("echo", 1), 1)[:10])
                assert await idle.packet() is None
                assert await dripping.packet() is None, "a part of a frame is no sign of life"
            puppet.release(1)
            assert (await call)[0].offset == 1
            await until(lambda: not busy.is_open, "the connection is idle now")

    run(main())


# -- slow readers ----------------------------------------------------------------------------------------------------

SLOW = NetSettings(write_buffer_bytes_max=256 * KIB, slow_reader_timeout_s=0.1)


@pytest.mark.usefixtures("fast_sweep")
def test_slow_reader_is_held_back_then_cut_and_others_do_not_notice(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    def cut() -> bool:
        return any("does not read its replies" in record.getMessage() for record in caplog.records)

    async def main() -> None:
        async with serving(SLOW) as (puppet, address), connected(address) as other:
            async with await open_slow(address) as client:
                await client.hello()
                await client.send(b"".join(encode_request(ask("large", 128), number) for number in range(1000)))
                while not cut():
                    async with asyncio.timeout(60):
                        await echo(other)
                assert 0 < puppet.buffered_bytes_max <= 256 * KIB, "no reply is made while the buffer is over its limit"
                received = 0
                while (packet := await client.packet()) is not None:
                    received += len(packet.payload)
                assert received < 32 * KIB * KIB, "of 128 MB it gets what the system held for it"
            await echo(other)

    with caplog.at_level(logging.INFO, "quiver.net"):
        run(main())


@pytest.mark.usefixtures("fast_sweep")
def test_slow_reader_that_reads_in_time_gets_everything(run: Run) -> None:
    async def main() -> None:
        settings = NetSettings(write_buffer_bytes_max=256 * KIB, slow_reader_timeout_s=10)
        async with serving(settings) as (puppet, address), await open_slow(address) as client:
            await client.hello()
            count = 200
            requests = b"".join(encode_request(ask("large", 128), number) for number in range(count))
            sending = asyncio.ensure_future(client.send(requests))
            await until(lambda: puppet.buffered_bytes_max)
            await let_the_server_work(address)
            found = set()
            for _ in range(count):
                packet = await client.packet()
                assert packet is not None and len(packet.payload) == 128 * KIB
                found.add(packet.correlation)
            assert found == set(range(count))
            assert puppet.buffered_bytes_max <= 256 * KIB
            await sending

    run(main())


@pytest.mark.usefixtures("fast_sweep")
def test_connection_that_is_closing_but_not_read_is_cut_in_the_end(run: Run) -> None:
    async def main() -> None:
        settings = NetSettings(connections_max=1, slow_reader_timeout_s=0.1, write_buffer_bytes_max=64 * KIB * KIB)
        async with serving(settings) as (puppet, address), await open_slow(address) as client:
            await client.hello()
            await client.send(encode_request(ask("large", 20_000), 1))
            await until(lambda: puppet.started)
            await client.send(b"\xff" * 100)  # the server closes, and still has megabytes to deliver
            while True:
                try:
                    async with connected(address) as other:
                        await echo(other)
                    break
                except OverloadedError:
                    await asyncio.sleep(0.01)

    run(main())
