"""Classic requests by chance: each is answered in the form of the contract, and nothing is lost or invented.

Most are valid calls with something wrong in them, so that they get far before they are refused; some are noise; some
never get in whole: too large, too slow, cut off, or no text. What was refused has changed nothing.
"""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from collections.abc import Callable
from contextlib import closing
from typing import Any
from urllib.parse import quote, urlencode

from tests.manager.kit import Answer, Api
from tests.manager.test_wrong_input import METHODS, PATHS, Call, calls
from tests.manager.wire_kit import Wire, chunk, head
from tests.system.kit import until

# Small limits, so that what passes them is soon sent, and what is too slow soon refused.
BODY_BYTES_MAX = 100_000
LIMITS = {"QUIVER_HTTP_BODY_BYTES_MAX": str(BODY_BYTES_MAX), "QUIVER_HTTP_BODY_TIMEOUT_S": "1"}
SLOW_MAX = 20  # that wait at the same time
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

    def step(self) -> int:
        """The status of the answer; 0 when nothing was sent."""
        return self._noise() if self.dice.random() < 0.15 else self._mutated_call()

    def _noise(self) -> int:
        dice = self.dice
        path = dice.choice((*PATHS, *PATHS, "/", "/nope", "/topics/", f"/{quote(self._text())}", "/brokers/x"))
        # What would change something is not sent as noise: its outcome could not be told from the answer.
        method = dice.choice(("GET", "PUT", "DELETE", "OPTIONS", "PATCH", *METHODS))
        if method == "POST" or path == "/consumer/consume":
            method = "PUT"
        target = path + dice.choice(("", "?", f"?{self._garbage_query()}"))
        body = dice.choice((None, b"", self._garbage()))
        return self._check(self.api.request(method, target, body=body), method, path, {})

    def call(self) -> Call:
        """A valid one."""
        dice = self.dice
        topic = dice.choice(TOPICS)
        return dice.choice(calls(topic, dice.choice(self.producers[topic]), dice.choice(self.consumers[topic])))

    def _mutated_call(self) -> int:
        dice, call = self.dice, self.call()
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
        if len(target) >= 60_000:
            return 0
        return self._check(self.api.request(call.method, target, body=raw), call.method, call.path, sent)

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

    def _check(self, answer: Answer, method: str, path: str, fields: dict[str, Any]) -> int:
        """The form is checked with every answer; here is what a success means."""
        self.statuses[answer.status] += 1
        assert answer.status != 503, (method, path, fields, answer)
        if answer.status != 200:
            return answer.status
        self.successes[path] += 1
        body = answer.body
        if path == "/producer/produce":
            if body["offset"] == self.stored[self._where(body, fields)]:
                self.stored[self._where(body, fields)] += 1  # else it was there before: a retry
        elif path == "/producer/register":
            self._registered(self.producers, body["producer_id"], fields)
        elif path == "/consumer/register":
            self._registered(self.consumers, body["consumer_id"], fields)
        return answer.status

    @staticmethod
    def topic_in(fields: dict[str, Any]) -> str:
        return str(next(fields[name] for name in ("topic", "topic_name", "name") if fields.get(name) is not None))

    def _where(self, body: dict[str, Any], fields: dict[str, Any]) -> str:
        return f"{self.topic_in(fields)} {body['partition_id']}"

    def _registered(self, known: dict[str, list[int]], number: int, fields: dict[str, Any]) -> None:
        topic = self.topic_in(fields)
        assert all(number not in numbers for numbers in known.values()), "an id was given twice"
        known.setdefault(topic, []).append(number)


class Broken:
    """Requests of which each would change something, if it got in."""

    MARK = "MARK"
    NO_TEXT = (b"\xff", b"\xc3(", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe2\x82", b"\\ud800")

    def __init__(self, fuzzer: Fuzzer, http: str) -> None:
        self._fuzzer = fuzzer
        self._dice = fuzzer.dice
        self._http = http
        self._slow: deque[Wire] = deque()
        self.kinds: Counter[str] = Counter()

    def step(self) -> None:
        ways = (self._announced, self._in_chunks, self._no_text, self._no_text_in_query, self._cut_off, self._too_slow)
        way: Callable[[Call, bytes], None] = self._dice.choice(ways)
        call = self._fuzzer.call()
        names = [name for name in ("topic_name", "message", "topic", "prod_client", "endpoint") if name in call.valid]
        fields = call.valid | {self._dice.choice(names): f"broken{self.MARK}"}
        self.kinds[way.__name__] += 1
        way(call, json.dumps(fields).encode())

    def _refused(self, *parts: bytes) -> None:
        with closing(Wire(self._http)) as wire:
            wire.send(*parts)
            assert wire.answer().status == 400

    def _announced(self, call: Call, body: bytes) -> None:
        length = BODY_BYTES_MAX + self._dice.choice((1, 1000, 10**9, 2**62))
        self._refused(head(call.method, call.path, f"Content-Length: {length}"), body)

    def _in_chunks(self, call: Call, body: bytes) -> None:
        spaces = [chunk(b" " * (BODY_BYTES_MAX // 4 + 1))] * 4
        self._refused(head(call.method, call.path, "Transfer-Encoding: chunked"), chunk(body), *spaces)

    def _no_text(self, call: Call, body: bytes) -> None:
        body = body.replace(self.MARK.encode(), self._dice.choice(self.NO_TEXT))
        self._refused(head(call.method, call.path, f"Content-Length: {len(body)}"), body)

    def _no_text_in_query(self, call: Call, body: bytes) -> None:
        raw = self._dice.choice(("%ff", "%c3(", "%ed%a0%80", "%f5%80%80%80"))
        query = urlencode({name: str(value) for name, value in json.loads(body).items()}).replace(self.MARK, raw)
        self._refused(head(call.method, f"{call.path}?{query}"))

    def _cut_off(self, call: Call, body: bytes) -> None:
        with closing(Wire(self._http)) as wire:
            wire.send(head(call.method, call.path, f"Content-Length: {len(body)}"), body[:-1])

    def _too_slow(self, call: Call, body: bytes) -> None:
        wire = Wire(self._http)
        self._slow.append(wire)
        wire.send(head(call.method, call.path, f"Content-Length: {len(body)}"), body[: self._dice.randrange(len(body))])
        if len(self._slow) > SLOW_MAX:
            self._await_slow()

    def _await_slow(self) -> None:
        with closing(self._slow.popleft()) as wire:
            answer = wire.answer()
            assert (answer.status, "did not arrive within" in answer.message) == (400, True), answer

    def finish(self) -> None:
        while self._slow:
            self._await_slow()


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


def glance(api: Api) -> dict[str, Any]:
    """What a refused request must leave as it was; quick, however many clients there are."""
    health = api.get("/health")
    found: dict[str, Any] = {name: len(health[name]) for name in ("producers", "consumers", "brokers")}
    found |= {"transaction": health["transaction"], "topics": api.get("/topics")["topics"]}
    watched = {row["topic"]: row["consumer_id"] for row in reversed(health["consumers"])}
    return found | {"sizes": {topic: api.size(topic, consumer) for topic, consumer in watched.items()}}


def fuzz_classic(http: str, cases: int, seed: int, looked_at: str | None = None) -> Fuzzer:
    """`http` has the LIMITS. What came of it is looked at there too, or at another manager."""
    dice = random.Random(seed)
    with Api(http) as api, Api(looked_at or http) as other:
        for topic in TOPICS:
            api.create(topic, 2)
        fuzzer, valid = Fuzzer(dice, api), ValidClient(other)
        broken = Broken(fuzzer, http)
        for number in range(cases):
            if number % 50 == 0:
                valid.step()
            before = glance(api) if number % 20 == 0 else None
            if dice.random() < 0.1:
                broken.step()
                status = 400
            else:
                status = fuzzer.step()
            if before is not None and status != 200:
                assert glance(api) == before
        before = glance(api)
        broken.finish()
        assert glance(api) == before
        check_outcome(other, fuzzer, valid)
    # The dice must have met every call from both sides, and every way to break one, or they prove nothing.
    assert fuzzer.statuses.keys() == {200, 400, 404, 405}
    assert min(fuzzer.statuses[200], fuzzer.statuses[400]) > cases // 6
    assert len(broken.kinds) == 6
    assert cases < 1_000 or fuzzer.successes.keys() >= PATHS.keys() - {"/brokers/1"}
    return fuzzer


def check_outcome(api: Api, fuzzer: Fuzzer, valid: ValidClient) -> None:
    """Exactly what was answered with success is there."""
    health = api.get("/health")
    known = {row["producer_id"] for row in health["producers"]}
    assert known == {number for numbers in fuzzer.producers.values() for number in numbers} | {valid.producer}
    known = {row["consumer_id"] for row in health["consumers"]}
    assert known == {number for numbers in fuzzer.consumers.values() for number in numbers} | {valid.consumer}
    assert not [topic for topic in api.get("/topics")["topics"] if "broken" in topic]
    for topic in TOPICS:
        messages = api.consume_all(topic, api.consumer(topic))
        assert len(messages) == sum(fuzzer.stored[f"{topic} {partition}"] for partition in (0, 1)), topic
    assert api.consume_all("valid", api.consumer("valid")) == [f"v{number}" for number in range(valid.sent)]
    until(lambda: api.get("/health")["lag"] == 0)
