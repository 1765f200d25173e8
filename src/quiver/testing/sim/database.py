"""The SQL database of a simulated manager: rows in memory, which outlive the process.

As SQLite without a sync for each transaction: a transaction is there as a whole or not, and a power cut may take the
last ones. Rule: whenever a transaction is written, the rows are held against what all managers had at its number.
"""

from __future__ import annotations

import errno
import random
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from quiver.metadata.groups import Group
from quiver.metadata.image import difference, entities_of
from quiver.metadata.manager_table import Manager
from quiver.metadata.state import Broker, Consumer, Counters, Entity, Producer, Put, Remove, State, Topic

_VERSIONS_MAX = 4  # so many of the last transactions may be lost

Key = tuple[str, Any]
OnWrite = Callable[[int, int], None]


def key_of(entity: Any) -> Key:
    return type(entity).__name__, entity.name if isinstance(entity, (Topic, Group)) else entity.id


def image_of(counters: Counters, entities: Iterable[Entity]) -> int:
    """A number that stands for all rows."""
    encode = msgspec.msgpack.encode
    rows = sorted(type(entity).__name__.encode() + encode(entity) for entity in entities)
    return zlib.crc32(b"".join(rows), zlib.crc32(encode(counters)))


def state_image(state: State) -> int:
    return image_of(state.counters, (entity for found in entities_of(state) for entity in found.values()))


class Rows(NamedTuple):
    """What is in a database after a transaction."""

    applied: int = 0
    cluster: int = 0
    counters: Counters = Counters()
    entities: Mapping[Key, Any] = {}


class Database:
    """On the disk of a manager."""

    def __init__(self) -> None:
        self._versions = [Rows()]
        self.is_away = False

    @property
    def rows(self) -> Rows:
        return self._versions[-1]

    def put(self, rows: Rows) -> None:
        self._versions = [*self._versions[-_VERSIONS_MAX:], rows]

    def lose_power(self, chance: random.Random) -> None:
        self._versions = self._versions[: chance.randint(1, len(self._versions))]


class SimulatedStore:
    """What `quiver.metadata.store.Store` is to a manager, for one life of it."""

    def __init__(self, database: Database, on_write: OnWrite) -> None:
        self._database = database
        self._on_write = on_write
        self.cluster = 0
        self.alive = True

    def position(self) -> tuple[int, int]:
        return self._database.rows.applied, self._database.rows.cluster

    def apply(self, applied: int, counters: Counters, changes: Iterable[Put | Remove]) -> None:
        if self._database.is_away or not self.alive:
            raise OSError(errno.ECONNREFUSED, "the database is away")
        entities = dict(self._database.rows.entities)
        for change in changes:
            entities.pop(key_of(change.entity), None)
            if isinstance(change, Put):
                entities[key_of(change.entity)] = change.entity
        self._database.put(Rows(applied, self.cluster, msgspec.structs.replace(counters), entities))
        self._on_write(applied, image_of(counters, entities.values()))

    def become(self, state: State, *, anew: bool) -> None:
        before = {} if anew else self._database.rows.entities
        gone: list[Put | Remove] = [Remove(entity) for entity in self._database.rows.entities.values()] if anew else []
        self.apply(state.applied, state.counters, [*gone, *difference(_state_of(before), state)])

    def close(self) -> None:
        pass


def _state_of(entities: Mapping[Key, Any]) -> State:
    state = State()
    for entity in entities.values():
        match entity:
            case Topic():
                state.topics[entity.name] = entity
            case Producer():
                state.producers[entity.id] = entity
            case Consumer():
                state.consumers[entity.id] = entity
            case Broker():
                state.brokers[entity.id] = entity
            case Manager():
                state.managers.put(entity)
            case Group():
                state.groups[entity.name] = entity
    return state
