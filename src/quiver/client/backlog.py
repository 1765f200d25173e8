"""What was fetched and not yet handed to the application, and how far each partition was handed out.

Rule: a position moves when a record is handed out, never before, and back only by a seek. Records are handed out from
here alone, so that `poll`, `poll_arrow` and iteration go on where any of them stopped. The loop delivers; one reader
takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import pyarrow as pa

from quiver.client.fetcher import Chunk, Fetcher
from quiver.errors import QuiverError
from quiver.types import Record
from quiver.wire.rows import TABLE_SCHEMA, Rows, rows_of, to_records, to_table

TopicPartition = tuple[str, int]


class _Run:
    """Records of one chunk, decoded; `at` is the next one to hand out, `end` the offset behind the chunk."""

    __slots__ = ("at", "end", "fetcher", "records")

    def __init__(self, fetcher: Fetcher, records: list[Record], end: int) -> None:
        self.fetcher = fetcher
        self.records = records
        self.end = end
        self.at = 0


class Backlog:
    def __init__(self, taken: Callable[[Fetcher, int], None]) -> None:
        """`taken` is told of each chunk that leaves, with its size in bytes."""
        self.positions: dict[TopicPartition, int] = {}
        self._taken = taken
        self._chunks: deque[Chunk] = deque()
        self._run: _Run | None = None
        # Partitions that cannot be read on: told once at once, then whenever there is nothing else to hand out.
        self._failed: dict[Fetcher, QuiverError] = {}
        self._untold: deque[QuiverError] = deque()
        self.interrupted = False  # the reader is to come back before it takes more

    # -- on the loop ---------------------------------------------------------------------------------------------

    def deliver(self, fetcher: Fetcher, what: list[Chunk] | QuiverError) -> None:
        if isinstance(what, QuiverError):
            self._fail(fetcher, what)
        elif fetcher not in self._failed:
            self._chunks.extend(what)

    def _fail(self, fetcher: Fetcher, error: QuiverError) -> None:
        self._failed[fetcher] = error
        self._untold.append(error)

    def forget(self, fetcher: Fetcher, position: int) -> None:
        """The partition goes on at `position`: what waits of it is of no use. The reader must not be taking."""
        self.drop(fetcher)
        self.positions[fetcher.topic, fetcher.partition] = position

    def drop(self, fetcher: Fetcher) -> None:
        """What waits of a partition is not handed out; its position stays. The reader must not be taking."""
        self._chunks = deque(chunk for chunk in self._chunks if chunk.fetcher is not fetcher)
        if self._run is not None and self._run.fetcher is fetcher:
            self._run = None
        if (error := self._failed.pop(fetcher, None)) is not None:
            self._untold = deque(other for other in self._untold if other is not error)

    def begin(self, fetcher: Fetcher, position: int) -> None:
        """A partition that nothing came from yet. The reader may be taking."""
        self.positions[fetcher.topic, fetcher.partition] = position

    def clear(self) -> None:
        """Nothing more is handed out."""
        self._run = None
        self._chunks.clear()

    # -- from the reader's thread --------------------------------------------------------------------------------

    def prepare(self) -> bool:
        """Whether `walk` has something to give. Raises what keeps a partition from being read."""
        self._raise_untold()
        if self._next_run() is None:
            self._raise_failed()
            return False
        return True

    def walk(self) -> Iterator[Record]:
        """The records of one chunk, each counted as read when it is given; ends early when others take or seek."""
        run, positions = self._run, self.positions
        count = 0 if run is None else len(run.records)
        while run is not None and run is self._run and run.at < count and not self.interrupted:
            record = run.records[run.at]
            run.at += 1
            positions[record.topic, record.partition] = record.offset + 1 if run.at < count else run.end
            yield record

    def take(self, count_max: int) -> list[Record]:
        """Up to `count_max` records, counted as read. Empty when nothing waits."""
        self._raise_untold()
        taken: list[Record] = []
        while len(taken) < count_max and (run := self._next_run()) is not None:
            part = run.records[run.at : run.at + count_max - len(taken)]
            run.at += len(part)
            position = part[-1].offset + 1 if run.at < len(run.records) else run.end
            self.positions[part[-1].topic, part[-1].partition] = position
            taken = taken + part if taken else part
        if not taken:
            self._raise_failed()
        return taken

    def take_table(self) -> pa.Table | None:
        """Everything that waits, as one table, counted as read. None when nothing waits."""
        self._raise_untold()
        batches = []
        if self._run is not None and self._run.at < len(self._run.records):
            rest = self._run.records[self._run.at :]
            batches.append(_records_to_batch(rest))
            self.positions[rest[-1].topic, rest[-1].partition] = self._run.end
        self._run = None
        while (found := self._next_rows()) is not None:
            fetcher, rows, end = found
            batches.append(to_table(fetcher.topic, fetcher.partition, rows))
            self.positions[fetcher.topic, fetcher.partition] = end
        if not batches:
            self._raise_failed()
            return None
        return pa.Table.from_batches(batches, TABLE_SCHEMA)

    def _next_run(self) -> _Run | None:
        if self._run is not None and self._run.at < len(self._run.records):
            return self._run
        self._run = None
        if (found := self._next_rows()) is not None:
            fetcher, rows, end = found
            self._run = _Run(fetcher, to_records(fetcher.topic, fetcher.partition, rows), end)
        return self._run

    def _next_rows(self) -> tuple[Fetcher, Rows, int] | None:
        """What is wanted of the next chunk that can be read, and where it ends. One that cannot be read ends its
        partition here: skipping it would lose records. One that compaction emptied is passed."""
        while self._chunks:
            chunk = self._chunks.popleft()
            fetcher, end = chunk.fetcher, chunk.header.next_offset
            self._taken(fetcher, len(chunk.payload))
            if fetcher in self._failed:
                continue
            try:
                rows = rows_of(chunk.header, chunk.payload).since(chunk.header.base_offset + chunk.skip)
            except QuiverError as error:
                self._fail(fetcher, error)
                continue
            if rows.offsets:
                return fetcher, rows, end
            self.positions[fetcher.topic, fetcher.partition] = end
        return None

    def _raise_untold(self) -> None:
        if self._untold:
            raise self._untold.popleft()

    def _raise_failed(self) -> None:
        # Nothing at hand, and of this partition nothing will come: an empty answer would look like the end of the log.
        self._raise_untold()
        if self._failed:
            raise next(iter(self._failed.values()))


def _records_to_batch(records: list[Record]) -> pa.RecordBatch:
    """Records that were decoded for `poll` and are wanted as a table after all."""
    columns = [
        pa.array([getattr(record, field.name) for record in records]).dictionary_encode()
        if field.name == "topic"
        else pa.array([getattr(record, field.name) or None for record in records], field.type)
        if field.name == "headers"
        else pa.array([getattr(record, field.name) for record in records], field.type)
        for field in TABLE_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA)
