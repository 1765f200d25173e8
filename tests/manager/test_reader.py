"""Batches are fetched and decoded once, and what is kept is bounded and never another topic's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from crc32c import crc32c
from msgspec import Struct

from quiver.manager import reader as reader_module
from quiver.manager.reader import RecordReader
from quiver.metadata.state import Partition, Topic
from quiver.wire.batch_check import SCHEMA_ID_COMPACTED
from quiver.wire.frame import Entry, Kind, encode_frame, encode_header, padding, stamp
from quiver.wire.messages import Fetch, FetchReply
from quiver.wire.records import batch_from_lists, encode_batch
from quiver.wire.rows import Rows, encode_rows


def topic_with(uid: str) -> Topic:
    return Topic("logs", 1, 0, (Partition(1, "logs", 0, uid, (1,)),))


def frame(base_offset: int, values: list[bytes | None]) -> bytes:
    payload = bytes(encode_batch(batch_from_lists([0], None, values, None)))
    entry = Entry(Kind.DATA, payload, crc32c(payload), len(values), 0, 0, 1)
    header = stamp(entry, base_offset + 1, 1, base_offset)
    return bytes(encode_header(header)) + payload + bytes(padding(len(payload)))


def compacted_frame(base_offset: int, count: int, left: list[int]) -> bytes:
    """A batch of so many records of which only these offsets are left."""
    header = stamp(Entry(Kind.DATA, b"", 0, count), base_offset + 1, 1, base_offset)
    rows = Rows(left, batch_from_lists([0] * len(left), None, [b"%d" % offset for offset in left], None))
    payload = encode_rows(header, rows, None)
    entry = Entry(Kind.DATA, payload, crc32c(payload), count, 0, 0, SCHEMA_ID_COMPACTED)
    return encode_frame(stamp(entry, base_offset + 1, 1, base_offset), payload)


class Broker:
    """Holds batches of so many records each."""

    def __init__(self, batch_records: int, text: str = "") -> None:
        self.batch_records = batch_records
        self.text = text
        self.fetches: list[int] = []

    async def call(self, request: Struct, payload: Any = b"") -> tuple[Struct, Sequence[Any]]:
        assert isinstance(request, Fetch)
        self.fetches.append(request.offset)
        base = request.offset - request.offset % self.batch_records
        values: list[bytes | None] = [
            f"{self.text}{offset}".encode() for offset in range(base, base + self.batch_records)
        ]
        return FetchReply(0, 10**6), (frame(base, values),)


def test_a_batch_is_fetched_once_for_all_its_records() -> None:
    async def main() -> None:
        broker = Broker(10)
        reader = RecordReader(lambda topic, partition: broker)
        topic = topic_with("u")
        for _ in range(3):
            found = [await reader.next_at(topic, 0, offset, 10**6) for offset in range(25)]
            assert found == [(offset, b"%d" % offset) for offset in range(25)]
        assert broker.fetches == [0, 10, 20]

    asyncio.run(main())


def test_gaps_that_compaction_left_are_passed() -> None:
    class Compacted:
        async def call(self, request: Struct, payload: Any = b"") -> tuple[Struct, Sequence[Any]]:
            assert isinstance(request, Fetch)
            left = {0: [1, 3], 5: [], 10: [14], 15: []}
            base = request.offset - request.offset % 5
            return FetchReply(0, 20), (compacted_frame(base, 5, left[base]),)

    async def main() -> None:
        reader = RecordReader(lambda topic, partition: Compacted())
        found = [await reader.next_at(topic_with("u"), 0, offset, 20) for offset in (0, 1, 2, 4, 7, 14, 15)]
        assert [each and each.offset for each in found] == [1, 1, 3, 14, 14, 14, None]
        assert found[0] is not None and found[0].value == b"1"

    asyncio.run(main())


def test_a_topic_of_the_same_name_is_another_one() -> None:
    """Also when the old one's messages were just being fetched while it was deleted."""

    async def main() -> None:
        broker = Broker(5, "old ")
        reader = RecordReader(lambda topic, partition: broker)
        old, new = topic_with("u1"), topic_with("u2")
        assert await reader.next_at(old, 0, 0, 1) == (0, b"old 0")
        reader.forget(old)
        assert await reader.next_at(old, 0, 0, 1) == (0, b"old 0")  # a request that was under way keeps it after all
        broker.text = "new "
        assert await reader.next_at(new, 0, 0, 1) == (0, b"new 0")

    asyncio.run(main())


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_CACHE_BYTES_MAX", 5000)

    async def main() -> None:
        broker = Broker(10)
        reader = RecordReader(lambda topic, partition: broker)
        topics = [topic_with(f"u{number}") for number in range(4)]
        for offset in range(0, 500, 10):
            for topic in topics[: 1 if offset < 250 else 4]:
                assert await reader.next_at(topic, 0, offset, 10**6) == (offset, b"%d" % offset)
                kept = sum(run.size_bytes for runs in reader._runs.values() for run in runs)
                assert kept == reader._size_bytes <= 5000
        for topic in topics:
            reader.forget(topic)
        assert reader._size_bytes == 0

    asyncio.run(main())


def test_a_batch_larger_than_the_cache_is_still_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_CACHE_BYTES_MAX", 1)

    async def main() -> None:
        broker = Broker(10)
        reader = RecordReader(lambda topic, partition: broker)
        for offset in (0, 5, 25, 0):
            assert await reader.next_at(topic_with("u"), 0, offset, 10**6) == (offset, b"%d" % offset)
        assert broker.fetches == [0, 25, 0]

    asyncio.run(main())
