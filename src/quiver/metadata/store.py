"""The metadata in SQL: SQLite beside the log, or any database SQLAlchemy reaches by URL.

Rule: rows and the id of the last applied transaction change in one database transaction. The log is the truth; a
database that is behind catches up from it, one that is lost is built again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import sqlalchemy as sa

from quiver.errors import InvalidRequestError
from quiver.metadata.groups import Group
from quiver.metadata.image import difference
from quiver.metadata.manager_table import EXPECTED, GONE, Manager
from quiver.metadata.state import (
    REMOVED,
    Broker,
    Consumer,
    Counters,
    Entity,
    Partition,
    Producer,
    Put,
    Remove,
    State,
    Topic,
)

_tables = sa.MetaData()

BROKERS: Final = sa.Table(
    "broker_metadata",
    _tables,
    sa.Column("broker_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("endpoint", sa.String(300), nullable=False),
    sa.Column("last_heartbeat", sa.BigInteger),  # microseconds since 1970 UTC, as every time here
    sa.Column("status", sa.String(20), nullable=False),
    sa.Column("disk_id", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("phase", sa.String(20), nullable=False, server_default=""),
)
TOPICS: Final = sa.Table(
    "topic_metadata",
    _tables,
    sa.Column("topic_name", sa.String(249), primary_key=True),
    sa.Column("partitions", sa.Integer, nullable=False),
    sa.Column("replication_factor", sa.Integer, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    sa.Column("settings", sa.Text, nullable=False, server_default="{}"),  # what was set, as JSON
    sa.Column("revision", sa.BigInteger, nullable=False, server_default="0"),
)
PARTITIONS: Final = sa.Table(
    "partition_metadata",
    _tables,
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("topic_name", sa.String(249), nullable=False, index=True),
    sa.Column("partition_id", sa.Integer, nullable=False),
    sa.Column("uid", sa.String(64), nullable=False),
    sa.Column("broker_id", sa.BigInteger),  # of the leader, as the brokers last said
    sa.Column("replicas", sa.String(1000), nullable=False),  # broker ids, who should lead first, joined by commas
    sa.Column("size", sa.BigInteger, nullable=False),  # messages, as the broker last said
    sa.Column("voters", sa.Text, nullable=False, server_default=""),  # replica ids, joined by commas
    sa.Column("epoch", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("leaving", sa.String(1000), nullable=False, server_default=""),  # broker ids, joined by commas
    sa.Column("moving", sa.Integer, nullable=False, server_default="0"),
)
PRODUCERS: Final = sa.Table(
    "producer_metadata",
    _tables,
    sa.Column("producer_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("topic_name", sa.String(249), nullable=False),
    sa.Column("partition_id", sa.Integer),
    sa.Column("last_seen", sa.BigInteger),
)
CONSUMERS: Final = sa.Table(
    "consumer_metadata",
    _tables,
    sa.Column("consumer_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("topic_name", sa.String(249), nullable=False),
    sa.Column("partition_id", sa.Integer),
    sa.Column("offset", sa.BigInteger),  # messages read, over all its partitions; the truth is in the partitions
    sa.Column("last_seen", sa.BigInteger),
)
MANAGERS: Final = sa.Table(
    "manager_metadata",
    _tables,
    sa.Column("manager_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("endpoint", sa.String(300), nullable=False),
    sa.Column("http", sa.String(300), nullable=False),
    sa.Column("last_heartbeat", sa.BigInteger),
    sa.Column("status", sa.String(20), nullable=False),
    sa.Column("replica_id", sa.BigInteger, nullable=False),
)
GROUPS: Final = sa.Table(
    "group_metadata",
    _tables,
    sa.Column("group_name", sa.String(600), primary_key=True),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("members", sa.Integer, nullable=False),
    sa.Column("body", sa.Text, nullable=False),  # all of it, as JSON
)
NUMBERS: Final = sa.Table(
    "metadata_state",
    _tables,
    sa.Column("name", sa.String(40), primary_key=True),
    sa.Column("value", sa.BigInteger, nullable=False),
)
_APPLIED: Final = "applied_transaction"
_CLUSTER: Final = "cluster"  # the number of the cluster whose rows these are; 0 in a database of an earlier version

# In one question: databases take a limited number of values in a statement.
_NAMES_MAX: Final = 500

_KEY_OF: Final[Mapping[type, tuple[sa.Table, str, str]]] = {
    Broker: (BROKERS, "broker_id", "id"),
    Topic: (TOPICS, "topic_name", "name"),
    Producer: (PRODUCERS, "producer_id", "id"),
    Consumer: (CONSUMERS, "consumer_id", "id"),
    Manager: (MANAGERS, "manager_id", "id"),
    Group: (GROUPS, "group_name", "key"),
}


def sqlite_url(path: Path) -> str:
    return f"sqlite:///{path}"


def schema_url(url: str, manager_id: int) -> str:
    """Managers that share a PostgreSQL database have a schema each; other databases have no such thing."""
    found = sa.make_url(url)
    if found.get_backend_name() != "postgresql":
        raise InvalidRequestError(f"several managers cannot share a database of {found.get_backend_name()}")
    options = " ".join(filter(None, (str(found.query.get("options", "")), f"-csearch_path=manager_{manager_id}")))
    return found.update_query_dict({"options": options}).render_as_string(hide_password=False)


def make_schema(url: str, manager_id: int) -> None:
    engine = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE SCHEMA IF NOT EXISTS manager_{manager_id}"))


def read_applied(url: str) -> int:
    """The last transaction in a database that a manager writes; changes nothing in it."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        found = connection.execute(sa.select(NUMBERS.c.value).where(NUMBERS.c.name == _APPLIED)).scalar()
    return int(found or 0)


class LastSeen(NamedTuple):
    """When each was last seen, by id."""

    producers: dict[int, int]
    consumers: dict[int, int]
    brokers: dict[int, int]
    managers: dict[int, int]


class Store:
    """One database. Blocking; used from one thread at a time. `cluster` is written with every transaction."""

    def __init__(self, url: str) -> None:
        self.cluster = 0
        self._engine = sa.create_engine(url)
        if self._engine.dialect.name == "sqlite":
            sa.event.listen(self._engine, "connect", _prepare_sqlite)
        _tables.create_all(self._engine)
        self._add_columns()

    def position(self) -> tuple[int, int]:
        """The last applied transaction, and the number of the cluster it is of; zeros in an empty database."""
        with self._engine.begin() as connection:
            numbers = {row.name: row.value for row in connection.execute(sa.select(NUMBERS))}
        return numbers.get(_APPLIED, 0), numbers.get(_CLUSTER, 0)

    def load(self) -> State:
        """The state as of the last applied transaction."""
        state = State()
        with self._engine.begin() as connection:
            numbers = {row.name: row.value for row in connection.execute(sa.select(NUMBERS))}
            state.applied = numbers.pop(_APPLIED, 0)
            numbers.pop(_CLUSTER, 0)
            state.counters = Counters(**numbers)
            for row in connection.execute(sa.select(BROKERS)):
                broker = Broker(row.broker_id, row.endpoint, row.disk_id, row.phase)
                (state.removed if broker.phase == REMOVED else state.brokers)[broker.id] = broker
            partitions: dict[str, list[Partition]] = {}
            for row in connection.execute(sa.select(PARTITIONS).order_by(PARTITIONS.c.partition_id)):
                moves = (row.epoch, _numbers(row.leaving), bool(row.moving))
                replicas, voters = _numbers(row.replicas), _numbers(row.voters)
                found = Partition(row.id, row.topic_name, row.partition_id, row.uid, replicas, voters, *moves)
                partitions.setdefault(row.topic_name, []).append(found)
            for row in connection.execute(sa.select(TOPICS).order_by(TOPICS.c.created_at, TOPICS.c.topic_name)):
                state.topics[row.topic_name] = Topic(
                    row.topic_name,
                    row.replication_factor,
                    row.created_at,
                    tuple(partitions.get(row.topic_name, ())),
                    msgspec.json.decode(row.settings, type=dict[str, bool | int | str]),
                    row.revision,
                )
            for row in connection.execute(sa.select(PRODUCERS)):
                state.producers[row.producer_id] = Producer(row.producer_id, row.topic_name, row.partition_id)
            for row in connection.execute(sa.select(CONSUMERS)):
                state.consumers[row.consumer_id] = Consumer(row.consumer_id, row.topic_name, row.partition_id)
            for row in connection.execute(sa.select(MANAGERS)):
                phase = row.status if row.status in (EXPECTED, GONE) else ""  # else it is what was observed
                state.managers.put(Manager(row.manager_id, row.endpoint, row.http, row.replica_id, phase))
            for row in connection.execute(sa.select(GROUPS.c.body)):
                group = msgspec.json.decode(row.body, type=Group)
                state.groups[group.name] = group
        return state

    def load_seen(self) -> LastSeen:
        with self._engine.begin() as connection:
            return LastSeen(
                *(
                    {row[0]: row[1] for row in connection.execute(sa.select(key, seen).where(seen.is_not(None)))}
                    for key, seen in (
                        (PRODUCERS.c.producer_id, PRODUCERS.c.last_seen),
                        (CONSUMERS.c.consumer_id, CONSUMERS.c.last_seen),
                        (BROKERS.c.broker_id, BROKERS.c.last_heartbeat),
                        (MANAGERS.c.manager_id, MANAGERS.c.last_heartbeat),
                    )
                )
            )

    def become(self, state: State, *, anew: bool) -> None:
        """Makes the rows those of this state, whatever they are now. `anew`: what is there is of no worth."""
        if anew:
            with self._engine.begin() as connection:
                for table in reversed(_tables.sorted_tables):
                    connection.execute(sa.delete(table))
        self.apply(state.applied, state.counters, difference(self.load(), state))

    def apply(self, applied: int, counters: Counters, changes: Iterable[Put | Remove]) -> None:
        """Makes the rows those of transaction `applied`, all or nothing."""
        last = {
            (type(change.entity), getattr(change.entity, _KEY_OF[type(change.entity)][2])): change for change in changes
        }
        with self._engine.begin() as connection:
            rows = self._rows([change.entity for change in last.values() if isinstance(change, Put)], connection)
            for kind, (table, column, attribute) in _KEY_OF.items():
                gone = [{"_key": getattr(change.entity, attribute)} for (of, _), change in last.items() if of is kind]
                self._delete(connection, table.c[column], gone)
                if kind is Topic:
                    self._delete(connection, PARTITIONS.c.topic_name, gone)
            for table, new in rows.items():
                if new:
                    connection.execute(sa.insert(table), new)
            numbers = {_APPLIED: applied, _CLUSTER: self.cluster}
            numbers |= {name: getattr(counters, name) for name in counters.__struct_fields__}
            connection.execute(sa.delete(NUMBERS))
            connection.execute(sa.insert(NUMBERS), [{"name": name, "value": value} for name, value in numbers.items()])

    def record(self, reports: Mapping[tuple[str, str], Mapping[int, Any]]) -> None:
        """Writes what is observed and not replicated, in bulk: (table, column) -> key -> value."""
        with self._engine.begin() as connection:
            for (table_name, column), values in reports.items():
                table = _tables.tables[table_name]
                key = next(iter(table.primary_key.columns))
                statement = sa.update(table).where(key == sa.bindparam("_key")).values({column: sa.bindparam("_value")})
                if values:
                    connection.execute(statement, [{"_key": k, "_value": value} for k, value in values.items()])

    def close(self) -> None:
        self._engine.dispose()

    def _add_columns(self) -> None:
        """A database of an earlier version lacks the columns that came later; each has a default."""
        inspector = sa.inspect(self._engine)
        for table in _tables.sorted_tables:
            there = {column["name"] for column in inspector.get_columns(table.name)}
            for column in table.columns:
                if column.name not in there:
                    definition = sa.schema.CreateColumn(column).compile(dialect=self._engine.dialect)
                    with self._engine.begin() as connection:
                        connection.execute(sa.text(f"ALTER TABLE {table.name} ADD COLUMN {definition}"))

    @staticmethod
    def _delete(connection: sa.Connection, column: sa.ColumnElement[Any], keys: list[dict[str, Any]]) -> None:
        if keys:
            connection.execute(sa.delete(column.table).where(column == sa.bindparam("_key")), keys)

    def _rows(self, entities: list[Entity], connection: sa.Connection) -> dict[sa.Table, list[dict[str, Any]]]:
        """The rows of these entities, by table."""
        rows: dict[sa.Table, list[dict[str, Any]]] = {table: [] for table in _tables.sorted_tables}
        observed = self._observed(connection, [entity.name for entity in entities if isinstance(entity, Topic)])
        for entity in entities:
            rows[_KEY_OF[type(entity)][0]].append(_row(entity))
            if isinstance(entity, Topic):
                rows[PARTITIONS] += [_partition_row(part, *observed.get(part.id, (0, 0))) for part in entity.partitions]
        return rows

    def _observed(self, connection: sa.Connection, topics: list[str]) -> dict[int, tuple[int, int]]:
        """Size and leader of their partitions, which a change of a topic leaves as they are."""
        found: dict[int, tuple[int, int]] = {}
        for first in range(0, len(topics), _NAMES_MAX):
            names = PARTITIONS.c.topic_name.in_(topics[first : first + _NAMES_MAX])
            query = sa.select(PARTITIONS.c.id, PARTITIONS.c.size, PARTITIONS.c.broker_id).where(names)
            found |= {row.id: (row.size, row.broker_id or 0) for row in connection.execute(query)}
        return found


def _row(entity: Entity) -> dict[str, Any]:
    match entity:
        case Broker():
            status = REMOVED if entity.phase == REMOVED else "active"
            row: dict[str, Any] = {"broker_id": entity.id, "endpoint": entity.endpoint, "phase": entity.phase}
            return row | {"disk_id": entity.disk_id, "status": status}
        case Topic():
            row = {"topic_name": entity.name, "partitions": len(entity.partitions)}
            row |= {"settings": msgspec.json.encode(entity.settings).decode(), "revision": entity.revision}
            return row | {"replication_factor": entity.replication_factor, "created_at": entity.created_us}
        case Manager():
            row = {"manager_id": entity.id, "endpoint": entity.address, "http": entity.http}
            return row | {"replica_id": entity.replica_id, "status": entity.phase or "active"}
        case Producer():
            return {"producer_id": entity.id, "topic_name": entity.topic, "partition_id": entity.partition}
        case Consumer():
            row = {"consumer_id": entity.id, "topic_name": entity.topic, "partition_id": entity.partition}
            return row | {"offset": 0}
        case Group():
            row = {"group_name": entity.key, "generation": entity.generation, "members": len(entity.members)}
            return row | {"body": msgspec.json.encode(entity).decode()}


def _partition_row(partition: Partition, size: int, leader: int) -> dict[str, Any]:
    """`leader` counts while it has a replica; else the one that should lead is entered, until brokers say more."""
    should_lead = partition.replicas[0] if partition.replicas else None
    return {
        "id": partition.id,
        "topic_name": partition.topic,
        "partition_id": partition.number,
        "uid": partition.uid,
        "broker_id": leader if leader in partition.holders else should_lead,
        "replicas": ",".join(map(str, partition.replicas)),
        "size": size,
        "voters": ",".join(map(str, partition.voters)),
        "epoch": partition.epoch,
        "leaving": ",".join(map(str, partition.leaving)),
        "moving": int(partition.moving),
    }


def _numbers(joined: str) -> tuple[int, ...]:
    return tuple(int(part) for part in joined.split(",") if part)


def _prepare_sqlite(connection: Any, record: Any) -> None:
    # The log is synced before anyone is answered, so the database need not be: it never tears, it may be behind.
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=5000"):
        connection.execute(f"PRAGMA {pragma}")
