"""What the tests of the log share: entries that can be told apart, whole contents of a log, and a driver that knows
what a log must still hold after a crash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

from crc32c import crc32c

from quiver.config import LogSettings
from quiver.errors import DiskFullError, LogFailedError
from quiver.log.checkpoint import Checkpoint
from quiver.log.disk import Disk
from quiver.log.flush import CheckpointJob
from quiver.log.partition_log import PartitionLog
from quiver.testing.faulty_disk import FaultyDisk, SimulatedCrash
from quiver.wire.frame import Entry, FrameHeader, Kind, walk_frames

DIRECTORY = "data/partition"
# Small enough that a few entries make several segments, and a segment several index entries.
# Files are as long as their content: many tests take them apart.
SETTINGS = LogSettings(
    segment_bytes_max=700,
    room_bytes_max=0,
    index_interval_bytes=200,
    checkpoint_bytes=1000,
    retention_ms=None,
    retention_bytes=None,
)
# Files are made longer ahead.
ROOMY = dataclasses.replace(SETTINGS, room_bytes_max=300)


class Stored(NamedTuple):
    """One entry as a reader must find it."""

    index: int
    term: int
    kind: int
    base_offset: int
    record_count: int
    timestamp_max: int
    payload: bytes

    @classmethod
    def of(cls, header: FrameHeader, payload: bytes | memoryview) -> Stored:
        return cls(
            header.index,
            header.term,
            header.kind,
            header.base_offset,
            header.record_count,
            header.timestamp_max,
            bytes(payload),
        )


def data(number: int, payload_bytes: int = 60, records: int = 2, timestamp: int | None = None) -> Entry:
    """A batch whose payload nobody else has."""
    payload = random.Random(number).randbytes(payload_bytes)
    last = 1000 + number * 10 if timestamp is None else timestamp
    return Entry(Kind.DATA, payload, crc32c(payload), records, last - 5, last)


def control(number: int, kind: Kind = Kind.POSITIONS, payload_bytes: int = 20) -> Entry:
    return Entry.control(kind, random.Random(-number).randbytes(payload_bytes))


def open_log(disk: Disk, settings: LogSettings = SETTINGS, directory: str = DIRECTORY) -> PartitionLog:
    return PartitionLog(disk, directory, settings)


def append(log: PartitionLog, entry: Entry, term: int = 1, now_s: float = 0.0) -> Stored:
    return Stored.of(log.append(term, entry, now_s), entry.payload)


def fill(log: PartitionLog, count: int, term: int = 1) -> list[Stored]:
    """Appends and flushes so many entries, every fourth without records."""
    stored = []
    for _ in range(count):
        number = log.next_index
        stored.append(append(log, control(number) if number % 4 == 0 else data(number, 40 + number % 7 * 30), term))
        log.flush()
    return stored


def contents(log: PartitionLog) -> list[Stored]:
    """All stored entries, by index."""
    return [Stored.of(header, payload) for _, header, payload in log.scan(log.first_index)]


def contents_by_offset(log: PartitionLog, bytes_max: int = 500) -> list[Stored]:
    """All stored entries with records, read as a consumer reads."""
    found: list[Stored] = []
    offset = log.base_offset
    while chunk := log.read(offset, bytes_max):
        frames = [Stored.of(header, payload) for _, header, payload in walk_frames(chunk)]
        found += [frame for frame in frames if frame.record_count]
        offset = found[-1].base_offset + found[-1].record_count
    return found


def check_contents(log: PartitionLog, expected: list[Stored]) -> None:
    """Both ways of reading give exactly these entries, with dense indexes and offsets."""
    assert contents(log) == expected
    assert contents_by_offset(log) == [entry for entry in expected if entry.record_count]
    for before, after in itertools.pairwise(expected):
        assert after.index == before.index + 1
        assert after.base_offset == before.base_offset + before.record_count


def check_lookups(log: PartitionLog, expected: list[Stored]) -> None:
    """Each entry is found by its index, and by its offsets if it has any."""
    for entry in expected:
        _, header, payload = next(iter(log.scan(entry.index)))
        assert Stored.of(header, payload) == entry
        for offset in range(entry.base_offset, entry.base_offset + entry.record_count):
            _, header, payload = next(walk_frames(log.read(offset, 1)))
            assert Stored.of(header, payload) == entry


def image(disk: Disk, directory: str = DIRECTORY) -> dict[str, bytes]:
    """The files of a directory, by name."""
    files = {}
    for name in disk.list(directory):
        file = disk.open(f"{directory}/{name}")
        files[name] = file.pread(file.size(), 0)
    return files


def write_files(disk: Disk, files: dict[str, bytes], directory: str = DIRECTORY) -> None:
    disk.make_directory(directory)
    for name, raw in files.items():
        file = disk.open(f"{directory}/{name}", create=True)
        file.truncate(0)
        file.pwrite([raw], 0)
        file.datasync()
    disk.sync_directory(directory)


def disk_with(files: dict[str, bytes], seed: int = 0) -> FaultyDisk:
    disk = FaultyDisk(seed)
    write_files(disk, files)
    return disk


def last_segment(files: dict[str, bytes]) -> str:
    return max(name for name in files if name.endswith(".seg"))


@dataclasses.dataclass
class Driver:
    """Works on a log and knows at each moment what a crash may take and what it may not.

    `entries` are all that were appended, from index 1 on; those below `acked` were acknowledged.
    """

    disk: FaultyDisk
    settings: LogSettings = SETTINGS
    entries: list[Stored] = dataclasses.field(default_factory=list)
    acked: int = 1
    first_min: int = 1

    def __post_init__(self) -> None:
        self.checkpoint = Checkpoint()  # the newest that was finished
        self.checkpoint_begun = Checkpoint()
        self.log: PartitionLog | None = None

    @property
    def live(self) -> PartitionLog:
        assert self.log is not None
        return self.log

    def append(self, entry: Entry, term: int = 1, now_s: float = 0.0) -> None:
        self.entries.append(append(self.live, entry, term, now_s))

    def flush(self) -> None:
        try:
            self.live.flush()
        except DiskFullError:
            # Undone, on disk too.
            del self.entries[self.live.next_index - 1 :]
        else:
            self.acked = self.live.synced_index
        self.check()

    def truncate(self, index: int) -> None:
        self.acked = min(self.acked, index)  # it may happen from now on
        self.live.truncate_suffix(index)
        del self.entries[index - 1 :]
        self.check()

    def begin_checkpoint(self, index: int) -> CheckpointJob:
        entry = self.entries[index - 1]
        state = f"state after {index}".encode()
        self.checkpoint_begun = Checkpoint(index, entry.term, entry.base_offset + entry.record_count, state)
        return self.live.begin_checkpoint(self.checkpoint_begun)

    def finish_checkpoint(self, job: CheckpointJob) -> None:
        job.run()
        self.live.finish_checkpoint(job)
        self.checkpoint = job.checkpoint

    def write_checkpoint(self, index: int) -> None:
        self.finish_checkpoint(self.begin_checkpoint(index))

    def trim(self, index: int) -> None:
        self.live.trim_prefix(index)
        self.first_min = self.live.first_index
        self.check()

    def check(self) -> None:
        check_contents(self.live, self.entries[self.live.first_index - 1 : self.acked - 1])

    def open(self) -> None:
        """Opens after whatever happened. What is found counts as acknowledged from now on: readers see it."""
        self.log = log = open_log(self.disk, self.settings)
        assert log.checkpoint in (self.checkpoint, self.checkpoint_begun)
        assert self.first_min <= log.first_index <= log.checkpoint.index + 1
        assert self.acked <= log.next_index <= len(self.entries) + 1, "acknowledged entries are gone, or new ones there"
        assert log.synced_index == log.next_index
        del self.entries[log.next_index - 1 :]
        self.acked, self.first_min, self.checkpoint = log.next_index, log.first_index, log.checkpoint
        self.check()
        check_lookups(log, self.entries[max(log.first_index, log.next_index - 20) - 1 :])
        assert log.next_offset == sum(entry.record_count for entry in self.entries)
        assert log.last_term == (self.entries[-1].term if self.entries else 0)

    def crash(self) -> None:
        self.log = None
        self.disk.crash()

    def kill(self) -> None:
        self.log = None
        self.disk.kill()


@contextlib.contextmanager
def until_stopped() -> Iterator[None]:
    """The work inside may be stopped by the disk, or the log by an error of the disk."""
    with contextlib.suppress(SimulatedCrash, LogFailedError, OSError):
        yield
