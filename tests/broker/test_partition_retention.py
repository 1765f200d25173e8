"""Trimming and check-points: what is let go, what stays, and what a restart reads again."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
from typing import Any

import pytest

from quiver.broker.partition import Partition
from quiver.broker.partition_state import PartitionState
from quiver.errors import LogFailedError, OffsetOutOfRangeError
from quiver.testing.faulty_disk import FaultyDisk
from quiver.wire.frame import FrameHeader
from quiver.wire.messages import Position, ProduceReply
from tests.broker.kit import (
    DIRECTORY,
    LOG,
    Bench,
    HeldExecutor,
    batch,
    check_dense,
    finish,
    frames_from,
    payloads,
    settle,
    simulate,
)

BY_SIZE = dataclasses.replace(LOG, retention_bytes=2500)
BY_AGE = dataclasses.replace(LOG, retention_ms=60_000)


async def fill(partition: Partition, start: int, count: int, timestamp: int = 0) -> None:
    for number in range(start, start + count):
        await partition.produce(batch(number * 2, producer=1, timestamp=timestamp))


async def trimmed(partition: Partition) -> None:
    """Applies retention and lets the check-point and the removal follow."""
    await partition.apply_retention()
    await settle()


@pytest.mark.parametrize("how", ["crash", "kill", "stop"])
def test_retention_by_size_moves_the_log_start_and_survives_a_restart(how: str) -> None:
    async def main() -> None:
        disk = FaultyDisk(6)
        partition = Bench(disk, BY_SIZE).open()
        await fill(partition, 0, 60)
        await partition.commit_position(Position("group", 3))
        size, files = partition.status().size_bytes, len(disk.list(DIRECTORY))
        await trimmed(partition)
        start = partition.start_offset
        assert 0 < start < 120 and start % 2 == 0
        assert partition.status().size_bytes < size and len(disk.list(DIRECTORY)) < files
        assert partition.status().size_bytes >= 2500, "no more than the surplus goes"
        with pytest.raises(OffsetOutOfRangeError) as caught:
            await partition.read(start - 1, 1000)
        assert caught.value.facts == {
            "topic": "logs",
            "partition": 0,
            "offset": start - 1,
            "earliest": start,
            "latest": 120,
        }
        expected = await frames_from(partition, start)
        if how == "stop":
            await partition.stop()
        getattr(disk, how if how != "stop" else "kill")()
        async with Bench(disk, BY_SIZE).opened() as reopened:
            assert (reopened.start_offset, reopened.high_watermark) == (start, 120)
            assert await frames_from(reopened, start) == expected
            assert reopened.state.positions.get("group") == 3, "what was trimmed is still known by what it meant"
            assert await reopened.produce(batch(118, producer=1)) == ProduceReply(118, duplicate=True)
            assert await reopened.produce(batch(120, producer=1)) == ProduceReply(120)
            await check_dense(reopened)

    simulate(main())


def test_retention_by_age_empties_an_idle_topic_and_offsets_go_on() -> None:
    async def main() -> None:
        bench = Bench(FaultyDisk(6), BY_AGE)
        async with bench.opened() as partition:
            await fill(partition, 0, 30, timestamp=bench.clock.now_us())
            await trimmed(partition)
            assert partition.start_offset == 0, "nothing is old yet"
            bench.clock.now_s += 61
            await trimmed(partition)
            assert partition.start_offset == partition.high_watermark == 60
            assert bytes(await partition.read(60, 1000)) == b""
            assert await partition.offset_at(0) == 60
            assert partition.status().size_bytes < 1000
            await fill(partition, 30, 1, timestamp=bench.clock.now_us())
            assert [header.base_offset for header, _ in await frames_from(partition, 60)] == [60]
            for _ in range(5):
                await trimmed(partition)
            assert partition.start_offset == 60 and partition.status().segments <= 3

    simulate(main())


def test_retention_that_frees_nothing_writes_nothing() -> None:
    async def main() -> None:
        disk = FaultyDisk(6)
        async with Bench(disk, BY_SIZE).opened() as partition:
            await fill(partition, 0, 5)
            before = disk.operations
            for _ in range(10):
                await trimmed(partition)
            assert disk.operations == before

    simulate(main())


def test_reader_on_its_way_to_a_trimmed_file_is_told_the_valid_range() -> None:
    async def main() -> None:
        disk, readers = FaultyDisk(6), HeldExecutor()
        partition = Bench(disk, BY_SIZE, readers=readers).open()
        await fill(partition, 0, 60)
        low = asyncio.ensure_future(partition.read(0, 1000))
        high = asyncio.ensure_future(partition.read(119, 1000))
        by_time = asyncio.ensure_future(partition.offset_at(0))
        await settle()
        await trimmed(partition)
        assert partition.start_offset > 0
        await finish(readers)
        with pytest.raises(OffsetOutOfRangeError) as caught:
            await low
        assert caught.value.facts["earliest"] == partition.start_offset
        assert len(await high) > 0
        assert await by_time == partition.start_offset
        await partition.stop()

    simulate(main())


def test_retention_that_cannot_read_its_index_fails_and_nothing_else_does() -> None:
    async def main() -> None:
        disk = FaultyDisk(6)
        partition = Bench(disk, BY_SIZE).open()
        await fill(partition, 0, 60)
        await partition.stop()
        disk.kill()
        async with Bench(disk, BY_SIZE).opened() as reopened:
            disk.fail("open", errno.EIO, path=".idx")
            with pytest.raises(LogFailedError):
                await reopened.apply_retention()
            assert await reopened.produce(batch(120, producer=1)) == ProduceReply(120)
            await trimmed(reopened)
            assert reopened.start_offset > 0

    simulate(main())


# -- check-points ----------------------------------------------------------------------------------------------------


def count_applied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    applied: list[int] = []
    apply = PartitionState.apply

    def counted(self: PartitionState, header: FrameHeader, payload: Any) -> Any:
        applied.append(header.index)
        return apply(self, header, payload)

    monkeypatch.setattr(PartitionState, "apply", counted)
    return applied


def test_restart_after_a_check_point_reads_only_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        disk = FaultyDisk(7)
        partition = Bench(disk).open()
        await fill(partition, 0, 50)
        await partition.stop()  # check-points
        disk.kill()
        partition = Bench(disk).open()
        await fill(partition, 50, 7)
        disk.kill()
        applied = count_applied(monkeypatch)
        async with Bench(disk).opened() as reopened:
            assert applied == list(range(51, 58))
            assert reopened.high_watermark == 114
            assert await reopened.produce(batch(112, producer=1)) == ProduceReply(112, duplicate=True)
            assert len(await payloads(reopened)) == 57

    simulate(main())


def test_check_points_come_by_themselves_while_data_flows(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        disk = FaultyDisk(7)
        settings = dataclasses.replace(LOG, checkpoint_bytes=2000)
        partition = Bench(disk, settings).open()
        await fill(partition, 0, 100)
        disk.kill()
        applied = count_applied(monkeypatch)
        async with Bench(disk, settings).opened() as reopened:
            assert len(applied) < 25
            assert reopened.high_watermark == 200
            assert len(await payloads(reopened)) == 100

    simulate(main())


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_failed_check_point_is_logged_and_the_partition_goes_on(error: int, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        disk = FaultyDisk(8)
        settings = dataclasses.replace(LOG, checkpoint_bytes=500)
        partition = Bench(disk, settings).open()
        disk.fail("rename", error, path="state.tmp")
        await fill(partition, 0, 30)
        assert partition.status().state == "online"
        await partition.stop()
        disk.crash()
        async with Bench(disk, settings).opened() as reopened:
            assert len(await payloads(reopened)) == 30

    with caplog.at_level(logging.WARNING, "quiver.broker"):
        simulate(main())
    assert any("checkpoint_failed partition=logs-0" in record.getMessage() for record in caplog.records)


def test_nothing_is_removed_before_the_check_point_is_on_disk() -> None:
    async def main() -> None:
        for seed in range(40):
            disk = FaultyDisk(seed)
            partition = Bench(disk, BY_SIZE).open()
            await fill(partition, 0, 60)
            disk.stop_at(seed % 20 + 1)  # somewhere in trim, check-point or removal
            with pytest.MonkeyPatch.context() as quiet:
                quiet.setattr(logging.getLogger("quiver.broker"), "disabled", True)
                await asyncio.gather(partition.apply_retention(), return_exceptions=True)
                await settle()
            disk.crash()
            async with Bench(disk, BY_SIZE).opened() as reopened:
                assert reopened.high_watermark == 120
                assert await reopened.produce(batch(118, producer=1)) == ProduceReply(118, duplicate=True)
                await check_dense(reopened)

    simulate(main())
