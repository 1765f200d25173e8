"""`replay`: an archive, or a range of it, in a topic: in the order it had, each message once wherever the job dies."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quiver import Admin, Producer
from quiver.errors import InvalidRequestError
from quiver.spark import archive, replay
from quiver.spark.jobs.folder import Folder
from quiver.spark.jobs.replay import cut_parts
from quiver.types import Record
from tests.spark.kit import Lake
from tests.system.kit import read_all

DAY_US = 86_400_000_000
START = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC)
START_US = int(START.timestamp()) * 1_000_000


def test_parts_hold_whole_batches_in_their_order() -> None:
    sizes = {"p=1/0000000002-00000.parquet": 5, "p=0/0000000000-00000.parquet": 6, "p=1/0000000000-00001.parquet": 1}
    sizes |= {"p=0/0000000010-00000.parquet": 90, "p=0/0000000001-00000.parquet": 3}
    first = ["p=0/0000000000-00000.parquet", "p=1/0000000000-00001.parquet", "p=0/0000000001-00000.parquet"]
    assert cut_parts(sizes, 10) == [first, ["p=1/0000000002-00000.parquet"], ["p=0/0000000010-00000.parquet"]]
    assert cut_parts({}) == []
    with pytest.raises(InvalidRequestError, match="its name says no batch"):
        cut_parts({"other.parquet": 1})


@pytest.fixture(scope="module")
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, list[Record]]:
    """An archive of several batches, its topic, and the messages of that: three partitions, four days."""
    lake = Lake(request.getfixturevalue("spark"), request.getfixturevalue("node").address)
    topic, path = lake.new_topic(3), str(tmp_path_factory.mktemp("archive [1]"))
    with Producer(lake.servers) as producer:
        for number in range(400):
            producer.send(
                topic,
                None if number == 7 else b"value %d" % number,
                key=b"key %d" % (number % 5),
                partition=number % 3,
                timestamp=START_US + number % 4 * DAY_US,  # days come and go: files of a batch overlap in offsets
                headers={"n": b"%d" % number},
            )
    archive(lake.spark, topic, path, servers=lake.servers, rows_per_batch=150)
    return path, topic, read_all(lake.servers, topic)


def fields(records: list[Record], *left_out: str) -> list[dict[str, Any]]:
    kept = {"topic", "offset"} | set(left_out)
    return [{k: v for k, v in msgspec.structs.asdict(one).items() if k not in kept} for one in records]


def test_archive_comes_back_as_it_was_wherever_the_job_dies(
    lake: Lake, kept: tuple[str, str, list[Record]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, source, records = kept
    again, state = lake.new_topic(3), str(tmp_path / "state")
    monkeypatch.setattr(cut_parts, "__defaults__", (1,))  # each batch is a part

    def run() -> tuple[int, int]:
        done = replay(lake.spark, path, again, servers=lake.servers, source=source, state=state)
        return done.rows, done.parts

    write = Folder.write
    for fatal in (b"1", b"3"):

        def dies(self: Folder, name: str, content: bytes, fatal: bytes = fatal) -> None:
            if name == "done.json" and content == fatal:
                raise InvalidRequestError("killed here")  # sent, and not noted
            write(self, name, content)

        monkeypatch.setattr(Folder, "write", dies)
        with pytest.raises(InvalidRequestError, match="killed here"):
            run()
    monkeypatch.setattr(Folder, "write", write)
    assert run() == (100, 1)  # the last part: the brokers had it
    assert fields(read_all(lake.servers, again)) == fields(records)
    assert run() == (0, 0)


def test_ranges_and_keys_choose(lake: Lake, kept: tuple[str, str, list[Record]], tmp_path: Path) -> None:
    path, source, records = kept
    topic = lake.new_topic(2)
    until = START + datetime.timedelta(days=2, microseconds=1)
    chosen = [
        one
        for one in records
        if one.partition in (0, 2)
        and 10 <= one.offset < 90
        and START_US + DAY_US <= one.timestamp <= START_US + 2 * DAY_US
    ]
    done = replay(
        lake.spark,
        path,
        topic,
        servers=lake.servers,
        source=source,
        since=(START + datetime.timedelta(days=1)).replace(tzinfo=None),
        until=until,
        partitions=[0, 2],
        offsets=(10, 90),
        spread=True,
        state=str(tmp_path / "state"),
    )
    assert done.rows == len(chosen) > 50
    found = fields(read_all(lake.servers, topic), "partition")
    assert sorted(found, key=repr) == sorted(fields(chosen, "partition"), key=repr)
    assert len({one.partition for one in read_all(lake.servers, topic)}) == 2


def test_mistakes_are_told(lake: Lake, kept: tuple[str, str, list[Record]], tmp_path: Path) -> None:
    path, source, _ = kept
    topic = lake.new_topic(2)
    with pytest.raises(InvalidRequestError, match=r"archive has 3 partitions and topic .* has 2: .*--spread"):
        replay(lake.spark, path, topic, servers=lake.servers, source=source, state=str(tmp_path / "a"))
    with pytest.raises(InvalidRequestError, match="no archive of topic"):
        replay(lake.spark, path, topic, servers=lake.servers, state=str(tmp_path / "b"))
    with Admin(lake.servers) as admin:
        assert sum(end for _, end in admin.offsets(topic).values()) == 0
