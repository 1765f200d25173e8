"""Requests by chance do no harm: short runs of `python -m tests.manager.http_fuzz`."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from quiver.manager.v1_media import ARROW, NDJSON
from tests.manager.http_fuzz import RUNS
from tests.manager.kit import HttpNode
from tests.manager.v1_kit import V1, arrow, log_of, ndjson

pytestmark = pytest.mark.system


@pytest.mark.parametrize(("name", "cases"), [("classic", 1_000), ("v1", 1_000), ("openapi", 350), ("forwarded", 400)])
def test_requests_by_chance_do_no_harm(tmp_path: Path, name: str, cases: int) -> None:
    RUNS[name](tmp_path, cases, 20_261_116)


def test_refused_requests_by_chance_change_nothing(node: HttpNode) -> None:
    """Every body is damaged beyond repair: two records that cannot be, in each form."""
    dice = random.Random(7)
    with V1(node.http) as client:
        topic = client.create("untouched", 2)
        client.produce(topic, ["a"], 0)
        before = log_of(client)
        for number in range(1000):
            wrong = dice.choice(({"value": 1}, {"value": "a", "x": 1}, {"value": "a", "partition": 9}, {}, None))
            records = [{"value": "good"}] * dice.randint(0, 5)
            records.insert(dice.randrange(len(records) + 1), wrong)
            form = number % 3
            if form == 0:
                reply = client.json("POST", f"/v1/topics/{topic}/records", {"records": records})
            elif form == 1:
                reply = client.post(topic, ndjson(records), NDJSON)
            else:
                whole = arrow(pa.table({"value": ["a"] * 5, "partition": [0, 1, 0, 1, dice.randint(2, 100)]}))
                reply = client.post(topic, whole[: dice.choice((len(whole), dice.randrange(len(whole))))], ARROW)
            assert reply.status == 400, reply
        assert log_of(client) == before
