"""Which lines are sent, counted and blamed."""

from __future__ import annotations

import pytest

from quiver.cli.lines import Lines
from quiver.cli.produce import Sender
from quiver.errors import DeliveryTimeoutError, InvalidRequestError, QuiverError
from quiver.types import BatchMetadata


class Outcome:
    def __init__(self, error: QuiverError | None = None, done: bool = True) -> None:
        self.error = error
        self.is_done = done

    def done(self) -> bool:
        return self.is_done

    def result(self, timeout: float | None = None) -> list[BatchMetadata]:
        if self.error is not None:
            raise self.error
        return []


class FakeProducer:
    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = list(outcomes)
        self.calls: list[tuple[list[bytes], list[bytes] | None, int | None]] = []

    def send_many(
        self, topic: str, records: list[bytes], *, keys: list[bytes] | None = None, partition: int | None = None
    ) -> Outcome:
        self.calls.append((records, keys, partition))
        return self.outcomes.pop(0) if self.outcomes else Outcome()


def test_lines_are_counted_when_they_are_acknowledged() -> None:
    producer = FakeProducer(Outcome(done=False))
    sender = Sender(producer, "t", None, 3)
    sender.send(Lines(1, [b"a", b"b"]))
    assert sender.acknowledged == 0
    sender.finish()
    assert sender.acknowledged == 2
    assert producer.calls == [([b"a", b"b"], None, 3)]
    assert sender.summary().startswith("sent 2 messages in ")


def test_a_failed_delivery_names_its_lines_and_the_rest_is_still_counted() -> None:
    sender = Sender(FakeProducer(Outcome(), Outcome(DeliveryTimeoutError("too late"), done=False)), "t", None, None)
    sender.send(Lines(1, [b"a"]))
    sender.send(Lines(2, [b"b", b"c"]))
    sender.send(Lines(4, [b"d"]))
    with pytest.raises(DeliveryTimeoutError, match=r"^lines 2 to 3: too late$"):
        sender.finish()
    assert sender.acknowledged == 2


def test_reading_stops_at_a_failed_delivery() -> None:
    sender = Sender(FakeProducer(Outcome(DeliveryTimeoutError("too late"))), "t", None, None)
    with pytest.raises(DeliveryTimeoutError, match=r"^line 1: too late$"):
        sender.send(Lines(1, [b"a"]))


def test_keys_are_split_off_and_the_lines_before_a_mistake_are_sent() -> None:
    producer = FakeProducer()
    sender = Sender(producer, "t", b":", None)
    with pytest.raises(InvalidRequestError, match="line 12 has no key"):
        sender.send(Lines(10, [b"k:v", b":w", b"nothing", b"k:x"]))
    sender.finish()
    assert producer.calls == [([b"v", b"w"], [b"k", b""], None)]
    assert sender.acknowledged == 2
