"""Rounds of sudden death: a node is killed at random moments under load and started again on its data.

    python -m tests.system.crash_rounds --rounds 200
    python -m tests.system.crash_rounds --rounds 20 --seed 7

Producers send one by one and in lists, consumers follow and commit. Most rounds end with SIGKILL, some with SIGTERM,
some with a second SIGKILL while the node still recovers. At the end all that was acknowledged must be there exactly
once, in order, at dense offsets, the same for every reader, and no committed position may have moved back. The seed
decides what is sent and when the node dies; what the machine makes of that differs from run to run.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from quiver import Admin, Consumer, Producer, RecordMetadata
from quiver.testing.history import History, ProducerLog, Reader, Violation
from tests.system.kit import SMALL_FILES, Node, until

TOPIC = "rounds"
PARTITIONS = 3
PENDING_MAX = 500  # records of one sender without an outcome; beyond it the sender waits
PROGRESS_PER_ROUND = 30  # acknowledgements that a restarted node must give before it is killed again
COMMIT_EVERY_S = 0.05
OUTCOME_S_MAX = 60.0  # however often the node dies, a record gets its outcome in this time


class Result(NamedTuple):
    rounds: int
    kills: int
    acknowledged: int
    seen: int
    recovery_s_max: float
    violations: list[Violation]


class Load:
    """Senders and followers in threads. What goes wrong in one of them is raised by `finish`."""

    def __init__(self, servers: str, seed: int) -> None:
        self.history = History()
        self.acknowledged = 0
        self._servers = servers
        self._seed = seed
        self._sending = threading.Event()
        self._reading = threading.Event()
        self._abandoned = False
        self._ends: dict[int, int] | None = None
        self._errors: list[BaseException] = []
        self._shared = Producer(servers, batch_bytes=4000)
        self._senders = [
            self._thread("single 1", self._send, self._shared, False),
            self._thread("single 2", self._send, self._shared, False),
            self._thread("lists 1", self._send, self._shared, True),
            self._thread("lists 2", self._send, Producer(servers, compression="lz4"), True),
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

    def finish(self) -> None:
        """Lets the senders end, then the followers read to the end."""
        self._sending.set()
        for thread in self._senders:
            thread.join()
        self.check()
        with Admin(self._servers) as admin:
            self._ends = {partition: latest for partition, (_, latest) in admin.offsets(TOPIC).items()}
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

    def check(self) -> None:
        if self._errors:
            raise self._errors[0]

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
                pending.append((values, producer.send_many(TOPIC, values, partition=partition)))
            else:
                pending.append((values, producer.send(TOPIC, values[0], partition=partition)))
            while pending and (pending[0][1].done() or len(pending) > PENDING_MAX):
                self._settle(log, *pending.popleft())
            time.sleep(dice.choice((0.0, 0.002, 0.01 * count)))
        for values, future in pending:
            self._settle(log, values, future)
        producer.close(timeout=0.1 if self._abandoned else 30)

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
            log.acknowledged(value, RecordMetadata(TOPIC, partition, offset))
        self.acknowledged += len(values)

    # -- followers -----------------------------------------------------------------------------------------------

    def _follow(self, name: str, dice: random.Random, life_s: float) -> None:
        group = self.history.group(name)
        while True:
            settings = {"group": name, "start": "earliest", "request_timeout": 20.0}
            with Consumer(self._servers, [TOPIC], **settings) as consumer:
                reader = self.history.reader(name)
                for partition in range(PARTITIONS):
                    position = consumer.position(TOPIC, partition)
                    assert position is not None
                    group.found(TOPIC, partition, position)
                    reader.resumed(TOPIC, partition, position)  # the first record must be this one
                die_s = time.monotonic() + life_s * dice.uniform(0.2, 1.0)
                while time.monotonic() < die_s or self._reading.is_set():
                    deadline_s = time.monotonic() + COMMIT_EVERY_S
                    while time.monotonic() < deadline_s:
                        for record in consumer.poll(dice.randint(1, 500), timeout=COMMIT_EVERY_S):
                            reader.saw(record)
                    positions = {partition: consumer.position(TOPIC, partition) for partition in range(PARTITIONS)}
                    consumer.commit()
                    for partition, position in positions.items():
                        group.committed(TOPIC, partition, position or 0)
                    if self._abandoned or (self._reading.is_set() and positions == self._ends):
                        return


def read_everything(servers: str, reader: Reader) -> None:
    with Admin(servers) as admin:
        left = sum(latest for _, latest in admin.offsets(TOPIC).values())
    for partition in range(PARTITIONS):
        reader.jumped(TOPIC, partition, 0)
    with Consumer(servers, [TOPIC], start="earliest") as consumer:
        while left > 0:
            records = consumer.poll(5000, timeout=30)
            assert records, f"{left} records never came"
            for record in records:
                reader.saw(record)
            left -= len(records)


def end_node(node: Node, dice: random.Random) -> int:
    """One of the ways to die; returns how often the node was killed."""
    way = dice.random()
    if way < 0.15:
        assert node.terminate() == 0
        return 0
    node.kill()
    if way < 0.8:
        return 1
    # Once more, while it starts: recovery must survive its own death.
    ready = node.launch()
    time.sleep(dice.uniform(0.0, 0.3))
    node.kill()
    os.close(ready)
    return 2


def run_rounds(directory: Path, rounds: int, seed: int, report: Callable[[str], object] = print) -> Result:
    dice = random.Random(seed)
    kills, recovery_s_max = 0, 0.0
    with Node(directory, SMALL_FILES) as node:
        with Admin(node.address) as admin:
            admin.create_topic(TOPIC, PARTITIONS)
        load = Load(node.address, seed)
        try:
            for number in range(1, rounds + 1):
                before = load.acknowledged
                until(lambda before=before: load.check() or load.acknowledged >= before + PROGRESS_PER_ROUND, 60)
                time.sleep(dice.uniform(0.0, 0.6))
                kills += end_node(node, dice)
                node.start()
                recovery_s_max = max(recovery_s_max, node.start_s)
                if number % 10 == 0 or number == rounds:
                    report(f"round {number}/{rounds}: {kills} kills, {load.acknowledged} acknowledged")
            load.finish()
        except BaseException:
            node.kill()
            load.abandon()
            raise
        node.kill()
        node.start()
        reader = load.history.reader("last")
        read_everything(node.address, reader)
        assert node.terminate() == 0
        for word in ("Traceback", "partition_corrupt", "owner_failed", "append_failed"):
            assert word not in node.log, f"{word} in {node.log_path}"
    history = load.history
    seen = len(reader.events) - PARTITIONS
    return Result(rounds, kills, history.acknowledged_count, seen, recovery_s_max, history.judge())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.system.crash_rounds", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="a random one when not given; it is printed")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        result = run_rounds(Path(directory), arguments.rounds, seed, lambda line: print(line, flush=True))
    for violation in result.violations:
        print(violation)
    outcome = f"{len(result.violations)} violations" if result.violations else "all there, once, in order"
    print(
        f"seed {seed}: {result.rounds} rounds, {result.kills} kills, {result.acknowledged} acknowledged, "
        f"{result.seen} stored, slowest start {result.recovery_s_max:.2f} s, "
        f"{time.monotonic() - began_s:.0f} s: {outcome}"
    )
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
