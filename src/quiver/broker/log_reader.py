"""Reads a partition's files in threads, while its owner goes on appending and trimming."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from quiver.broker.partition_state import OFFSET_UNKNOWN
from quiver.errors import CorruptLogError, LogFailedError, QuiverError, ShuttingDownError
from quiver.log.disk import Disk
from quiver.log.partition_log import PartitionLog
from quiver.log.segment import read_chunk
from quiver.wire.frame import FLAG_UNSEQUENCED, FrameHeader

T = TypeVar("T")


class LogReader:
    """`name` is for error messages, `refusal` says what is told of an error. `damage` is the damaged place that a
    reader met last."""

    def __init__(
        self,
        name: str,
        log: PartitionLog,
        disk: Disk,
        readers: Executor,
        on_damage: Callable[[CorruptLogError], None] | None,
        refusal: Callable[[QuiverError], QuiverError],
    ) -> None:
        self._name = name
        self._log = log
        self._disk = disk
        self._readers = readers
        self._on_damage = on_damage
        self._refusal = refusal
        self.damage: CorruptLogError | None = None
        self.is_closing = False

    async def read(self, prepare: Callable[[], tuple[int, int]], bytes_max: int) -> memoryview:
        """Frames from an offset on. `prepare` gives offset and end index, anew for each try; it may raise."""

        def start() -> Callable[[], memoryview]:
            offset, index_end = prepare()
            return partial(read_chunk, self._disk, self._log.spans_for_offset(offset), offset, index_end, bytes_max)

        return await self._in_thread(start)

    async def find_timestamp(self, timestamp: int, index_end: int) -> FrameHeader | None:
        return await self._in_thread(lambda: partial(self._log.find_timestamp, timestamp, index_end))

    async def offset_after(self, offset: int, bytes_max: int) -> tuple[int, int]:
        return await self._in_thread(lambda: partial(self._log.offset_after, offset, bytes_max))

    async def find_batch(self, producer_id: int, epoch: int, sequence: int) -> int:
        """The first offset of a stored batch that is no longer remembered; -1 when it is gone."""
        return await self._in_thread(lambda: partial(self._find_batch, producer_id, epoch, sequence))

    def _find_batch(self, producer_id: int, epoch: int, sequence: int) -> int:
        for _, header, _ in self._log.scan(self._log.first_index):
            found = (header.producer_id, header.producer_epoch, header.sequence) == (producer_id, epoch, sequence)
            if found and not header.flags & FLAG_UNSEQUENCED:
                return header.base_offset
        return OFFSET_UNKNOWN

    async def _in_thread(self, prepare: Callable[[], Callable[[], T]]) -> T:
        """Prepares here and reads in a thread; again, when a trim, a truncation or a compaction took the file
        meanwhile."""
        while True:
            first_index, cuts = self._log.first_index, self._log.cuts
            try:
                found = await asyncio.get_running_loop().run_in_executor(self._readers, prepare())
                if self._log.cuts == cuts:  # else it may have read at places of another file
                    return found
            except CorruptLogError as error:
                if self._log.cuts != cuts:
                    continue  # it read behind what is committed, while that was being replaced
                raise self._refusal(self._judged(error)) from error
            except OSError as error:
                if self.is_closing:
                    raise ShuttingDownError(f"{self._name} is stopping") from error
                if isinstance(error, FileNotFoundError) and (
                    self._log.first_index > first_index or self._log.cuts != cuts
                ):
                    continue
                if isinstance(error, FileNotFoundError):
                    missing = CorruptLogError.at(str(error.filename), 0, "the file is missing")
                    raise self._refusal(self._judged(missing)) from error
                raise self._refusal(LogFailedError(f"{self._name} cannot be read: {error}")) from error

    def _judged(self, damage: CorruptLogError) -> QuiverError:
        """A log that stopped, perhaps in the middle of a cut, may have other files than it knows: what it misses there
        is no damage. Who opens it again will see."""
        if self._log.failure is not None:
            return self._log.failure
        self.note(damage)
        return damage

    def health(self, otherwise: str) -> tuple[str, str]:
        """What is wrong with the log, in a word and in a sentence."""
        if self._log.failure is not None:
            return "failed", self._log.failure.message
        return (otherwise, "") if self.damage is None else ("corrupt", self.damage.message)

    def note(self, damage: CorruptLogError) -> None:
        self.damage = damage
        if self._on_damage is not None:
            self._on_damage(damage)
