"""Quiver's side: what is timed, through the synchronous SDK, on topics of one partition.

Rule: nothing counts before it is acknowledged or read, and the number of records is checked after each run.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
import uvloop
from measure import KIB, MIB, Sample, make_values

from quiver import Admin, Consumer, Producer, aio

RECORDS_PER_CALL = 10_000  # of one send_many
POLL_RECORDS_MAX = 1000
BATCH_VALUE_BYTES = KIB  # values in the batches of a fixed size
TABLE_BYTES = 32 * MIB  # handed to one send_many in the batches section
READ_TIMEOUT_S = 30.0

_numbers = itertools.count(1)


def next_topic() -> str:
    return f"bench-{next(_numbers)}"


def delete_topic(servers: str, topic: str) -> None:
    with Admin(servers) as admin:
        admin.delete_topic(topic)


@contextlib.contextmanager
def fresh_topic(servers: str, partitions: int = 1) -> Iterator[str]:
    name = next_topic()
    with Admin(servers) as admin:
        admin.create_topic(name, partitions)
        yield name
        admin.delete_topic(name)


def fill_topic(servers: str, topic: str, values: Sequence[bytes], times: int, *, create: bool = False) -> None:
    if create:
        with Admin(servers) as admin:
            admin.create_topic(topic)
    with Producer(servers) as producer:
        for _ in range(times):
            producer.send_many(topic, values)
        producer.flush()


def fill_partitions(servers: str, topic: str, partitions: int) -> None:
    """One record in each partition."""
    with Producer(servers) as producer:
        for future in [producer.send(topic, b"one", partition=number) for number in range(partitions)]:
            future.result()


def produce_many(servers: str, values: Sequence[bytes]) -> Sample:
    def send(producer: Producer, topic: str) -> int:
        futures = [
            producer.send_many(topic, values[start : start + RECORDS_PER_CALL])
            for start in range(0, len(values), RECORDS_PER_CALL)
        ]
        for future in futures:
            future.result()
        return len(values)

    return _produce(servers, send, len(values), sum(map(len, values)))


def produce_single(servers: str, values: Sequence[bytes]) -> Sample:
    def send(producer: Producer, topic: str) -> int:
        for value in values:
            producer.send(topic, value)
        producer.flush()
        return len(values)

    return _produce(servers, send, len(values), sum(map(len, values)))


def produce_batches(servers: str, batch_bytes: int, count: int) -> Sample:
    """Batches with `batch_bytes` bytes of values each: every chunk of an Arrow table is one batch to the SDK."""
    per_table = max(1, min(count, TABLE_BYTES // batch_bytes))
    rows = batch_bytes // BATCH_VALUE_BYTES
    chunks = [pa.array(make_values(rows, BATCH_VALUE_BYTES), pa.binary()) for _ in range(per_table)]
    table = pa.table({"value": pa.chunked_array(chunks)})
    tables = -(-count // per_table)

    def send(producer: Producer, topic: str) -> int:
        futures = [producer.send_many(topic, table) for _ in range(tables)]
        sent = sum(len(future.result()) for future in futures)
        if sent != tables * per_table:
            raise RuntimeError(f"{tables * per_table} batches were handed over and {sent} were sent")
        return sent

    records = table.num_rows * tables
    # Twice the size: room for the other columns, so that the SDK does not cut a batch in two.
    return _produce(servers, send, records, records * BATCH_VALUE_BYTES, batch_bytes=2 * batch_bytes)


def _produce(
    servers: str, send: Callable[[Producer, str], int], records: int, value_bytes: int, **settings: int
) -> Sample:
    """Times `send` on a new topic with a producer that has already connected."""
    with fresh_topic(servers) as topic:
        with Producer(servers, **settings) as producer:
            producer.send(topic, b"first").result()
            began_s = time.perf_counter()
            count = send(producer, topic)
            seconds = time.perf_counter() - began_s
        with Admin(servers) as admin:
            stored = admin.offsets(topic)[0][1] - 1
        if stored != records:
            raise RuntimeError(f"{records} records were sent and {stored} are stored")
    return Sample(seconds, count, value_bytes)


def consume(servers: str, topic: str, records: int, value_bytes: int, *, arrow: bool) -> Sample:
    """Reads the whole topic by poll_arrow or by poll; connecting is part of the time."""
    with Consumer(servers, [topic], start="earliest") as consumer:
        read = 0
        began_s = time.perf_counter()
        while read < records:
            if arrow:
                got = consumer.poll_arrow(READ_TIMEOUT_S).num_rows
            else:
                got = len(consumer.poll(POLL_RECORDS_MAX, READ_TIMEOUT_S))
            if not got:
                raise RuntimeError(f"{read} of {records} records came, then none for {READ_TIMEOUT_S:g} s")
            read += got
        seconds = time.perf_counter() - began_s
    if read != records:
        raise RuntimeError(f"{records} records are stored and {read} came")
    return Sample(seconds, records, records * value_bytes)


def round_trips_aio(servers: str, topic: str, value: bytes, rounds: int) -> list[float]:
    """The same with the asyncio SDK, which needs no second thread."""

    async def run() -> list[float]:
        seconds = []
        async with aio.Producer(servers) as producer:
            await (await producer.send(topic, value))
            for _ in range(rounds):
                began_s = time.perf_counter()
                await (await producer.send(topic, value))
                seconds.append(time.perf_counter() - began_s)
        return seconds

    return uvloop.run(run())


def round_trips(servers: str, topic: str, value: bytes, rounds: int) -> list[float]:
    """Seconds of each of `rounds` sends, one in flight."""
    seconds = []
    with Producer(servers) as producer:
        producer.send(topic, value).result()
        for _ in range(rounds):
            began_s = time.perf_counter()
            producer.send(topic, value).result()
            seconds.append(time.perf_counter() - began_s)
    return seconds
