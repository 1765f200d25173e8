"""`quiver produce`: each line of a file or of standard input becomes a message.

Rule: what is counted as sent was acknowledged. An error names the lines it concerns, and everything before it is
brought to its end first, so that the user knows what is stored.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections import deque
from io import FileIO
from typing import Annotated, Protocol

import typer

from quiver.cli.lines import Lines, read_lines, split_key
from quiver.cli.options import DataDir, Servers, examples, find_cluster, say
from quiver.cli.progress import Progress
from quiver.cli.render import human_bytes
from quiver.config import MESSAGE_BYTES_MAX
from quiver.errors import InvalidRequestError, QuiverError
from quiver.types import BatchMetadata, check_topic_name

# Chunks of lines that may wait for their acknowledgement. The producer bounds their bytes.
CHUNKS_IN_FLIGHT_MAX = 256


def register(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "echo hello | quiver produce logs",
            "quiver produce logs --file access.log",
            "quiver produce users --key-separator : --file users.txt",
        )
    )(produce)


def produce(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False, help="Where the messages go.")],
    file: Annotated[
        str | None, typer.Option(metavar="FILE", show_default=False, help="Read this file, not standard input.")
    ] = None,
    key_separator: Annotated[
        str | None,
        typer.Option(metavar="TEXT", show_default=False, help="Each line is KEY, this text, VALUE; \\t is a tab."),
    ] = None,
    partition: Annotated[
        int | None, typer.Option(min=0, show_default=False, help="Send everything to this partition.")
    ] = None,
    servers: Servers = None,
    data_dir: DataDir = None,
) -> None:
    """Send each line as one message, without its newline."""
    check_topic_name(topic)
    separator = None if key_separator is None else key_separator.replace("\\t", "\t").encode()
    if separator == b"":
        raise InvalidRequestError("--key-separator must not be empty")
    with _open(file) as source:
        from quiver import Producer

        if source.isatty():
            say("One message a line; Ctrl-D ends.")
        line_bytes_max = MESSAGE_BYTES_MAX + len(separator or b"")
        with Producer(find_cluster(servers, data_dir)) as producer, Progress(_size_of(source)) as progress:
            sender = Sender(producer, topic, separator, partition)
            try:
                for chunk in read_lines(lambda size: _read(source, size), line_bytes_max):
                    sender.send(chunk)
                    progress.update(sender.acknowledged, sender.sent_bytes)
            finally:
                try:
                    sender.finish()
                finally:
                    progress.close()
                    say(sender.summary())


class _Outcome(Protocol):
    def done(self) -> bool: ...

    def result(self, timeout: float | None = None) -> list[BatchMetadata]: ...


class _Producer(Protocol):
    def send_many(
        self, topic: str, records: list[bytes], *, keys: list[bytes] | None = None, partition: int | None = None
    ) -> _Outcome: ...


class Sender:
    """Hands chunks of lines to the producer, waits for the oldest when too many are unanswered, and keeps count."""

    def __init__(self, producer: _Producer, topic: str, separator: bytes | None, partition: int | None) -> None:
        self._producer = producer
        self._topic = topic
        self._separator = separator
        self._partition = partition
        self._waiting: deque[tuple[int, int, _Outcome]] = deque()  # first line, last line, outcome
        self._failure: QuiverError | None = None
        self._began_s = time.monotonic()
        self.acknowledged = 0
        self.sent_bytes = 0

    def send(self, chunk: Lines) -> None:
        keys: list[bytes] | None = None
        values = chunk.lines
        mistake: InvalidRequestError | None = None
        if self._separator is not None:
            keys, values = [], []
            try:
                for number, line in enumerate(chunk.lines, chunk.first):
                    key, value = split_key(line, self._separator, number)
                    keys.append(key)
                    values.append(value)
            except InvalidRequestError as error:
                mistake = error  # the lines before it are sent
        if values:
            outcome = self._producer.send_many(self._topic, values, keys=keys, partition=self._partition)
            self._waiting.append((chunk.first, chunk.first + len(values) - 1, outcome))
            self.sent_bytes += chunk.size_bytes
        if mistake is not None:
            raise mistake
        self._settle(CHUNKS_IN_FLIGHT_MAX)
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Waits for every outcome; raises the first failure."""
        self._settle(0)
        if self._failure is not None:
            raise self._failure

    def summary(self) -> str:
        took_s = max(time.monotonic() - self._began_s, 1e-6)
        count = f"{self.acknowledged:,} message{'' if self.acknowledged == 1 else 's'}"
        rate = f"{self.acknowledged / took_s:,.0f} messages/s, {human_bytes(int(self.sent_bytes / took_s))}/s"
        return f"sent {count} in {took_s:.2f} s ({rate})"

    def _settle(self, waiting_max: int) -> None:
        while self._waiting and (len(self._waiting) > waiting_max or self._waiting[0][2].done()):
            first, last, outcome = self._waiting.popleft()
            try:
                outcome.result()
                self.acknowledged += last - first + 1
            except QuiverError as error:
                where = f"line {first}" if first == last else f"lines {first} to {last}"
                failure = type(error)(f"{where}: {error.message}")
                failure.__cause__ = error
                self._failure = self._failure or failure


def _open(file: str | None) -> FileIO:
    """Unbuffered: a typed line is sent when it is typed."""
    if file is None:
        return FileIO(sys.stdin.fileno(), "rb", closefd=False)
    try:
        return FileIO(file, "rb")
    except OSError as error:
        raise InvalidRequestError(f"cannot read {file}: {error.strerror}") from error


def _read(source: FileIO, size: int) -> bytes:
    try:
        return source.read(size) or b""
    except OSError as error:
        raise InvalidRequestError(f"cannot read the input: {error.strerror}") from error


def _size_of(source: FileIO) -> int | None:
    """How much there is to read; None for a pipe or a terminal."""
    found = os.fstat(source.fileno())
    return found.st_size if stat.S_ISREG(found.st_mode) else None
