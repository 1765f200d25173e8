"""The metadata log: acknowledged means on disk, and a restart applies exactly what the database lacks."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from quiver.errors import (
    DiskFullError,
    LogFailedError,
    QuiverError,
    ShuttingDownError,
)
from quiver.log.disk import File, SystemDisk
from quiver.manager import database as database_module
from quiver.manager import quorum as quorum_module
from quiver.manager.quorum import MetadataQuorum
from quiver.metadata.commands import Command, DeleteTopic, decode_command
from quiver.metadata.state import Applied, State
from quiver.metadata.store import sqlite_url
from quiver.testing.faulty_disk import FaultyDisk
from quiver.wire.frame import Kind
from tests.broker.kit import HeldExecutor, finish, settle
from tests.manager.kit import QuorumBench, abandon, until
from tests.metadata.kit import attempt, broker, consume, create, dump, image, produce, random_command


@pytest.fixture
def bench(tmp_path: Path) -> QuorumBench:
    return QuorumBench(FaultyDisk(0), sqlite_url(tmp_path / "metadata.db"))


def after(commands: list[Command]) -> Any:
    """What these commands make."""
    state = State()
    for command in commands:
        attempt(state, command)
    return made(state)


def made(state: State) -> Any:
    """Everything but the number of the last transaction: a new leader's first entry counts as one."""
    return image(state)[1:]


async def stored(quorum: MetadataQuorum) -> None:
    """Waits until the database has all that is applied."""
    await until(lambda: quorum.database.stored >= quorum.state.applied)


async def ended(quorum: MetadataQuorum, held: HeldExecutor) -> None:
    """Stops a quorum whose disk waits for the test."""
    stop = asyncio.create_task(quorum.stop())
    while not stop.done():
        await finish(held)
        await asyncio.sleep(0.001)


async def told(proposal: Coroutine[Any, Any, Any]) -> Any:
    """What the asker hears: the result, or the error."""
    try:
        return await proposal
    except QuiverError as error:
        return error


# -- acknowledged means on disk ----------------------------------------------------------------------------------


def test_a_proposal_is_answered_when_the_disk_has_it_and_not_before(bench: QuorumBench) -> None:
    bench.writers = held = HeldExecutor()

    async def main() -> None:
        quorum, _, _ = bench.make()
        await quorum.start()
        await finish(held)
        proposal = asyncio.create_task(quorum.propose(create("logs")))
        await settle()
        assert not proposal.done()
        assert quorum.state.topics == {}, "nobody may see what a crash could take back"
        held.run_one()
        assert (await proposal).name == "logs"
        assert list(quorum.state.topics) == ["logs"]
        await ended(quorum, held)

    asyncio.run(main())


class GatedDisk(SystemDisk):
    """A real disk whose syncs wait for the test."""

    def __init__(self) -> None:
        self.syncs = 0
        self.gate = threading.Event()

    def open(self, path: str, *, create: bool = False) -> File:
        file = super().open(path, create=create)
        real = file.datasync
        disk = self

        class Gated:
            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

            def datasync(self) -> None:
                assert disk.gate.wait(30)
                disk.syncs += 1
                real()

        return Gated()  # type: ignore[return-value]


def test_a_real_disk_that_hangs_holds_back_the_answer_and_nothing_else(tmp_path: Path) -> None:
    async def main() -> None:
        disk = GatedDisk()
        disk.gate.set()
        with ThreadPoolExecutor(1) as writers:
            bench = QuorumBench(disk, sqlite_url(tmp_path / "metadata.db"), str(tmp_path / "log"), writers)
            async with bench.opened() as (quorum, _, _):
                await quorum.propose(create("before"))
                disk.gate.clear()
                syncs = disk.syncs
                proposals = [asyncio.create_task(quorum.propose(create(f"t{number}"))) for number in range(20)]
                await until(lambda: quorum.last_transaction == 22)
                assert quorum.state.topic("before")  # readers are served meanwhile
                assert disk.syncs == syncs
                assert not any(proposal.done() for proposal in proposals)
                disk.gate.set()
                await asyncio.gather(*proposals)
                assert 0 < disk.syncs - syncs <= 3, "proposals that wait together share a sync"

    asyncio.run(main())


@pytest.mark.parametrize("operation", ["pwrite", "datasync"])
def test_a_disk_error_is_told_and_nothing_is_changed(bench: QuorumBench, operation: str) -> None:
    disk = bench.disk
    assert isinstance(disk, FaultyDisk)

    async def main() -> None:
        async with bench.opened() as (quorum, store, _):
            await quorum.propose(create("logs"))
            before = made(quorum.state)
            disk.fail(operation, errno.EIO)
            with pytest.raises(LogFailedError):
                await quorum.propose(produce("logs"))
            # The disk cannot be trusted any more: no second try that looks like success.
            with pytest.raises(LogFailedError):
                await quorum.propose(produce("logs"))
            assert made(quorum.state) == before
            await stored(quorum)
            assert store.applied[-1] == 2

    asyncio.run(main())


def test_errors_of_a_failed_log_do_not_pile_up(bench: QuorumBench) -> None:
    """Each asker gets an error of its own: one that is raised again and again would hold everybody's frames."""
    disk = bench.disk
    assert isinstance(disk, FaultyDisk)

    async def main() -> None:
        async with bench.opened() as (quorum, _, _):
            disk.fail("datasync", errno.EIO)
            errors = [await told(quorum.propose(create("logs"))) for _ in range(3)]
            assert {type(error) for error in errors} == {LogFailedError}
            assert errors[1] is not errors[2]

    asyncio.run(main())


def test_a_full_disk_is_told_and_works_again_with_room(bench: QuorumBench) -> None:
    disk = bench.disk
    assert isinstance(disk, FaultyDisk)

    async def main() -> None:
        async with bench.opened() as (quorum, _, _):
            await quorum.propose(create("logs"))
            before = made(quorum.state)
            disk.capacity_bytes = 0
            for _ in range(3):
                with pytest.raises(DiskFullError):
                    await quorum.propose(produce("logs"))
            assert made(quorum.state) == before
            disk.capacity_bytes = None
            assert (await quorum.propose(produce("logs"))).id == 1, "an id that nobody got is not used up"
        async with bench.opened() as (quorum, _, _):
            assert list(quorum.state.producers) == [1]
            assert list(quorum.state.topics) == ["logs"]

    asyncio.run(main())


def test_a_manager_that_is_alone_starts_on_a_full_disk_and_tells_what_it_knows(bench: QuorumBench) -> None:
    disk = bench.disk
    assert isinstance(disk, FaultyDisk)

    async def main() -> None:
        first, _, _ = bench.make()
        await first.start()
        for number in range(3):
            await first.propose(create(f"t{number}"))
        before = made(first.state)
        await abandon(first)
        disk.kill()  # without a check-point: all of it is in the log
        disk.capacity_bytes = 0
        async with bench.opened() as (quorum, _, _):
            await quorum.until_led()
            assert made(quorum.state) == before
            assert "space" in quorum.full
            assert isinstance(await told(quorum.propose(create("more"))), DiskFullError)
            disk.capacity_bytes = None
            await quorum.propose(create("more"))
            assert not quorum.full
            assert len(quorum.state.topics) == 4

    asyncio.run(main())


def test_all_that_wait_when_the_disk_is_full_are_told(bench: QuorumBench) -> None:
    bench.writers = held = HeldExecutor()
    disk = bench.disk
    assert isinstance(disk, FaultyDisk)

    async def main() -> None:
        quorum, _, _ = bench.make()
        await quorum.start()
        await finish(held)
        proposals = [asyncio.create_task(told(quorum.propose(create(f"t{number}")))) for number in range(50)]
        await settle()
        disk.capacity_bytes = 0
        await finish(held)
        assert {type(answer) for answer in await asyncio.gather(*proposals)} == {DiskFullError}
        disk.capacity_bytes = None
        again = asyncio.create_task(quorum.propose(create("again", 2)))
        await finish(held)
        assert [partition.id for partition in (await again).partitions] == [1, 2]
        await ended(quorum, held)

    asyncio.run(main())


# -- order -------------------------------------------------------------------------------------------------------


def test_concurrent_proposals_keep_their_order_and_share_syncs(bench: QuorumBench) -> None:
    bench.writers = held = HeldExecutor()

    async def main() -> None:
        quorum, _, applies = bench.make()
        await quorum.start()
        await finish(held)
        commands = [create("logs"), *(produce("logs") for _ in range(300))]
        proposals = [asyncio.create_task(quorum.propose(command)) for command in commands]
        jobs = 0
        while not all(proposal.done() for proposal in proposals):
            await settle()
            held.run_one()
            jobs += 1
            await settle()
        assert [proposal.result().id for proposal in proposals[1:]] == list(range(1, 301))
        assert applies.indexes == list(range(2, 303))
        assert jobs <= 3, "what waits together goes to the disk together"
        await ended(quorum, held)

    asyncio.run(main())


def test_more_proposals_than_fit_wait_at_the_door(bench: QuorumBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quorum_module, "_PROPOSALS_MAX", 3)

    async def main() -> None:
        async with bench.opened() as (quorum, _, _):
            await quorum.propose(create("logs"))
            producers = await asyncio.gather(*(quorum.propose(produce("logs")) for _ in range(40)))
            assert [producer.id for producer in producers] == list(range(1, 41))

    asyncio.run(main())


def test_a_refused_command_is_told_and_the_others_go_on(bench: QuorumBench) -> None:
    async def main() -> None:
        async with bench.opened() as (quorum, _, _):
            commands = [create("logs"), create("logs"), consume("none"), produce("logs"), produce("logs", 9)]
            answers = await asyncio.gather(*(told(quorum.propose(command)) for command in commands))
            assert [type(answer).__name__ for answer in answers] == [
                "Topic",
                "TopicExistsError",
                "UnknownTopicError",
                "Producer",
                "UnknownPartitionError",
            ]
            assert made(quorum.state) == after(commands)
            await stored(quorum)
            await told(quorum.propose(create("logs")))
            await stored(quorum)
            assert quorum.database.stored == 7, "the database is done with the refused one too"

    asyncio.run(main())


def test_a_change_stands_when_its_asker_is_gone(bench: QuorumBench) -> None:
    bench.writers = held = HeldExecutor()

    async def main() -> None:
        quorum, _, _ = bench.make()
        await quorum.start()
        await finish(held)
        proposal = asyncio.create_task(quorum.propose(create("logs")))
        await settle()
        proposal.cancel()
        await finish(held)
        assert list(quorum.state.topics) == ["logs"]
        await ended(quorum, held)

    asyncio.run(main())


def test_after_stop_a_proposal_is_refused_and_what_waited_was_finished(bench: QuorumBench) -> None:
    async def main() -> None:
        quorum, _, _ = bench.make()
        await quorum.start()
        await quorum.until_led()
        waiting = asyncio.create_task(quorum.propose(create("logs")))
        await asyncio.sleep(0)
        await quorum.stop()
        assert (await waiting).name == "logs"
        with pytest.raises(ShuttingDownError):
            await quorum.propose(create("late"))
        assert dump(bench.url)["metadata_state"][0] == ("applied_transaction", 2)

    asyncio.run(main())


def test_a_bug_while_applying_leaves_nobody_waiting(bench: QuorumBench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = State.apply

    def apply(self: State, command: Command) -> Applied:
        if isinstance(command, DeleteTopic):
            raise ZeroDivisionError
        return real(self, command)

    monkeypatch.setattr(State, "apply", apply)

    async def main() -> None:
        async with bench.opened() as (quorum, _, _):
            commands = [create("logs"), DeleteTopic("logs"), create("other")]
            answers = await asyncio.gather(*(told(quorum.propose(command)) for command in commands))
            assert [type(answer).__name__ for answer in answers] == ["Topic", "LogFailedError", "LogFailedError"]
            with pytest.raises(LogFailedError, match="internal error"):
                await quorum.propose(create("later"))

    asyncio.run(main())


# -- restart -----------------------------------------------------------------------------------------------------

COMMANDS: list[Command] = [
    broker(1),
    create("logs", 3),
    produce("logs"),
    create("logs"),  # refused
    consume("logs", 1),
    DeleteTopic("logs"),
    produce("logs", partitions=1),
    consume("logs"),
]


async def propose_all(quorum: MetadataQuorum, commands: list[Command]) -> None:
    for command in commands:
        await told(quorum.propose(command))


@pytest.mark.parametrize("stored_count", range(len(COMMANDS) + 1))
def test_a_restart_gives_the_database_exactly_what_it_lacks(bench: QuorumBench, stored_count: int) -> None:
    """The failpoint is between the log and the database: it fails from some transaction on, and the process dies."""
    state, lacks = State(), []
    for place, command in enumerate(COMMANDS):
        applied = attempt(state, command)
        if place >= stored_count and isinstance(applied, Applied):
            lacks += applied.changes

    async def main() -> None:
        quorum, store, _ = bench.make()
        await quorum.start()
        await propose_all(quorum, COMMANDS[:stored_count])
        await stored(quorum)
        store.fails = True
        await propose_all(quorum, COMMANDS[stored_count:])
        expected = made(quorum.state)
        assert expected == after(COMMANDS), "a database that is away holds nobody up"
        await abandon(quorum)

        quorum, store, applies = bench.make()
        await quorum.start()
        await quorum.until_led()
        await stored(quorum)
        assert store.changes == lacks
        assert made(quorum.state) == made(store.load()) == expected
        await abandon(quorum)

        quorum, store, applies = bench.make()
        await quorum.start()
        await quorum.until_led()
        await stored(quorum)
        assert store.changes == [], "what it has it does not get again"
        assert made(quorum.state) == made(store.load()) == expected
        await quorum.stop()

        quorum, store, applies = bench.make()
        await quorum.start()
        await quorum.until_led()
        assert applies.indexes == [], "a clean stop leaves a check-point"
        assert made(quorum.state) == expected
        await quorum.stop()

    asyncio.run(main())


def test_a_death_while_the_database_works_loses_nothing(bench: QuorumBench) -> None:
    """The transaction is under way in the database's thread, and never comes back."""

    async def main() -> None:
        quorum, store, _ = bench.make()
        await quorum.start()
        await propose_all(quorum, COMMANDS[:2])
        await stored(quorum)
        store.gate.clear()
        await propose_all(quorum, COMMANDS[2:])
        expected = made(quorum.state)
        store.fails = True  # the thread that waits at the gate will have written nothing
        store.gate.set()
        await abandon(quorum)
        async with bench.opened() as (quorum, store, _):
            await stored(quorum)
            assert made(quorum.state) == made(store.load()) == expected

    asyncio.run(main())


def test_ids_go_on_where_they_were_after_a_restart(bench: QuorumBench) -> None:
    async def main() -> None:
        async with bench.opened() as (quorum, _, _):
            await quorum.propose(create("logs"))
            assert [(await quorum.propose(produce("logs"))).id for _ in range(3)] == [1, 2, 3]
            await quorum.propose(DeleteTopic("logs"))
        async with bench.opened() as (quorum, _, _):
            await quorum.propose(create("logs"))
            assert (await quorum.propose(produce("logs"))).id == 4

    asyncio.run(main())


def test_a_lost_database_is_built_again_from_the_log(bench: QuorumBench, tmp_path: Path) -> None:
    async def main() -> None:
        async with bench.opened() as (quorum, _, _):
            await propose_all(quorum, COMMANDS)
            expected = made(quorum.state)
        rows = dump(bench.url)
        for name in os.listdir(tmp_path):
            if name.startswith("metadata.db"):
                (tmp_path / name).unlink()
        async with bench.opened() as (quorum, _, applies):
            assert applies.indexes == [], "the state comes from the check-point, and so do the rows"
            assert made(quorum.state) == expected
        assert without_number(dump(bench.url)) == without_number(rows)

    asyncio.run(main())


@pytest.mark.parametrize("foreign", ["ahead", "another cluster"])
def test_a_database_that_does_not_belong_to_the_log_is_made_anew(bench: QuorumBench, foreign: str) -> None:
    async def main() -> None:
        async with bench.opened() as (quorum, _, _):
            await propose_all(quorum, COMMANDS)
        bench.disk = FaultyDisk(1)  # another log, or an old copy of it
        if foreign == "another cluster":
            bench.cluster_id = "d"
        async with bench.opened() as (quorum, store, _):
            commands = [create(f"t{number}") for number in range(1 if foreign == "ahead" else 20)]
            await propose_all(quorum, commands)
            await stored(quorum)
            assert made(store.load()) == made(quorum.state) == after(commands)
            assert store.load().applied == quorum.state.applied

    asyncio.run(main())


def without_number(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Without the number of the last transaction, of which a start adds one."""
    return rows | {"metadata_state": [row for row in rows["metadata_state"] if row[0] != "applied_transaction"]}


def test_a_database_that_comes_back_is_brought_up_to_date(bench: QuorumBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "_STORE_RETRY_S", 0.001)

    async def main() -> None:
        async with bench.opened() as (quorum, store, _):
            await propose_all(quorum, COMMANDS[:3])
            await stored(quorum)
            store.fails = True
            await propose_all(quorum, COMMANDS[3:])
            await asyncio.sleep(0.01)  # some tries
            assert quorum.database.stored == 4
            assert made(store.load()) == after(COMMANDS[:3])
            store.fails = False
            await stored(quorum)
            assert made(store.load()) == made(quorum.state) == after(COMMANDS)

    asyncio.run(main())


def test_a_stop_with_the_database_away_still_ends(bench: QuorumBench) -> None:
    async def main() -> None:
        async with bench.opened() as (quorum, store, _):
            store.fails = True
            await quorum.propose(create("logs"))
        async with bench.opened() as (quorum, store, _):
            await stored(quorum)
            assert list(store.load().topics) == ["logs"]

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(12))
def test_a_power_cut_takes_nothing_that_was_acknowledged(tmp_path: Path, seed: int) -> None:
    """Proposals in any number under way, the disk anywhere, the database behind: what is left is a first part of what
    was proposed, and all that was answered is in it."""
    dice = random.Random(seed)
    disk = FaultyDisk(seed)
    held = HeldExecutor()
    bench = QuorumBench(disk, sqlite_url(tmp_path / "metadata.db"), writers=held)
    commands: list[Command] = []

    async def live() -> int:
        """Returns how many transactions were acknowledged."""
        quorum, store, _ = bench.make()
        await quorum.start()
        await finish(held)
        assert made(quorum.state) == after(commands)
        first = len(commands)
        proposals = []
        for _ in range(dice.randint(1, 30)):
            commands.append(random_command(dice))
            proposals.append(asyncio.create_task(told(quorum.propose(commands[-1]))))
            if dice.random() < 0.3:
                await settle()
            if dice.random() < 0.3 and held.jobs:
                held.run_one()
                await settle()
            store.fails = dice.random() < 0.5
        await settle()
        answered = [proposal for proposal in proposals if proposal.done()]
        assert answered == proposals[: len(answered)], "answers come in the order of the log"
        assert not any(isinstance(proposal.result(), LogFailedError) for proposal in answered)
        for proposal in proposals:
            proposal.cancel()
        await asyncio.gather(*proposals, return_exceptions=True)
        await abandon(quorum)
        held.jobs.clear()
        return first + len(answered)

    for _ in range(4):
        acknowledged = asyncio.run(live())
        disk.crash()
        found = asyncio.run(left(bench))
        assert found == commands[: len(found)]
        assert acknowledged <= len(found)
        del commands[len(found) :]


async def left(bench: QuorumBench) -> list[Command]:
    """The commands that are in the log."""
    quorum, _, _ = bench.make()
    found = [decode_command(one.payload) for one in quorum._tail if one.header.kind == Kind.COMMAND]
    await quorum.database.close()
    return found


# -- PostgreSQL --------------------------------------------------------------------------------------------------


def test_the_same_holds_with_a_real_postgresql(postgres_url: str) -> None:
    bench = QuorumBench(FaultyDisk(0), postgres_url)

    async def main() -> None:
        quorum, store, _ = bench.make()
        await quorum.start()
        await propose_all(quorum, COMMANDS[:4])
        await stored(quorum)
        store.fails = True
        await propose_all(quorum, COMMANDS[4:])
        await abandon(quorum)
        async with bench.opened() as (quorum, store, _):
            await stored(quorum)
            assert made(store.load()) == made(quorum.state) == after(COMMANDS)
        engine = sa.create_engine(bench.url, poolclass=sa.NullPool)
        with engine.begin() as connection:
            for table in dump(bench.url):
                connection.execute(sa.text(f"DROP TABLE {table}"))
        async with bench.opened() as (quorum, store, _):
            await stored(quorum)
            assert made(store.load()) == after(COMMANDS)

    asyncio.run(main())
