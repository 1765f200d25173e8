"""A quorum begins once, with all its managers; who lost its disk comes back as another."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from quiver.errors import CorruptLogError, InvalidRequestError
from quiver.manager.founding import Quorum, decide, parse_peers
from quiver.replication.group import broker_of
from quiver.wire.messages import QuorumReply
from tests.manager.kit import until
from tests.manager.quorum_kit import Managers, managers, retried
from tests.metadata.kit import create, produce

ALL = {1: "h:1", 2: "h:2", 3: "h:3"}
NEW = {number: QuorumReply(number, number << 32 | 7) for number in ALL}
VOTERS = [number << 32 | 7 for number in ALL]


# -- the decision ------------------------------------------------------------------------------------------------


def test_the_lowest_decides_when_all_have_answered_and_nobody_else_does() -> None:
    assert decide(1, ALL, NEW) == Quorum("", tuple(VOTERS))
    assert decide(2, ALL, NEW) is None
    assert decide(3, ALL, NEW) is None


@pytest.mark.parametrize("silent", [2, 3])
def test_nothing_begins_while_one_is_silent(silent: int) -> None:
    told = {number: reply for number, reply in NEW.items() if number != silent}
    assert all(decide(me, ALL, told) is None for me in told)


def test_a_quorum_that_one_has_heard_of_is_everybodys() -> None:
    told = NEW | {2: QuorumReply(2, VOTERS[1], "c", VOTERS)}
    assert all(decide(me, ALL, told) == Quorum("c", tuple(VOTERS)) for me in ALL)
    assert decide(3, ALL, {3: NEW[3], 2: told[2]}) == Quorum("c", tuple(VOTERS)), "whoever else is silent"


def test_a_manager_on_a_new_disk_does_not_count_under_its_old_name() -> None:
    told = {1: QuorumReply(1, 1 << 32 | 99), 2: QuorumReply(2, VOTERS[1], "c", VOTERS), 3: NEW[3]}
    found = decide(1, ALL, told)
    assert found is not None
    assert 1 << 32 | 99 not in found.voters


def test_managers_of_two_clusters_are_told_so() -> None:
    told = {1: NEW[1], 2: QuorumReply(2, VOTERS[1], "c", VOTERS), 3: QuorumReply(3, VOTERS[2], "d", VOTERS)}
    with pytest.raises(InvalidRequestError, match="different clusters: c, d"):
        decide(1, ALL, told)


def test_the_list_of_managers_is_read_and_mistakes_are_named() -> None:
    assert parse_peers("1=127.0.0.1:9400, 2=[::1]:9401,") == {1: "127.0.0.1:9400", 2: "[::1]:9401"}
    assert parse_peers("") == {}
    for wrong in ("127.0.0.1:9400", "x=h:1", "0=h:1", "1=h", "1=:5", "1=h:p"):
        with pytest.raises(InvalidRequestError, match="not of the form 1=host:port"):
            parse_peers(wrong)
    with pytest.raises(InvalidRequestError, match="given twice"):
        parse_peers("1=h:1,1=h:2")


# -- with managers -----------------------------------------------------------------------------------------------


def test_three_managers_become_one_quorum_and_stay_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path) as cluster:
            clusters = {cluster.manager(number).cluster_id for number in cluster.nodes}
            assert len(clusters) == 1
            first = await cluster.until_led()
            await cluster.quorum(first).propose(create("logs"))
            ids = [(await cluster.quorum(first).propose(produce("logs"))).id for _ in range(3)]
            await cluster.stop()
            await cluster.start()
            again = await cluster.until_led()
            assert {cluster.manager(number).cluster_id for number in cluster.nodes} == clusters
            assert list(cluster.quorum(again).state.producers) == ids == [1, 2, 3]
            assert (await cluster.quorum(again).propose(produce("logs"))).id == 4

    asyncio.run(main())


def test_two_of_three_do_not_begin_and_the_third_makes_the_quorum(tmp_path: Path) -> None:
    async def main() -> None:
        cluster = Managers(tmp_path)
        early = [asyncio.ensure_future(cluster.start_one(number)) for number in (1, 2)]
        try:
            done, _ = await asyncio.wait(early, timeout=0.5)
            assert not done
            assert not any((tmp_path / "data" / f"manager-{number}" / "log").exists() for number in (1, 2))
            await cluster.start(3)
            await asyncio.gather(*early)
            assert await cluster.until_led()
        finally:
            await cluster.close()

    asyncio.run(main())


def test_a_majority_goes_on_after_a_restart_without_the_third(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path) as cluster:
            primary = await cluster.until_led()
            await cluster.quorum(primary).propose(create("logs"))
            await cluster.stop()
            await cluster.start(2, 3)
            primary = await cluster.until_led()
            assert "logs" in cluster.quorum(primary).state.topics
            await cluster.start(1)
            await cluster.until_equal()

    asyncio.run(main())


@pytest.mark.parametrize("what", ["directory", "log"])
def test_a_manager_that_lost_its_disk_is_let_in_under_another_name(tmp_path: Path, what: str) -> None:
    async def main() -> None:
        async with managers(tmp_path) as cluster:
            primary = await cluster.until_led()
            await cluster.quorum(primary).propose(create("logs"))
            lost = cluster.secondaries[0]
            before = cluster.quorum(lost).replica.raft.me
            await cluster.stop(lost)
            directory = tmp_path / "data" / f"manager-{lost}"
            shutil.rmtree(directory if what == "directory" else directory / "log")
            await cluster.quorum(primary).propose(produce("logs"))
            await cluster.start(lost)
            after = cluster.quorum(lost).replica.raft.me
            assert after != before
            assert broker_of(after) == lost
            await until(lambda: after in cluster.quorum(primary).voters)
            assert before not in cluster.quorum(primary).voters
            assert len(cluster.quorum(primary).voters) == 3
            await cluster.until_equal()
            # Now it counts: with one of the old ones away, the newcomer makes the majority.
            (other,) = {1, 2, 3} - {primary, lost}
            await cluster.stop(other)
            assert (await retried(lambda: cluster.quorum(cluster.primary or primary).propose(produce("logs")))).id == 2

    asyncio.run(main())


def test_one_manager_grows_to_three(tmp_path: Path) -> None:
    async def main() -> None:
        cluster = Managers(tmp_path)
        try:
            await cluster.start_one(1, peers="")
            await cluster.quorum(1).propose(create("logs"))
            await cluster.stop(1)
            await cluster.start()
            await until(lambda: len(cluster.quorum(1).voters) == 3)
            await cluster.until_equal()
            await cluster.kill(1)
            primary = await cluster.until_led()
            assert "logs" in cluster.quorum(primary).state.topics
        finally:
            await cluster.close()

    asyncio.run(main())


def test_a_manager_with_a_damaged_log_does_not_cut_it_but_begins_anew(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path) as cluster:
            primary = await cluster.until_led()
            for number in range(20):
                await cluster.quorum(primary).propose(create(f"t{number}"))
            await cluster.until_equal()
            hurt = cluster.secondaries[0]
            before = cluster.quorum(hurt).replica.raft.me
            await cluster.kill(hurt)
            damage(tmp_path / "data" / f"manager-{hurt}" / "log")
            await cluster.start(hurt)
            after = cluster.quorum(hurt).replica.raft.me
            assert after != before
            await until(
                lambda: after in cluster.quorum(primary).voters and before not in cluster.quorum(primary).voters
            )
            await cluster.until_equal()
            assert len(cluster.quorum(hurt).state.topics) == 20

    asyncio.run(main())


def damage(directory: Path) -> None:
    """A bit of an early entry, long since acknowledged."""
    segment = min(directory.glob("*.seg"))
    raw = bytearray(segment.read_bytes())
    raw[300] ^= 1
    segment.write_bytes(raw)


def test_an_only_manager_with_a_damaged_log_says_where(tmp_path: Path) -> None:
    async def main() -> None:
        cluster = Managers(tmp_path, 1)
        await cluster.start_one(1, peers="")
        for number in range(5):
            await cluster.quorum(1).propose(create(f"t{number}"))
        await cluster.kill(1)
        damage(tmp_path / "data" / "manager-1" / "log")
        with pytest.raises(CorruptLogError, match=r"manager-1/log/0+1\.seg at byte"):
            await cluster.start_one(1, peers="")
        assert (tmp_path / "data" / "manager-1" / "log").exists()

    asyncio.run(main())
