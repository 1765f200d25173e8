"""The owner of a partition: what is acknowledged, when, and what a retry gets."""

from __future__ import annotations

import asyncio

import pytest

from quiver.broker import partition as partition_module
from quiver.broker import partition_state
from quiver.broker.partition_state import OFFSET_UNKNOWN
from quiver.errors import (
    ConflictError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    OverloadedError,
    ShuttingDownError,
)
from quiver.testing.faulty_disk import FaultyDisk
from quiver.wire.messages import Position, ProduceReply
from tests.broker.kit import Bench, batch, check_dense, finish, held, payloads, settle, simulate

# -- the acknowledgement ---------------------------------------------------------------------------------------------


def test_produce_is_acknowledged_after_the_sync_and_not_before() -> None:
    async def main() -> None:
        bench, writers, disk = held()
        partition = bench.open()
        future = asyncio.ensure_future(partition.produce(batch()))
        await settle()
        assert len(writers.jobs) == 1 and not future.done()
        assert partition.high_watermark == 0 and await payloads(partition) == []
        disk.crash()  # the disk work has not begun: nothing may be promised yet
        writers.jobs.clear()
        reopened = Bench(disk).open()
        assert reopened.high_watermark == 0
        await reopened.stop()
        future.cancel()

    simulate(main())


def test_acknowledged_batch_survives_a_power_cut_at_once() -> None:
    async def main() -> None:
        for seed in range(20):
            bench, writers, disk = held(seed)
            partition = bench.open()
            future = asyncio.ensure_future(partition.produce(batch()))
            await settle()
            writers.run_one()
            await settle()
            assert await future == ProduceReply(0)
            assert await payloads(partition) == [batch().payload]
            disk.crash()
            reopened = Bench(disk).open()
            assert await payloads(reopened) == [batch().payload]
            await reopened.stop()

    simulate(main())


def test_all_that_come_during_one_sync_are_covered_by_the_next() -> None:
    async def main() -> None:
        bench, writers, disk = held()
        partition = bench.open()
        first = asyncio.ensure_future(partition.produce(batch(text="first")))
        await settle()
        rest = [asyncio.ensure_future(partition.produce(batch(text=str(number)))) for number in range(50)]
        await settle()
        assert len(writers.jobs) == 1, "one disk job at a time"
        writers.run_one()
        await settle()
        assert first.done() and not any(future.done() for future in rest)
        assert len(writers.jobs) == 1
        syncs: list[str] = []
        count_step = disk.step
        disk.step = lambda operation, path: (  # type: ignore[method-assign]
            syncs.append(path) if operation == "datasync" else None,
            count_step(operation, path),
        )
        writers.run_one()
        await settle()
        assert [(await future).base_offset for future in rest] == list(range(2, 102, 2))
        assert len(set(syncs)) == len(syncs) <= 8, "one sync for each segment file, none for each batch"
        assert not writers.jobs
        stopping = asyncio.ensure_future(partition.stop())
        await finish(writers)
        await stopping

    simulate(main())


def test_replies_of_one_partition_leave_in_log_order() -> None:
    async def main() -> None:
        async with Bench(FaultyDisk(0)).opened() as partition:
            order: list[int] = []
            futures = []
            for number in range(30):
                future = asyncio.ensure_future(partition.produce(batch(number * 2, producer=1)))
                future.add_done_callback(lambda done: order.append(done.result().base_offset))
                futures.append(future)
            await asyncio.gather(*futures)
            assert order == sorted(order)
            await check_dense(partition)

    simulate(main())


def test_asker_who_goes_away_before_admission_leaves_nothing() -> None:
    async def main() -> None:
        async with Bench(FaultyDisk(0)).opened() as partition:
            gone = asyncio.ensure_future(partition.produce(batch(text="gone")))
            await asyncio.sleep(0)
            gone.cancel()
            await partition.produce(batch(text="here"))
            assert await payloads(partition) == [batch(text="here").payload]

    simulate(main())


def test_asker_who_goes_away_during_the_sync_does_not_stop_the_batch() -> None:
    async def main() -> None:
        bench, writers, _ = held()
        partition = bench.open()
        gone = asyncio.ensure_future(partition.produce(batch(0, producer=3)))
        await settle()
        gone.cancel()
        await finish(writers)
        retry = await partition.produce(batch(0, producer=3))
        assert retry == ProduceReply(0, duplicate=True)
        stopping = asyncio.ensure_future(partition.stop())
        await finish(writers)
        await stopping

    simulate(main())


def test_inbox_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_module, "INBOX_MAX", 5)

    async def main() -> None:
        async with Bench(FaultyDisk(0)).opened() as partition:
            askers = [asyncio.ensure_future(partition.produce(batch(text=str(number)))) for number in range(8)]
            found = await asyncio.gather(*askers, return_exceptions=True)
            assert [type(outcome) for outcome in found] == [ProduceReply] * 5 + [OverloadedError] * 3
            assert partition.high_watermark == 10

    simulate(main())


# -- duplicates ------------------------------------------------------------------------------------------------------


def test_retry_of_an_uncommitted_batch_waits_for_its_commit_and_is_stored_once() -> None:
    async def main() -> None:
        bench, writers, _ = held()
        partition = bench.open()
        first = asyncio.ensure_future(partition.produce(batch(0, producer=9)))
        await settle()
        retry = asyncio.ensure_future(partition.produce(batch(0, producer=9)))
        following = asyncio.ensure_future(partition.produce(batch(2, producer=9)))
        await settle()
        assert not first.done() and not retry.done()
        writers.run_one()
        await settle()
        assert await first == ProduceReply(0)
        assert await retry == ProduceReply(0, duplicate=True)
        assert not following.done()
        again = asyncio.ensure_future(partition.produce(batch(2, producer=9)))
        await finish(writers)
        assert (await following, await again) == (ProduceReply(2), ProduceReply(2, duplicate=True))
        assert await payloads(partition) == [batch(0, producer=9).payload, batch(2, producer=9).payload]
        stopping = asyncio.ensure_future(partition.stop())
        await finish(writers)
        await stopping

    simulate(main())


@pytest.mark.parametrize("how", ["crash", "kill", "stop"])
def test_retry_after_a_restart_is_known(how: str) -> None:
    async def main() -> None:
        disk = FaultyDisk(1)
        partition = Bench(disk).open()
        for sequence in (0, 2, 4):
            await partition.produce(batch(sequence, producer=9))
        if how == "stop":
            await partition.stop()  # writes a check-point: the table must come from there
        getattr(disk, how if how != "stop" else "kill")()
        async with Bench(disk).opened() as reopened:
            for sequence in (0, 2, 4):
                assert await reopened.produce(batch(sequence, producer=9)) == ProduceReply(sequence, duplicate=True)
            assert await reopened.produce(batch(6, producer=9)) == ProduceReply(6)
            with pytest.raises(OutOfOrderSequenceError):
                await reopened.produce(batch(100, producer=9))

    simulate(main())


def test_old_batch_is_known_and_found_in_the_log() -> None:
    async def main() -> None:
        async with Bench(FaultyDisk(0)).opened() as partition:
            for sequence in range(0, 60, 2):
                await partition.produce(batch(sequence, producer=9))
            assert await partition.produce(batch(4, producer=9)) == ProduceReply(OFFSET_UNKNOWN, duplicate=True)
            assert await partition.reader.find_batch(9, 0, 4) == 4
            assert await partition.reader.find_batch(9, 0, 5) == OFFSET_UNKNOWN
            assert await partition.reader.find_batch(8, 0, 4) == OFFSET_UNKNOWN
            assert partition.high_watermark == 60

    simulate(main())


# -- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["crash", "kill", "stop"])
def test_positions_survive_a_restart(how: str) -> None:
    async def main() -> None:
        disk = FaultyDisk(4)
        partition = Bench(disk).open()
        await partition.produce(batch(count=10))
        assert await partition.commit_position(Position("a", 4)) == 4
        assert await partition.commit_position(Position("a", 2)) == 4, "it does not move back"
        assert await partition.commit_position(Position("b", 10)) == 10
        assert await partition.commit_position(Position("b", 3, rewind=True)) == 3
        if how == "stop":
            await partition.stop()
        getattr(disk, how if how != "stop" else "kill")()
        async with Bench(disk).opened() as reopened:
            assert (
                reopened.state.positions.get("a"),
                reopened.state.positions.get("b"),
                reopened.state.positions.get("c"),
            ) == (4, 3, None)
            assert reopened.high_watermark == 10
            assert await reopened.commit_position(Position("a", 3)) == 4

    simulate(main())


def test_position_beyond_the_end_is_refused() -> None:
    async def main() -> None:
        async with Bench(FaultyDisk(0)).opened() as partition:
            await partition.produce(batch(count=10))
            with pytest.raises(OffsetOutOfRangeError) as caught:
                await partition.commit_position(Position("a", 11, rewind=True))
            assert (caught.value.facts["earliest"], caught.value.facts["latest"]) == (0, 10)
            assert partition.state.positions.get("a") is None

    simulate(main())


def test_position_that_moved_meanwhile_is_a_conflict() -> None:
    async def main() -> None:
        async with Bench(FaultyDisk(0)).opened() as partition:
            await partition.produce(batch(count=10))
            askers = [partition.commit_position(Position("a", offset, expected=-1)) for offset in (4, 5)]
            first, second = await asyncio.gather(*askers, return_exceptions=True)
            assert first == 4
            assert isinstance(second, ConflictError) and second.facts == {"current": 4}
            assert await partition.commit_position(Position("a", 5, expected=4)) == 5

    simulate(main())


def test_number_of_consumers_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_state, "POSITIONS_MAX", 2)

    async def main() -> None:
        async with Bench(FaultyDisk(0)).opened() as partition:
            for consumer in ("a", "b"):
                await partition.commit_position(Position(consumer, 0))
            with pytest.raises(OverloadedError):
                await partition.commit_position(Position("c", 0))
            assert await partition.commit_position(Position("a", 0)) == 0

    simulate(main())


# -- the end ---------------------------------------------------------------------------------------------------------


def test_stop_finishes_what_is_admitted_and_refuses_the_rest() -> None:
    async def main() -> None:
        bench, writers, disk = held()
        partition = bench.open()
        admitted = [asyncio.ensure_future(partition.produce(batch(text=str(number)))) for number in range(3)]
        waiting = asyncio.ensure_future(partition.until_commit(1000))
        await settle()
        stopping = asyncio.ensure_future(partition.stop())
        await settle()
        for request in (partition.produce(batch()), partition.commit_position(Position("a", 0))):
            with pytest.raises(ShuttingDownError):
                await request
        assert not any(future.done() for future in admitted)
        await finish(writers)
        await stopping
        assert [(await future).base_offset for future in admitted] == [0, 2, 4]
        assert await waiting, "woken by the commit"
        with pytest.raises(ShuttingDownError):
            await partition.until_commit(1)
        disk.crash()
        async with Bench(disk).opened() as reopened:
            assert len(await payloads(reopened)) == 3

    simulate(main())
