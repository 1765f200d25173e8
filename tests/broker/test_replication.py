"""A partition on three brokers: leaders change, disks are lost and damaged, nothing that was acknowledged is."""

from __future__ import annotations

import asyncio
import contextlib
import errno

import pytest

from quiver.config import LogSettings
from quiver.errors import LogFailedError, NotLeaderError, OutcomeUnknownError
from quiver.log.flusher import ALONE_S_MIN
from quiver.replication.group import broker_of
from quiver.replication.raft_replica import RaftReplica
from quiver.testing.faulty_disk import FaultyDisk
from quiver.wire.messages import OFFSET_LATEST, ListOffset, ListOffsetReply
from tests.broker.group_kit import UID, Group, payload_of, segment_files
from tests.broker.server_kit import run

SMALL = LogSettings(segment_bytes_max=8000, checkpoint_bytes=4000, index_interval_bytes=512)


def values(first: int, last: int) -> list[bytes]:
    return [payload_of(b"%d" % number) for number in range(first, last)]


def test_acknowledged_entries_are_on_every_replica_in_order() -> None:
    async def main() -> None:
        async with Group() as group:
            await group.fill(50)
            await group.until_all_have(50)
            for number in group.numbers:
                assert await group.payloads(number) == values(0, 50)

    run(main())


def test_first_of_the_voters_leads_a_new_group() -> None:
    async def main() -> None:
        async with Group() as group:
            assert await group.leader() == 1

    run(main())


def test_stopped_leader_hands_over_and_nothing_is_lost() -> None:
    async def main() -> None:
        async with Group() as group:
            await group.fill(20)
            first = await group.leader()
            await group.stop(first)
            await group.fill(20, 20)
            assert await group.leader() != first
            await group.start(first)
            await group.until_all_have(40)
            assert await group.payloads(first) == values(0, 40)

    run(main())


def test_retry_at_the_next_leader_is_stored_once() -> None:
    async def main() -> None:
        async with Group() as group:
            assert await group.produce(b"a", producer_id=7, sequence=0) == 0
            assert await group.produce(b"b", producer_id=7, sequence=1) == 1
            await group.stop(await group.leader())
            assert await group.produce(b"b", producer_id=7, sequence=1) == 1
            assert await group.produce(b"c", producer_id=7, sequence=2) == 2

    run(main())


def test_follower_refuses_and_names_the_leader() -> None:
    async def main() -> None:
        async with Group() as group:
            await group.fill(1)
            await group.until_all_have(1)  # so that the follower has heard of the leader
            leader = await group.leader()
            follower = next(number for number in group.numbers if number != leader)
            with pytest.raises(NotLeaderError) as caught:
                await group.ask(follower, ListOffset("logs", 0, OFFSET_LATEST))
            assert caught.value.facts["leader"] == leader
            reply, _ = await group.ask(leader, ListOffset("logs", 0, OFFSET_LATEST))
            assert isinstance(reply, ListOffsetReply) and reply.offset == 1

    run(main())


def test_leader_without_a_majority_acknowledges_nothing() -> None:
    async def main() -> None:
        async with Group() as group:
            await group.fill(5)
            leader = await group.leader()
            for number in [number for number in group.numbers if number != leader]:
                await group.stop(number)
            # No answer, or that its outcome is unknown because the leader has given up its place.
            with pytest.raises((TimeoutError, OutcomeUnknownError)):
                await asyncio.wait_for(group.produce(b"lost"), 1.0)
            assert (await group.status(leader)).next_offset == 5

    run(main())


def test_follower_that_was_away_catches_up_from_files() -> None:
    async def main() -> None:
        async with Group(log=SMALL) as group:
            away = await group.follower()
            await group.stop(away)
            await group.fill(200)
            await group.start(away)
            await group.until_all_have(200)
            assert await group.payloads(away) == values(0, 200)

    run(main())


def test_broker_with_an_empty_disk_comes_back_as_another_replica() -> None:
    async def main() -> None:
        async with Group(log=SMALL) as group:
            await group.fill(100)
            lost = await group.follower()
            before = group.voters[lost - 1]
            await group.stop(lost)
            group.disks[lost] = FaultyDisk(99)
            await group.start(lost)
            await group.host(lost, group.voters)
            await group.fill(20, 100)
            await group.until_all_have(120)
            assert await group.payloads(lost) == values(0, 120)

            async def is_voter() -> bool:
                raft = group.partition(lost).raft
                assert raft is not None and raft.raft.me != before
                return raft.raft.me in raft.raft.membership.voters

            await group.until(is_voter)
            raft = group.partition(lost).raft
            assert raft is not None
            voters = raft.raft.membership.voters
            assert before not in voters and sorted(map(broker_of, voters)) == [1, 2, 3]

    run(main())


def test_lost_directory_is_not_taken_for_an_empty_replica_of_the_same_name() -> None:
    async def main() -> None:
        async with Group() as group:
            await group.fill(30)
            lost = await group.follower()
            await group.stop(lost)
            group.disks[lost].remove_tree(f"data/broker-{lost}/partitions/{UID}")
            await group.start(lost)
            raft = group.partition(lost).raft
            assert raft is not None and raft.raft.me not in group.voters
            await group.until_all_have(30)
            assert await group.payloads(lost) == values(0, 30)

    run(main())


@pytest.mark.parametrize("byte", [4, 40, 200])
def test_frame_that_is_damaged_at_the_start_is_repaired_from_a_peer(byte: int) -> None:
    """In the header, in the checksum and in the payload of an entry that was acknowledged."""

    async def main() -> None:
        async with Group() as group:
            await group.fill(20)
            await group.until_all_have(20)
            hurt = await group.follower()
            await group.stop(hurt)
            path = segment_files(group.disks[hurt], hurt)[0]
            flip(group.disks[hurt], path, 2000 + byte)
            await group.start(hurt)
            await group.until_all_have(20)
            assert await group.payloads(hurt) == values(0, 20)
            raft = group.partition(hurt).raft
            assert raft is not None and raft.raft.me == group.voters[hurt - 1]

    run(main())


def test_frame_that_a_leader_finds_damaged_is_repaired_and_not_served() -> None:
    async def main() -> None:
        async with Group(log=SMALL) as group:
            await group.fill(100)
            await group.until_all_have(100)
            hurt = await group.leader()
            path = segment_files(group.disks[hurt], hurt)[0]
            flip(group.disks[hurt], path, 2000)
            with pytest.raises(Exception, match="corrupt log"):
                await group.payloads(hurt)
            await group.until_all_have(100)
            assert await group.payloads(hurt) == values(0, 100)
            await group.fill(10, 100)

    run(main())


def test_leader_whose_mark_cannot_be_written_stops_as_with_any_failed_disk(caplog: pytest.LogCaptureFixture) -> None:
    """The mark of a flush on the loop is written when its entries are answered already."""

    async def main() -> None:
        async with Group() as group:
            await group.fill(5)
            await asyncio.sleep(2 * ALONE_S_MIN)
            hurt = await group.leader()
            raft = group.partition(hurt).raft
            assert raft is not None
            group.disks[hurt].fail("pwrite", errno.EIO, path="synced")
            with contextlib.suppress(LogFailedError):  # it is not told whether that one is stored
                await group.fill(1, 5)
            await group.until(lambda: _is_failed(raft))
            await group.stop(hurt)
            await group.fill(5, 6)
            found = await group.payloads(await group.leader())
            assert (found[:5], found[-5:]) == (values(0, 5), values(6, 11))

    run(main())
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [line.partition(" ")[0] for line in said] == ["append_failed"], said


async def _is_failed(raft: RaftReplica) -> bool:
    return raft.raft.failed


def test_damage_that_no_frame_can_fill_makes_the_replica_begin_anew() -> None:
    async def main() -> None:
        async with Group() as group:
            await group.fill(20)
            await group.until_all_have(20)
            hurt = await group.follower()
            await group.stop(hurt)
            disk = group.disks[hurt]
            path = segment_files(disk, hurt)[0]
            disk.open(path).truncate(1000)
            await group.start(hurt)
            await group.until_all_have(20)
            assert await group.payloads(hurt) == values(0, 20)
            raft = group.partition(hurt).raft
            assert raft is not None and raft.raft.me not in group.voters

    run(main())


def flip(disk: FaultyDisk, path: str, position: int) -> None:
    file = disk.open(path)
    file.pwrite([bytes([file.pread(1, position)[0] ^ 4])], position)
    file.datasync()


def test_what_was_acknowledged_is_marked_as_synced_where_it_counts() -> None:
    """A frame below the mark is damage when it cannot be read, not a torn write: who counted for a commit has it."""

    async def main() -> None:
        async with Group() as group:
            await group.fill(5)
            await asyncio.sleep(2 * ALONE_S_MIN)  # from here on a flush runs on the loop
            for number in range(5, 20):
                await group.produce(b"%d" % number)
                leader = group.partition(await group.leader())
                assert leader._log.mark.values[0] == leader._log.synced_index == leader.state.applied_index + 1
            await group.until_all_have(20)
            for number in group.brokers:
                log = group.partition(number)._log
                assert log.mark.values[0] == log.synced_index

    run(main())
