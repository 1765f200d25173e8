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
from quiver.wire.frame import Entry, Kind, encode_header, padding, stamp
from quiver.wire.messages import Fetch, FetchReply
from quiver.wire.records import batch_from_lists, encode_batch


def topic_with(uid: str) -> Topic:
    return Topic("logs", 1, 0, (Partition(1, "logs", 0, uid, (1,)),))


def frame(base_offset: int, values: list[bytes | None]) -> bytes:
    payload = bytes(encode_batch(batch_from_lists([0], None, values, None)))
    entry = Entry(Kind.DATA, payload, crc32c(payload), len(values), 0, 0, 1)
    header = stamp(entry, base_offset + 1, 1, base_offset)
    return bytes(encode_header(header)) + payload + bytes(padding(len(payload)))


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
            found = [await reader.value_at(topic, 0, offset) for offset in range(25)]
            assert found == [b"%d" % offset for offset in range(25)]
        assert broker.fetches == [0, 10, 20]

    asyncio.run(main())


def test_a_topic_of_the_same_name_is_another_one() -> None:
    """Also when the old one's messages were just being fetched while it was deleted."""

    async def main() -> None:
        broker = Broker(5, "old ")
        reader = RecordReader(lambda topic, partition: broker)
        old, new = topic_with("u1"), topic_with("u2")
        assert await reader.value_at(old, 0, 0) == b"old 0"
        reader.forget(old)
        assert await reader.value_at(old, 0, 0) == b"old 0"  # a request that was under way keeps it after all
        broker.text = "new "
        assert await reader.value_at(new, 0, 0) == b"new 0"

    asyncio.run(main())


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_CACHE_BYTES_MAX", 5000)

    async def main() -> None:
        broker = Broker(10)
        reader = RecordReader(lambda topic, partition: broker)
        topics = [topic_with(f"u{number}") for number in range(4)]
        for offset in range(0, 500, 10):
            for topic in topics[: 1 if offset < 250 else 4]:
                assert await reader.value_at(topic, 0, offset) == b"%d" % offset
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
            assert await reader.value_at(topic_with("u"), 0, offset) == b"%d" % offset
        assert broker.fetches == [0, 25, 0]

    asyncio.run(main())
