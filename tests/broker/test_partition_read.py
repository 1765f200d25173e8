"""Reading, waiting for more, and finding offsets by time."""

from __future__ import annotations

import asyncio
import errno

import pytest

from quiver.broker.partition import Partition
from quiver.errors import CorruptLogError, LogFailedError, OffsetOutOfRangeError, ShuttingDownError
from quiver.log.disk import File
from quiver.testing.faulty_disk import FaultyDisk
from quiver.wire.frame import walk_frames
from quiver.wire.messages import Position
from tests.broker.kit import (
    DIRECTORY,
    Bench,
    HeldExecutor,
    batch,
    finish,
    frames_from,
    held,
    now_s,
    payloads,
    settle,
    simulate,
)


async def fill(partition: Partition, count: int) -> None:
    """Batches of two records, with entries without records between them."""
    for number in range(count):
        await partition.produce(batch(number * 2, producer=1, timestamp=1000 + number * 10))
        if number % 3 == 0:
            await partition.commit_position(Position("group", number))


def segments(disk: FaultyDisk) -> list[str]:
    return [f"{DIRECTORY}/{name}" for name in disk.list(DIRECTORY) if name.endswith(".seg")]


def test_reading_from_any_offset_gives_the_batch_that_holds_it_and_all_after() -> None:
    async def main() -> None:
        async with Bench(FaultyDisk(0)).opened() as partition:
            await fill(partition, 40)
            for offset in range(81):
                found = await frames_from(partition, offset, bytes_max=500)
                assert [header.base_offset for header, _ in found] == list(range(offset - offset % 2, 80, 2))

    simulate(main())


@pytest.mark.parametrize("bytes_max", [1, 100, 200, 400, 10_000])
def test_answer_keeps_the_limit_but_always_has_a_batch(bytes_max: int) -> None:
    async def main() -> None:
        async with Bench(FaultyDisk(0)).opened() as partition:
            await fill(partition, 40)
            for offset in range(0, 80, 7):
                chunk = await partition.read(offset, bytes_max)
                frames = [header for _, header, _ in walk_frames(chunk)]
                assert frames[0].base_offset <= offset < frames[0].next_offset
                assert len(chunk) <= bytes_max or len(frames) == 1

    simulate(main())


def test_end_of_the_log_is_empty_and_beyond_it_is_out_of_range() -> None:
    async def main() -> None:
        async with Bench(FaultyDisk(0)).opened() as partition:
            await fill(partition, 3)
            assert bytes(await partition.read(6, 1000)) == b""
            with pytest.raises(OffsetOutOfRangeError) as caught:
                await partition.read(7, 1000)
            assert (caught.value.facts["earliest"], caught.value.facts["latest"]) == (0, 6)

    simulate(main())


def test_what_is_not_committed_is_not_served() -> None:
    async def main() -> None:
        bench, writers, _ = held()
        partition = bench.open()
        first = asyncio.ensure_future(partition.produce(batch(text="one")))
        await finish(writers)
        await first
        second = asyncio.ensure_future(partition.produce(batch(text="two")))
        await settle()
        job, _ = writers.jobs[0]
        job()  # on disk, but the owner does not know yet
        assert len(await payloads(partition)) == 1
        with pytest.raises(OffsetOutOfRangeError):
            await partition.read(3, 1000)
        assert len(list(walk_frames(await partition.read(0, 10_000)))) == 1
        second.cancel()

    simulate(main())


# -- waiting ---------------------------------------------------------------------------------------------------------


def test_waiter_is_woken_by_the_next_commit() -> None:
    async def main() -> None:
        async with Bench(FaultyDisk(0)).opened() as partition:
            waiters = [asyncio.ensure_future(partition.until_commit(1000)) for _ in range(5)]
            await settle()
            assert not any(waiter.done() for waiter in waiters)
            await partition.produce(batch())
            await settle()
            assert [waiter.result() for waiter in waiters] == [True] * 5
            assert now_s() < 1

    simulate(main())


def test_waiter_is_told_when_nothing_came_in_time() -> None:
    async def main() -> None:
        async with Bench(FaultyDisk(0)).opened() as partition:
            assert not await partition.until_commit(2.5)
            assert now_s() == pytest.approx(2.5)

    simulate(main())


def test_waiter_is_woken_when_the_partition_stops() -> None:
    async def main() -> None:
        partition = Bench(FaultyDisk(0)).open()
        waiter = asyncio.ensure_future(partition.until_commit(1000))
        await settle()
        await partition.stop()
        with pytest.raises(ShuttingDownError):
            await waiter
        assert now_s() < 1

    simulate(main())


# -- damage ----------------------------------------------------------------------------------------------------------


def test_damaged_frame_is_reported_and_not_served_and_others_are() -> None:
    async def main() -> None:
        disk = FaultyDisk(5)
        async with Bench(disk).opened() as partition:
            await fill(partition, 20)
            files = segments(disk)
            disk.flip(files[1], 100, 3)
            with pytest.raises(CorruptLogError) as caught:
                await payloads(partition)
            assert caught.value.facts["path"] == files[1]
            assert partition.status().state == "corrupt" and files[1] in partition.status().detail
            last = await frames_from(partition, partition.high_watermark - 2)
            assert last[-1][0].next_offset == 40
            await partition.produce(batch(40, producer=1))

    simulate(main())


def test_missing_file_is_damage_and_not_an_endless_search() -> None:
    async def main() -> None:
        disk = FaultyDisk(5)
        async with Bench(disk).opened() as partition:
            await fill(partition, 20)
            gone = segments(disk)[1]
            disk.remove(gone)
            opened, open_file = 0, disk.open

            def count(path: str, *, create: bool = False) -> File:
                nonlocal opened
                opened += 1
                assert opened < 1000, "the file is looked for again and again"
                return open_file(path, create=create)

            disk.open = count  # type: ignore[method-assign]
            with pytest.raises(CorruptLogError, match="is missing") as caught:
                await payloads(partition)
            assert caught.value.facts["path"] == gone
            looked_for = [partition.offset_at(1000 + number * 10) for number in range(20)]
            found = await asyncio.gather(*looked_for, return_exceptions=True)
            assert {type(outcome) for outcome in found} == {int, CorruptLogError}
            assert partition.status().state == "corrupt"

    simulate(main())


def test_log_that_stopped_in_the_middle_of_a_cut_is_not_damaged() -> None:
    async def main() -> None:
        disk = FaultyDisk(5)
        async with Bench(disk).opened() as partition:
            await fill(partition, 20)
            log = partition.reader._log
            disk.fail("datasync", errno.EIO, path=".seg")  # when the bytes are gone already
            with pytest.raises(LogFailedError):
                log.truncate_suffix(log.next_index - 1)
            with pytest.raises(LogFailedError, match="stopped"):
                await frames_from(partition, partition.high_watermark - 1)
            disk.remove(segments(disk)[-1])
            with pytest.raises(LogFailedError, match="stopped"):
                await frames_from(partition, partition.high_watermark - 1)
            assert partition.status().state == "failed"
            assert partition.reader.damage is None

    simulate(main())


def test_failed_read_is_told_and_the_next_may_succeed() -> None:
    async def main() -> None:
        disk = FaultyDisk(5)
        async with Bench(disk).opened() as partition:
            await fill(partition, 5)
            disk.fail("pread", errno.EIO, path=".seg")
            with pytest.raises(LogFailedError, match="cannot be read"):
                await partition.read(0, 1000)
            disk.fail("open", errno.EMFILE, path=".seg")
            with pytest.raises(LogFailedError, match="cannot be read"):
                await partition.offset_at(0)
            assert len(await payloads(partition)) == 5
            assert partition.status().state == "online"

    simulate(main())


def test_file_removed_with_the_topic_ends_the_read() -> None:
    async def main() -> None:
        disk, readers = FaultyDisk(5), HeldExecutor()
        partition = Bench(disk, readers=readers).open()
        await fill(partition, 5)
        reading = asyncio.ensure_future(partition.read(0, 1000))
        finding = asyncio.ensure_future(partition.offset_at(0))
        await settle()
        await partition.stop()
        disk.remove_tree(DIRECTORY)
        await finish(readers)
        for task in (reading, finding):
            with pytest.raises(ShuttingDownError):
                await task

    simulate(main())


# -- by time ---------------------------------------------------------------------------------------------------------


def test_offset_is_found_by_time() -> None:
    async def main() -> None:
        async with Bench(FaultyDisk(0)).opened() as partition:
            await fill(partition, 40)  # batch n has the time 1000 + 10 n
            for timestamp, offset in ((-5, 0), (1000, 0), (1001, 2), (1010, 2), (1195, 40), (1390, 78), (1391, 80)):
                assert await partition.offset_at(timestamp) == offset

    simulate(main())


def test_offset_by_time_looks_at_committed_records_only() -> None:
    async def main() -> None:
        bench, writers, _ = held()
        partition = bench.open()
        first = asyncio.ensure_future(partition.produce(batch(timestamp=10)))
        await finish(writers)
        await first
        second = asyncio.ensure_future(partition.produce(batch(timestamp=20)))
        await settle()
        assert await partition.offset_at(15) == 2 == partition.high_watermark
        await finish(writers)
        await second
        stopping = asyncio.ensure_future(partition.stop())
        await finish(writers)
        await stopping

    simulate(main())
