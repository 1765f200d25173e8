"""Managers are added to the quorum and removed from it: what is wanted, and managers as they run."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quiver.errors import InvalidRequestError, UnavailableError
from quiver.manager.seats import Wanted, is_out, plan_seats, rows_of
from quiver.metadata.commands import AddManager, RemoveManager
from quiver.metadata.manager_table import ManagerTable
from quiver.raft import Membership
from quiver.replication.group import replica_id
from quiver.types import ManagerInfo
from quiver.wire.admin_messages import AddManager as AskToAdd
from quiver.wire.admin_messages import GetManagers, ManagersReply
from quiver.wire.admin_messages import RemoveManager as AskToRemove
from quiver.wire.quorum_messages import QuorumReply
from tests.manager.kit import until
from tests.manager.quorum_kit import Managers, free_ports, managers
from tests.metadata.kit import create, produce
from tests.metadata.test_manager_table import table

R = {manager: replica_id(manager, 7) for manager in range(1, 6)}
LIST = (1, 2, 3)


def removed(managers: ManagerTable, *numbers: int) -> ManagerTable:
    for number in numbers:
        managers.change(RemoveManager(number))
    return managers


def group(*managers: int, learners: tuple[int, ...] = ()) -> Membership:
    return Membership(tuple(R[one] for one in managers), tuple(R[one] for one in learners))


# -- what is wanted --------------------------------------------------------------------------------------------------


def test_nothing_is_ordered_while_nobody_leaves() -> None:
    known = table(1, 2, 3)
    assert plan_seats(group(1, 2, 3), known, LIST, 1) == Wanted(frozenset(LIST), ())
    known.change(AddManager(4, "h:1"))
    assert plan_seats(group(1, 2, 3), known, LIST, 1) == Wanted(frozenset((1, 2, 3, 4)), ())


def test_one_that_is_removed_leaves_and_is_not_let_in_though_the_settings_name_it() -> None:
    known = removed(table(1, 2, 3), 3)
    assert plan_seats(group(1, 2, 3), known, LIST, 2) == Wanted(frozenset((1, 2)), (2, 1)), "the leader first"
    assert plan_seats(group(1, 2), known, LIST, 2) == Wanted(frozenset((1, 2)), ())
    assert plan_seats(group(1, 2, learners=(3,)), known, LIST, 2).staying == (2, 1), "nor does it go on learning"


def test_a_primary_that_is_removed_leaves_too() -> None:
    assert plan_seats(group(1, 2, 3), removed(table(1, 2, 3), 1), LIST, 1).staying == (2, 3)


def test_a_newcomer_that_was_added_does_not_hold_up_a_removal() -> None:
    known = removed(table(1, 2, 3), 3)
    known.change(AddManager(4, "h:1"))
    assert plan_seats(group(1, 2, 3), known, LIST, 1) == Wanted(frozenset((1, 2, 4)), (1, 2))


def test_everybody_is_shown_who_is_one_or_will_be_or_was_until_now() -> None:
    known = removed(table(1, 2, 3, 5), 3)
    known.change(AddManager(4, "h:1"))
    shown = rows_of(group(1, 2, 3, learners=(5,)), known, 2)
    assert [(one.id, one.state) for one in shown] == [
        *((1, "secondary"), (2, "primary"), (3, "leaving"), (4, "expected"), (5, "newcomer"))
    ]
    assert [one.id for one in rows_of(group(1, 2, 5), known, 2)] == [1, 2, 4, 5], "it is out"


# -- who was removed finds out ---------------------------------------------------------------------------------------


def told(by: int, primary: int, members: tuple[int, ...], removed: tuple[int, ...] = ()) -> QuorumReply:
    return QuorumReply(by, R[by], "c", [], primary, 5, [R[one] for one in members], list(removed))


def test_only_a_primary_can_say_that_somebody_is_out() -> None:
    assert is_out(R[3], True, told(1, 1, (1, 2)))
    assert not is_out(R[3], True, told(2, 1, (1, 2))), "it does not lead: its membership may be old"
    assert not is_out(R[3], True, told(1, 1, ())), "its membership is just changing"
    assert not is_out(R[3], True, told(1, 1, (1, 2, 3), removed=(3,))), "the group still needs it"


def test_a_newcomer_waits_to_be_let_in_unless_its_number_was_removed() -> None:
    assert not is_out(replica_id(3, 8), False, told(1, 1, (1, 2, 3)))
    assert is_out(replica_id(3, 8), False, told(1, 1, (1, 2), removed=(3,)))


# -- managers as they run --------------------------------------------------------------------------------------------


async def ask(cluster: Managers, request: AskToAdd | AskToRemove | GetManagers) -> list[ManagerInfo]:
    """At any of them: the primary does it."""
    reply = await cluster.ask(min(cluster.nodes), request)
    assert isinstance(reply, ManagersReply)
    return reply.managers


async def until_voting(cluster: Managers, *numbers: int) -> None:
    def voting() -> set[int]:
        primary = cluster.primary
        return {voter >> 32 for voter in cluster.quorum(primary).voters} if primary else set()

    await until(lambda: voting() == set(numbers))


async def add(cluster: Managers, number: int) -> None:
    """Adds it, starts it with a list that has those that are there, and waits until it votes."""
    (port,) = free_ports(1)
    there = {one: cluster.ports[one] for one in cluster.nodes} | {number: port}
    await ask(cluster, AskToAdd(number, f"127.0.0.1:{port}"))
    before, cluster.ports = cluster.ports, there
    await cluster.start(number)
    cluster.ports = before | there
    await until_voting(cluster, *cluster.nodes)


async def remove(cluster: Managers, number: int) -> None:
    """Removes one that runs, and waits until it knows."""
    await cluster.ask(next(one for one in cluster.nodes if one != number), AskToRemove(number))
    await until(lambda: number in cluster.removed)
    assert f"Manager {number} was removed from this cluster" in cluster.removed.pop(number)
    await cluster.stop(number)
    await until_voting(cluster, *cluster.nodes)


@contextlib.asynccontextmanager
async def registering(cluster: Managers) -> AsyncIterator[list[int]]:
    """Producers register all the time; afterwards each that was answered is known to all managers, and none twice."""
    await cluster.quorum(await cluster.until_led()).propose(create("logs"))
    answered: list[int] = []
    over = asyncio.Event()

    async def register() -> None:
        while not over.is_set():
            try:
                answered.append((await cluster.quorum(cluster.primary).propose(produce("logs"))).id)
            except (UnavailableError, KeyError):
                await asyncio.sleep(0.005)

    clients = [asyncio.create_task(register()) for _ in range(3)]
    yield answered
    over.set()
    await asyncio.gather(*clients)
    await cluster.until_led()
    await cluster.until_equal()
    assert len(answered) == len(set(answered))
    for number in cluster.nodes:
        assert set(answered) <= cluster.quorum(number).state.producers.keys()


def test_a_manager_is_replaced_under_load_and_the_new_one_counts(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path, metadata_stale_s=0.6) as cluster, registering(cluster) as answered:
            await add(cluster, 4)
            await remove(cluster, 3)
            assert [one.id for one in await ask(cluster, GetManagers())] == [1, 2, 4]
            await until(lambda: all(cluster.quorum(one).state.managers.keys() == {1, 2, 4} for one in cluster.nodes))
            for dying in (1, 2):  # each time the new one is half of the majority
                await cluster.kill(dying)
                before = len(answered)
                await until(lambda before=before: len(answered) > before + 10)
                await cluster.start(dying)

    asyncio.run(main())


def test_the_others_find_a_new_one_again_though_their_settings_do_not_name_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path, metadata_stale_s=0.6) as cluster:
            await cluster.until_led()
            named = ",".join(f"{one}=127.0.0.1:{port}" for one, port in cluster.ports.items())
            await add(cluster, 4)
            await add(cluster, 5)
            await remove(cluster, 2)
            await remove(cluster, 3)
            await cluster.stop(1, 4, 5)
            first = asyncio.create_task(cluster.start_one(1, peers=named))
            await cluster.start_one(5, peers=named + f",5=127.0.0.1:{cluster.ports[5]}")
            await first
            assert await cluster.until_led() in (1, 5)

    asyncio.run(main())


def test_a_primary_is_removed_and_another_leads(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path, metadata_stale_s=0.6) as cluster, registering(cluster) as answered:
            primary = await cluster.until_led()
            await remove(cluster, primary)
            before = len(answered)
            await until(lambda: len(answered) > before + 10)
            assert await cluster.until_led() != primary

    asyncio.run(main())


def test_one_that_is_gone_for_good_is_removed_and_comes_back_only_when_it_is_added(tmp_path: Path) -> None:
    async def main() -> None:
        async with managers(tmp_path, metadata_stale_s=0.6) as cluster:
            await cluster.until_led()
            gone = cluster.secondaries[-1]
            await cluster.kill(gone)
            await ask(cluster, AskToRemove(gone))
            await until_voting(cluster, *cluster.nodes)
            await ask(cluster, AskToRemove(gone))  # once more changes nothing
            for disk in ("old", "empty"):
                if disk == "empty":
                    shutil.rmtree(tmp_path / "data" / f"manager-{gone}")
                starting = asyncio.create_task(cluster.start_one(gone))
                await until(lambda: gone in cluster.removed)
                assert f"'quiver manager add {gone} HOST:PORT'" in cluster.removed.pop(gone)
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
            shutil.rmtree(tmp_path / "data" / f"manager-{gone}")
            await add(cluster, gone)

    asyncio.run(main())


def test_what_would_leave_too_few_is_refused(tmp_path: Path) -> None:
    async def refused(cluster: Managers, request: AskToAdd | AskToRemove, words: str) -> None:
        with pytest.raises(InvalidRequestError, match=words):
            await ask(cluster, request)

    async def main() -> None:
        async with managers(tmp_path, metadata_stale_s=0.6) as cluster:
            primary = await cluster.until_led()
            first, second = cluster.secondaries
            await refused(cluster, AskToRemove(9), "Manager 9 does not exist")
            await refused(cluster, AskToAdd(first, "127.0.0.1:1"), f"Manager {first} is part of the quorum")
            await refused(cluster, AskToAdd(9, "nowhere"), "not of the form HOST:PORT")
            await cluster.kill(second)
            await until(lambda: cluster.quorum(primary).replica.raft.down)
            await refused(cluster, AskToRemove(first), "too few of the others answer")
            await ask(cluster, AskToRemove(second))
            await until_voting(cluster, primary, first)
            await refused(cluster, AskToRemove(first), "there would be fewer than 2; add another one first")

    asyncio.run(main())
