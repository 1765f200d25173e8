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
from types import TracebackType
from typing import ClassVar, Final, Self

from quiver.client.http import HttpLink, Params, Reply
from quiver.errors import QuiverError
from quiver.types import RecordMetadata
from quiver.wire.partitioning import partition_of_key

URL_DEFAULT: Final = "http://127.0.0.1:8002"
TIMEOUT_S_DEFAULT: Final = 30.0
# A number that no message has: sent to be refused, because the refusal names the number that is expected.
_SEQUENCE_TO_ASK: Final = 2**62 - 1
_EXPECTED: Final = re.compile(r"expected sequence is (\d+)")
_EXISTS: Final = "Topic already exists"
_NOTHING_LEFT: Final = "No new message"


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


class _Client:
    _error: ClassVar[type[QuiverError]]

    def __init__(self, url: str | Sequence[str], timeout: float) -> None:
        self._link = HttpLink(url, timeout)
        self._lock = threading.Lock()

    def ListTopics(self) -> list[str]:
        """The names of all topics."""
        topics: list[str] = self._checked(self._link.get("/topics", {})).body["topics"]
        return topics

    def _partitions(self, topic: str) -> list[int]:
        reply = self._checked(self._link.get("/topics/partitions", {"topic_name": topic}))
        partitions: list[int] = reply.body["partitions"]
        return partitions

    def _checked(self, reply: Reply) -> Reply:
        if not reply.is_success:
            raise self._error(reply.message, status=reply.status)
        return reply

    def _check_partition(self, partition: object) -> None:
        if partition is not None and (not isinstance(partition, int) or isinstance(partition, bool)):
            raise self._error(f"partition must be an integer, not {type(partition).__name__}", status=400)

    def close(self) -> None:
        """Closes the connections. The client may still be used; it opens new ones."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_link"):  # not so when the arguments were wrong
            self._link.close()


class _ProducerLane:
    """One partition's numbering. Whoever sends to the partition holds the lock: numbers arrive in order."""

    __slots__ = ("lock", "pending", "sequence")

    def __init__(self, sequence: int | None) -> None:
        self.lock = threading.Lock()
        self.sequence = sequence  # of the next message; None: the server has to be asked
        self.pending: tuple[str, str | None] | None = None  # message and key that carry `sequence`, outcome unknown


class _ProducerRegistration:
    __slots__ = ("id", "partition", "partition_count")

    def __init__(self, producer_id: int, partition: int | None, partition_count: int) -> None:
        self.id = producer_id
        self.partition = partition
        self.partition_count = partition_count


class MyProducer(_Client):
    """Sends messages over HTTP. Safe to share between threads.

        producer = MyProducer("http://127.0.0.1:8002")  # of any manager; a list of several is fine
        producer.RegisterProducer("logs")          # creates the topic when it is missing
        producer.Enqueue("logs", "hello")          # -> RecordMetadata(topic='logs', partition=0, offset=0)

    Without partition and key all messages of this producer go to one partition, chosen by `client`, and keep their
    order. `client` names the producer to the server, which counts messages by it; a name belongs to one producer object
    at a time, because two that number their messages under one name would take each other's for repetitions. Without it
    a new name is made.

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
        registration = _ProducerRegistration(producer_id, partition, len(self._partitions(topic)))
        with self._lock:
            self._registrations[topic] = registration
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
            number = self._choose(registration, partition, key)
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

    def _choose(self, registration: _ProducerRegistration, partition: int | None, key: str | None) -> int:
        """What the server would choose. It is told, so that a retry meets its first try whatever changes meanwhile."""
        if partition is not None:
            return partition
        if registration.partition is not None:
            return registration.partition
        return partition_of_key((self.client if key is None else key).encode(), registration.partition_count)

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
    __slots__ = ("id", "lanes", "partitions", "turn")

    def __init__(self, consumer_id: int, partitions: list[int]) -> None:
        self.id = consumer_id
        self.partitions = partitions
        self.lanes: dict[int, _ConsumerLane] = {}
        self.turn = 0  # whose turn it is when no partition is named


class MyConsumer(_Client):
    """Reads messages over HTTP, each once. Safe to share between threads: each message goes to one of them.

        consumer = MyConsumer("http://127.0.0.1:8002")
        consumer.RegisterConsumer("logs")          # begins at the oldest message that is kept
        consumer.Dequeue("logs")                   # -> 'hello'; raises NoNewMessageError when there is none
        consumer.Size("logs")                      # -> 0, what is left to read

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
        partitions = self._partitions(topic) if partition is None else [partition]
        with self._lock:
            self._registrations[topic] = _ConsumerRegistration(consumer_id, partitions)
        return consumer_id

    def Dequeue(self, topic: str, partition: int | None = None) -> Message:
        """The next message of a partition, or of the topic's partitions in turn."""
        self._check_partition(partition)
        registration = self._registration(topic)
        if partition is not None:
            return self._take(topic, registration, partition)
        with self._lock:
            turn = registration.turn
            registration.turn += 1
        count = len(registration.partitions)
        for step in range(count):
            try:
                found = self._take(topic, registration, registration.partitions[(turn + step) % count])
            except NoNewMessageError:
                continue
            with self._lock:
                registration.turn = turn + step + 1
            return found
        raise NoNewMessageError(f"{_NOTHING_LEFT} is published to {topic}", status=400)

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
