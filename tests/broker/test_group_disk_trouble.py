"""A replicated partition whose leader has trouble of its own: the others are asked, and nothing is stored twice."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from crc32c import crc32c
from msgspec import Struct

from quiver.broker.partition import Partition
from quiver.broker.partition_state import PartitionState
from quiver.clock import SystemClock
from quiver.config import LogSettings
from quiver.errors import CorruptLogError, DiskFullError, LogFailedError, NotLeaderError, QuiverError
from quiver.manager import links
from quiver.manager.brokers import Brokers
from quiver.manager.joiner import Joiner
from quiver.manager.links import LeaderLink
from quiver.metadata.state import Partition as Placed
from quiver.raft import Append
from quiver.replication import raft_replica
from quiver.testing.faulty_disk import FaultyDisk
from quiver.wire.batch_check import SCHEMA_ID_V1
from quiver.wire.messages import Fetch, Produce
from tests.broker.group_kit import UID, Group, payload_of, segment_files
from tests.broker.server_kit import run
from tests.broker.test_replication import SMALL, flip, values


class Link:
    """To one broker of the group, as a manager has it."""

    def __init__(self, group: Group, number: int) -> None:
        self._group = group
        self._number = number
        self.produced: list[tuple[int, int, int]] = []

    async def call(self, request: Struct, payload: Any = b"") -> tuple[Struct, Sequence[Any]]:
        if isinstance(request, Produce):
            self.produced.append((request.producer_id, request.producer_epoch, request.sequence))
        return await self._group.ask(self._number, request, bytes(payload))


def gateway(group: Group) -> tuple[Joiner, list[Link]]:
    known = Brokers(SystemClock(), 5.0)
    made = [Link(group, number) for number in group.numbers]
    for number, link in zip(group.numbers, made, strict=True):
        known.attach(number, link)
    placed = Placed(1, "logs", 0, UID, tuple(group.numbers), tuple(group.voters))
    return Joiner(lambda topic, number: LeaderLink(known, placed), SystemClock(), 77), made


async def ask_leader(group: Group, number: int, value: bytes, **more: int) -> QuiverError | None:
    """What that broker says to a produce; None when it takes it."""
    payload = payload_of(value)
    request = Produce("logs", 0, 1, 0, 0, crc32c(payload), SCHEMA_ID_V1, **more)
    try:
        await group.ask(number, request, payload)
    except QuiverError as error:
        return error
    return None


NO_ROOM = LogSettings(room_bytes_max=0)  # nothing is taken ahead: a full disk is felt at once


def fill_disk(disk: FaultyDisk) -> None:
    disk.capacity_bytes = 0


# -- a full disk -----------------------------------------------------------------------------------------------------


def test_leader_whose_disk_is_full_does_not_say_that_nothing_was_stored() -> None:
    """The followers have the entry already, and one of them will commit it."""

    async def main() -> None:
        async with Group(log=NO_ROOM) as group:
            await group.fill(3)
            await group.until_all_have(3)
            first = await group.leader()
            fill_disk(group.disks[first])
            told = await ask_leader(group, first, b"3", producer_id=7, sequence=0)
            assert isinstance(told, NotLeaderError) and told.facts["leader"] != first, told
            assert await group.produce(b"3", producer_id=7, sequence=0) == 3
            second = await group.leader()
            assert second != first
            assert await group.payloads(second) == values(0, 4), "once"
            group.disks[first].capacity_bytes = None
            await group.until_all_have(4)
            assert await group.payloads(first) == values(0, 4)

    run(main())


def test_gateway_goes_on_with_its_numbers_where_another_leads_when_the_leaders_disk_is_full() -> None:
    async def main() -> None:
        async with Group(log=NO_ROOM) as group:
            joiner, made = gateway(group)
            assert await joiner.add("logs", 0, 0, b"0", None) == 0
            first = await group.leader()
            fill_disk(group.disks[first])
            assert [await joiner.add("logs", 0, 0, b"%d" % number, None) for number in (1, 2)] == [1, 2]
            second = await group.leader()
            assert second != first
            numbers = {number for link in made for number in link.produced}
            assert numbers == {(77, 0, 0), (77, 0, 1), (77, 0, 2)}, "no new epoch: a repeat is recognised"
            assert (await group.status(second)).next_offset == 3

    run(main())


def test_where_every_disk_is_full_the_search_ends_with_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LEADER_SEARCH_S", 1.0)

    async def main() -> None:
        async with Group(log=NO_ROOM) as group:
            await group.fill(3)
            await group.until_all_have(3)
            for disk in group.disks.values():
                fill_disk(disk)
            joiner, _ = gateway(group)
            for _ in range(2):
                with pytest.raises(NotLeaderError, match="No space left"):
                    await asyncio.wait_for(joiner.add("logs", 0, 0, b"more", None), 5)

    run(main())


def test_only_replica_says_that_its_disk_is_full_as_long_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raft_replica, "_FULL_S", 0.3)

    async def main() -> None:
        async with Group(count=1, log=NO_ROOM) as group:
            await group.fill(3)
            fill_disk(group.disks[1])
            for _ in range(3):
                assert isinstance(await ask_leader(group, 1, b"3"), DiskFullError)
            group.disks[1].capacity_bytes = None

            async def is_taken() -> bool:
                return await ask_leader(group, 1, b"3") is None

            await asyncio.wait_for(group.until(is_taken), 10)
            assert await group.payloads(1) == values(0, 4)

    run(main())


# -- a failed disk ---------------------------------------------------------------------------------------------------


def test_leader_whose_disk_failed_sends_to_the_next_one() -> None:
    async def main() -> None:
        async with Group() as group:
            await group.fill(3)
            await group.until_all_have(3)
            first = await group.leader()
            group.disks[first].fail("datasync", errno.EIO, path=".seg")
            for _ in range(2):
                told = await ask_leader(group, first, b"3", producer_id=7, sequence=0)
                assert isinstance(told, NotLeaderError), told
            joiner, _ = gateway(group)
            assert await group.produce(b"3", producer_id=7, sequence=0) == 3
            assert await joiner.add("logs", 0, 0, b"4", None) == 4
            assert (await group.status(first)).state == "failed"

    run(main())


def test_only_replica_says_that_its_disk_failed() -> None:
    async def main() -> None:
        async with Group(count=1) as group:
            await group.fill(3)
            group.disks[1].fail("datasync", errno.EIO, path=".seg")
            await ask_leader(group, 1, b"3")
            assert isinstance(await ask_leader(group, 1, b"3"), LogFailedError)

    run(main())


def test_replica_that_cannot_be_opened_sends_to_the_others() -> None:
    async def main() -> None:
        async with Group() as group:
            await group.fill(3)
            await group.until_all_have(3)
            hurt = await group.follower()
            await group.stop(hurt)
            group.disks[hurt].fail("open", errno.EIO, path=".seg")
            await group.start(hurt)
            assert (await group.status(hurt)).state == "failed"
            with pytest.raises(NotLeaderError, match="cannot be opened"):
                await group.ask(hurt, Fetch("logs", 0, 0, 1000, 1, 0))

    run(main())


# -- damage ----------------------------------------------------------------------------------------------------------


def test_damage_that_others_can_mend_is_told_as_trouble_that_passes() -> None:
    async def main() -> None:
        async with Group(log=SMALL) as group:
            await group.fill(100)
            await group.until_all_have(100)
            hurt = await group.leader()
            flip(group.disks[hurt], segment_files(group.disks[hurt], hurt)[0], 2000)
            told = []
            async with asyncio.timeout(20):
                while (await group.status(hurt)).state != "online" or not told:
                    try:
                        await group.payloads(hurt)
                    except QuiverError as error:
                        told.append(error)
                    await asyncio.sleep(0.005)
            assert told and all(error.retriable for error in told), told
            assert isinstance(told[0], NotLeaderError) and told[0].facts["leader"] != hurt
            assert await group.payloads(hurt) == values(0, 100)

    run(main())


def test_replica_that_is_being_repaired_is_not_here() -> None:
    """Its partition is stopped, and must not be taken for one of a broker that stops."""

    async def main() -> None:
        async with Group(log=SMALL) as group:
            await group.fill(100)
            await group.until_all_have(100)
            hurt = await group.follower()
            for number in [number for number in group.brokers if number != hurt]:
                await group.stop(number)  # nobody can send the frame
            flip(group.disks[hurt], segment_files(group.disks[hurt], hurt)[0], 2000)
            with pytest.raises(NotLeaderError):
                await group.payloads(hurt)
            hosting = group.brokers[hurt]._hosting

            async def is_taken_out() -> bool:
                return not isinstance(hosting.partitions["logs"][0], Partition)

            await asyncio.wait_for(group.until(is_taken_out), 10)
            for request in (Fetch("logs", 0, 0, 1000, 1, 0), Fetch("logs", 0, 99, 1000, 1, 0)):
                with pytest.raises(NotLeaderError, match="corrupt log"):
                    await group.ask(hurt, request)
            assert (await group.status(hurt)).state == "corrupt"

    run(main())


def test_damage_of_the_only_replica_is_told_and_all_else_goes_on() -> None:
    async def main() -> None:
        async with Group(count=1, log=SMALL) as group:
            await group.fill(100)
            flip(group.disks[1], segment_files(group.disks[1], 1)[0], 2000)
            for _ in range(2):
                with pytest.raises(CorruptLogError) as caught:
                    await group.payloads(1)
                assert caught.value.facts["path"].endswith(".seg")
            assert not group.brokers[1]._hosting._repairs, "there is nobody to repair it from"
            assert await group.produce(b"100") == 100
            reply, frames = await group.ask(1, Fetch("logs", 0, 99, 10_000, 1, 0))
            assert reply.high_watermark == 101 and frames

    run(main())


# -- a bug -----------------------------------------------------------------------------------------------------------


def test_leader_that_a_bug_stops_does_not_say_that_nothing_was_stored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with Group() as group:
            await group.fill(3)
            await group.until_all_have(3)
            first = await group.leader()
            hurt = group.partition(first)
            apply = PartitionState.apply

            def broken(self: PartitionState, *given: Any) -> Any:
                if self is hurt.state:
                    raise KeyError("a bug")
                return apply(self, *given)

            monkeypatch.setattr(PartitionState, "apply", broken)
            told = await ask_leader(group, first, b"3", producer_id=7, sequence=0)
            assert isinstance(told, NotLeaderError) and "internal error" in told.message, told
            assert isinstance(await ask_leader(group, first, b"3", producer_id=7, sequence=0), NotLeaderError)
            assert await group.produce(b"3", producer_id=7, sequence=0) == 3

    with caplog.at_level(logging.CRITICAL, "quiver.broker"):
        run(main())


def test_leader_of_a_quiet_group_that_a_bug_stops_calls_for_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connections live and nobody expects heartbeats: nobody would miss it."""

    async def main() -> None:
        async with Group() as group:
            await group.fill(3)
            await group.until_all_have(3)
            first = await group.leader()
            hurt = group.partition(first)
            assert hurt.raft is not None

            async def is_quiet() -> bool:
                hostings = [broker._hosting for broker in group.brokers.values()]
                return all(
                    one.raft is not None and one.raft.raft.quiet for hosted in hostings for one in hosted.usable()
                )

            def broken() -> None:
                raise KeyError("a bug")

            await group.until(is_quiet)
            monkeypatch.setattr(hurt, "_own", broken)
            reading = hurt.raft.read()
            with pytest.raises(NotLeaderError):
                await asyncio.wait_for(reading, 5)
            assert await asyncio.wait_for(group.leader(), 5) != first
            assert not hurt.raft.receive(Append(0, hurt.raft.seat.me, 99, 0, 0, 0, 0), memoryview(b""))
            assert not hurt.raft._inputs, "what nobody will look at is not kept"

    with caplog.at_level(logging.CRITICAL, "quiver.broker"):
        run(main())
