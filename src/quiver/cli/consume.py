"""`quiver consume`: prints the messages of a topic.

Rule: a group's position is committed after what was printed has left this process, never before: a closed pipe or a
crash makes the group see a message again, not miss it.
"""

from __future__ import annotations

import enum
import select
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Protocol

import typer

from quiver.cli.options import DataDir, Servers, examples, find_cluster
from quiver.cli.positions import check_offset, choose_partitions, parse_start
from quiver.cli.records import as_json, as_text
from quiver.errors import InvalidRequestError
from quiver.types import Record, check_topic_name

POLL_RECORDS_MAX = 5_000
POLL_S = 0.5  # a closed pipe and Ctrl-C are noticed in this time


class Format(enum.StrEnum):
    TEXT = "text"
    JSON = "json"


def register(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "quiver consume logs",
            "quiver consume logs --from latest --follow",
            "quiver consume logs --from 2026-01-31T12:00:00Z --max 10 --format json",
            "quiver consume logs --group audit --follow",
        )
    )(consume)


def consume(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False, help="Where the messages are.")],
    start_at: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="PLACE",
            help="earliest, latest, an offset, or an ISO time (UTC unless it says otherwise). With --group: only where "
            "the group has no position yet.",
        ),
    ] = "earliest",
    partition: Annotated[int | None, typer.Option(min=0, show_default=False, help="Only this partition.")] = None,
    count_max: Annotated[
        int | None, typer.Option("--max", min=1, metavar="N", show_default=False, help="Stop after N messages.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more at the end of the log.")] = False,
    group: Annotated[
        str | None,
        typer.Option(show_default=False, help="Go on where this group stopped, and commit what was printed."),
    ] = None,
    form: Annotated[
        Format, typer.Option("--format", help="text: the value and a newline. json: everything, one object a line.")
    ] = Format.TEXT,
    servers: Servers = None,
    data_dir: DataDir = None,
) -> None:
    """Print messages. Stops at the end of the log as it was at the start, unless --follow is given."""
    check_topic_name(topic)
    start = parse_start(start_at)
    if group is not None and start.timestamp_us is not None:
        raise InvalidRequestError("--from with a time does not go with --group: a group has its own position")
    from quiver import Admin, Consumer

    address = find_cluster(servers, data_dir)
    with Admin(address) as admin:
        offsets = choose_partitions(topic, admin.offsets(topic), partition)
        if start.offset is not None and group is None:
            check_offset(topic, start.offset, offsets)
        policy = start.offset if start.offset is not None else start.name or "earliest"
        # Whoever follows shares with the others of its group; up to an end all is read here.
        shares = follow and group is not None and partition is None
        chosen = None if shares else {topic: sorted(offsets)}
        with Consumer(address, [topic], group=group, start=policy, partitions=chosen) as consumer:
            if start.timestamp_us is not None:
                for number in offsets:
                    consumer.seek_to_time(topic, number, start.timestamp_us)
            reader = Reader(consumer, topic, lambda: admin.offsets(topic), commits=group is not None)
            if not follow:
                reader.ends = {number: latest for number, (_, latest) in offsets.items()}
            _print_all(reader, count_max, as_json if form is Format.JSON else as_text)


class _Consumer(Protocol):
    def poll(self, max_records: int = 500, timeout: float = 1.0) -> list[Record]: ...

    def position(self, topic: str, partition: int) -> int | None: ...

    def seek(self, topic: str, partition: int, offset: int) -> None: ...

    def commit(self) -> None: ...


class Reader:
    """Records up to the ends of the partitions, or without end when `ends` is None."""

    def __init__(
        self, consumer: _Consumer, topic: str, offsets: Callable[[], dict[int, tuple[int, int]]], *, commits: bool
    ) -> None:
        self._consumer = consumer
        self._topic = topic
        self._offsets = offsets
        self._commits = commits
        self._gone: set[int] = set()  # partitions that retention emptied up to their end while we read
        self.ends: dict[int, int] | None = None

    def at_end(self) -> bool:
        if self.ends is None:
            return False
        return all(number in self._gone or self._position(number) >= end for number, end in self.ends.items())

    def read(self, count_max: int) -> list[Record]:
        """Records of before the end; an empty list when none came in time."""
        records = self._consumer.poll(min(count_max, POLL_RECORDS_MAX), POLL_S)
        ends = self.ends
        if ends is None:
            return records
        if not records:
            # What was removed will never come. A cluster that is gone raises here.
            now = self._offsets()
            self._gone = {number for number, end in ends.items() if number not in now or now[number][0] >= end}
        return [record for record in records if record.offset < ends[record.partition]]

    def printed(self) -> None:
        """What was read so far has been written out."""
        if not self._commits:
            return
        for number, end in (self.ends or {}).items():
            if self._position(number) > end:
                self._consumer.seek(self._topic, number, end)  # read and not printed: the group must see it again
        self._consumer.commit()

    def _position(self, number: int) -> int:
        return self._consumer.position(self._topic, number) or 0


def _print_all(reader: Reader, count_max: int | None, render: Callable[[Iterable[Record]], bytes]) -> None:
    left = sys.maxsize if count_max is None else count_max
    output = sys.stdout.buffer
    while left > 0 and not reader.at_end():
        records = reader.read(left)
        if records:
            output.write(render(records))
            output.flush()
            reader.printed()
            left -= len(records)
        elif _reader_is_gone(sys.stdout.fileno()):
            raise BrokenPipeError


def _reader_is_gone(fd: int) -> bool:
    """Whether the other end of a pipe was closed. A write would tell, but there is nothing to write."""
    poll = select.poll()
    poll.register(fd, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
