"""The classic clients: MyProducer and MyConsumer, over HTTP, with the method names of the classic API.

They need the address of one manager, or of several, and find the others: what changes something goes to the primary,
what reads to the secondaries in turn. A manager that dies costs a retry at another. An address that is not a manager's
own, as that of nginx before them, is kept to.

Rule: a retry never stores a message twice and never skips one. A producer numbers its messages for each partition, so
that the server knows a repetition; a consumer says which offset it saw last, so that a reply that got lost comes again.
Both decide themselves which partition a call is for: numbers and offsets count for each partition alone.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Sequence
from typing import Final

from quiver.client.classic_base import TIMEOUT_S_DEFAULT, URL_DEFAULT, ClassicClient, PartitionLook
from quiver.client.http import Params, Reply
from quiver.errors import QuiverError
from quiver.types import RecordMetadata
from quiver.wire.partitioning import partition_of_key

# A number that no message has: sent to be refused, because the refusal names the number that is expected.
_SEQUENCE_TO_ASK: Final = 2**62 - 1
_EXPECTED: Final = re.compile(r"expected sequence is (\d+)")
_EXISTS: Final = "Topic already exists"
_NOTHING_LEFT: Final = "No new message"
_NO_PARTITION: Final = re.compile(r"Partition \d+ does not exist")


class MyProducerError(QuiverError):
    """What the server said. `facts["status"]` is the HTTP status, 0 when it did not answer within the time-out."""


class MyConsumerError(QuiverError):
    """What the server said. `facts["status"]` is the HTTP status, 0 when it did not answer within the time-out."""


class NoNewMessageError(MyConsumerError):
    """There is nothing left to consume now."""


class Message(str):
    """The text of a message, which also knows where it is stored."""

    __slots__ = ("offset", "partition_id", "topic")

    topic: str
    partition_id: int
    offset: int


class _ProducerLane:
    """One partition's numbering. Whoever sends to the partition holds the lock: numbers arrive in order."""

    __slots__ = ("lock", "pending", "sequence")

    def __init__(self, sequence: int | None) -> None:
        self.lock = threading.Lock()
        self.sequence = sequence  # of the next message; None: the server has to be asked
        self.pending: tuple[str, str | None] | None = None  # message and key that carry `sequence`, outcome unknown


class _ProducerRegistration:
    """`counts`: how many partitions the topic had, one after the other; the last is how many there are now."""

    __slots__ = ("counts", "id", "look", "partition")

    def __init__(self, producer_id: int, partition: int | None, counts: list[int]) -> None:
        self.id = producer_id
        self.partition = partition
        self.counts = counts
        self.look = PartitionLook()


class MyProducer(ClassicClient):
    """Sends messages over HTTP. Safe to share between threads.

        producer = MyProducer("http://127.0.0.1:8002")  # of any manager; a list of several is fine
        producer.RegisterProducer("logs")          # creates the topic when it is missing
        producer.Enqueue("logs", "hello")          # -> RecordMetadata(topic='logs', partition=0, offset=0)

    Without partition and key all messages of this producer go to one partition, chosen by `client`, and keep their
    order, also when the topic gets more partitions. Keys are spread over all partitions; that there are more is noticed
    within PARTITIONS_REFRESH_S. `client` names the producer to the server, which counts messages by it; a name belongs
    to one producer object at a time, because two that number their messages under one name would take each other's for
    repetitions. Without it a new name is made.

    A server that is away is tried again for `timeout` seconds. After that Enqueue raises, and the message may or may
    not be stored: calling Enqueue with the same message again stores it once; any other message waits until the open
    one is settled.
    """

    _error = MyProducerError

    def __init__(
        self,
        url: str | Sequence[str] = URL_DEFAULT,
        client: str | None = None,
        *,
        timeout: float = TIMEOUT_S_DEFAULT,
    ) -> None:
        super().__init__(url, timeout)
        if client is not None and (not isinstance(client, str) or not client):
            raise MyProducerError(f"client must be a name, not {client!r}", status=400)
        # A name made here is new to every server: its numbers begin at 0 without asking.
        self._first_sequence = 0 if client is None else None
        self.client = f"producer-{uuid.uuid4().hex}" if client is None else client
        self._registrations: dict[str, _ProducerRegistration] = {}
        self._lanes: dict[tuple[str, int], _ProducerLane] = {}

    def CreateTopic(self, name: str, partitions: int = 1, replication_factor: int = 3) -> list[int]:
        """Returns the numbers of its partitions."""
        params: Params = {"topic_name": name, "partitions": partitions, "replication_factor": replication_factor}
        reply = self._link.post("/topics", params)
        if reply.repeated and reply.message == _EXISTS:
            return self._partitions(name)  # our first try made it, and its reply got lost
        made: list[int] = self._checked(reply).body["partitions"]
        return made

    def RegisterProducer(self, topic: str, partition: int | None = None) -> int:
        """Registers to a topic, or to one partition of it, and remembers the id that it returns."""
        self._check_partition(partition)
        reply = self._checked(self._link.post("/producer/register", {"topic": topic, "partition_id": partition}))
        producer_id: int = reply.body["producer_id"]
        count = len(self._partitions(topic))
        with self._lock:
            before = self._registrations.get(topic)
            counts = (
                before.counts if before is not None and before.counts[-1] <= count else []
            )  # else it is another one
            self._registrations[topic] = _ProducerRegistration(producer_id, partition, _grown(counts, count))
        return producer_id

    def Enqueue(self, topic: str, message: str, partition: int | None = None, key: str | None = None) -> RecordMetadata:
        """Returns where the message is stored, once it is on disk."""
        for name, text in (("message", message), ("key", key or "")):
            if not isinstance(text, str):
                raise MyProducerError(f"{name} must be a string, not {type(text).__name__}", status=400)
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise MyProducerError(f"{name} is not valid text: {error}", status=400) from error
        self._check_partition(partition)
        with self._lock:
            registration = self._registrations.get(topic)
            if registration is None:
                raise MyProducerError(f"call RegisterProducer({topic!r}) first", status=400)
            free = partition is None and registration.partition is None and key is not None
            look = free and registration.look.is_due()
        if look:
            count = len(self._partitions(topic))
            with self._lock:
                registration.counts = _grown(registration.counts, count)
        with self._lock:
            number = self._choose(topic, registration, partition, message, key)
            lane = self._lanes.setdefault((topic, number), _ProducerLane(self._first_sequence))
        with lane.lock:
            if lane.pending not in (None, (message, key)):
                self._settle(topic, registration.id, number, lane)
            return self._store(topic, registration.id, number, lane, message, key)

    def _settle(self, topic: str, producer_id: int, partition: int, lane: _ProducerLane) -> None:
        """Sends the open message again, under its own number: only so the next number is known."""
        assert lane.pending is not None
        try:
            self._store(topic, producer_id, partition, lane, *lane.pending)
        except MyProducerError:
            if lane.pending is not None:
                raise

    def _choose(
        self, topic: str, registration: _ProducerRegistration, partition: int | None, message: str, key: str | None
    ) -> int:
        """It is told to the server, so that a retry meets its first try whatever changes meanwhile."""
        if partition is not None:
            return partition
        if registration.partition is not None:
            return registration.partition
        if key is None:
            return partition_of_key(self.client.encode(), registration.counts[0])
        *earlier, count = registration.counts
        for before in earlier:
            number = partition_of_key(key.encode(), before)
            lane = self._lanes.get((topic, number))
            if lane is not None and lane.pending == (message, key):
                return number  # where its first try may have stored it, when there were fewer partitions
        return partition_of_key(key.encode(), count)

    def _store(
        self, topic: str, producer_id: int, partition: int, lane: _ProducerLane, message: str, key: str | None
    ) -> RecordMetadata:
        if lane.sequence is None:
            lane.sequence = self._ask_sequence(topic, producer_id, partition)
        reply = self._send(topic, producer_id, partition, lane.sequence, message, key)
        if lane.pending is None and not reply.repeated and (expected := _expected(reply)) is not None:
            # Nothing of this number was ever sent, so nothing can be doubled: the server has forgotten this client.
            lane.sequence = expected
            reply = self._send(topic, producer_id, partition, lane.sequence, message, key)
        if reply.is_success:
            lane.sequence += 1
            lane.pending = None
            return RecordMetadata(topic, reply.body["partition_id"], reply.body["offset"])
        if reply.is_unknown:
            lane.pending = (message, key)
            raise MyProducerError(f"{reply.message}; the message may or may not be stored", status=reply.status)
        if reply.is_final:
            if lane.pending is not None or reply.repeated:
                lane.sequence = None  # an earlier try may have used it up
            lane.pending = None
        raise MyProducerError(reply.message, status=reply.status)

    def _send(
        self, topic: str, producer_id: int, partition: int, sequence: int, message: str, key: str | None
    ) -> Reply:
        params: Params = {
            "topic": topic,
            "producer_id": producer_id,
            "partition_id": partition,
            "message": message,
            "key": key,
            "prod_client": self.client,
            "sequence": sequence,
        }
        return self._link.post("/producer/produce", params)

    def _ask_sequence(self, topic: str, producer_id: int, partition: int) -> int:
        reply = self._send(topic, producer_id, partition, _SEQUENCE_TO_ASK, "", None)
        expected = _expected(reply)
        if expected is None:
            raise MyProducerError(reply.message, status=reply.status)
        return expected


def _grown(counts: list[int], count: int) -> list[int]:
    """A manager that is behind may know of fewer: their number only grows."""
    return [*counts, count] if not counts or count > counts[-1] else counts


def _expected(reply: Reply) -> int | None:
    """The number that a refusal names."""
    found = _EXPECTED.search(reply.message) if reply.status == 400 else None
    return int(found.group(1)) if found else None


class _ConsumerLane:
    """One partition as this consumer saw it. Whoever asks holds the lock: `after` must be what was seen last."""

    __slots__ = ("after", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.after = -1


class _ConsumerRegistration:
    """`look`: None for one that is registered to a partition, and has no others to look for."""

    __slots__ = ("id", "lanes", "look", "partitions", "turn")

    def __init__(self, consumer_id: int, partitions: list[int], look: PartitionLook | None) -> None:
        self.id = consumer_id
        self.partitions = partitions
        self.lanes: dict[int, _ConsumerLane] = {}
        self.look = look
        self.turn = 0  # whose turn it is when no partition is named


class MyConsumer(ClassicClient):
    """Reads messages over HTTP, each once. Safe to share between threads: each message goes to one of them.

        consumer = MyConsumer("http://127.0.0.1:8002")
        consumer.RegisterConsumer("logs")          # begins at the oldest message that is kept
        consumer.Dequeue("logs")                   # -> 'hello'; raises NoNewMessageError when there is none
        consumer.Size("logs")                      # -> 0, what is left to read

    A topic that gets more partitions is noticed within PARTITIONS_REFRESH_S.

    A server that is away is tried again for `timeout` seconds. After that Dequeue raises; nothing is skipped: the next
    call gets the message that this one would have got.
    """

    _error = MyConsumerError

    def __init__(self, url: str | Sequence[str] = URL_DEFAULT, *, timeout: float = TIMEOUT_S_DEFAULT) -> None:
        super().__init__(url, timeout)
        self._registrations: dict[str, _ConsumerRegistration] = {}

    def RegisterConsumer(self, topic: str, partition: int | None = None) -> int:
        """Registers to a topic, or to one partition of it, and remembers the id that it returns.

        Registered again, this is a new consumer to the server: it begins at the oldest message again.
        """
        self._check_partition(partition)
        reply = self._checked(self._link.post("/consumer/register", {"topic": topic, "partition_id": partition}))
        consumer_id: int = reply.body["consumer_id"]
        partitions, look = (self._partitions(topic), PartitionLook()) if partition is None else ([partition], None)
        with self._lock:
            self._registrations[topic] = _ConsumerRegistration(consumer_id, partitions, look)
        return consumer_id

    def Dequeue(self, topic: str, partition: int | None = None) -> Message:
        """The next message of a partition, or of the topic's partitions in turn."""
        self._check_partition(partition)
        registration = self._registration(topic)
        if partition is not None:
            return self._take(topic, registration, partition)
        self._look_for_partitions(topic, registration)
        with self._lock:
            turn = registration.turn
            registration.turn += 1
            partitions = registration.partitions
        for step in range(len(partitions)):
            try:
                found = self._take(topic, registration, partitions[(turn + step) % len(partitions)])
            except NoNewMessageError:
                continue
            except MyConsumerError as error:
                if _NO_PARTITION.match(error.message):
                    continue  # a manager that has not heard of it yet; another one told us of it
                raise
            with self._lock:
                registration.turn = turn + step + 1
            return found
        raise NoNewMessageError(f"{_NOTHING_LEFT} is published to {topic}", status=400)

    def _look_for_partitions(self, topic: str, registration: _ConsumerRegistration) -> None:
        """Also while messages come: those of the partitions that are known may never end."""
        with self._lock:
            if registration.look is None or not registration.look.is_due():
                return
        found = self._partitions(topic)
        with self._lock:
            if len(found) > len(registration.partitions):  # a manager that is behind may know of fewer
                registration.partitions = found

    def Size(self, topic: str) -> int:
        """How many messages this consumer has still to read."""
        params: Params = {"topic": topic, "consumer_id": self._registration(topic).id}
        size: int = self._checked(self._link.get("/size", params)).body["size"]
        return size

    def _registration(self, topic: str) -> _ConsumerRegistration:
        with self._lock:
            registration = self._registrations.get(topic)
        if registration is None:
            raise MyConsumerError(f"call RegisterConsumer({topic!r}) first", status=400)
        return registration

    def _take(self, topic: str, registration: _ConsumerRegistration, partition: int) -> Message:
        with self._lock:
            lane = registration.lanes.setdefault(partition, _ConsumerLane())
        with lane.lock:
            params: Params = {
                "topic": topic,
                "consumer_id": registration.id,
                "partition_id": partition,
                "after": lane.after,
            }
            reply = self._link.get("/consumer/consume", params)
            if reply.status == 400 and reply.message.startswith(_NOTHING_LEFT):
                raise NoNewMessageError(reply.message, status=400)
            body = self._checked(reply).body
            found = Message(body["message"])
            found.topic, found.partition_id, found.offset = topic, body["partition_id"], body["offset"]
            lane.after = found.offset
            return found
