"""The classic HTTP API under many clients at once, and through the death of the node: nothing acknowledged is lost,
doubled or reordered, and no id is given twice."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quiver.config import LogSettings
from quiver.log.disk import SystemDisk
from quiver.log.partition_log import PartitionLog
from quiver.metadata.store import sqlite_url
from quiver.wire.frame import Kind
from tests.manager.kit import Answer, Api, HttpNode, state_of
from tests.manager.wire_kit import Wire, post
from tests.metadata.kit import dump
from tests.system.kit import WAIT_S

pytestmark = pytest.mark.system


@pytest.fixture
def node(tmp_path: Path) -> Iterator[HttpNode]:
    with HttpNode(tmp_path) as made:
        yield made


class Crowd:
    """Threads that work at once. Leaving the block waits for all of them and raises what any of them raised."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, work: Callable[..., None], *arguments: Any) -> None:
        def run() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self._errors.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def check(self) -> None:
        """For those who wait for others' work: raises when somebody gave up."""
        assert not self._errors, "another one failed"

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._errors.append(error)  # those who wait for others need not wait any more
        for thread in self._threads:
            thread.join(2 * WAIT_S)
        if self._errors and self._errors[0] is not error:
            raise self._errors[0]


class Stubborn:
    """A client that asks until it is answered, wherever the node is now. The contract makes that safe.

    One answer in ten is lost on its way, whether the node dies or not.
    """

    def __init__(self, node: HttpNode, seed: int = 0) -> None:
        self._node = node
        self._api: Api | None = None
        self._dice = random.Random(seed)
        self.retries = 0

    def call(self, method: str, path: str, **fields: Any) -> Answer:
        deadline = time.monotonic() + WAIT_S
        while True:
            assert time.monotonic() < deadline, "nobody answers"
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._api is None:
                    self._api = Api(self._node.http, timeout_s=5.0)
                answer = self._api.call(method, path, **fields)
                if answer.status != 503 and self._dice.random() > 0.1:
                    return answer
            self.close()
            self.retries += 1
            time.sleep(0.01)

    def close(self) -> None:
        if self._api is not None:
            self._api.close()
            self._api = None


def frames_of(node: HttpNode, topic: str) -> list[int]:
    """The number of records of each batch that was stored, over all partitions. The node has ended."""
    rows = dump(sqlite_url(node.database))["partition_metadata"]
    found = []
    for uid in (row[3] for row in rows if row[1] == topic):
        log = PartitionLog(SystemDisk(), f"{node.directory}/data/broker-1/partitions/{uid}", LogSettings())
        found += [header.record_count for _, header, _ in log.scan(log.first_index) if header.kind == Kind.DATA]
    return found


# -- many at once ------------------------------------------------------------------------------------------------

CONNECTIONS = 32
MESSAGES_EACH = 25


def test_many_clients_at_once_see_one_order_and_each_message_once(node: HttpNode) -> None:
    with Api(node.http) as api:
        api.create("logs", 3)
        consumers = [api.consumer("logs") for _ in range(3)]
    acknowledged: dict[tuple[int, int], str] = {}
    seen: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    ids: dict[str, list[int]] = defaultdict(list)
    total = CONNECTIONS * MESSAGES_EACH

    def produce(number: int) -> None:
        with Api(node.http) as api:
            producer = api.producer("logs")
            ids["producer"].append(producer)
            for message in (f"{number}:{count}" for count in range(MESSAGES_EACH)):
                place = api.produce("logs", producer, message, **({"partition_id": number % 3} if number % 2 else {}))
                assert place not in acknowledged, "two messages at one place"
                acknowledged[place] = message

    def consume(consumer: int) -> None:
        with Api(node.http) as api:
            while len(seen[consumer]) < total:
                crowd.check()
                answer = api.call("GET", "/consumer/consume", topic="logs", consumer_id=consumer)
                if answer.status == 200:
                    seen[consumer].append((answer.body["partition_id"], answer.body["offset"], answer.message))
                else:
                    assert answer.message == "No new message is published to logs"
                    time.sleep(0.005)

    def register() -> None:
        with Api(node.http) as api:
            for count in range(20):
                ids["consumer"].append(api.consumer("logs", **({"partition_id": count % 3} if count % 2 else {})))
                ids["producer"].append(api.producer(f"other-{count % 5}"))

    with Crowd() as crowd:
        for consumer in consumers:
            crowd.start(consume, consumer)
        for number in range(CONNECTIONS):
            crowd.start(produce, number)
        for _ in range(2):
            crowd.start(register)

    assert len(acknowledged) == total
    expected = {(partition, offset, message) for (partition, offset), message in acknowledged.items()}
    for consumer in consumers:
        assert len(seen[consumer]) == total
        assert set(seen[consumer]) == expected, "each once, where its producer was told that it is"
        for partition in range(3):
            offsets = [offset for found, offset, _ in seen[consumer] if found == partition]
            assert offsets == list(range(len(offsets))), "one order, the same for all"
    for given in ids.values():
        assert len(set(given)) == len(given)
    with Api(node.http) as api:
        assert [api.size("logs", consumer) for consumer in consumers] == [0, 0, 0]
        for consumer in consumers:
            assert api.consume("logs", consumer) is None
        health = api.get("/health")
    assert {row["producer_id"] for row in health["producers"]} == set(ids["producer"])
    assert {row["consumer_id"] for row in health["consumers"]} == set(ids["consumer"]) | set(consumers)


def test_parallel_calls_of_one_consumer_share_the_messages(node: HttpNode) -> None:
    total = 200
    with Api(node.http) as api:
        api.create("logs", 3)
        producer, consumer = api.producer("logs"), api.consumer("logs")
        for number in range(total):
            api.produce("logs", producer, f"m{number}")
    taken: list[str] = []

    def consume() -> None:
        with Api(node.http) as api:
            taken.extend(api.consume_all("logs", consumer))

    with Crowd() as crowd:
        for _ in range(8):
            crowd.start(consume)
    assert len(taken) == total
    assert len(set(taken)) == total


def test_messages_that_come_together_are_stored_together(node: HttpNode) -> None:
    """A thousand single-message requests become a few batches, and a batch is one append and one sync."""
    with Api(node.http) as api, contextlib.ExitStack() as stack:
        request = post("/producer/produce", topic="logs", producer_id=api.producer("logs"), message="m")
        wires = [stack.enter_context(contextlib.closing(Wire(node.http))) for _ in range(CONNECTIONS)]
        for _ in range(MESSAGES_EACH):
            node.signal(signal.SIGSTOP)  # all of them wait for it when it goes on
            for wire in wires:
                wire.send(request)
            node.signal(signal.SIGCONT)
            assert {wire.answer().status for wire in wires} == {200}
    node.terminate()
    frames = frames_of(node, "logs")
    assert sum(frames) == CONNECTIONS * MESSAGES_EACH
    assert len(frames) <= sum(frames) // 2
    assert max(frames) >= 4


def test_a_topic_that_many_make_at_once_can_be_used_at_once(node: HttpNode) -> None:
    """Whoever gets an id may use it: nobody meets a topic that is only half made."""
    barrier = threading.Barrier(16)
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def work(number: int) -> None:
        with Api(node.http) as api:
            for turn in range(4):
                topic = f"new-{turn}"
                barrier.wait(WAIT_S)
                if number % 4 == 0:
                    assert api.call("POST", "/topics", topic_name=topic).status in (200, 400)
                producer = api.producer(topic)
                places[topic].append(api.produce(topic, producer, f"{number}"))
                assert api.consume(topic, api.consumer(topic)) is not None

    with Crowd() as crowd:
        for number in range(16):
            crowd.start(work, number)
    for found in places.values():
        assert sorted(found) == [(0, offset) for offset in range(16)]


# -- the node dies -----------------------------------------------------------------------------------------------

ENDS = {
    "SIGKILL": lambda node: node.kill(),
    "SIGTERM": lambda node: node.terminate(),
    "SIGINT": lambda node: node._end(signal.SIGINT),
}


def end_again_and_again(
    node: HttpNode, crowd: Crowd, ends: list[str], progress: Callable[[], int], marks: list[int]
) -> None:
    """Ends the node and starts it again while the crowd works, each time that it has come so far."""
    for mark, name in zip(marks, itertools.cycle(ends), strict=False):
        while progress() < mark:
            crowd.check()
            time.sleep(0.001)
        ENDS[name](node)
        node.start()


def test_ids_survive_kills_and_are_never_given_twice(node: HttpNode) -> None:
    answered: dict[str, list[int]] = {"producer": [], "consumer": []}
    done = threading.Event()
    with Api(node.http) as api:
        api.create("logs", 2)

    def register(kind: str) -> None:
        client = Stubborn(node)
        while not done.is_set():
            answer = client.call("POST", f"/{kind}/register", topic="logs")
            assert answer.status == 200
            answered[kind].append(answer.body[f"{kind}_id"])
        client.close()

    known: list[dict[str, set[int]]] = []
    with Crowd() as crowd:
        for kind in ("producer", "producer", "consumer", "consumer"):
            crowd.start(register, kind)
        try:
            for _ in range(3):
                given = len(answered["producer"])
                end_again_and_again(node, crowd, ["SIGKILL"], lambda: len(answered["producer"]), [given + 40])
                before = {kind: set(ids) for kind, ids in answered.items()}
                with Api(node.http) as api:
                    health = api.get("/health")
                known.append({kind: {row[f"{kind}_id"] for row in health[f"{kind}s"]} for kind in before})
                for kind in before:
                    assert before[kind] <= known[-1][kind], "an id that was given is not known any more"
        finally:
            done.set()
    for ids in answered.values():
        assert len(set(ids)) == len(ids), "an id was given twice"
    with Api(node.http) as api:
        health = api.get("/health")
    for kind, ids in answered.items():
        # Some were made whose answer was lost; none is missing.
        assert {row[f"{kind}_id"] for row in health[f"{kind}s"]} >= set(ids)


@pytest.mark.parametrize("ends", [["SIGKILL"], ["SIGTERM", "SIGINT"]], ids="+".join)
def test_every_message_arrives_once_and_in_order_through_the_nodes_deaths(node: HttpNode, ends: list[str]) -> None:
    """Producers number their messages, consumers say what they saw last, and both ask again when nobody answers."""
    clients, each, partitions = 4, 80, 2
    with Api(node.http) as api:
        api.create("logs", partitions)
        producers = [api.producer("logs", partition_id=number % partitions) for number in range(clients)]
        readers = [(api.consumer("logs", partition_id=number), number) for number in (0, 0, 1, 1)]
    told: dict[int, list[int]] = defaultdict(list)
    seen: dict[int, list[tuple[int, str]]] = defaultdict(list)
    retries: list[int] = []

    def produce(number: int) -> None:
        client = Stubborn(node, number)
        fields = {"topic": "logs", "producer_id": producers[number], "prod_client": f"client-{number}"}
        for sequence in range(each):
            answer = client.call(
                "POST", "/producer/produce", **fields, message=f"{number}:{sequence}", sequence=sequence
            )
            assert answer.status == 200, answer
            told[number].append(answer.body["offset"])
        client.close()
        retries.append(client.retries)

    def consume(consumer: int) -> None:
        client, after = Stubborn(node, consumer), -1
        while len(seen[consumer]) < clients // partitions * each:
            crowd.check()
            answer = client.call("GET", "/consumer/consume", topic="logs", consumer_id=consumer, after=after)
            if answer.status == 200:
                after = answer.body["offset"]
                seen[consumer].append((after, answer.message))
            else:
                assert answer.message == "No new message is published to logs"
                time.sleep(0.005)
        client.close()
        retries.append(client.retries)

    with Crowd() as crowd:
        for consumer, _ in readers:
            crowd.start(consume, consumer)
        for number in range(clients):
            crowd.start(produce, number)
        marks = [clients * each * part // 8 for part in (1, 3, 5)]
        end_again_and_again(node, crowd, ends, lambda: sum(len(told[number]) for number in range(clients)), marks)

    assert sum(retries) > 0
    for consumer, partition in readers:
        assert [offset for offset, _ in seen[consumer]] == list(range(clients // partitions * each))
        messages = [message for _, message in seen[consumer]]
        for number in range(partition, clients, partitions):
            of_client = [(offset, message) for offset, message in seen[consumer] if message.startswith(f"{number}:")]
            assert of_client == [(told[number][sequence], f"{number}:{sequence}") for sequence in range(each)]
        assert len(set(messages)) == len(messages)
    assert seen[readers[0][0]] == seen[readers[1][0]]
    assert seen[readers[2][0]] == seen[readers[3][0]]
    with Api(node.http) as api:
        assert [api.client_size(f"client-{number}") for number in range(clients)] == [each] * clients
        for consumer, _ in readers:
            assert api.size("logs", consumer) == 0
            assert api.consume("logs", consumer) is None


@pytest.mark.parametrize("end", ENDS)
def test_everything_that_was_answered_is_there_after_the_end(node: HttpNode, end: str) -> None:
    with Api(node.http) as api:
        api.create("logs", 3)
        api.producer("made-by-its-producer")
        producer, bound = api.producer("logs"), api.producer("logs", partition_id=2)
        consumer, second = api.consumer("logs"), api.consumer("logs", partition_id=2)
        places = [
            api.produce("logs", producer, f"m{number}", partition_id=1, prod_client="c", sequence=number)
            for number in range(20)
        ]
        for number in range(4):
            api.produce("logs", bound, f"n{number}", prod_client="label")
        for _ in range(3):
            api.consume("logs", consumer, partition_id=1)
        assert api.consume_all("logs", second) == ["n0", "n1", "n2", "n3"]
        api.post("/consumer/set_offset", consumer_id=second, offset=1)
        before = state_of(api, ["c", "label"])
    ENDS[end](node)
    node.start()
    with Api(node.http) as api:
        after = state_of(api, ["c", "label"])
        for name in ("transaction", "brokers"):  # its port is another one, and that is a transaction
            assert after.pop(name) != before.pop(name)
        assert after == before
        # Retries from before the end still meet their first try, near and far.
        for number in (0, 5, 19):
            place = api.produce("logs", producer, "again", partition_id=1, prod_client="c", sequence=number)
            assert place == places[number]
        message = api.refusal(
            "POST",
            "/producer/produce",
            topic="logs",
            producer_id=producer,
            message="m",
            partition_id=1,
            prod_client="c",
            sequence=21,
        )
        assert message == "Sequence 21 is out of order: the expected sequence is 20"
        assert api.consume("logs", consumer, partition_id=1, after=1) == "m2", "the last reply may have been lost"
        assert api.consume("logs", consumer, partition_id=1, after=2) == "m3"
        assert api.consume_all("logs", second) == ["n2", "n3"]
        only = f"Producer {bound} is registered to partition 2 only"
        fields = {"topic": "logs", "producer_id": bound, "message": "m", "partition_id": 0}
        assert api.refusal("POST", "/producer/produce", **fields) == only
        assert api.producer("logs") == bound + 1
        assert api.consumer("logs") == second + 1


def test_answers_that_were_under_way_are_given_before_a_clean_end(node: HttpNode) -> None:
    """SIGTERM in the middle of a load: each request is answered, and what was acknowledged is there."""
    acknowledged: list[str] = []

    def produce(number: int) -> None:
        with Api(node.http) as api:
            for count in itertools.count():
                try:
                    answer = api.call(
                        "POST", "/producer/produce", topic="logs", producer_id=producer, message=f"{number}:{count}"
                    )
                except (OSError, http.client.HTTPException):
                    return  # between two requests
                if answer.status == 503:
                    return
                assert answer.status == 200, answer
                acknowledged.append(f"{number}:{count}")

    with Api(node.http) as api:
        producer = api.producer("logs")
    with Crowd() as crowd:
        for number in range(8):
            crowd.start(produce, number)
        while len(acknowledged) < 100:
            time.sleep(0.005)
        assert node.terminate() == 0
    node.start()
    with Api(node.http) as api:
        found = api.consume_all("logs", api.consumer("logs"))
    assert set(acknowledged) <= set(found)
    assert len(set(found)) == len(found)
    assert len(found) <= len(acknowledged) + 8
