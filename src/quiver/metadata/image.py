"""A whole state: as bytes for a check-point, as a copy for a thread, as what makes another state of it.

Rule: pure, and a state is never changed here.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import msgspec

from quiver.metadata.group_table import GroupTable
from quiver.metadata.groups import Group
from quiver.metadata.manager_table import Manager, ManagerTable
from quiver.metadata.state import REMOVED, Broker, Consumer, Counters, Producer, Put, Remove, State, Topic

_LEVEL: Final = 1  # names of fields repeat in every row: the quickest level takes them out


class _Image(msgspec.Struct):
    applied: int
    counters: Counters
    topics: list[Topic]
    producers: list[Producer]
    consumers: list[Consumer]
    brokers: list[Broker]  # those that were removed, too
    managers: list[Manager] = []
    groups: list[Group] = []


_decoder = msgspec.msgpack.Decoder(_Image)


def copy_of(state: State) -> State:
    """The state as it is now. Entities never change, so that they are shared."""
    copy = State()
    copy.applied = state.applied
    copy.counters = msgspec.structs.replace(state.counters)
    copy.topics, copy.producers, copy.consumers = dict(state.topics), dict(state.producers), dict(state.consumers)
    copy.brokers, copy.removed = dict(state.brokers), dict(state.removed)
    copy.managers = ManagerTable(state.managers.rows.values())
    copy.groups = GroupTable(state.groups)
    return copy


def encode_state(state: State) -> bytes:
    rows = (list(found.values()) for found in entities_of(state))
    image = _Image(state.applied, state.counters, *rows)
    return zlib.compress(msgspec.msgpack.encode(image), _LEVEL)


def decode_state(raw: bytes) -> State:
    """The state of `encode_state`; without bytes, the state before the first transaction."""
    state = State()
    if raw:
        image = _decoder.decode(zlib.decompress(raw))
        state.applied, state.counters = image.applied, image.counters
        state.topics = {topic.name: topic for topic in image.topics}
        state.producers = {producer.id: producer for producer in image.producers}
        state.consumers = {consumer.id: consumer for consumer in image.consumers}
        state.brokers = {broker.id: broker for broker in image.brokers if broker.phase != REMOVED}
        state.removed = {broker.id: broker for broker in image.brokers if broker.phase == REMOVED}
        state.managers = ManagerTable(image.managers)
        state.groups = GroupTable({group.name: group for group in image.groups})
    return state


def difference(old: State, new: State) -> list[Put | Remove]:
    """The changes that make the entities of `old` those of `new`."""
    changes: list[Put | Remove] = []
    for before, after in zip(entities_of(old), entities_of(new), strict=True):
        changes += [Remove(entity) for key, entity in before.items() if key not in after]
        changes += [Put(entity) for key, entity in after.items() if before.get(key) != entity]
    return changes


def entities_of(state: State) -> tuple[dict[Any, Any], ...]:
    """By what names a row: a broker or manager that was removed is one too."""
    brokers, managers = state.brokers | state.removed, state.managers.rows
    return state.topics, state.producers, state.consumers, brokers, managers, state.groups
