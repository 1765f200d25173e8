"""What GET /health keeps of clients that were not seen again is what it would make anew."""

from __future__ import annotations

import datetime
import json
from random import Random

import msgspec
import pytest

from quiver.manager.seen_rows import BLOCK, ConsumerSeen, SeenRows
from quiver.manager.sightings import SeenTimes
from quiver.metadata.state import Consumer

NOW_US = 1_763_290_000_000_000


@pytest.mark.parametrize("seed", range(5))
def test_kept_rows_are_those_made_anew(seed: int) -> None:
    random = Random(seed)
    clients: dict[int, Consumer] = {}
    seen, rows = SeenTimes(), SeenRows(ConsumerSeen)
    last, now_us = 0, NOW_US
    for _ in range(40):
        for _ in range(random.choice((0, 0, 1, BLOCK))):
            last += random.choice((1, 1, 7))
            clients[last] = Consumer(last, random.choice(("a", 'b"c')), None)
        for gone in random.sample(list(clients), random.choice((0, min(2, len(clients))))):
            del clients[gone]
        seen.keep(clients)
        for known in random.choices(list(clients), k=random.randrange(4)) if clients else ():
            now_us += random.randrange(2_000_000)
            seen.note(known, now_us)
        for _ in range(random.choice((0, 0, 1, 3))):
            rows.make_ahead(clients, seen)
        found = json.loads(msgspec.json.encode(rows.rows(clients, seen)))
        assert [(row["consumer_id"], row["topic"]) for row in found] == [(c.id, c.topic) for c in clients.values()]
        assert [row["last_heartbeat"] for row in found] == [_text(seen.get(known)) for known in clients]


def test_rows_of_new_clients_are_made_ahead_and_once() -> None:
    seen, rows = SeenTimes(), SeenRows(ConsumerSeen)
    clients = {known: Consumer(known, "a", None) for known in range(BLOCK, 4 * BLOCK + 1)}
    made = [rows.make_ahead(clients, seen) for _ in range(5)]
    assert made == [True, True, True, False, False], "all blocks but that of the newest client"
    seen.note(BLOCK, NOW_US)
    assert not rows.make_ahead(clients, seen), "who calls again and again costs nothing until somebody asks"
    assert _text(NOW_US) == json.loads(msgspec.json.encode(rows.rows(clients, seen)))[0]["last_heartbeat"]


def _text(us: int | None) -> str | None:
    if us is None:
        return None
    epoch = datetime.datetime.fromtimestamp(0, datetime.UTC)
    return (epoch + datetime.timedelta(microseconds=us)).isoformat(timespec="microseconds")
