"""Five thousand requests by chance: the node answers each in the form of the contract, and loses and invents nothing.

Most are valid calls with something wrong in them, so that they get far before they are refused; some are noise.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from tests.manager.kit import Answer, Api, HttpNode
from tests.manager.test_wrong_input import METHODS, PATHS, calls
from tests.system.kit import until

pytestmark = pytest.mark.system

REQUESTS = 5_000
TOPICS = ("fuzz-a", "fuzz-b", "fuzz-c")
NEW_TOPICS = tuple(f"fuzz-new-{number}" for number in range(20))

ANY_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, -1, -2, 7, 10**6, 2**31, 2**53, 2**62, 2**63, 2**64, -(2**63), 0.5, 1e18, 1e308),
    *("", " ", "0", "1", "-1", "01", "1.0", "1e3", "NaN", "null", "true", "\x00", "\n", "a\x00b", "ü", "🏹", "\u202e"),
    *(".", "..", "../..", "x" * 249, "x" * 250, "x" * 5000, "'; DROP TABLE topic_metadata; --", "%00", "%ff", "${x}"),
    *([], [1, 2], [[]], {}, {"topic": "fuzz-a"}, {"a": {"b": [None]}}, "fuzz-a", "fuzz-nobody"),
)


def _understood(raw: bytes) -> dict[str, Any]:
    """What a damaged body still says, if it says anything."""
    try:
        found = json.loads(raw)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class Fuzzer:
    """Makes requests out of dice, and knows what those that succeeded must have done."""

    def __init__(self, dice: random.Random, api: Api) -> None:
        self.dice = dice
        self.api = api
        self.producers = {topic: [api.producer(topic)] for topic in TOPICS}
        self.consumers = {topic: [api.consumer(topic)] for topic in TOPICS}
        self.stored: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.successes: Counter[str] = Counter()

    def step(self) -> None:
        if self.dice.random() < 0.15:
            self._noise()
        else:
            self._mutated_call()

    def _noise(self) -> None:
        dice = self.dice
        path = dice.choice((*PATHS, *PATHS, "/", "/nope", "/topics/", f"/{quote(self._text())}", "/brokers/x"))
        # What would change something is not sent as noise: its outcome could not be told from the answer.
        method = dice.choice(("GET", "PUT", "DELETE", "OPTIONS", "PATCH", *METHODS))
        if method == "POST" or path == "/consumer/consume":
            method = "PUT"
        target = path + dice.choice(("", "?", f"?{self._garbage_query()}"))
        body = dice.choice((None, b"", self._garbage()))
        self._check(self.api.request(method, target, body=body), method, path, {})

    def _mutated_call(self) -> None:
        dice = self.dice
        topic = dice.choice(TOPICS)
        call = dice.choice(calls(topic, dice.choice(self.producers[topic]), dice.choice(self.consumers[topic])))
        fields = {name: value for name, value in call.valid.items() if name in call.required or dice.random() < 0.4}
        if call.path == "/topics":
            fields["topic_name"] = dice.choice(NEW_TOPICS)
        if "sequence" in fields:
            fields["sequence"] = dice.randint(0, 6)
        for _ in range(dice.choice((0, 0, 1, 1, 2, 4))):
            self._mutate(fields)
        if fields.get("partitions") not in (None, 1, 2, "1"):
            fields["partitions"] = dice.choice((-1, 0, 10_001, "x", 2**62, []))  # thousands take their time
        if dice.random() < 0.3:
            sent: dict[str, Any] = {name: str(value) for name, value in fields.items()}
            target, raw = f"{call.path}?{urlencode(sent)}", None
        else:
            target, raw = call.path, self._damaged(json.dumps(fields).encode())
            sent = _understood(raw)
        if len(target) < 60_000:
            self._check(self.api.request(call.method, target, body=raw), call.method, call.path, sent)

    def _mutate(self, fields: dict[str, Any]) -> None:
        dice = self.dice
        names = [*fields, "topic", "topic_name", "name", "partition", "partition_id", "after", "key", "prod_name", "x"]
        name = dice.choice(names)
        if dice.random() < 0.3:
            fields.pop(name, None)
        else:
            fields[name] = dice.choice(ANY_VALUES) if dice.random() < 0.8 else self._text()

    def _damaged(self, raw: bytes) -> bytes:
        dice = self.dice
        if dice.random() < 0.9:
            return raw
        damaged = bytearray(raw)
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(len(damaged) + 1)
            damaged[at : at + dice.randint(0, 3)] = dice.randbytes(dice.randint(0, 3))
        return bytes(damaged)

    def _text(self) -> str:
        dice = self.dice
        return "".join(
            chr(dice.choice((dice.randrange(128), dice.randrange(0xD800), 0x1F3F9))) for _ in range(dice.randrange(12))
        )

    def _garbage_query(self) -> str:
        return "".join(
            self.dice.choice("topicname=&%0123456789abcdefFF;+[]#?/") for _ in range(self.dice.randrange(40))
        )

    def _garbage(self) -> bytes:
        dice = self.dice
        return dice.choice(
            (dice.randbytes(dice.randrange(200)), b"[" * dice.randrange(3000), b'{"topic":"fuzz-a"}', b"null")
        )

    def _check(self, answer: Answer, method: str, path: str, fields: dict[str, Any]) -> None:
        """The form is checked with every answer; here is what a success means."""
        self.statuses[answer.status] += 1
        assert answer.status != 503, (method, path, fields, answer)
        if answer.status != 200:
            return
        self.successes[path] += 1
        body = answer.body
        if path == "/producer/produce":
            if body["offset"] == self.stored[self._where(body, fields)]:
                self.stored[self._where(body, fields)] += 1  # else it was there before: a retry
        elif path == "/producer/register":
            self._registered(self.producers, body["producer_id"], fields)
        elif path == "/consumer/register":
            self._registered(self.consumers, body["consumer_id"], fields)

    @staticmethod
    def topic_in(fields: dict[str, Any]) -> str:
        return str(next(fields[name] for name in ("topic", "topic_name", "name") if fields.get(name) is not None))

    def _where(self, body: dict[str, Any], fields: dict[str, Any]) -> str:
        return f"{self.topic_in(fields)} {body['partition_id']}"

    def _registered(self, known: dict[str, list[int]], number: int, fields: dict[str, Any]) -> None:
        topic = self.topic_in(fields)
        assert all(number not in numbers for numbers in known.values()), "an id was given twice"
        known.setdefault(topic, []).append(number)


class ValidClient:
    """Somebody who does everything right meanwhile."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.topic = api.create("valid", 2)
        self.producer, self.consumer = api.producer("valid"), api.consumer("valid")
        self.sent = 0

    def step(self) -> None:
        api, number = self.api, self.sent
        assert api.produce(self.topic, self.producer, f"v{number}", partition_id=number % 2) == (
            number % 2,
            number // 2,
        )
        assert api.size(self.topic, self.consumer) == 1
        assert api.consume(self.topic, self.consumer) == f"v{number}"
        assert api.consume(self.topic, self.consumer) is None
        self.sent += 1


def test_five_thousand_requests_by_chance_do_no_harm(node: HttpNode) -> None:
    dice = random.Random(20_240_229)
    with Api(node.http) as api, Api(node.http) as other:
        for topic in TOPICS:
            api.create(topic, 2)
        fuzzer, valid = Fuzzer(dice, api), ValidClient(other)
        for number in range(REQUESTS):
            fuzzer.step()
            if number % 50 == 0:
                valid.step()
        # The dice must have met every call from both sides, or they prove nothing.
        assert fuzzer.statuses.keys() == {200, 400, 404, 405}
        assert min(fuzzer.statuses[200], fuzzer.statuses[400]) > REQUESTS // 6
        assert fuzzer.successes.keys() >= PATHS.keys() - {"/brokers/1"}

        health = other.get("/health")
        known = {row["producer_id"] for row in health["producers"]}
        assert known == {number for numbers in fuzzer.producers.values() for number in numbers} | {valid.producer}
        known = {row["consumer_id"] for row in health["consumers"]}
        assert known == {number for numbers in fuzzer.consumers.values() for number in numbers} | {valid.consumer}
        for topic in TOPICS:
            reader = other.consumer(topic)
            messages = other.consume_all(topic, reader)
            assert len(messages) == sum(fuzzer.stored[f"{topic} {partition}"] for partition in (0, 1)), topic
        assert other.consume_all("valid", other.consumer("valid")) == [f"v{number}" for number in range(valid.sent)]
        until(lambda: other.get("/health")["lag"] == 0)
    assert "http_failed" not in node.log
    assert "Traceback" not in node.log
