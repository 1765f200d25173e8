"""Clients of the simulated cluster: they produce with idempotence, consume, commit, ask, and write down what they were
told.

Rule: a client knows what a real one knows. It guesses who leads, waits so long, and then the outcome is unknown.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from crc32c import crc32c

from quiver.errors import NotLeaderError, OutOfOrderSequenceError, QuiverError, RequestTimeoutError
from quiver.testing.history import History, ProducerLog
from quiver.testing.sim.ledger import Ledger
from quiver.testing.sim.network import Network
from quiver.testing.sim.world import Violation, VirtualLoop, World
from quiver.types import RecordMetadata
from quiver.wire.batch_check import SCHEMA_ID_V1
from quiver.wire.messages import Produce, ProduceReply
from quiver.wire.records import batch_from_lists, encode_batch, encode_single

_EPOCH_US = 1_700_000_000_000_000
# Most records are of a few keys. The others are of keys that are seldom written again: there a deletion is often the
# last word, and has to go without its key coming back.
_OFTEN_KEYS, _SELDOM_KEYS = 6, 40


class Clients:
    """What all clients share: the way to the nodes, the history, and how violations are told."""

    def __init__(
        self, world: World, network: Network, ledger: Ledger, uids: dict[tuple[str, int], str], chance: random.Random
    ) -> None:
        self.world = world
        self.network = network
        self.ledger = ledger
        self.uids = uids
        self.chance = chance
        self.loop = VirtualLoop(world, "clients")
        self.history = History()
        self.found: list[Violation] = []
        self.stopping = False
        self.rest = 1.0  # pauses are so many times longer
        self.compacts = False  # records have keys
        self.calls = 0
        self._epochs = 0
        self.ends: dict[tuple[str, int], int] = {}  # the highest offset anybody was told of, by partition

    def begin(self, actor: Any) -> None:
        """`actor.run()` goes on until `stopping`."""
        self.loop.turn(self.loop.create_task, (self._run(actor),))

    async def _run(self, actor: Any) -> None:
        try:
            await actor.run()
        except Violation as violation:
            self.found.append(violation)
        except Exception as error:
            mistake = Violation("no mistakes", f"a client was told {error!r}")
            mistake.__cause__ = error
            self.found.append(mistake)

    async def pause(self, mean_s: float) -> None:
        await asyncio.sleep(self.chance.expovariate(1 / mean_s) * self.rest)

    def next_epoch(self) -> int:
        """As managers count them: each is used once."""
        self._epochs += 2
        return self._epochs

    def any_node(self) -> int:
        return self.chance.choice([*self.network.nodes])

    def told_of(self, topic: str, partition: int, end: int) -> None:
        self.ends[topic, partition] = max(self.ends.get((topic, partition), 0), end)

    async def call(self, node_id: int, request: Any, payload: bytes = b"", timeout_s: float = 1.0) -> tuple[Any, bytes]:
        """The reply and its frames. Raises what the broker says, or RequestTimeoutError."""
        self.calls += 1
        future: asyncio.Future[tuple[Any, bytes]] = self.loop.create_future()
        node = self.network.nodes[node_id]

        def reply(answer: Any, frames: bytes) -> None:
            self._check_reply(node_id, request, answer)
            if not (self.network.loss and self.chance.random() < self.network.loss):
                self.world.after(self.network.delay(), self.loop, _settle, future, (answer, frames))

        self.network.carry(node, node.request, request, payload, reply)
        timer = self.loop.call_later(timeout_s, _settle, future, (None, b""))
        answer, frames = await future
        timer.cancel()
        if answer is None:
            raise RequestTimeoutError("no reply in time")
        if isinstance(answer, Exception):
            raise answer
        return answer, frames

    def _check_reply(self, node_id: int, request: Any, answer: Any) -> None:
        if isinstance(answer, ProduceReply) and not answer.duplicate:
            node = self.network.nodes[node_id]
            if node.disk.met and node.failed_syncs(self.uids[request.topic, request.partition]):
                self.found.append(Violation("8 fsync stops", f"{node.name} acknowledges a batch after a failed sync"))


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


class Batch:
    def __init__(self, sequence: int, values: list[bytes], payload: bytes) -> None:
        self.sequence = sequence
        self.values = values
        self.payload = payload
        self.crc = crc32c(payload)


class Producer:
    """Sends a few batches at a time and repeats them, in order, until all are acknowledged."""

    def __init__(self, clients: Clients, producer_id: int, topic: str, partition: int) -> None:
        self._clients = clients
        self._id = producer_id
        self._topic = topic
        self._partition = partition
        self._epoch = 0
        self._sequence = 0
        self._leader = clients.any_node()
        # Who is impatient finds a new leader while the old one does not know yet that it is replaced.
        self._patience_s = 0.5 if producer_id % 2 else 0.15
        self._log: ProducerLog = clients.history.producer(f"p{producer_id}")
        self._stamp = 0
        self.is_done = False

    async def run(self) -> None:
        clients = self._clients
        while not clients.stopping:
            await self._deliver([self._batch() for _ in range(clients.chance.randint(1, 5))])
            await clients.pause(0.05)
            if clients.chance.random() < 0.02:  # it was opened again
                self._epoch, self._sequence = self._epoch + 1, 0
        self.is_done = True

    def _batch(self) -> Batch:
        count = 3 if self._clients.chance.random() < 0.05 else 1
        self._stamp += 1
        stamp = _EPOCH_US + self._stamp
        values = [b"p%d-%d-%06d" % (self._id, self._epoch, self._sequence + place) for place in range(count)]
        if self._clients.compacts:
            chance = self._clients.chance
            keys = [(self._key(), chance.random() < 0.2) for _ in values]
            self._clients.ledger.keys[self._id, self._epoch, self._sequence] = keys
            said = [None if is_deleted else value for value, (_, is_deleted) in zip(values, keys, strict=True)]
            payload = bytes(encode_batch(batch_from_lists([stamp], [key for key, _ in keys], said, None)))
        elif count == 1:
            payload = bytes(encode_single(stamp, values[0]))
        else:
            payload = bytes(encode_batch(batch_from_lists([stamp], None, values, None)))
        batch = Batch(self._sequence, values, payload)
        self._sequence += count
        self._clients.ledger.sent[self._id, self._epoch, batch.sequence] = (values, batch.crc)
        for value in values:
            self._log.sent(value)
        return batch

    def _key(self) -> bytes:
        chance = self._clients.chance
        if chance.random() < 0.7:
            return b"k%d" % chance.randrange(_OFTEN_KEYS)
        return b"seldom-%d" % chance.randrange(_SELDOM_KEYS)

    async def _deliver(self, batches: list[Batch]) -> None:
        while batches:
            asked = self._leader
            replies = await asyncio.gather(*map(self._send, batches))
            told = zip(batches, replies, strict=True)
            batches = [batch for batch, reply in told if not self._acked(batch, reply, asked)]
            if batches:
                await self._clients.pause(0.05)

    async def _send(self, batch: Batch) -> ProduceReply | QuiverError:
        stamp = _EPOCH_US + self._stamp
        request = Produce(
            self._topic,
            self._partition,
            len(batch.values),
            stamp,
            stamp,
            batch.crc,
            SCHEMA_ID_V1,
            self._id,
            self._epoch,
            batch.sequence,
        )
        try:
            reply, _ = await self._clients.call(self._leader, request, batch.payload, timeout_s=self._patience_s)
        except QuiverError as error:
            return error
        found: ProduceReply = reply
        return found

    def _acked(self, batch: Batch, reply: ProduceReply | QuiverError, asked: int) -> bool:
        clients = self._clients
        if isinstance(reply, QuiverError):
            self._leader = leader_after(clients, reply, asked)
            return False
        group = clients.ledger.group(clients.uids[self._topic, self._partition])
        if group.sequences.get((self._id, self._epoch), 0) <= batch.sequence:
            raise Violation("2 committed stays", f"{batch.values} of p{self._id} is acknowledged and not committed")
        if reply.base_offset >= 0:
            clients.told_of(self._topic, self._partition, reply.base_offset + len(batch.values))
            for place, value in enumerate(batch.values):
                where = RecordMetadata(self._topic, self._partition, reply.base_offset + place)
                self._log.acknowledged(value, where)
        return True


def leader_after(clients: Clients, error: QuiverError, asked: int) -> int:
    """Whom to ask next."""
    if isinstance(error, OutOfOrderSequenceError):
        return asked  # it leads; an earlier batch is still on its way
    if isinstance(error, NotLeaderError):
        told = int(error.facts.get("leader", 0))
        if told in clients.network.nodes and told != asked:
            return told
    return clients.any_node()


Seen = Callable[[str, int, int], None]
