"""The clients in GET /health: a row of JSON for each, with when it was last seen.

Rule: pure. There may be a hundred thousand, and few of them were seen since somebody last asked: rows are kept, in
blocks of neighbours (a row made alone takes twice as long), and those of new clients are made before anybody asks.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from quiver.manager.sightings import SeenTimes

BLOCK: Final = 500  # ids
_SECOND_US: Final = 1_000_000


Clients = dict[int, Any]  # of producers or of consumers, by id


class ProducerSeen(msgspec.Struct, gc=False):  # a hundred thousand would send the collector round and round
    producer_id: int
    topic: str
    last_heartbeat: str | None


class ConsumerSeen(msgspec.Struct, gc=False):
    consumer_id: int
    topic: str
    last_heartbeat: str | None


class SeenRows:
    """Clients come in the order of their ids, which are never used again, and never change."""

    def __init__(self, row: type[ProducerSeen | ConsumerSeen]) -> None:
        self._row = row
        self._count = self._newest = 0
        self._members: dict[int, list[Any]] = {}  # the clients of each block
        self._blocks: dict[int, bytes] = {}
        self._stale: set[int] = set()
        self._version = 0

    def rows(self, clients: Clients, seen: SeenTimes) -> msgspec.Raw:
        self._look(clients, seen)
        for block in self._stale:
            self._make(block, seen)
        self._stale.clear()
        return msgspec.Raw(b"[" + b",".join(self._blocks.values()) + b"]")

    def make_ahead(self, clients: Clients, seen: SeenTimes) -> bool:
        """The rows of one block that has none yet and will have no more clients; False when there is no such block."""
        self._look(clients, seen)
        block = next((one for one in self._stale if not self._blocks[one] and one < self._newest // BLOCK), None)
        if block is None:
            return False
        self._make(block, seen)
        self._stale.discard(block)
        return True

    def _look(self, clients: Clients, seen: SeenTimes) -> None:
        """Finds out which blocks are not what they should be."""
        new = list(itertools.takewhile(lambda client: client.id > self._newest, reversed(clients.values())))
        if len(clients) < self._count + len(new):
            self._leave_out_all_but(clients)
        for client in reversed(new):
            block = client.id // BLOCK
            self._members.setdefault(block, []).append(client)
            self._blocks.setdefault(block, b"")
            self._stale.add(block)
            self._newest = client.id
        self._count = len(clients)
        self._stale |= self._blocks.keys() & {client // BLOCK for client in seen.since(self._version)}
        self._version = seen.version

    def _leave_out_all_but(self, clients: Clients) -> None:
        for block, members in list(self._members.items()):
            kept = self._members[block] = [one for one in members if one.id in clients]
            if not kept:
                del self._members[block], self._blocks[block]
                self._stale.discard(block)
            elif len(kept) < len(members):
                self._stale.add(block)

    def _make(self, block: int, seen: SeenTimes) -> None:
        members = self._members[block]
        ids = [one.id for one in members]
        rows = list(map(self._row, ids, [one.topic for one in members], _times(map(seen.get, ids))))
        self._blocks[block] = msgspec.json.encode(rows)[1:-1]


def time_text(us: int | None) -> str | None:
    return _times([us])[0]


def _times(times_us: Iterable[int | None]) -> list[str | None]:
    """Quick where neighbours were seen in the same second."""
    found: list[str | None] = []
    second_us, text = -_SECOND_US, ""
    for us in times_us:
        if us is None:
            found.append(None)
            continue
        if not 0 <= us - second_us < _SECOND_US:
            second_us = us - us % _SECOND_US
            second = datetime.datetime.fromtimestamp(second_us // _SECOND_US, datetime.UTC)
            text = second.strftime("%Y-%m-%dT%H:%M:%S.%%06d+00:00")
        found.append(text % (us - second_us))
    return found
