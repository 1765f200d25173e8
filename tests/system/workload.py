"""Work that goes on whatever happens to the cluster: senders and followers in threads, and the judge of what they saw.

    with under_load(servers, "t") as load:
        kill_something()
        load.until_acknowledged(100)

Senders send one by one and in lists; one follower reads on and on, one is closed and opened again; both commit. A
watcher asks for the latest offsets and compares them with what was acknowledged before it asked. At the end everything
is read once more, from the first offset on.

Rule: nothing here knows what happens to the cluster. A record has an outcome within OUTCOME_S_MAX or that is an error.
"""

from __future__ import annotations

import collections
import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from quiver import Admin, Consumer, Producer, RecordMetadata
from quiver.errors import RequestTimeoutError, UnavailableError
from quiver.testing.history import History, ProducerLog, Reader, Violation
from tests.system.kit import until

PARTITIONS: Final = 3
PENDING_MAX: Final = 500  # records of one sender without an outcome; beyond it the sender waits
COMMIT_EVERY_S: Final = 0.05
WATCH_EVERY_S: Final = 0.05
OUTCOME_S_MAX: Final = 100.0  # however often nodes die and however long they stay dead, a request has ended by then
STALE: Final = "stale"  # latest offsets from which something acknowledged was missing


class Load:
    """What goes wrong in one of its threads is raised by `check` and `finish`.

    `pace` stretches the pauses between what is sent: a long run need not keep millions of records in mind.
    """

    def __init__(self, servers: str, topic: str, seed: int, pace: float = 1.0) -> None:
        self.history = History()
        self.acknowledged = 0
        self.topic = topic
        self._servers = servers
        self._seed = seed
        self._pace = pace
        self._sending = threading.Event()
        self._reading = threading.Event()
        self._abandoned = False
        self._ends: dict[int, int] | None = None
        self._errors: list[BaseException] = []
        self._stale: list[Violation] = []
        self._lock = threading.Lock()
        self._acknowledged_ends = dict.fromkeys(range(PARTITIONS), 0)
        shared, own = Producer(servers, batch_bytes=4000), Producer(servers, compression="lz4")
        self._producers = (shared, own)
        self._senders = [
            self._thread("single 1", self._send, shared, False),
            self._thread("single 2", self._send, shared, False),
            self._thread("lists 1", self._send, shared, True),
            self._thread("lists 2", self._send, own, True),
            self._thread("watcher", self._watch),
        ]
        self._followers = [
            self._thread("steady", self._follow, float("inf")),
            self._thread("restless", self._follow, 2.0),
        ]

    def _thread(self, name: str, run: Callable[..., None], *arguments: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                run(name, random.Random(f"{self._seed} {name}"), *arguments)
            except BaseException as error:
                if not self._abandoned:
                    self._errors.append(error)

        thread = threading.Thread(target=guarded, name=name)
        thread.start()
        return thread

    def until_acknowledged(self, count: int, timeout_s: float = OUTCOME_S_MAX) -> None:
        """Until so many more records are acknowledged than are now, some in each partition: work goes on."""
        wanted, before = self.acknowledged + count, self.acknowledged_ends()

        def is_enough() -> bool:
            self.check()
            return self.acknowledged >= wanted and all(end > before[n] for n, end in self.acknowledged_ends().items())

        until(is_enough, timeout_s)

    def finish(self) -> None:
        """Lets the senders end, then the followers read to the end."""
        self._sending.set()
        for thread in self._senders:
            thread.join()
        for producer in self._producers:
            producer.close()
        self.check()
        with Admin(self._servers) as admin:
            self._ends = {partition: latest for partition, (_, latest) in admin.offsets(self.topic).items()}
        self._reading.set()
        for thread in self._followers:
            thread.join()
        self.check()

    def abandon(self) -> None:
        """Ends all threads as soon as they can; what they know is of no use any more."""
        self._abandoned = True
        self._sending.set()
        self._reading.set()
        for thread in self._senders + self._followers:
            thread.join()
        for producer in self._producers:
            with contextlib.suppress(RequestTimeoutError):
                producer.close(timeout=0.1)

    def check(self) -> None:
        if self._errors:
            raise self._errors[0]

    def judge(self) -> list[Violation]:
        return self._stale + self.history.judge()

    # -- senders -------------------------------------------------------------------------------------------------

    def _send(self, name: str, dice: random.Random, producer: Producer, lists: bool) -> None:
        log = self.history.producer(name)
        pending: collections.deque[tuple[list[bytes], Any]] = collections.deque()
        number = 0
        while not self._sending.is_set():
            count = dice.randint(1, 40) if lists else 1
            values = [self._value(name, dice, number + row) for row in range(count)]
            number += count
            partition = dice.randrange(PARTITIONS)
            for value in values:
                log.sent(value)
            if lists:
                pending.append((values, producer.send_many(self.topic, values, partition=partition)))
            else:
                pending.append((values, producer.send(self.topic, values[0], partition=partition)))
            while pending and (pending[0][1].done() or len(pending) > PENDING_MAX):
                self._settle(log, *pending.popleft())
            time.sleep(dice.choice((0.0, 0.002, 0.01 * count)) * self._pace)
        for values, future in pending:
            self._settle(log, values, future)

    @staticmethod
    def _value(name: str, dice: random.Random, number: int) -> bytes:
        size = 20_000 if dice.random() < 0.002 else dice.randint(0, 150)
        return f"{name}/{number}/".encode() + b"." * size

    def _settle(self, log: ProducerLog, values: list[bytes], future: Any) -> None:
        until(lambda: future.done() or self._abandoned, OUTCOME_S_MAX)
        places = future.result(0)
        runs = (
            [(places.partition, places.offset, 1)]
            if isinstance(places, RecordMetadata)
            else [(run.partition, run.offset, run.count) for run in places]
        )
        offsets = [(partition, offset + row) for partition, offset, count in runs for row in range(count)]
        for value, (partition, offset) in zip(values, offsets, strict=True):
            log.acknowledged(value, RecordMetadata(self.topic, partition, offset))
        with self._lock:
            self.acknowledged += len(values)
            for partition, offset, count in runs:
                self._acknowledged_ends[partition] = max(self._acknowledged_ends[partition], offset + count)

    def acknowledged_ends(self) -> dict[int, int]:
        """By partition: the offset after the last acknowledged one. Whoever asks later must not hear less."""
        with self._lock:
            return dict(self._acknowledged_ends)

    def _watch(self, name: str, dice: random.Random) -> None:
        with Admin(self._servers, request_timeout=5) as admin:
            while not self._sending.is_set():
                before = self.acknowledged_ends()
                with contextlib.suppress(UnavailableError):  # that is allowed to it; an old answer is not
                    for partition, (_, latest) in admin.offsets(self.topic).items():
                        if latest < before[partition]:
                            detail = f"partition {partition} ends at {latest}, {before[partition]} was acknowledged"
                            self._stale.append(Violation(STALE, detail))
                time.sleep(WATCH_EVERY_S * dice.random())

    # -- followers -----------------------------------------------------------------------------------------------

    def _follow(self, name: str, dice: random.Random, life_s: float) -> None:
        group = self.history.group(name)
        while True:
            # All partitions by name: it shares with nobody, and needs no manager to begin.
            everything = {self.topic: list(range(PARTITIONS))}
            settings = {"group": name, "partitions": everything, "start": "earliest", "request_timeout": OUTCOME_S_MAX}
            with Consumer(self._servers, [self.topic], **settings) as consumer:
                reader = self.history.reader(name)
                for partition in range(PARTITIONS):
                    position = consumer.position(self.topic, partition)
                    assert position is not None
                    group.found(self.topic, partition, position)
                    reader.resumed(self.topic, partition, position)  # the first record must be this one
                die_s = time.monotonic() + life_s * dice.uniform(0.2, 1.0)
                while time.monotonic() < die_s or self._reading.is_set():
                    deadline_s = time.monotonic() + COMMIT_EVERY_S
                    while time.monotonic() < deadline_s:
                        for record in consumer.poll(dice.randint(1, 500), timeout=COMMIT_EVERY_S):
                            reader.saw(record)
                    positions = {partition: consumer.position(self.topic, partition) for partition in range(PARTITIONS)}
                    consumer.commit()
                    for partition, position in positions.items():
                        group.committed(self.topic, partition, position or 0)
                    if self._abandoned or (self._reading.is_set() and positions == self._ends):
                        return


def read_everything(servers: str, topic: str, reader: Reader) -> int:
    """The whole topic into `reader`; returns how many records it has."""
    with Admin(servers) as admin:
        count = left = sum(latest for _, latest in admin.offsets(topic).values())
    for partition in range(PARTITIONS):
        reader.jumped(topic, partition, 0)
    with Consumer(servers, [topic], start="earliest") as consumer:
        while left > 0:
            records = consumer.poll(5000, timeout=30)
            assert records, f"{left} records never came"
            for record in records:
                reader.saw(record)
            left -= len(records)
    return count


@contextlib.contextmanager
def under_load(servers: str, topic: str, pace: float = 2.0) -> Iterator[Load]:
    """A new topic under load; when the block ends, work must go on, and all that was acknowledged must be there."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"load seed {seed}")  # shown by pytest when the test fails
    with Admin(servers) as admin:
        admin.create_topic(topic, PARTITIONS)
    load = Load(servers, topic, seed, pace)
    try:
        load.until_acknowledged(100)
        yield load
        load.until_acknowledged(100)
        load.finish()
    except BaseException:
        load.abandon()
        raise
    assert read_everything(servers, topic, load.history.reader("last")) >= load.history.acknowledged_count > 0
    assert load.judge() == []
