"""Bytes that are not our protocol, at our port."""

from __future__ import annotations

import logging
import random

import pytest

import quiver.net.server
from quiver.config import NetSettings
from quiver.wire.packet import encode_prefix
from tests.net.kit import RawClient, Run, ask, connected, echo, encode_request, serving, until

HTTP = b"GET /topics HTTP/1.1\r\nHost: 127.0.0.1:9400\r\nUser-Agent: curl/8\r\n\r\n"
TLS = b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03" + bytes(range(190))
STRANGERS = {"http": HTTP, "tls": TLS, "random": random.Random(5).randbytes(10_000), "zeros": bytes(5000)}


# Not zeros after a hello: those are empty packets of an unknown kind, and answered so.
@pytest.mark.parametrize(
    ("name", "after_hello"), [(n, a) for n in STRANGERS for a in (False, True) if (n, a) != ("zeros", True)]
)
def test_stranger_closes_only_its_connection_and_the_reason_is_logged(
    run: Run, name: str, after_hello: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving() as (_, address), connected(address) as other:
            async with await RawClient.open(address) as client:
                if after_hello:
                    await client.hello()
                await client.send(STRANGERS[name])
                while (packet := await client.packet()) is not None:
                    assert after_hello and packet.flags == 3, "at most errors for what looks like packets"
            await echo(other)

    with caplog.at_level(logging.INFO, "quiver.net"):
        run(main())
    messages = [record.getMessage() for record in caplog.records]
    closed = [message for message in messages if message.startswith("connection_closed") and "stopping" not in message]
    assert len(closed) == 1
    assert "peer=('127.0.0.1'" in closed[0]
    assert "not our protocol" in closed[0] or "bad handshake" in closed[0]


def test_request_header_that_is_no_msgpack_closes_the_connection(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving() as (_, address), connected(address) as other:
            async with await RawClient.open(address) as client:
                await client.hello()
                await client.send(encode_prefix(14, 0, 1, b"\xc1\xc1", 0))
                assert await client.packet() is None
            await echo(other)

    with caplog.at_level(logging.INFO, "quiver.net"):
        run(main())
    assert any("not our protocol" in record.getMessage() for record in caplog.records)


def test_cut_off_and_reset_connections_are_forgotten(run: Run) -> None:
    async def main() -> None:
        async with serving(NetSettings(connections_max=5)) as (puppet, address), connected(address) as other:
            whole = encode_request(ask("wait", 1), 1, bytes(100_000))
            for length in (1, 24, 40, len(whole) - 1, len(whole)):
                client = await RawClient.open(address)
                await client.hello()
                await client.send(whole[:length])
                if length == len(whole):
                    await until(lambda: puppet.waiting)
                client.reset()
                await echo(other)
            await until(lambda: puppet.waiting[1].cancelled(), "the request of the reset connection ends")

    run(main())


def test_flood_of_strangers_does_not_flood_the_log(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiver.net.server, "_SWEEP_S", 0.2)

    async def main() -> None:
        async with serving() as (_, address), connected(address) as other:
            for _ in range(200):
                async with await RawClient.open(address) as client:
                    await client.send(HTTP)
                    assert await client.packet() is None
            await until(lambda: sum(told()) == 200, "each to be counted")
            await echo(other)

    def told() -> tuple[int, int]:
        """Those named in the log and those only counted there."""
        messages = [record.getMessage() for record in caplog.records]
        named = sum(m.startswith("connection_closed") and "not our protocol" in m for m in messages)
        return named, sum(int(m.rpartition("=")[2]) for m in messages if m.startswith("connections_closed"))

    with caplog.at_level(logging.INFO, "quiver.net"):
        run(main())
    assert told()[0] < 100
