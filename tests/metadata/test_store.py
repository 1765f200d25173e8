"""The metadata in SQL, on SQLite and on a real PostgreSQL: what a restart reads is what was applied, all or nothing."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from quiver.metadata.commands import ChangeGroup, Command, CreateTopic, DeleteTopic
from quiver.metadata.groups import Change, Member
from quiver.metadata.state import Applied, Counters, State
from quiver.metadata.store import Store
from tests.metadata.kit import (
    add_partitions,
    attempt,
    broker,
    consume,
    create,
    dump,
    image,
    manager,
    produce,
    random_command,
)

# R12, and what the log's directory of a partition is called.
COLUMNS = {
    "broker_metadata": ["broker_id", "endpoint", "last_heartbeat", "status", "disk_id", "phase"],
    "topic_metadata": ["topic_name", "partitions", "replication_factor", "created_at", "settings", "revision"],
    "partition_metadata": [
        *("id", "topic_name", "partition_id", "uid", "broker_id", "replicas", "size", "voters"),
        *("epoch", "leaving", "moving"),
    ],
    "producer_metadata": ["producer_id", "topic_name", "partition_id", "last_seen"],
    "consumer_metadata": ["consumer_id", "topic_name", "partition_id", "offset", "last_seen"],
    "manager_metadata": ["manager_id", "endpoint", "http", "last_heartbeat", "status", "replica_id"],
    "group_metadata": ["group_name", "generation", "members", "body"],
    "metadata_state": ["name", "value"],
}


@contextlib.contextmanager
def opened(url: str) -> Iterator[Store]:
    store = Store(url)
    try:
        yield store
    finally:
        store.close()


def loaded(url: str) -> Any:
    """What a manager finds that starts now."""
    with opened(url) as store:
        return image(store.load())


def play(store: Store, state: State, commands: list[Command]) -> None:
    for command in commands:
        applied = attempt(state, command)
        state.applied += 1
        store.apply(state.applied, state.counters, applied.changes if isinstance(applied, Applied) else [])


def furnished() -> list[Command]:
    return [
        broker(1, disk_id=7),
        broker(2, disk_id=8),
        CreateTopic("logs", ["u0", "u1"], 2, 1000),
        produce("logs"),
        produce("logs", 1),
        consume("logs", 0),
        consume("logs"),
        manager(1),
        ChangeGroup("g", Change([Member("m1", ("logs",), 10_000), Member("m2", ("logs",), 10_000)]), "sticky"),
    ]


@contextlib.contextmanager
def watching_statements(see: Any) -> Iterator[None]:
    """Calls `see(connection, statement)` before each statement that changes something."""

    def before(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.split(maxsplit=1)[0] in ("INSERT", "UPDATE", "DELETE"):
            see(connection, statement)

    sa.event.listen(sa.Engine, "before_cursor_execute", before)
    try:
        yield
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", before)


class DatabaseGone(Exception):
    pass


def test_the_tables_have_the_columns_that_were_asked_for(url: str) -> None:
    with opened(url):
        engine = sa.create_engine(url)
        inspector = sa.inspect(engine)
        found = {table: [column["name"] for column in inspector.get_columns(table)] for table in COLUMNS}
        keys = {table: inspector.get_pk_constraint(table)["constrained_columns"] for table in COLUMNS}
        assert sorted(inspector.get_table_names()) == sorted(COLUMNS)
        engine.dispose()
    assert found == COLUMNS
    assert keys == {table: columns[:1] for table, columns in COLUMNS.items()}


def test_the_rows_say_what_the_commands_did(url: str) -> None:
    with opened(url) as store:
        play(store, State(), furnished())
        found = dump(url)
    assert found == {
        "broker_metadata": [(1, "127.0.0.1:9001", None, "active", 7, ""), (2, "127.0.0.1:9002", None, "active", 8, "")],
        "topic_metadata": [("logs", 2, 2, 1000, "{}", 0)],
        "partition_metadata": [
            (1, "logs", 0, "u0", 1, "1,2", 0, f"{1 << 32 | 7},{2 << 32 | 8}", 0, "", 0),
            (2, "logs", 1, "u1", 2, "2,1", 0, f"{2 << 32 | 8},{1 << 32 | 7}", 0, "", 0),
        ],
        "producer_metadata": [(1, "logs", None, None), (2, "logs", 1, None)],
        "consumer_metadata": [(1, "logs", 0, 0, None), (2, "logs", None, 0, None)],
        "manager_metadata": [(1, "127.0.0.1:9401", "http://127.0.0.1:8001", None, "active", 1 << 32 | 7)],
        "group_metadata": [
            (
                *("g", 3, 2),
                '{"name":"g","strategy":"sticky","generation":3,"members":['
                '{"id":"m1","topics":["logs"],"session_ms":10000},{"id":"m2","topics":["logs"],"session_ms":10000}],'
                '"shares":[["logs",0,"m1",1,"m1"],["logs",1,"m2",2,"m2"]]}',
            )
        ],
        "metadata_state": [
            ("applied_transaction", 9),
            ("cluster", 0),
            ("consumer", 3),
            ("ownership", 4),
            ("partition", 3),
            ("producer", 3),
        ],
    }


def test_a_change_of_a_topic_keeps_what_was_observed_of_its_partitions(url: str) -> None:
    with opened(url) as store:
        state = State()
        play(store, state, [broker(1, disk_id=7), create("logs", 2)])
        store.record({("partition_metadata", "size"): {1: 10, 2: 20}})
        play(store, state, [add_partitions("logs", 2, 1)])
        assert [row[6] for row in dump(url)["partition_metadata"]] == [10, 20, 0]


def test_the_leader_that_brokers_told_of_stays_while_it_has_a_replica(url: str) -> None:
    def leaders() -> list[int]:
        return [row[4] for row in dump(url)["partition_metadata"]]

    with opened(url) as store:
        state = State()
        play(store, state, [broker(1, disk_id=7), broker(2, disk_id=8), create("logs", 2, replication_factor=2)])
        assert leaders() == [1, 2]
        store.record({("partition_metadata", "broker_id"): {1: 2, 2: 9}})
        assert leaders() == [2, 9]
        play(store, state, [add_partitions("logs", 2, 1)])
        assert leaders() == [2, 2, 1]  # 9 has none of it


def test_a_database_of_an_earlier_version_gets_the_columns_that_came_later(url: str) -> None:
    with opened(url) as store:
        play(store, State(), [broker(1), create("logs", 2)])
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE broker_metadata DROP COLUMN disk_id"))
        connection.execute(sa.text("ALTER TABLE partition_metadata DROP COLUMN voters"))
    engine.dispose()
    with opened(url) as store:
        state = store.load()
        assert state.brokers[1].disk_id == 0
        assert [partition.voters for partition in state.topic("logs").partitions] == [(), ()]
        play(store, state, [broker(1, disk_id=9)])
        assert store.load().brokers[1].disk_id == 9


def test_a_new_database_is_the_empty_state(url: str) -> None:
    assert loaded(url) == image(State())


def test_a_deleted_topic_leaves_no_rows_but_its_numbers_stay_used(url: str) -> None:
    state = State()
    with opened(url) as store:
        play(store, state, [*furnished(), DeleteTopic("logs")])
        found = dump(url)
    for table in ("topic_metadata", "partition_metadata", "producer_metadata", "consumer_metadata"):
        assert found[table] == []
    with opened(url) as store:
        reborn = store.load()
    reborn.apply(create("logs"))
    assert reborn.topic("logs").partitions[0].id == 3
    assert reborn.apply(produce("logs")).result.id == 3
    assert reborn.apply(consume("logs")).result.id == 3


@pytest.mark.parametrize("seed", range(3))
def test_a_restart_finds_the_state_after_the_same_commands(url: str, seed: int) -> None:
    dice = random.Random(seed)
    state, known = State(), State()
    store = Store(url)
    for _ in range(60):
        command = random_command(dice, state)
        applied, again = attempt(state, command), attempt(known, command)
        # The one that lived and the one that was read answer alike.
        assert applied == again
        state.applied += 1
        store.apply(state.applied, state.counters, applied.changes if isinstance(applied, Applied) else [])
        if dice.random() < 0.2:
            store.close()
            store = Store(url)
            known = store.load()
            assert image(known) == image(state)
    store.close()
    assert loaded(url) == image(state)


def test_changes_of_several_transactions_can_be_written_at_once(url: str) -> None:
    state, changes = State(), []
    for command in (*furnished(), DeleteTopic("logs"), create("logs", 3), produce("logs", 2), broker(1, "moved:1")):
        changes += state.apply(command).changes
        state.applied += 1
    with opened(url) as store:
        store.apply(state.applied, state.counters, changes)
    assert loaded(url) == image(state)


def test_a_statement_that_fails_takes_the_whole_transaction_back(url: str) -> None:
    """Whichever it is, the rows and the applied id included: else a restart would skip or repeat a change."""
    state = State()
    with opened(url) as store:
        play(store, state, furnished())
        before, before_rows = loaded(url), dump(url)
        state.apply(DeleteTopic("logs"))
        changes = [
            *(
                change
                for command in (create("logs", 2), produce("logs"), consume("logs"))
                for change in state.apply(command).changes
            )
        ]
        statements: list[str] = []
        fail_at = 0

        def see(connection: Any, statement: str) -> None:
            statements.append(statement)
            if len(statements) == fail_at:
                raise DatabaseGone

        with watching_statements(see):
            while True:
                statements, fail_at = [], fail_at + 1
                try:
                    store.apply(state.applied + 4, state.counters, changes)
                except DatabaseGone:
                    assert dump(url) == before_rows
                else:
                    break
        assert loaded(url) != before
        # One for each row at least, and those of the numbers: the loop has seen them all.
        assert fail_at > 8
        assert any("metadata_state" in statement for statement in statements)


def test_a_commit_that_fails_takes_the_whole_transaction_back(url: str) -> None:
    state = State()
    with opened(url) as store:
        play(store, state, furnished())
        before = dump(url)

        def refuse(connection: Any) -> None:
            raise DatabaseGone

        sa.event.listen(sa.Engine, "commit", refuse)
        try:
            with pytest.raises(DatabaseGone):
                store.apply(99, Counters(9, 9, 9), state.apply(create("new", 3)).changes)
        finally:
            sa.event.remove(sa.Engine, "commit", refuse)
        assert dump(url) == before
        store.apply(99, Counters(9, 9, 9), [])
        assert store.load().applied == 99


def test_rows_and_applied_id_become_visible_together(url: str) -> None:
    """Another reader of the database never sees one without the other."""
    state = State()
    with opened(url) as store:
        play(store, state, furnished())
        before = dump(url)
        seen: list[Any] = []

        def see(connection: Any, statement: str) -> None:
            seen.append(dump(url))

        changes = state.apply(create("new", 2)).changes
        with watching_statements(see):
            store.apply(state.applied + 1, state.counters, changes)
        assert len(seen) >= 4
        assert all(view == before for view in seen)


def test_a_refused_command_moves_only_the_applied_id(url: str) -> None:
    state = State()
    with opened(url) as store:
        play(store, state, furnished())
        before = dump(url)
        store.apply(8, state.counters, [])
        after = dump(url)
    assert after.pop("metadata_state") == [
        ("applied_transaction", 8),
        *[row for row in before.pop("metadata_state") if row[0] != "applied_transaction"],
    ]
    assert after == before


def test_observations_are_written_beside_the_rows(url: str) -> None:
    state = State()
    with opened(url) as store:
        play(store, state, furnished())
        before = loaded(url)
        store.record(
            {
                ("broker_metadata", "last_heartbeat"): {1: 111, 2: 222},
                ("broker_metadata", "status"): {2: "inactive"},
                ("partition_metadata", "size"): {1: 10, 2: 20},
                ("producer_metadata", "last_seen"): {2: 333, 99: 5},  # 99 is nobody
                ("consumer_metadata", "last_seen"): {},
                ("consumer_metadata", "offset"): {1: 7},
            }
        )
        found = dump(url)
        assert store.load_seen() == ({2: 333}, {}, {1: 111, 2: 222}, {})
    assert [row[:4] for row in found["broker_metadata"]] == [
        (1, "127.0.0.1:9001", 111, "active"),
        (2, "127.0.0.1:9002", 222, "inactive"),
    ]
    assert [row[6] for row in found["partition_metadata"]] == [10, 20]
    assert found["producer_metadata"] == [(1, "logs", None, None), (2, "logs", 1, 333)]
    assert found["consumer_metadata"] == [(1, "logs", 0, 7, None), (2, "logs", None, 0, None)]
    # What was observed is not state: a restart finds what the log made.
    assert loaded(url) == before


def test_the_longest_names_and_largest_numbers_fit(url: str) -> None:
    state = State()
    commands: list[Command] = [broker(2**62, "h" * 250 + ":65535"), *(broker(10_000 + number) for number in range(100))]
    commands += [create("x" * 249, 300, 100), produce("x" * 249, 299)]
    with opened(url) as store:
        play(store, state, commands)
        store.record({("producer_metadata", "last_seen"): {1: 2**53}})
    assert loaded(url) == image(state)


def test_a_connection_that_the_server_cuts_takes_the_transaction_back(postgres_url: str) -> None:
    state = State()
    with opened(postgres_url) as store:
        play(store, state, furnished())
        before = dump(postgres_url)
        count = 0

        def see(connection: Any, statement: str) -> None:
            nonlocal count
            count += 1
            if count == 3:
                pid = connection.connection.dbapi_connection.info.backend_pid
                killer = sa.create_engine(postgres_url)
                with killer.begin() as other:
                    other.execute(sa.text(f"SELECT pg_terminate_backend({pid}, 5000)"))
                killer.dispose()

        changes = state.apply(create("new", 2)).changes
        with watching_statements(see), pytest.raises(sa.exc.OperationalError):
            store.apply(8, state.counters, changes)
        assert dump(postgres_url) == before
        # And the next try finds a new connection by itself.
        store.apply(8, state.counters, changes)
        state.applied = 8
        assert image(store.load()) == image(state)


def test_a_database_that_cannot_be_opened_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    broken = tmp_path_factory.mktemp("db") / "metadata.db"
    broken.write_bytes(b"this is no database" * 100)
    with pytest.raises(sa.exc.DatabaseError):
        Store(f"sqlite:///{broken}")
