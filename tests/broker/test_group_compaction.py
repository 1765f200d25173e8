"""Compaction of a partition on three brokers: all come to the same, whoever was away, lost its disk or was damaged."""

from __future__ import annotations

import asyncio

import pytest

from quiver.broker.compactor import Compactor
from quiver.config import LogSettings
from quiver.errors import InvalidRequestError
from quiver.raft.messages import Compacted
from quiver.testing.faulty_disk import FaultyDisk
from quiver.types import Record
from quiver.wire.frame import walk_frames
from quiver.wire.messages import Fetch
from quiver.wire.records import batch_from_lists, encode_batch
from quiver.wire.rows import rows_of, to_records
from tests.broker.group_kit import Group, payload_of, segment_files
from tests.broker.server_kit import run
from tests.broker.test_moves import Moving

LOG = LogSettings(segment_bytes_max=4000, index_interval_bytes=512)
SETTINGS: dict[str, bool | int | str] = {"cleanup": "compact", "tombstone.ms": 0}
KEYS = (b"a", b"b", b"c")


def compacted_group(spare: int = 0) -> Group:
    return Group(log=LOG, settings=SETTINGS, spare=spare)


async def say(group: Group, *pairs: tuple[bytes, bytes | None]) -> None:
    keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    await group.produce_batch(bytes(encode_batch(batch_from_lists([1000], keys, values, None))))


async def fill(group: Group, rounds: int) -> None:
    for number in range(rounds):
        for key in KEYS:
            await say(group, (key, b"%d" % number * 30))


async def read(group: Group, number: int) -> list[Record]:
    """All records, as that broker serves them."""
    found: list[Record] = []
    offset, end = 0, (await group.status(number)).next_offset
    while offset < end:
        _, parts = await group.ask(number, Fetch("logs", 0, offset, 1_000_000, 0, 0))
        for _, header, payload in walk_frames(memoryview(b"".join(parts))):
            if header.record_count:  # an election leaves entries without records
                found += to_records("logs", 0, rows_of(header, payload).since(offset))
                offset = header.next_offset
    return found


async def compact(group: Group, rounds: int = 4) -> None:
    """Every broker does what it would do by itself every now and then."""
    for _ in range(rounds):
        for number in list(group.brokers):
            await group.partition(number).compact()
        await asyncio.sleep(0)


async def until_done(group: Group, order: int) -> None:
    async def all_done() -> bool:
        await compact(group, 1)
        return all(group.partition(number).compactor.completed >= order for number in group.brokers)

    await group.until(all_done)


async def order_of(group: Group) -> int:
    return group.partition(await group.leader()).state.order.index


async def until_gone(group: Group, key: bytes) -> None:
    async def gone() -> bool:
        await compact(group, 1)
        return all([key not in {r.key for r in await read(group, number)} for number in group.brokers])

    await group.until(gone)


def logs(group: Group) -> list[list[tuple[int, bytes]]]:
    """What each broker has on its disk."""
    found = []
    for number in group.brokers:
        log = group.partition(number)._log
        found.append([(header.index, bytes(payload)) for _, header, payload in log.scan(log.first_index)])
    return found


def test_all_replicas_come_to_the_same_bytes() -> None:
    async def main() -> None:
        async with compacted_group() as group:
            await fill(group, 12)
            await say(group, (b"gone", b"value"))
            await say(group, (b"gone", None))
            await group.until_all_have(38)
            await compact(group, 1)
            await until_done(group, await order_of(group))
            await until_gone(group, b"gone")
            await until_done(group, await order_of(group))
            expected = [(key, b"11" * 30) for key in KEYS]
            for number in group.brokers:
                assert [(record.key, record.value) for record in await read(group, number)] == expected
            first, *others = logs(group)
            assert all(log == first for log in others)

    run(main())


def test_what_says_deleted_waits_for_a_member_that_is_away() -> None:
    """Else that member would keep what was deleted: it gets entries of which the deletion is gone."""

    async def main() -> None:
        async with compacted_group() as group:
            away = await group.follower()
            await say(group, (b"gone", b"value"))
            await fill(group, 4)
            await group.until_all_have(13)
            await group.stop(away)
            await say(group, (b"gone", None))
            await fill(group, 10)
            await compact(group, 1)
            await until_done(group, await order_of(group))
            await fill(group, 20)
            await compact(group, 6)
            for number in group.brokers:
                assert (b"gone", None) in [(record.key, record.value) for record in await read(group, number)]
            await group.start(away)
            await group.until_all_have(104)
            await until_gone(group, b"gone")
            await until_done(group, await order_of(group))
            first, *others = logs(group)
            assert all(log == first for log in others)

    run(main())


def test_broker_with_an_empty_disk_gets_what_is_left() -> None:
    async def main() -> None:
        async with compacted_group() as group:
            await fill(group, 12)
            await say(group, (b"gone", b"value"))
            await say(group, (b"gone", None))
            await group.until_all_have(38)
            await compact(group, 1)
            await until_done(group, await order_of(group))
            await until_gone(group, b"gone")
            lost = await group.follower()
            await group.stop(lost)
            group.disks[lost] = FaultyDisk(99)
            await group.start(lost)
            await group.host(lost, group.voters)
            await group.until_all_have(38)
            assert [record.key for record in await read(group, lost)] == list(KEYS)
            await until_done(group, await order_of(group))
            first, *others = logs(group)
            assert all(log == first for log in others)

    run(main())


def test_damaged_frame_is_repaired_from_one_that_is_compacted_too() -> None:
    async def main() -> None:
        async with compacted_group() as group:
            await fill(group, 12)
            await group.until_all_have(36)
            await compact(group, 1)
            await until_done(group, await order_of(group))
            damaged = await group.follower()
            before = await read(group, damaged)
            path = segment_files(group.disks[damaged], damaged)[0]
            group.disks[damaged].flip(path, 100, 0)

            async def mended() -> bool:
                try:
                    return await read(group, damaged) == before
                except Exception:
                    return False  # it is taken out until it is mended

            await group.until(mended)
            first, *others = logs(group)
            assert all(log == first for log in others)

    run(main())


def test_who_is_less_compacted_does_not_help_with_a_repair() -> None:
    async def main() -> None:
        async with compacted_group() as group:
            await fill(group, 12)
            await group.until_all_have(36)
            await compact(group, 1)
            order = await order_of(group)
            damaged = await group.follower()

            async def done() -> bool:
                await group.partition(damaged).compact()
                return group.partition(damaged).compactor.completed == order

            await group.until(done)
            before = await read(group, damaged)
            group.disks[damaged].flip(segment_files(group.disks[damaged], damaged)[0], 100, 0)
            with pytest.raises(Exception, match=r"checksum|leader|does not have"):
                await read(group, damaged)
            leader = group.partition(await group.leader())
            for _ in range(20):
                await asyncio.sleep(0.05)
                assert leader.compactor.completed == 0
            hosting = group.brokers[damaged]._hosting
            assert hosting._repairs, "nobody has the frame as it was"
            await leader.compact()

            async def mended() -> bool:
                return not hosting._repairs and await read(group, damaged) == before

            await group.until(mended)

    run(main())


def test_records_without_a_key_are_refused() -> None:
    async def main() -> None:
        async with compacted_group() as group:
            await say(group, (b"a", None))
            with pytest.raises(InvalidRequestError, match="a record of topic logs needs a key"):
                await group.produce(b"value")
            mixed = batch_from_lists([0], [b"a", None], [b"1", b"2"], None)
            for compression in (None, "lz4", "zstd"):
                with pytest.raises(InvalidRequestError, match="compacted by key"):
                    await group.produce_batch(bytes(encode_batch(mixed, compression)), record_count=2)
            assert payload_of(b"value")
            await group.until_all_have(1)

    run(main())


def test_answers_count_for_one_term_and_one_order() -> None:
    async def main() -> None:
        async with compacted_group() as group:
            await fill(group, 12)
            await group.until_all_have(36)
            await compact(group, 1)
            order = await order_of(group)
            await until_done(group, order)
            partition = group.partition(await group.leader())
            assert partition.raft is not None
            compactor: Compactor = partition.compactor
            me, term = partition.raft.seat.me, partition.raft.raft.term
            others = [member for member in partition.raft.raft.membership.members if member != me]
            compactor._asked, compactor._answers = (term, order), {}
            compactor.receive(Compacted(others[0], me, term, order, order), partition.raft)
            compactor.receive(Compacted(others[1], me, term - 1, order, order), partition.raft)
            compactor.receive(Compacted(others[1], me, term, order - 1, order), partition.raft)
            compactor.receive(Compacted(others[1], me + 1, term, order, order), partition.raft)
            assert not compactor._all_have(order, partition.raft)
            compactor.receive(Compacted(others[1], me, term, order, order), partition.raft)
            assert compactor._all_have(order, partition.raft)

    run(main())


def test_deleted_key_stays_away_from_who_was_put_out_and_is_wanted_again() -> None:
    """Nobody waited for it with the records that say 'deleted'; with its old log it would have the key again."""

    async def main() -> None:
        async with Moving(log=LOG, settings=SETTINGS, spare=1) as group:
            await say(group, (b"x", b"once"))
            leader = await group.leader()
            away, stays = (number for number in (1, 2, 3) if number != leader)

            async def has_x() -> bool:
                return (await group.status(away)).next_offset == 1

            await group.until(has_x)
            before = group.partition(away).raft
            await group.stop(away)
            await group.tell([leader, stays, 4, away])
            await group.until_done([leader, stays, 4])
            await say(group, (b"x", None))
            await fill(group, 20)
            await until_gone(group, b"x")
            await group.start(away)
            await group.tell([leader, stays, away, 4])
            await group.until_done([leader, stays, away])
            end = (await group.status(leader)).next_offset

            async def has_all() -> bool:
                return (await group.status(away)).next_offset == end

            await group.until(has_all)
            assert b"x" not in {record.key for record in await read(group, away)}
            after = group.partition(away).raft
            assert before is not None and after is not None and before.seat.me != after.seat.me

    run(main())
