"""A partition on a disk that is full or fails."""

from __future__ import annotations

import asyncio
import errno
import logging

import pytest

from quiver.broker.partition_state import PartitionState
from quiver.errors import DiskFullError, LogFailedError
from quiver.testing.faulty_disk import FaultyDisk
from quiver.wire.messages import Position, ProduceReply
from tests.broker.kit import Bench, batch, describe, finish, held, payloads, settle, simulate

# -- a full disk -----------------------------------------------------------------------------------------------------


def test_full_disk_tells_all_waiters_and_works_again_when_space_returns() -> None:
    async def main() -> None:
        disk = FaultyDisk(2)
        async with Bench(disk).opened() as partition:
            await partition.produce(batch(0, producer=9))
            room = disk.room_bytes()
            assert room is None
            disk.capacity_bytes = 0
            askers = [asyncio.ensure_future(partition.produce(batch(n, producer=9))) for n in (2, 4, 6)]
            position = asyncio.ensure_future(partition.commit_position(Position("group", 1)))
            found = await asyncio.gather(*askers, position, return_exceptions=True)
            assert [type(outcome) for outcome in found] == [DiskFullError] * 4
            assert describe(partition.status()) == ("full", 0, 2)
            assert partition.state.positions.get("group") is None
            assert await payloads(partition) == [batch(0, producer=9).payload], "reads go on"
            with pytest.raises(DiskFullError):
                await partition.produce(batch(2, producer=9))
            assert await partition.produce(batch(0, producer=9)) == ProduceReply(0, duplicate=True)
            disk.capacity_bytes = None
            for sequence in (2, 4, 6):
                assert await partition.produce(batch(sequence, producer=9)) == ProduceReply(sequence)
            assert await partition.produce(batch(4, producer=9)) == ProduceReply(4, duplicate=True)
            assert describe(partition.status()) == ("online", 0, 8)
            assert await payloads(partition) == [batch(n, producer=9).payload for n in (0, 2, 4, 6)]
        disk.crash()
        async with Bench(disk).opened() as reopened:
            assert await payloads(reopened) == [batch(n, producer=9).payload for n in (0, 2, 4, 6)]

    simulate(main())


def test_waiter_of_a_duplicate_is_told_of_the_full_disk_too() -> None:
    async def main() -> None:
        bench, writers, disk = held()
        partition = bench.open()
        askers = [asyncio.ensure_future(partition.produce(batch(0, producer=9))) for _ in range(3)]
        await settle()
        askers.append(asyncio.ensure_future(partition.produce(batch(0, producer=9))))
        await settle()
        disk.capacity_bytes = 0
        await finish(writers)
        found = await asyncio.gather(*askers, return_exceptions=True)
        assert [type(outcome) for outcome in found] == [DiskFullError] * 4
        disk.capacity_bytes = None
        again = asyncio.ensure_future(partition.produce(batch(0, producer=9)))
        await finish(writers)
        assert await again == ProduceReply(0), "it was rolled back, so it is new"
        stopping = asyncio.ensure_future(partition.stop())
        await finish(writers)
        await stopping

    simulate(main())


# -- a failing disk --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["datasync", "pwrite"])
def test_failed_sync_stops_the_partition_for_good_and_reads_go_on(
    operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        disk = FaultyDisk(3)
        partition = Bench(disk).open()
        await partition.produce(batch(0, producer=9))
        disk.fail(operation, errno.EIO, path=".seg")
        askers = [asyncio.ensure_future(partition.produce(batch(n, producer=9))) for n in (2, 4)]
        found = await asyncio.gather(*askers, return_exceptions=True)
        assert [type(outcome) for outcome in found] == [LogFailedError] * 2
        assert describe(partition.status()) == ("failed", 0, 2)
        assert "Input/output error" in partition.status().detail
        for _ in range(3):  # the disk would work again, but what it lost is not known: never retried
            with pytest.raises(LogFailedError):
                await partition.produce(batch(2, producer=9))
            with pytest.raises(LogFailedError):
                await partition.commit_position(Position("group", 1))
        assert await payloads(partition) == [batch(0, producer=9).payload]
        assert not await partition.until_commit(0.5)
        await partition.stop()

    with caplog.at_level(logging.ERROR, "quiver.broker"):
        simulate(main())
    assert any("append_failed partition=logs-0" in record.getMessage() for record in caplog.records)


def test_failed_partition_does_not_keep_what_it_refuses() -> None:
    async def main() -> None:
        disk = FaultyDisk(3)
        partition = Bench(disk).open()
        disk.fail("datasync", errno.EIO, path=".seg")
        with pytest.raises(LogFailedError):
            await partition.produce(batch())
        errors = []
        for _ in range(3):
            with pytest.raises(LogFailedError) as caught:
                await partition.produce(batch())
            errors.append(caught.value)
        depths = []
        for error in errors:
            traceback, depth = error.__traceback__, 0
            while traceback is not None:
                traceback, depth = traceback.tb_next, depth + 1
            depths.append(depth)
        assert depths[0] == depths[-1], "an error that is raised again and again holds the frames of all its callers"
        await partition.stop()

    simulate(main())


@pytest.mark.parametrize("method", ["apply", "judge"])
def test_bug_in_the_owner_stops_this_partition_and_answers_everyone(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        partition = Bench(FaultyDisk(0)).open()
        await partition.produce(batch(text="before"))

        def broken(*_: object) -> None:
            raise KeyError("a bug")

        monkeypatch.setattr(PartitionState, method, broken)
        askers = [asyncio.ensure_future(partition.produce(batch(text=str(n)))) for n in range(3)]
        found = await asyncio.gather(*askers, return_exceptions=True)
        assert [type(outcome) for outcome in found] == [LogFailedError] * 3
        assert partition.status().state == "failed"
        assert (await payloads(partition))[0] == batch(text="before").payload, "reads go on"
        await partition.stop()

    with caplog.at_level(logging.CRITICAL, "quiver.broker"):
        simulate(main())
