"""`ingest`: files of all formats become messages, each row once, though the job runs again or a batch is replayed."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import quiver.spark.jobs.ingest as job
from quiver.errors import InvalidRequestError, UnknownTopicError
from quiver.spark import ingest
from quiver.wire.partitioning import partition_of_key
from tests.spark.kit import Lake
from tests.system.kit import read_all


def forget_last_commit(state: Path) -> None:
    """As if the driver was killed after the rows were stored and before Spark wrote down that they are."""
    commits = sorted((state / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    commits[-1].unlink()
    (commits[-1].parent / f".{commits[-1].name}.crc").unlink(missing_ok=True)


def test_lines_are_sent_once_however_often_the_job_runs(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, files, state = lake.new_topic(), tmp_path / "files", tmp_path / "state"
    (files / "deep").mkdir(parents=True)
    lines = {name: [f"{name} line {number}" for number in range(3_000)] for name in ("a", "b", "c")}
    (files / "a.log").write_text("\n".join(lines["a"]) + "\n")
    (files / "deep" / "b, {1}.log").write_text("\n".join(lines["b"]))
    monkeypatch.setitem(job._CUT, "spark.sql.files.maxPartitionBytes", "40000")  # several tasks
    monkeypatch.setitem(job._CUT, "spark.sql.files.openCostInBytes", "10")
    paths = [str(files / "a.log"), str(files / "deep")]

    def run() -> int:
        return ingest(lake.spark, topic, paths, servers=lake.servers, state=str(state)).rows

    assert run() == 6_000
    assert sorted(lake.stored(topic)) == sorted(line.encode() for name in "ab" for line in lines[name])
    assert run() == 0
    (files / "deep" / "c.log").write_text("\n".join(lines["c"]))
    forget_last_commit(state)
    assert run() == 9_000  # the replayed batch is read again, and recognised
    assert sorted(lake.stored(topic)) == sorted(line.encode() for name in "abc" for line in lines[name])


def test_rows_become_json_or_a_column_and_keys_choose_partitions(lake: Lake, tmp_path: Path) -> None:
    (tmp_path / "o.csv").write_text("customer,amount,note\nann,5,\nbob,7,late\n")
    (tmp_path / "o.jsonl").write_text('{"customer":"ann", "n":1}\n{"customer":"eve","n":2}\n')
    table = pa.table({"customer": ["ann", "bob"], "raw": pa.array([b"\xff\x00", None])})
    pq.write_table(table, tmp_path / "o.parquet")
    found = {}
    for name, value in (("o.csv", None), ("o.jsonl", None), ("o.parquet", "raw")):
        topic = lake.new_topic(3)
        path = str(tmp_path / name)
        state = str(tmp_path / f"state-{name}")
        ingest(lake.spark, topic, path, servers=lake.servers, key="customer", value=value, state=state)
        found[name] = {record.key: record for record in read_all(lake.servers, topic)}
        for record in found[name].values():
            assert record.key is not None and record.partition == partition_of_key(record.key, 3)
    rows = {key: json.loads(record.value or b"") for key, record in found["o.csv"].items()}
    assert rows == {
        b"ann": {"customer": "ann", "amount": "5", "note": None},
        b"bob": {"customer": "bob", "amount": "7", "note": "late"},
    }
    assert {key: record.value for key, record in found["o.jsonl"].items()} == {
        b"ann": b'{"customer":"ann", "n":1}',
        b"eve": b'{"customer":"eve","n":2}',
    }
    assert {key: record.value for key, record in found["o.parquet"].items()} == {b"ann": b"\xff\x00", b"bob": None}


def test_mistakes_are_told_before_anything_is_sent(lake: Lake, tmp_path: Path) -> None:
    topic, state = lake.new_topic(), str(tmp_path / "state")
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")

    def run(path: str = "a.csv", **options: str) -> None:
        ingest(lake.spark, topic, str(tmp_path / path), servers=lake.servers, **({"state": state} | options))

    with pytest.raises(UnknownTopicError):
        ingest(lake.spark, "nowhere", str(tmp_path), servers=lake.servers)
    with pytest.raises(InvalidRequestError, match=r"Path does not exist: .*/missing"):
        run("missing", state=f"{state}-1")
    with pytest.raises(InvalidRequestError, match="there is no column z: there are x, y"):
        run(key="z", state=f"{state}-2")
    with pytest.raises(InvalidRequestError, match="a line of text has no key"):
        run(format="text", key="z", state=f"{state}-3")
    run()
    with pytest.raises(
        InvalidRequestError, match=r"state of another job: there key is None, here x; .*another --state"
    ):
        run(key="x")
    assert len(lake.stored(topic)) == 1
