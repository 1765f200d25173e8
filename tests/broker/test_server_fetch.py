"""Fetching from a whole broker: waiting, limits, and what a slow consumer costs."""

from __future__ import annotations

import asyncio
import dataclasses
import weakref

import pytest

from quiver.broker.partition import Partition
from quiver.config import MIB, NetSettings
from quiver.errors import OffsetOutOfRangeError
from quiver.testing.faulty_disk import FaultyDisk
from quiver.wire.frame import HEADER_BYTES, walk_frames
from quiver.wire.messages import Fetch
from tests.broker.server_kit import SETTINGS, broker, connected, run, running, until
from tests.net.kit import HELLO, RawClient, encode_request
from tests.wire.kit import make_payload

SMALL = dataclasses.replace(SETTINGS, message_bytes_max=10_000, batch_bytes_max=50_000, fetch_bytes_max=4000)
PAYLOAD = make_payload(3)


def test_fetch_at_the_end_waits_and_is_woken_by_a_commit() -> None:
    async def main() -> None:
        async with broker(FaultyDisk(0)) as client:
            await client.create()
            waiting = asyncio.ensure_future(client.fetch(0, wait_ms=60_000))
            await client.status()
            assert not waiting.done()
            await client.produce()
            assert await waiting == [PAYLOAD]

    run(main())


def test_fetch_waits_until_there_are_enough_bytes() -> None:
    async def main() -> None:
        async with broker(FaultyDisk(0)) as client:
            await client.create()
            frame = HEADER_BYTES + len(PAYLOAD)
            waiting = asyncio.ensure_future(client.fetch(0, wait_ms=60_000, bytes_min=2 * frame + 1))
            for _ in range(2):
                await client.produce()
                await client.status()
                assert not waiting.done()
            await client.produce()
            assert await waiting == [PAYLOAD] * 3

    run(main())


def test_fetch_sees_what_is_committed_while_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Partition.read

    async def main() -> None:
        async with broker(FaultyDisk(0)) as client:
            await client.create()
            await client.produce()
            produced = 0

            async def read_slowly(self: Partition, offset: int, bytes_max: int) -> memoryview:
                nonlocal produced
                data = await read(self, offset, bytes_max)
                if produced < 2:
                    produced += 1
                    await client.produce()
                return data

            monkeypatch.setattr(Partition, "read", read_slowly)
            frame = HEADER_BYTES + len(PAYLOAD)
            assert await client.fetch(0, wait_ms=60_000, bytes_min=2 * frame + 1) == [PAYLOAD] * 3

    run(main())


def test_fetch_gives_what_there_is_when_its_time_is_over() -> None:
    async def main() -> None:
        async with broker(FaultyDisk(0)) as client:
            await client.create()
            assert await client.fetch(0) == [], "no wait, nothing there"
            await client.produce()
            clock = asyncio.get_running_loop().time
            started_s = clock()
            assert await client.fetch(0, bytes_min=10**6) == [PAYLOAD]
            assert clock() - started_s < 5
            started_s = clock()
            assert await client.fetch(0, bytes_min=10**6, wait_ms=50) == [PAYLOAD]
            assert clock() - started_s >= 0.045
            assert await client.fetch(3, wait_ms=20) == []
            assert await client.fetch(3, bytes_min=0, wait_ms=60_000) == []

    run(main())


def test_wait_and_size_of_a_fetch_have_the_brokers_limits() -> None:
    async def main() -> None:
        settings = dataclasses.replace(SMALL, fetch_wait_ms_max=20)
        async with broker(FaultyDisk(0), settings) as client:
            await client.create()
            assert await client.fetch(0, wait_ms=3_600_000) == []
            for _ in range(20):
                await client.produce()
            _, raw = await client.fetch_raw(Fetch("logs", 0, 0, 2**31 - 1, 2**31 - 1, 3_600_000))
            assert 0 < len(raw) <= 4000
            _, raw = await client.fetch_raw(Fetch("logs", 0, 0, 1))
            assert len(list(walk_frames(raw))) == 1, "always at least one batch"

    run(main())


@pytest.mark.parametrize("offset", [4, 2**63 - 1])
def test_fetch_outside_the_log_says_the_valid_range(offset: int) -> None:
    async def main() -> None:
        async with broker(FaultyDisk(0)) as client:
            await client.create()
            await client.produce()
            with pytest.raises(OffsetOutOfRangeError) as caught:
                await client.fetch(offset, wait_ms=60_000)
            assert (caught.value.facts["earliest"], caught.value.facts["latest"]) == (0, 3)

    run(main())


def test_fetch_that_waits_holds_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held(bytearray):
        pass

    read = Partition.read
    alive: list[weakref.ref[Held]] = []

    async def read_and_watch(self: Partition, offset: int, bytes_max: int) -> memoryview:
        held = Held(await read(self, offset, bytes_max))
        alive.append(weakref.ref(held))
        return memoryview(held)

    monkeypatch.setattr(Partition, "read", read_and_watch)

    async def main() -> None:
        async with broker(FaultyDisk(0)) as client:
            await client.create()
            await client.produce()
            waiting = [asyncio.ensure_future(client.fetch(0, wait_ms=60_000, bytes_min=3000)) for _ in range(10)]
            await until(
                lambda: len(alive) == 10 and not any(reference() for reference in alive), "the data to be let go"
            )
            for _ in range(5):
                await client.produce()
            for found in await asyncio.gather(*waiting):
                assert len(found) >= 4

    run(main())


def test_slow_consumer_with_many_fetches_is_read_for_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Partition.read
    reads = 0

    async def read_and_count(self: Partition, offset: int, bytes_max: int) -> memoryview:
        nonlocal reads
        reads += 1
        return await read(self, offset, bytes_max)

    monkeypatch.setattr(Partition, "read", read_and_count)

    async def main() -> None:
        settings = dataclasses.replace(SETTINGS, net=NetSettings(write_buffer_bytes_max=MIB))
        async with (
            running(FaultyDisk(0), settings) as node,
            connected(node) as other,
            await RawClient.open(node.address, receive_buffer_bytes=4096) as slow,
        ):
            await other.create()
            payload = make_payload(2000)
            await other.produce(payload, 2000)
            await slow.send(encode_request(HELLO, 1))
            assert await slow.packet() is not None
            fetches = b"".join(encode_request(Fetch("logs", 0, 0, MIB), number) for number in range(2, 602))
            await slow.send(fetches)
            quiet, seen = 0, 0
            while quiet < 30:  # until nothing more is read for it
                await other.status()
                await other.fetch(0, bytes_max=1)
                quiet, seen = quiet + 1 if reads == seen + 1 else 0, reads
            # Its buffer, the four readers, and what the system takes in: nothing like six hundred.
            assert reads - quiet < 16 * MIB // len(payload) < 300
            for _ in range(5):
                packet = await slow.packet()
                assert packet is not None and len(packet.payload) > len(payload)

    run(main())
