"""`archive`: each message in exactly one file, for every reader, wherever the job dies; what is let go is archived."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from quiver import Admin, Producer
from quiver.errors import InvalidRequestError, QuiverError, UnknownTopicError
from quiver.spark import archive, verify
from quiver.spark.jobs.archive import group_of
from quiver.spark.jobs.archived import home_of, place_of
from quiver.spark.jobs.folder import Folder
from tests.spark.kit import Lake, numbered
from tests.spark.test_ingest import forget_last_commit
from tests.system.kit import SMALL_FILES, Node, until

# The last second of a day and the first of the next, in UTC.
MIDNIGHT_US = int(datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC).timestamp()) * 1_000_000


def read(path: Path) -> Counter[tuple[int, int, bytes]]:
    """As a reader that knows nothing of Spark or Quiver."""
    found = ds.dataset(path, format="parquet", partitioning="hive").to_table(columns=["partition", "offset", "value"])
    return Counter(zip(*(found[name].to_pylist() for name in found.column_names), strict=True))


def expected(topic_values: dict[int, list[bytes]]) -> Counter[tuple[int, int, bytes]]:
    return Counter(
        (partition, offset, value) for partition, values in topic_values.items() for offset, value in enumerate(values)
    )


def test_messages_are_archived_whole_by_partition_and_day(lake: Lake, tmp_path: Path) -> None:
    topic, path = lake.new_topic(2), tmp_path / "archive"
    with Producer(lake.servers) as producer:
        for number, shift in enumerate((-1, 0, 86_399_999_999, 86_400_000_000)):
            stamp, value = MIDNIGHT_US + shift, b"%d\xff" % number
            producer.send(topic, value, key=b"k", partition=number % 2, timestamp=stamp, headers={"h": b"\x00"})
    done = archive(lake.spark, topic, str(path), servers=lake.servers)
    assert (done.rows, done.files, done.ends) == (4, 4, {0: 2, 1: 2})
    where = f"topic={topic}/partition={{}}/date={{}}/0000000000-0000{{}}.parquet"
    wanted = [(0, "2026-02-28", 0), (0, "2026-03-01", 1), (1, "2026-03-01", 2), (1, "2026-03-02", 3)]
    files = [path / where.format(*one) for one in wanted]
    assert sorted(path.glob("topic=*/**/*.parquet")) == files
    (row,) = ds.dataset(files[3], format="parquet").to_table().to_pylist()
    assert row == {
        "offset": 1,
        "timestamp": datetime.datetime(2026, 3, 2, tzinfo=datetime.UTC),
        "key": b"k",
        "value": b"3\xff",
        "headers": [("h", b"\x00")],
    }
    assert place_of(str(files[3])) == (0, 3)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], None]]:
    """Makes the n-th call of a method of Folder fail, as if the driver died there."""

    def plan(method: str, number: int) -> None:
        kept, calls = getattr(Folder, method), iter(range(1, 1000))

        def call(self: Folder, *arguments: object) -> object:
            if next(calls) == number:
                raise OSError("killed here")
            return kept(self, *arguments)

        monkeypatch.setattr(Folder, method, call)

    yield plan
    monkeypatch.undo()


def test_each_message_is_in_one_file_wherever_the_job_dies(
    lake: Lake, tmp_path: Path, broken: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, path = lake.new_topic(2), tmp_path / "archive"
    values: dict[int, list[bytes]] = {0: [], 1: []}

    def more() -> None:
        for partition in values:
            added = numbered(150, f"p{partition} from {len(values[partition])}")
            lake.fill(topic, added, partition)
            values[partition] += added

    def run() -> int:
        return archive(lake.spark, topic, str(path), servers=lake.servers, rows_per_batch=200).rows

    more()
    # Written are the job, then the list of batch 0; in the second run that list is moved to its place, then two files.
    for method, number in (("write", 2), ("move", 3)):
        broken(method, number)
        with pytest.raises(QuiverError, match="killed here"):
            run()
        monkeypatch.undo()
        assert len(list(path.glob("topic=*/**/*.parquet"))) == (0 if method == "write" else 1)
    assert run() == 300
    assert read(path) == expected(values)
    assert run() == 0
    forget_last_commit(path / home_of(topic))
    more()
    run()
    assert read(path) == expected(values)
    assert list((path / home_of(topic) / "staging").glob("*")) == []
    assert verify(lake.spark, topic, archive=str(path), servers=lake.servers).right


def test_topic_forgets_what_is_archived_and_nothing_else(
    lake: Lake, tmp_path: Path, broken: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Node(tmp_path / "node", SMALL_FILES | {"QUIVER_RETENTION_CHECK_S": "0.05"}) as node,
        Admin(node.address) as admin,
    ):
        there = lake.via(node.address)
        topic, path = there.new_topic(1), tmp_path / "archive"
        admin.alter_topic(topic, {"segment.bytes": 4096})
        values = numbered(2_000)
        there.fill(topic, values, 0)

        def run() -> None:
            archive(lake.spark, topic, str(path), servers=node.address, trim=True)

        broken("move", 3)  # the first file on its way to its place
        with pytest.raises(QuiverError, match="killed here"):
            run()
        monkeypatch.undo()
        assert admin.list_groups() == []
        assert admin.offsets(topic) == {0: (0, 2_000)}
        run()
        _, (position,) = admin.describe_group(group_of(topic))
        assert position.offset == 2_000
        until(lambda: admin.offsets(topic)[0][0] > 1_000)
        assert read(path) == expected({0: values})


def test_mistakes_are_told(lake: Lake, tmp_path: Path) -> None:
    with pytest.raises(UnknownTopicError):
        archive(lake.spark, "nowhere", str(tmp_path), servers=lake.servers)
    with pytest.raises(InvalidRequestError, match="No FileSystem for scheme"):
        archive(lake.spark, lake.new_topic(), "nofs://x/y", servers=lake.servers)
