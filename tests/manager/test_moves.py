"""Brokers come, go and stay away: their replicas move until every partition has its number, and nothing is lost."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from quiver.aio import Admin
from quiver.errors import InvalidRequestError, RequestError
from tests.manager.nodes_kit import QUICK, Nodes, play, until, until_true


def test_removed_broker_gives_its_replicas_to_others_and_is_forgotten(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin:
            await admin.create_topic("logs", 8)
            await nodes.fill("logs", 40)
            await admin.remove_broker(2)
            await nodes.until_still()
            assert sorted(nodes.state.brokers) == [1, 3, 4]
            assert nodes.replicas("logs") == [{1, 3, 4}] * 8
            assert nodes.has(2) == []
            assert await nodes.messages("logs") == 40
            for status in (await nodes.leaders("logs")).values():
                assert {replica.broker for replica in status.replicas if replica.voter} == {1, 3, 4}
            await nodes.fill("logs", 10)

    play(tmp_path, test, count=4)


def test_dead_broker_can_be_removed_and_is_refused_when_it_is_back_with_its_old_directory(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin:
            await admin.create_topic("logs", 4)
            await nodes.fill("logs", 10)
            await nodes.stop(3)
            await admin.remove_broker(3)
            await nodes.until_still()
            assert nodes.replicas("logs") == [{1, 2, 4}] * 4
            assert nodes.has(3), "nobody told it to delete anything: it was not there"
            with pytest.raises(InvalidRequestError, match="Broker 3 was removed from this cluster"):
                await nodes.start(3)
            (tmp_path / "broker-3").rename(tmp_path / "old")
            await nodes.start(3)
            assert sorted(nodes.state.brokers) == [1, 2, 3, 4]
            assert await nodes.messages("logs") == 10

    play(tmp_path, test, count=4)


def test_with_too_few_brokers_there_are_fewer_replicas_and_a_rebalance_brings_them_back(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin:
            await admin.create_topic("logs", 3)
            await nodes.fill("logs", 10)
            await admin.remove_broker(1)
            await nodes.until_still()
            assert nodes.replicas("logs") == [{2, 3}] * 3
            await admin.remove_broker(2)
            await nodes.until_still()
            assert nodes.replicas("logs") == [{3}] * 3
            with pytest.raises(RequestError, match="Broker 3 is the only one: nothing could take its partitions"):
                await admin.remove_broker(3)
            await nodes.start(4, 5)
            await admin.rebalance()
            await nodes.until_still()
            assert nodes.replicas("logs") == [{3, 4, 5}] * 3
            assert await nodes.messages("logs") == 10

    play(tmp_path, test)


def test_removal_is_refused_while_the_others_are_no_majority(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin:
            await admin.create_topic("logs", 1)
            await nodes.stop(2)
            await until(lambda: not nodes.manager._registry.brokers.is_active(2))
            with pytest.raises(RequestError, match="Broker 3 cannot be removed now: too few of the brokers"):
                await admin.remove_broker(3)
            with pytest.raises(RequestError, match="Broker 9 does not exist"):
                await admin.remove_broker(9)
            assert nodes.manager._moves.draining() == []
            await admin.remove_broker(2)  # the dead one may go: the others go on without it
            await nodes.until_still()
            assert nodes.replicas("logs") == [{1, 3}]

    play(tmp_path, test)


def test_new_broker_gets_its_share_of_replicas_and_leaders(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin:
            await admin.create_topic("logs", 8)
            await nodes.fill("logs", 40)
            await nodes.start(4)
            assert nodes.has(4) == []
            moves = await admin.rebalance()
            assert moves
            await nodes.until_still()
            held = Counter(broker for replicas in nodes.replicas("logs") for broker in replicas)
            assert held == {1: 6, 2: 6, 3: 6, 4: 6}

            async def each_leads_its_share() -> bool:
                leaders = await nodes.leaders("logs")
                return Counter(status.leader for status in leaders.values()) == {1: 2, 2: 2, 3: 2, 4: 2}

            await until_true(each_leads_its_share)
            await until(lambda: len(nodes.has(4)) == len(nodes.has(1)) == 6)  # who left it is told a moment later
            assert await nodes.messages("logs") == 40
            assert await admin.rebalance() == [], "there is nothing left to do"

    play(tmp_path, test)


def test_manager_that_just_began_counts_all_brokers_before_it_shares_out(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin:
            await admin.create_topic("logs", 8)
            await nodes.start(4)
            await nodes.stop_manager()
            await nodes.start_manager()
            await nodes.manager._moves.rebalance()
            held = Counter(broker for replicas in nodes.replicas("logs") for broker in replicas)
            assert held == {1: 6, 2: 6, 3: 6, 4: 6}
            await nodes.until_still()

    play(tmp_path, test)


def test_manager_that_dies_in_the_middle_goes_on_after_its_start(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin:
            await admin.create_topic("logs", 6)
            await nodes.fill("logs", 20)
            await nodes.stop(4)  # nothing can arrive there
            await nodes.start(5)
            await nodes.manager._moves.stop()
            await admin.remove_broker(3)
            await nodes.manager._moves.step()
            assert nodes.manager._moves.moves()
            await nodes.stop_manager()
            await nodes.start_manager()
            assert nodes.manager._moves.draining() == [3]
            await nodes.start(4)
            await nodes.until_still()
            assert sorted(nodes.state.brokers) == [1, 2, 4, 5]
            assert all(len(replicas) == 3 and 3 not in replicas for replicas in nodes.replicas("logs"))
            assert await nodes.messages("logs") == 20

    play(tmp_path, test, count=4)


def test_broker_that_stays_away_loses_its_replicas_and_counts_as_empty_when_it_is_back(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin:
            await admin.create_topic(
                "logs",
                4,
            )
            await nodes.fill("logs", 20)
            away = next(iter(nodes.replicas("logs")[0]))
            await nodes.stop(away)
            await until(lambda: all(away not in replicas for replicas in nodes.replicas("logs")))
            await nodes.until_still()
            assert nodes.has(away)
            await nodes.start(away)
            await until(lambda: nodes.has(away) == [])
            assert sorted(nodes.state.brokers) == [1, 2, 3, 4]
            assert await nodes.messages("logs") == 20
            await admin.rebalance()
            await nodes.until_still()
            await until(lambda: len(nodes.has(away)) == 3)

    play(tmp_path, test, count=4, settings=dataclasses.replace(QUICK, broker_away_s=3.0))


def test_nobody_loses_anything_when_there_is_nobody_to_take_it(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin:
            await admin.create_topic("logs", 2)
            await nodes.fill("logs", 20)
            await nodes.stop(3)
            await until(lambda: nodes.manager._moves._is_away(3))
            await nodes.manager._moves.step()
            assert nodes.replicas("logs") == [{1, 2, 3}] * 2
            await nodes.start(3)
            await nodes.until_still()
            assert len(nodes.has(3)) == 2
            assert await nodes.messages("logs") == 20

    play(tmp_path, test, settings=dataclasses.replace(QUICK, broker_away_s=2.0))


def test_topic_that_is_deleted_while_it_moves_leaves_nothing_anywhere(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin:
            await admin.create_topic("logs", 6)
            await nodes.fill("logs", 20)
            await nodes.stop(2)
            await admin.remove_broker(1)
            await admin.delete_topic("logs")
            await nodes.until_still()
            await nodes.start(2)
            await until(lambda: not any(nodes.has(broker) for broker in (1, 2, 3, 4)))

    play(tmp_path, test, count=4)


def test_partitions_are_added_placed_and_used(tmp_path: Path) -> None:
    async def test(nodes: Nodes) -> None:
        async with Admin(nodes.address) as admin:
            await admin.create_topic("logs", 2)
            await nodes.fill("logs", 10)
            await nodes.stop(3)
            info = await admin.add_partitions("logs", 6)
            assert len(info.partitions) == 6
            await nodes.fill("logs", 60)
            await nodes.start(3)
            await until(lambda: len(nodes.has(3)) == 6)
            assert await nodes.messages("logs") == 70
            assert all(latest for _, latest in (await admin.offsets("logs")).values())
            with pytest.raises(RequestError, match="Topic logs has 6 partitions; their number can only grow"):
                await admin.add_partitions("logs", 5)
            await admin.remove_broker(3)
            await nodes.until_still()
            assert nodes.replicas("logs") == [{1, 2}] * 6

    play(tmp_path, test)
