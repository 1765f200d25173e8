"""cleanup=consumed: what everybody has read is let go, and nothing that somebody has still to read."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.broker.partition import Partition
from quiver.broker.retention import read_by_all
from quiver.errors import OffsetOutOfRangeError
from quiver.log import retention
from quiver.testing.faulty_disk import FaultyDisk
from quiver.topic_settings import CONSUMED, TopicRules
from quiver.wire.messages import Position
from tests.broker.group_kit import Group
from tests.broker.kit import DIRECTORY, LOG, Bench, batch, check_dense, frames_from, settle, simulate

RULES = TopicRules(LOG, cleanup=CONSUMED)


def opened(bench: Bench) -> Partition:
    partition = bench.open()
    partition.use(RULES)
    return partition


async def fill(partition: Partition, start: int, count: int) -> None:
    for number in range(start, start + count):
        await partition.produce(batch(number * 2, producer=1))


async def at(partition: Partition, consumer: str, offset: int, *, rewind: bool = False) -> None:
    await partition.commit_position(Position(consumer, offset, rewind))


async def cleaned(partition: Partition, registered: Collection[str] | None = ()) -> int:
    await partition.apply_retention(registered)
    await settle()
    return partition.start_offset


@pytest.mark.parametrize("how", ["crash", "kill"])
def test_log_begins_at_the_slowest_consumer_also_after_a_restart(how: str) -> None:
    async def main() -> None:
        disk = FaultyDisk(3)
        partition = opened(Bench(disk))
        await fill(partition, 0, 60)
        files = len(disk.list(DIRECTORY))
        await at(partition, "fast", 120)
        await at(partition, "#7", 51)
        expected = await frames_from(partition, 51)
        assert expected[0][0].base_offset == 50
        assert await cleaned(partition, ["#7"]) == 51
        assert len(disk.list(DIRECTORY)) < files, "space comes back"
        with pytest.raises(OffsetOutOfRangeError):
            await partition.read(50, 1000)
        assert await frames_from(partition, 51) == expected, (
            "files go whole, and only those that were read to their end"
        )
        getattr(disk, how)()
        partition = opened(Bench(disk))
        assert (partition.start_offset, partition.high_watermark) == (51, 120)
        assert await frames_from(partition, 51) == expected
        assert partition.state.positions.get("#7") == 51
        await check_dense(partition)
        await partition.stop()

    simulate(main())


def test_nothing_goes_while_nobody_reads_or_who_reads_is_not_known() -> None:
    async def main() -> None:
        disk = FaultyDisk(3)
        partition = opened(Bench(disk))
        await fill(partition, 0, 60)
        before = disk.operations
        assert await cleaned(partition) == 0, "no consumer at all"
        assert await cleaned(partition, None) == 0
        assert await cleaned(partition, ["#1"]) == 0, "registered, and has read nothing"
        assert disk.operations == before
        await at(partition, "group", 120)
        assert await cleaned(partition, None) == 0, "the managers are away: somebody may be registered"
        assert await cleaned(partition, ["#1"]) == 0
        await at(partition, "#1", 10)
        assert await cleaned(partition, ["#1"]) == 10
        await partition.stop()

    simulate(main())


def test_time_and_size_take_nothing_from_a_consumer_that_is_behind() -> None:
    async def main() -> None:
        bench = Bench(FaultyDisk(3), dataclasses.replace(LOG, retention_ms=1, retention_bytes=1))
        partition = bench.open()
        partition.use(dataclasses.replace(RULES, log=bench.settings))
        await fill(partition, 0, 60)
        await at(partition, "group", 4)
        bench.clock.now_s += 3600
        assert await cleaned(partition) == 4
        await partition.stop()

    simulate(main())


def test_consumer_that_goes_back_keeps_what_is_still_there() -> None:
    async def main() -> None:
        partition = opened(Bench(FaultyDisk(3)))
        await fill(partition, 0, 60)
        await at(partition, "group", 100)
        await at(partition, "group", 30, rewind=True)
        assert await cleaned(partition) == 30
        await at(partition, "group", 5, rewind=True)
        assert await cleaned(partition) == 30, "the log start never moves back"
        await partition.stop()

    simulate(main())


def test_log_that_was_read_whole_gives_all_its_space_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_READ_BYTES_MIN", 100)

    async def main() -> None:
        disk = FaultyDisk(3)
        partition = opened(Bench(disk))
        await fill(partition, 0, 60)
        await at(partition, "group", 120)
        for _ in range(3):
            assert await cleaned(partition) == 120
        assert partition.status().size_bytes < 1000
        before = disk.operations
        assert await cleaned(partition) == 120
        assert disk.operations == before, "an idle topic costs nothing"
        await fill(partition, 60, 1)
        assert [header.base_offset for header, _ in await frames_from(partition, 120)] == [120]
        await partition.stop()

    simulate(main())


def test_settings_count_from_the_moment_they_are_told() -> None:
    async def main() -> None:
        partition = Bench(FaultyDisk(3)).open()
        await fill(partition, 0, 30)
        await at(partition, "group", 60)
        assert await cleaned(partition) == 0, "kept for ever by its settings"
        partition.use(RULES)
        assert await cleaned(partition) == 60
        partition.use(TopicRules(dataclasses.replace(LOG, segment_bytes_max=10**6)))
        segments = partition.status().segments
        await fill(partition, 30, 60)
        assert partition.status().segments <= segments + 1
        await partition.stop()

    simulate(main())


@given(
    st.dictionaries(st.sampled_from(["a", "b", "#1", "#2"]), st.integers(5, 20)),
    st.sets(st.sampled_from(["#1", "#2", "#3"])),
)
def test_never_past_anybody(positions: dict[str, int], registered: set[str]) -> None:
    found = read_by_all(positions, registered, 3)
    if found is None:
        assert not positions and not registered
        return
    assert all(found <= offset for offset in positions.values())
    assert found == 3 or registered <= positions.keys()
    assert read_by_all(positions, None, 3) is None


def test_followers_begin_where_the_leader_says() -> None:
    async def main() -> None:
        async with Group(log=LOG) as group:
            await group.fill(40)
            leader = await group.leader()
            for number in group.numbers:
                group.partition(number).use(RULES)
            partition = group.partition(leader)
            await partition.commit_position(Position("group", 25))
            for number in group.numbers:
                await group.partition(number).apply_retention(())

            async def all_begin_there() -> bool:
                return all(group.partition(number).start_offset == 25 for number in group.numbers)

            await group.until(all_begin_there)

    asyncio.run(asyncio.wait_for(main(), 30))
