"""Consumers of the simulated cluster: they read from leaders and followers, keep positions, and ask for them again."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from quiver.errors import (
    ConflictError,
    CorruptLogError,
    MemberFencedError,
    OffsetOutOfRangeError,
    QuiverError,
    UnavailableError,
)
from quiver.testing.history import Reader
from quiver.testing.sim.clients import Clients, leader_after
from quiver.testing.sim.cluster import Cluster
from quiver.testing.sim.compaction import offsets_in
from quiver.testing.sim.ledger import is_same
from quiver.testing.sim.world import Violation
from quiver.types import Record
from quiver.wire.frame import FrameError, Kind, walk_frames
from quiver.wire.messages import OFFSET_LATEST, CommitPosition, Fetch, GetPosition, ListOffset, Position


def take_frames(
    clients: Clients, topic: str, partition: int, offset: int, frames: bytes, who: str
) -> tuple[list[Record], int]:
    """The records from `offset` on, each held against what is committed, and the offset to go on at."""
    group = clients.ledger.group(clients.uids[topic, partition])
    records: list[Record] = []
    try:
        found = list(walk_frames(memoryview(frames)))
    except FrameError as error:
        raise Violation("9 no bad frame", f"{who} was served a damaged frame: {error}") from error
    end = offset
    for _, header, payload in found:
        if header.index > group.commit or not is_same(group.entries[header.index - 1].header, header):
            raise Violation("phantom", f"{who} was served entry {header.index}, which is not the committed one")
        if header.kind != Kind.DATA:
            continue
        values, _ = clients.ledger.sent[header.producer_id, header.producer_epoch, header.sequence]
        for at in offsets_in(header, payload):
            if at >= offset:
                value = values[at - header.base_offset]
                records.append(Record(topic, partition, at, header.timestamp_min, None, value))
        end = max(end, header.next_offset)
    return records, end


async def check_end(clients: Clients, node: int, topic: str, partition: int) -> None:
    """Asks where it ends: not before what anybody was told when this was asked."""
    known = clients.ends.get((topic, partition), 0)
    reply, _ = await clients.call(node, ListOffset(topic, partition, OFFSET_LATEST), timeout_s=1.0)
    if reply.offset < known:
        detail = f"the end of {topic}-{partition} is said to be {reply.offset}, {known} was known before"
        raise Violation("stale", detail)


class Asker:
    """Asks where a partition ends, of whoever believes to lead it; when several do, of those that are replaced."""

    def __init__(self, clients: Clients, cluster: Cluster, topic: str, partition: int) -> None:
        self._clients = clients
        self._cluster = cluster
        self._topic = topic
        self._partition = partition
        self.is_done = False

    async def run(self) -> None:
        clients = self._clients
        while not clients.stopping:
            found = self._cluster.leading(clients.uids[self._topic, self._partition])
            leading = [(raft.term, node.id) for node, _, raft in found]
            if leading:
                with contextlib.suppress(QuiverError):
                    await check_end(clients, min(leading)[1], self._topic, self._partition)
            await clients.pause(0.01 if len(leading) > 1 else 0.1)
        self.is_done = True


class Consumer:
    def __init__(self, clients: Clients, name: str, topic: str, partition: int) -> None:
        self._clients = clients
        self._name = name
        self._topic = topic
        self._partition = partition
        self._node = clients.any_node()
        self._offset = 0
        self._floor = -1  # a committed position that was acknowledged
        self._epoch = 0  # of its last claim
        self._claimed = False  # whether that was acknowledged
        self._rewinds: list[int] = []  # seeks of unknown outcome: they may still come
        self._reader: Reader = clients.history.reader(name)
        self._reader.jumped(topic, partition, 0)
        self.is_done = False

    async def run(self) -> None:
        clients = self._clients
        while not clients.stopping:
            try:
                await self._act(clients.chance.random())
            except OffsetOutOfRangeError as error:
                self._moved(error)
            except ConflictError:
                pass  # an earlier commit of unknown outcome came through
            except MemberFencedError:
                self._fenced()
            except QuiverError as error:
                self._node = leader_after(clients, error, self._node)
                await clients.pause(0.05)
        self.is_done = True

    async def _act(self, what: float) -> None:
        clients = self._clients
        if what < 0.6:
            await self._fetch()
        elif what < 0.75:
            await self._commit()
        elif what < 0.85:
            await self._find_position()
        elif what < 0.95:
            await self._list_offset()
        elif what < 0.96:
            await self._open_again()
        elif what < 0.97:
            await self._claim()
        elif what < 0.98:
            await self._commit_late()
        elif what < 0.99:
            self._node = clients.any_node()  # a follower will do
        await clients.pause(0.05)

    async def _fetch(self) -> None:
        clients = self._clients
        request = Fetch(self._topic, self._partition, self._offset, 4000, 1, clients.chance.choice((0, 100, 500)))
        _, frames = await clients.call(self._node, request, timeout_s=1.5)
        records, self._offset = take_frames(clients, self._topic, self._partition, self._offset, frames, self._name)
        for record in records:
            self._reader.saw(record)
        clients.told_of(self._topic, self._partition, self._offset)

    def _moved(self, error: OffsetOutOfRangeError) -> None:
        """Retention took what it was about to read."""
        earliest = int(error.facts["earliest"])
        if self._offset < earliest:
            self._offset = earliest
            self._reader.jumped(self._topic, self._partition, earliest)
        else:
            raise Violation("stale", f"{self._name} has read up to {self._offset} and is told {error.message}")

    async def _commit(self) -> None:
        clients = self._clients
        kind, offset, expected = clients.chance.random(), self._offset, None
        rewind = kind < 0.1
        if rewind:
            offset = clients.chance.randint(0, self._offset)
            self._rewinds.append(offset)
        elif kind < 0.3:
            expected = self._floor
        elif kind < 0.4:  # an old commit that comes late: it must not move the position back
            offset = clients.chance.randint(0, self._offset)
        position = Position(self._name, offset, rewind, expected, self._epoch)
        reply, _ = await clients.call(self._node, CommitPosition(self._topic, self._partition, position))
        if rewind:
            self._rewinds.remove(offset)
            self._floor = reply.offset
        elif reply.offset < offset and not self._rewinds:
            raise Violation("7 positions", f"{self._name} committed {offset} and is told {reply.offset}")
        else:
            self._floor = max(self._floor, offset)

    def _fenced(self) -> None:
        if self._claimed:
            raise Violation("no fenced commit", f"{self._name} is refused and has claimed {self._epoch}, the last one")
        self._epoch = 0

    async def _claim(self) -> None:
        """As a member of a group does that takes over from another."""
        self._epoch, self._claimed = self._clients.next_epoch(), False
        position = Position(self._name, 0, epoch=self._epoch, act="claim")
        await self._clients.call(self._node, CommitPosition(self._topic, self._partition, position))
        self._claimed = True

    async def _commit_late(self) -> None:
        """As one that was away and does not know that another has claimed since."""
        if not self._claimed:
            return
        position = Position(self._name, self._offset, True, epoch=self._epoch - 1)
        try:
            await self._clients.call(self._node, CommitPosition(self._topic, self._partition, position))
        except MemberFencedError:
            return
        raise Violation("no fenced commit", f"{self._name} stores with epoch {self._epoch - 1} after {self._epoch}")

    async def _find_position(self) -> int:
        clients = self._clients
        floor = min([self._floor, *self._rewinds])
        reply, _ = await clients.call(self._node, GetPosition(self._topic, self._partition, self._name))
        found = -1 if reply.offset is None else int(reply.offset)
        if found < floor:
            raise Violation("7 positions", f"{self._name} finds its position at {found}, {floor} was acknowledged")
        return found

    async def _list_offset(self) -> None:
        await check_end(self._clients, self._node, self._topic, self._partition)

    async def _open_again(self) -> None:
        found = await self._find_position()
        self._reader = self._clients.history.reader(self._name)
        self._offset = max(found, 0)
        if self._rewinds:
            self._reader.jumped(self._topic, self._partition, self._offset)
        else:
            self._reader.resumed(self._topic, self._partition, self._offset)


async def read_all(clients: Clients, node: int, topic: str, partition: int) -> None:
    """Reads a partition of one node from its beginning to the end that is known, at the close of a run."""
    end = clients.ledger.group(clients.uids[topic, partition]).next_offset
    reader = clients.history.reader(f"all of n{node}")
    offset, tries = 0, 0
    while offset < end:
        tries += 1
        if tries > 2000:
            raise Violation("liveness", f"{topic}-{partition} of n{node} cannot be read beyond {offset} of {end}")
        try:
            _, frames = await clients.call(node, Fetch(topic, partition, offset, 100_000, 1, 0))
        except OffsetOutOfRangeError as error:
            if offset >= error.facts["earliest"]:
                raise Violation("lost", f"n{node} has {error.message}, {end} is the end") from error
            offset = int(error.facts["earliest"])
            reader.jumped(topic, partition, offset)
            continue
        except (UnavailableError, CorruptLogError):  # damage that is found is repaired
            await asyncio.sleep(0.1)
            continue
        records, offset = take_frames(clients, topic, partition, offset, frames, f"n{node}'s reader")
        for record in records:
            reader.saw(record)


def fill_in_trimmed(clients: Clients, starts: dict[Any, int]) -> None:
    """What retention removed was there: the ledger saw it. It counts as seen up to where the log now begins."""
    for place, uid in clients.uids.items():
        reader = clients.history.reader("trimmed")
        for header, _ in clients.ledger.group(uid).entries:
            if header.kind != Kind.DATA or header.next_offset > starts[place]:
                continue
            values, _ = clients.ledger.sent[header.producer_id, header.producer_epoch, header.sequence]
            for number, value in enumerate(values):
                reader.saw(Record(*place, header.base_offset + number, 0, None, value))
