"""Redis streams' side: XADD and XREAD, by redis-py and by a hand-made client.

The targets compare with redis-py, which parses with hiredis where that is installed: the best that a Python user has.
The hand-made client packs and parses the protocol with as little Python for each record as possible; its figure is
Redis' own rather than a client's, and is shown beside.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Sequence

import redis
import redis.utils
from floor import TIMEOUT_S, connect
from measure import Sample

STREAM = "s"
COUNTS = (1000, 10_000)  # records of one pipeline of XADD, and of one XREAD; the better one counts
PIPELINE_RECORDS = 1000  # of the hand-made client
PIPELINES_IN_FLIGHT = 5
_RECEIVE_BYTES = 1 << 20
_ID_BYTES_MIN = len("1700000000000-0")


def client_of(port: int) -> redis.Redis:
    return redis.Redis(port=port, socket_timeout=TIMEOUT_S)


def client_name() -> str:
    return f"redis-py {redis.__version__} {'with' if redis.utils.HIREDIS_AVAILABLE else 'WITHOUT'} hiredis"


def xadd_redis_py(port: int, values: Sequence[bytes], pipeline_records: int) -> Sample:
    with client_of(port) as client:
        client.unlink(STREAM)
        began_s = time.perf_counter()
        for start in range(0, len(values), pipeline_records):
            pipeline = client.pipeline(transaction=False)
            for value in values[start : start + pipeline_records]:
                pipeline.xadd(STREAM, {"v": value})
            pipeline.execute()
        seconds = time.perf_counter() - began_s
    return _stored(port, seconds, values)


def xadd_by_hand(port: int, values: Sequence[bytes]) -> Sample:
    """Values of one length. Keeps a few pipelines in flight, so that Redis never waits for the client."""
    with client_of(port) as client:
        client.unlink(STREAM)
    head = b"*5\r\n$4\r\nXADD\r\n$1\r\ns\r\n$1\r\n*\r\n$1\r\nv\r\n$%d\r\n" % len(values[0])
    between = b"\r\n" + head
    with connect(port) as server:
        sent = answered = 0
        began_s = time.perf_counter()
        while answered < len(values):
            while sent < len(values) and sent - answered <= (PIPELINES_IN_FLIGHT - 1) * PIPELINE_RECORDS:
                part = values[sent : sent + PIPELINE_RECORDS]
                server.sendall(head + between.join(part) + b"\r\n")
                sent += len(part)
            # Each answer is the id of an entry; `$` begins it and occurs nowhere else in it.
            answered += _receive(server).count(b"$")
        seconds = time.perf_counter() - began_s
    return _stored(port, seconds, values)


def _stored(port: int, seconds: float, values: Sequence[bytes]) -> Sample:
    with client_of(port) as client:
        stored = client.xlen(STREAM)
    if stored != len(values):
        raise RuntimeError(f"{len(values)} entries were sent to Redis and {stored} are stored")
    return Sample(seconds, len(values), sum(map(len, values)))


def xread_redis_py(port: int, count: int, records: int, value_bytes: int) -> Sample:
    with client_of(port) as client:
        read, last = 0, "0-0"
        began_s = time.perf_counter()
        while read < records:
            entries = client.xread({STREAM: last}, count=count)[0][1]
            last = entries[-1][0]
            read += len(entries)
        return Sample(time.perf_counter() - began_s, records, records * value_bytes)


def xread_by_hand(port: int, count: int, records: int, value_bytes: int) -> Sample:
    """A pattern takes the (id, value) pairs out of an answer, as it knows the form of the entries."""
    pattern = entry_pattern(value_bytes)
    with connect(port) as server:
        read, last = 0, b"0-0"
        began_s = time.perf_counter()
        while read < records:
            server.sendall(
                b"*6\r\n$5\r\nXREAD\r\n$5\r\nCOUNT\r\n$%d\r\n%d\r\n$7\r\nSTREAMS\r\n$1\r\ns\r\n$%d\r\n%s\r\n"
                % (len(str(count)), count, len(last), last)
            )
            entries = _receive_entries(server, pattern, min(count, records - read), value_bytes)
            last = entries[-1][0]
            read += len(entries)
        return Sample(time.perf_counter() - began_s, records, records * value_bytes)


def entry_pattern(value_bytes: int) -> re.Pattern[bytes]:
    return re.compile(
        rb"\*2\r\n\$\d+\r\n(\d+-\d+)\r\n\*2\r\n\$1\r\nv\r\n\$%d\r\n(.{%d})\r\n" % (value_bytes, value_bytes), re.DOTALL
    )


def _receive_entries(
    server: socket.socket, pattern: re.Pattern[bytes], count: int, value_bytes: int
) -> list[tuple[bytes, bytes]]:
    answer = bytearray()
    while True:
        answer += _receive(server)
        # The pattern is only tried when the answer may be whole: it reads all of it.
        if len(answer) >= count * (value_bytes + _ID_BYTES_MIN) and answer.endswith(b"\r\n"):
            entries = pattern.findall(answer)
            if len(entries) == count:
                return entries


def _receive(server: socket.socket) -> bytes:
    data = server.recv(_RECEIVE_BYTES)
    if not data:
        raise ConnectionError("Redis closed the connection")
    return data
