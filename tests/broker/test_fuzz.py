"""A hundred thousand bad packets against a real broker process, beside a client that works.

Nothing crashes, memory stays, every well-formed request gets a typed answer, no state changes, the client notices
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import struct
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from crc32c import crc32c

from quiver.errors import RequestError
from quiver.net.connection import open_connection
from quiver.wire.messages import REQUESTS, ErrorReply
from quiver.wire.packet import FLAG_ERROR, FLAG_REPLY, encode_prefix
from tests.broker.server_kit import Client, run
from tests.net.kit import HELLO, RawClient, encode_request
from tests.wire.kit import make_payload

CONNECTIONS = 500
PACKETS_EACH = 200  # well-formed ones; then some garbage, which ends the connection
AT_ONCE = 8
RSS_GROWTH_BYTES_MAX = 32 * 1024 * 1024

PAYLOAD = make_payload(3)
CRC = crc32c(PAYLOAD)
KINDS = {request.__name__: kind for kind, request in REQUESTS.items()}
WRONG_VALUES: list[Any] = [None, True, -1, 2**63, 2**64 - 1, 1.5, "x" * 2000, "", b"\xff", [], {}, [[[[]]]], {"a": 1}]
WRONG_TOPICS = ["../x", "..", "", "a/b", "nowhere", "x" * 999, "log\u00e9", "\0", "LOGS", "logs ", "/etc/passwd"]
ALLOWED_CODES = {cls.__name__ for cls in RequestError.__subclasses__()}

Packet = tuple[int, bytes, bytes]


def request(kind: str, *fields: Any, payload: bytes = b"") -> Packet:
    return KINDS[kind], msgspec.msgpack.encode(fields), payload


def wrong_requests(chance: random.Random) -> list[Packet]:
    """Well-formed msgpack, each wrong in at least one way, so that none may change anything."""
    found: list[Packet] = []
    good: dict[str, list[Any]] = {
        "Produce": ["logs", 0, 3, 0, 0, CRC, 1, 0, 0, 0],
        "Fetch": ["logs", 0, 0, 1000, 1, 0],
        "ListOffset": ["logs", 0, -1],
        "CommitPosition": ["logs", 0, ["fuzz", 0, False]],
        "CommitPositions": ["logs", 0, [["fuzz", 0, False]]],
        "GetPosition": ["logs", 0, "fuzz"],
    }
    for kind, fields in good.items():
        for topic in WRONG_TOPICS:
            found.append(request(kind, topic, *fields[1:], payload=PAYLOAD))
        for partition in (1, 7, 2**32 - 1, 2**32, -1, 2**64 - 1, "0", None):
            found.append(request(kind, fields[0], partition, *fields[2:], payload=PAYLOAD))
        for number in range(len(fields)):
            for value in (*WRONG_VALUES[:2], *WRONG_VALUES[5:]):
                if kind == "GetPosition" and number == 2 and isinstance(value, str):
                    continue
                changed = [*fields[:number], value, *fields[number + 1 :]]
                if number < 2 or not isinstance(value, str):
                    found.append(request(kind, *changed, payload=PAYLOAD))
        found.append(request(kind, *fields[:2]))
        found.append(request(kind))
    for changes in ({5: CRC ^ 1}, {2: 4}, {2: 2**31 - 1}, {6: 9}, {7: 5, 9: 77}, {7: 5, 8: 3, 9: 2**63 - 1}):
        fields = [changes.get(number, field) for number, field in enumerate(good["Produce"])]
        found.append(request("Produce", *fields, payload=PAYLOAD))
    for _ in range(300):
        mutant = bytearray(PAYLOAD)
        for _ in range(chance.randint(1, 4)):
            mutant[chance.randrange(len(mutant))] ^= 1 << chance.randrange(8)
        if bytes(mutant) != PAYLOAD:
            found.append(request("Produce", *good["Produce"], payload=bytes(mutant)))
    found += [request("CommitPosition", "logs", 0, ["fuzz", offset, True]) for offset in (2**62, 10**12)]
    found += [request("Fetch", "logs", 0, offset, 1000, 1, 3_600_000) for offset in (2**62, 10**12)]
    found += [request("CreateTopic", name, 1) for name in WRONG_TOPICS if name not in ("nowhere", "LOGS", "x" * 999)]
    found += [request("CreateTopic", "new", count) for count in (0, -1, 10_001, 2**40, "1", None)]
    found += [
        request("CreateTopic", "new", 1, 1, [uid]) for uid in ("..", "../" * 10, "A" * 32, "0" * 31, "0" * 32 + "/")
    ]
    found += [request("DeleteTopic", name) for name in WRONG_TOPICS]
    # A second hello and what only brokers say end a connection; a ping is answered whatever it says.
    answered = set(range(256)) - {KINDS[name] for name in ("Hello", "Ping", "PeerHello", "PeerMessages", "PeerPing")}
    found += [(kind, msgspec.msgpack.encode(chance.choice(WRONG_VALUES)), b"") for kind in sorted(answered)]
    return found


def garbage(chance: random.Random) -> bytes:
    """Something that is not our protocol, or a packet that is cut, too long or damaged."""
    whole = encode_prefix(11, 0, 5, msgspec.msgpack.encode(["logs", 0, 0, 1000]), 0)
    way = chance.randrange(6)
    if way == 0:
        return chance.randbytes(chance.randint(1, 2000))
    if way == 1:
        return whole[: chance.randrange(1, len(whole))]
    if way == 2:
        return struct.pack("<IIQBBH4x", chance.choice((2**32 - 1, 2**31, 18 * 2**20)), 5, 1, 11, 0, 0)
    if way == 3:
        mutant = bytearray(whole * 3)
        for _ in range(5):
            mutant[chance.randrange(len(mutant))] = chance.randrange(256)
        return bytes(mutant)
    if way == 4:
        return encode_prefix(chance.randrange(256), 0, 1, chance.randbytes(chance.randint(0, 60)), 0)
    return b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100)


async def attack(address: str, pool: list[Packet], chance: random.Random, codes: Counter[str]) -> None:
    """One connection: many wrong requests, each answered; then garbage."""
    async with await RawClient.open(address) as client:
        await client.send(encode_request(HELLO, 1))
        assert await client.packet() is not None
        chosen = chance.choices(pool, k=PACKETS_EACH)
        stream = [
            encode_prefix(kind, 0, number, header, len(payload)) + payload
            for number, (kind, header, payload) in enumerate(chosen)
        ]
        sending = asyncio.ensure_future(client.send(b"".join(stream)))
        waiting = set(range(PACKETS_EACH))
        while waiting:
            packet = await client.packet()
            assert packet is not None, "the connection ended before all were answered"
            waiting.remove(packet.correlation)
            assert packet.flags == FLAG_REPLY | FLAG_ERROR, chosen[packet.correlation]
            code = msgspec.msgpack.decode(packet.header, type=ErrorReply).code
            assert code in ALLOWED_CODES, (code, chosen[packet.correlation])
            codes[code] += 1
        await sending
        with contextlib.suppress(ConnectionError):
            await client.send(garbage(chance))


class Worker:
    """A client that produces and consumes, and checks that each record comes once, in order and in time."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.produced = 0
        self.slowest_s = 0.0
        self.stopping = False

    async def produce(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.stopping:
            started_s = loop.time()
            payload = make_payload(3, first=self.produced)
            reply = await self.client.produce(payload, producer_id=99, sequence=self.produced)
            assert reply.base_offset == self.produced
            self.produced += 3
            self.slowest_s = max(self.slowest_s, loop.time() - started_s)
            await asyncio.sleep(0.005)

    async def consume(self) -> None:
        offset = 0
        while not self.stopping or offset < self.produced:
            for payload in await self.client.fetch(offset, wait_ms=50):
                assert payload == make_payload(3, first=offset)
                offset += 3


@contextlib.asynccontextmanager
async def target(directory: Path) -> AsyncIterator[tuple[str, int]]:
    """A broker process; gives its address and pid, and expects an orderly end."""
    with (directory / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("fuzz_target.py")),
            str(directory / "data"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip(), process.pid
        assert process.returncode is None, "the broker has died"
    finally:
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 15) == 0


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.system
def test_hundred_thousand_bad_packets_change_nothing(tmp_path: Path) -> None:
    chance = random.Random(20)
    pool = wrong_requests(chance)
    codes: Counter[str] = Counter()

    async def main() -> None:
        async with target(tmp_path) as (address, pid):
            connection = await open_connection(address, "worker", timeout_s=10)
            client = Client(connection)
            await client.create("logs", 1)
            await client.commit("reader", 0)
            worker = Worker(client)
            working = asyncio.gather(worker.produce(), worker.consume())
            left = CONNECTIONS

            async def keep_attacking() -> None:
                nonlocal left
                while left > 0:
                    left -= 1
                    await attack(address, pool, chance, codes)

            for _ in range(20):
                await attack(address, pool, chance, codes)
            left -= 20
            before = rss_bytes(pid)
            await asyncio.gather(*(keep_attacking() for _ in range(AT_ONCE)))
            growth = rss_bytes(pid) - before
            worker.stopping = True
            await working
            assert growth < RSS_GROWTH_BYTES_MAX, f"{growth / 2**20:.0f} MiB more than before"
            assert sum(codes.values()) == CONNECTIONS * PACKETS_EACH
            assert worker.produced > 0 and worker.slowest_s < 5
            assert await client.topics() == {"logs": 1}
            assert await client.end() == worker.produced
            assert (await client.position("reader"), await client.position("fuzz")) == (0, None)
            connection.close()

    run(main())
    assert len(list((tmp_path / "data/broker-1/partitions").iterdir())) == 1
    log = (tmp_path / "log").read_text()
    assert "request_failed" not in log and "Traceback" not in log
    assert set(codes) >= {"InvalidRequestError", "InvalidTopicError", "UnknownTopicError", "InvalidBatchError"}
