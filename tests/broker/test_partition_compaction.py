"""Compaction of a partition: ordered by its leader, done behind its back, and never in the way."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest

from quiver.broker.partition import Partition
from quiver.errors import OffsetOutOfRangeError, ShuttingDownError
from quiver.testing.faulty_disk import FaultyDisk
from quiver.topic_settings import COMPACT, TopicRules
from quiver.types import Record
from quiver.wire.frame import walk_frames
from quiver.wire.rows import rows_of, to_records
from tests.broker.kit import LOG, Bench, HeldExecutor, frames_from, held, settle, simulate
from tests.log.compaction_kit import Said, keyed

RULES = TopicRules(dataclasses.replace(LOG, segment_bytes_max=1500), cleanup=COMPACT, tombstone_ms=60_000)
KEYS = (b"a", b"b", b"c")


async def fill(partition: Partition, rounds: int, keys: Sequence[bytes] = KEYS) -> None:
    for number in range(rounds):
        await partition.produce(keyed([Said(key, b"%d" % number, partition._clock.now_us()) for key in keys]))


async def records(partition: Partition, offset: int = 0) -> list[Record]:
    found = []
    for header, payload in await frames_from(partition, offset):
        found += to_records("logs", 0, rows_of(header, memoryview(payload)).since(offset))
    return found


def opened(bench: Bench) -> Partition:
    partition = bench.open()
    partition.use(RULES)
    return partition


def test_leader_orders_and_only_the_last_of_each_key_stays() -> None:
    async def main() -> None:
        partition = opened(Bench(FaultyDisk(0)))
        await fill(partition, 8)
        before = partition.status().size_bytes
        await partition.compact()  # orders
        order = partition.state.order
        assert order.index and partition.compactor.completed == 0
        await partition.compact()  # carries out
        assert partition.compactor.completed == order.index
        found = await records(partition)
        assert [(r.offset, r.key, r.value) for r in found] == [(21, b"a", b"7"), (22, b"b", b"7"), (23, b"c", b"7")]
        assert partition.status().size_bytes < before / 2
        assert (partition.start_offset, partition.high_watermark) == (0, 24)
        await fill(partition, 1)
        assert [record.offset for record in await records(partition)] == [21, 22, 23, 24, 25, 26]
        await partition.compact()
        assert partition.state.order == order, "little that is new is left alone"
        await partition.stop()

    simulate(main())


def test_small_and_other_topics_are_left_alone() -> None:
    async def main() -> None:
        partition = opened(Bench(FaultyDisk(0)))
        await fill(partition, 1)
        await partition.compact()
        assert partition.state.order.index == 0
        partition.use(dataclasses.replace(RULES, cleanup="delete"))
        await fill(partition, 20)
        await partition.compact()
        assert partition.state.order.index == 0
        await partition.stop()

    simulate(main())


def test_compacted_topic_is_not_trimmed_by_time_or_size() -> None:
    async def main() -> None:
        bench = Bench(FaultyDisk(0))
        partition = opened(bench)
        partition.use(dataclasses.replace(RULES, log=dataclasses.replace(RULES.log, retention_ms=1, retention_bytes=1)))
        await fill(partition, 8)
        bench.clock.now_s += 1000
        await partition.apply_retention()
        assert partition.start_offset == 0
        await partition.stop()

    simulate(main())


def test_order_and_what_was_done_survive_a_restart() -> None:
    async def main() -> None:
        disk = FaultyDisk(0)
        bench = Bench(disk)
        partition = opened(bench)
        await fill(partition, 8)
        await partition.compact()
        order = partition.state.order
        await partition.stop()
        disk.crash()
        partition = opened(bench)
        assert partition.state.order == order and partition.compactor.completed == 0
        await partition.compact()
        assert partition.compactor.completed == order.index
        found = await records(partition)
        await partition.stop()
        disk.crash()
        partition = opened(bench)
        assert partition.compactor.completed == order.index, "it is not done again"
        assert await records(partition) == found
        await partition.stop()

    simulate(main())


def test_what_says_deleted_stays_for_its_time_and_then_goes() -> None:
    async def main() -> None:
        bench = Bench(FaultyDisk(0))
        partition = opened(bench)
        await fill(partition, 4)
        await partition.produce(keyed([Said(b"a", None, bench.clock.now_us())]))
        await fill(partition, 4, KEYS[1:])
        for _ in range(4):
            await partition.compact()
        assert (b"a", None) in [(r.key, r.value) for r in await records(partition)]
        bench.clock.now_s += 59
        await partition.compact()
        await partition.compact()
        assert (b"a", None) in [(r.key, r.value) for r in await records(partition)]
        bench.clock.now_s += 2
        await partition.compact()
        await partition.compact()
        assert {record.key for record in await records(partition)} == {b"b", b"c"}
        await partition.stop()

    simulate(main())


def test_appends_are_acknowledged_while_files_are_rewritten() -> None:
    async def main() -> None:
        bench, writers, _ = held()
        partition = opened(bench)
        filling = asyncio.ensure_future(fill(partition, 8))
        await run_all(writers)
        await filling
        ordering = asyncio.ensure_future(partition.compact())
        await run_all(writers)
        await ordering
        working = asyncio.ensure_future(partition.compact())
        await settle()
        acknowledged, order = 0, partition.state.order
        while partition.compactor.completed < order.index:
            compacting = writers.jobs.popleft()
            producing = asyncio.ensure_future(fill(partition, 1))
            await run_all(writers)
            await producing  # though the job is not done
            acknowledged += 1
            writers.jobs.append(compacting)
            writers.run_one()
            await settle()
        await run_all(writers)
        await working
        assert acknowledged > 5
        assert len(await records(partition)) == 3 + 3 * acknowledged
        stopping = asyncio.ensure_future(partition.stop())
        await run_all(writers)
        await stopping

    simulate(main())


async def run_all(writers: HeldExecutor) -> None:
    await settle()
    while writers.jobs:
        writers.run_one()
        await settle()


@pytest.mark.parametrize("wanted", [0, 2, 10, 20])
def test_reader_in_the_middle_finds_every_record_that_stays(wanted: int) -> None:
    """A read that began on the old file gives no records of other places of the new one."""

    async def main() -> None:
        readers = HeldExecutor()
        partition = opened(Bench(FaultyDisk(0), readers=readers))
        await fill(partition, 8)
        await partition.compact()
        reading = asyncio.ensure_future(partition.read(wanted, 300))
        finding = asyncio.ensure_future(partition.offset_at(partition._clock.now_us()))
        await settle()
        await partition.compact()
        await run_all(readers)
        found = [
            record.offset
            for _, header, payload in walk_frames(await reading)
            for record in to_records("logs", 0, rows_of(header, payload).since(wanted))
        ]
        assert found == [21, 22, 23][: len(found)]
        first = next(header for _, header, _ in walk_frames(await reading))
        assert first.base_offset <= wanted < first.next_offset
        assert await finding == 21
        assert partition.status().state == "online"
        await partition.stop()

    simulate(main())


def test_stop_waits_for_the_file_that_is_being_rewritten() -> None:
    async def main() -> None:
        bench, writers, disk = held()
        partition = opened(bench)
        filling = asyncio.ensure_future(fill(partition, 8))
        await run_all(writers)
        await filling
        ordering = asyncio.ensure_future(partition.compact())
        await run_all(writers)
        await ordering
        working = asyncio.ensure_future(partition.compact())
        await settle()
        stopping = asyncio.ensure_future(partition.stop())
        await settle()
        assert not stopping.done()
        await run_all(writers)
        await stopping
        with pytest.raises(ShuttingDownError):
            await working
        assert partition.compactor.completed == 0
        again = opened(Bench(disk))
        await again.compact()
        assert again.compactor.completed == again.state.order.index
        assert [record.offset for record in await records(again)] == [21, 22, 23]
        await again.stop()

    simulate(main())


def test_offsets_in_gaps_are_valid_and_others_are_not() -> None:
    async def main() -> None:
        partition = opened(Bench(FaultyDisk(0)))
        await fill(partition, 8)
        await partition.compact()
        await partition.compact()
        for offset in range(24):
            assert [record.offset for record in await records(partition, offset)] == [
                left for left in (21, 22, 23) if left >= offset
            ]
        with pytest.raises(OffsetOutOfRangeError):
            await partition.read(25, 100)
        await partition.stop()

    simulate(main())
