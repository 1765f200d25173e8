"""Where reading ends, and what a group has seen."""

from __future__ import annotations

from quiver.cli.consume import Reader
from quiver.types import Record


def records(partition: int, *offsets: int) -> list[Record]:
    return [Record("t", partition, offset, 0, None, b"v") for offset in offsets]


class FakeConsumer:
    def __init__(self, *polls: list[Record], positions: dict[int, int] | None = None) -> None:
        self.polls = list(polls)
        self.positions = positions or {}
        self.asked: list[int] = []
        self.committed: list[dict[int, int]] = []

    def poll(self, max_records: int = 500, timeout: float = 1.0) -> list[Record]:
        self.asked.append(max_records)
        found = self.polls.pop(0) if self.polls else []
        for record in found:
            self.positions[record.partition] = record.offset + 1
        return found

    def position(self, topic: str, partition: int) -> int | None:
        return self.positions.get(partition)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        self.positions[partition] = offset

    def commit(self) -> None:
        self.committed.append(dict(self.positions))


def reader(
    consumer: FakeConsumer,
    ends: dict[int, int] | None,
    now: dict[int, tuple[int, int]] | None = None,
    commits: bool = False,
) -> Reader:
    made = Reader(consumer, "t", lambda: now or {}, commits=commits)
    made.ends = ends
    return made


def test_reading_ends_where_the_log_ended_at_the_start() -> None:
    made = reader(FakeConsumer(records(0, 0, 1, 2), records(1, 0, 1, 2, 3)), {0: 3, 1: 2})
    assert not made.at_end()
    assert made.read(100) == records(0, 0, 1, 2)
    assert not made.at_end()
    assert made.read(100) == records(1, 0, 1)
    assert made.at_end()


def test_an_empty_log_and_a_position_at_the_end_have_nothing_to_read() -> None:
    assert reader(FakeConsumer(), {0: 0, 1: 0}).at_end()
    assert reader(FakeConsumer(positions={0: 7}), {0: 7}).at_end()
    assert not reader(FakeConsumer(), None).at_end()


def test_no_more_is_asked_for_than_is_wanted() -> None:
    consumer = FakeConsumer(records(0, 0))
    reader(consumer, None).read(3)
    assert consumer.asked == [3]


def test_what_retention_removed_is_not_waited_for() -> None:
    made = reader(FakeConsumer([]), {0: 5, 1: 5}, now={0: (5, 9), 1: (9, 9)})
    assert made.read(100) == []
    assert made.at_end()


def test_a_partition_that_is_only_slow_is_waited_for() -> None:
    made = reader(FakeConsumer([], records(0, 4)), {0: 5}, now={0: (0, 9)})
    assert made.read(100) == []
    assert not made.at_end()
    assert made.read(100) == records(0, 4)
    assert made.at_end()


def test_a_group_commits_what_was_printed_and_nothing_beyond() -> None:
    consumer = FakeConsumer(records(0, 0, 1, 2, 3))
    made = reader(consumer, {0: 2}, commits=True)
    assert made.read(100) == records(0, 0, 1)
    assert consumer.committed == []
    made.printed()
    assert consumer.committed == [{0: 2}]


def test_without_a_group_nothing_is_committed() -> None:
    consumer = FakeConsumer(records(0, 0))
    made = reader(consumer, None)
    made.read(1)
    made.printed()
    assert consumer.committed == []
