"""`Consumer.run`: a handler called for every record, topics in parallel, until silence or a stop.

Rule: one thread and one consumer for each topic, so that a slow topic holds up no other and order within a partition is
kept. With a group, positions are stored after every poll whose records were all handled: at least once each.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from quiver.errors import UnavailableError
from quiver.types import Record

logger = logging.getLogger("quiver.client")

_RECORDS_PER_COMMIT: Final = 100

Handler = Callable[[Record], object]


class Source(Protocol):
    """What a topic is read by: a consumer."""

    def poll(self, max_records: int = ..., timeout: float = ...) -> list[Record]: ...

    def commit(self) -> None: ...


@dataclasses.dataclass(slots=True)
class Runner:
    """`timeout_s` without a record on any topic ends the run; None runs until `stop` is set."""

    handler: Handler
    timeout_s: float | None
    poll_time_s: float
    poll_time_after_error_s: float
    commits: bool
    stop: threading.Event
    handled: int = 0
    failure: BaseException | None = None
    _heard_at_s: float = dataclasses.field(default_factory=time.monotonic)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def run(self, sources: Mapping[str, Source]) -> int:
        """Returns how many records were handled; raises what a handler raised, with that record not counted."""
        threads = [
            threading.Thread(target=self._read, args=(topic, source), name=f"quiver-run-{topic}", daemon=True)
            for topic, source in sources.items()
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # in slices, so that Ctrl-C is heard
        finally:
            self.stop.set()
            for thread in threads:
                thread.join()
        if self.failure is not None:
            raise self.failure
        return self.handled

    def _read(self, topic: str, source: Source) -> None:
        try:
            while not self.stop.is_set() and not self._is_silent():
                try:
                    self._read_once(source)
                except UnavailableError as error:
                    logger.warning("run_waits topic=%s error=%r", topic, error.message)
                    self.stop.wait(self.poll_time_after_error_s)
        except BaseException as error:
            with self._lock:
                self.failure = self.failure or error
            self.stop.set()

    def _read_once(self, source: Source) -> None:
        # What is polled is handled before a stop is looked at; after a handler's error it is not stored as read.
        records = source.poll(max_records=_RECORDS_PER_COMMIT, timeout=self.poll_time_s)
        for record in records:
            self.handler(record)
            with self._lock:
                self.handled += 1
                self._heard_at_s = time.monotonic()
        if records and self.commits:
            source.commit()

    def _is_silent(self) -> bool:
        return self.timeout_s is not None and time.monotonic() - self._heard_at_s >= self.timeout_s
