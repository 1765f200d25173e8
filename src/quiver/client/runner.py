"""`Consumer.run`: a handler called for every record, topics in parallel, until silence or a stop.

Rule: one thread and one consumer for each topic, so that a slow topic holds up no other and order within a partition is
kept; with asyncio, one task each. With a group, positions are stored after every poll whose records were all handled:
at least once each.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from quiver.errors import InvalidRequestError, MemberFencedError, UnavailableError
from quiver.types import Record

logger = logging.getLogger("quiver.client")

_RECORDS_PER_COMMIT: Final = 100

Handler = Callable[[Record], object]
ON_ERROR: Final = ("stop", "skip")


def check_on_error(on_error: object) -> bool:
    """Whether a record whose handler raised is skipped."""
    if on_error not in ON_ERROR:
        raise InvalidRequestError(f"on_error is one of {ON_ERROR}, not {on_error!r}")
    return on_error == "skip"


class Source(Protocol):
    """What a topic is read by: a consumer."""

    def poll(self, max_records: int = ..., timeout: float = ...) -> list[Record]: ...

    def commit(self) -> None: ...

    @property
    def is_waiting(self) -> bool: ...


@dataclasses.dataclass(slots=True)
class Course:
    """How a run is to go. `timeout_s` without a record on any topic ends it; None: it runs until it is stopped.
    `skips`: a record whose handler raises is left out, else that ends the run."""

    timeout_s: float | None
    poll_time_s: float
    poll_time_after_error_s: float
    commits: bool
    skips: bool
    handled: int = 0
    heard_at_s: float = dataclasses.field(default_factory=time.monotonic)

    def note_handled(self) -> None:
        self.handled += 1
        self.heard_at_s = time.monotonic()

    def note_begun(self) -> None:
        """Who had nothing to read until now has heard no silence."""
        self.heard_at_s = time.monotonic()

    def skip(self, record: Record) -> None:
        """Called where the handler's error is being dealt with. Raises it again unless it is to be skipped."""
        if not self.skips:
            raise
        self.heard_at_s = time.monotonic()
        logger.exception("record_skipped topic=%s partition=%d offset=%d", *_place(record))

    @property
    def is_silent(self) -> bool:
        return self.timeout_s is not None and time.monotonic() - self.heard_at_s >= self.timeout_s


def _place(record: Record) -> tuple[str, int, int]:
    return record.topic, record.partition, record.offset


@dataclasses.dataclass(slots=True)
class Runner:
    """In threads, until `stop` is set or the course ends."""

    handler: Handler
    course: Course
    stop: threading.Event
    failure: BaseException | None = None
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
        return self.course.handled

    def _read(self, topic: str, source: Source) -> None:
        try:
            while not self.stop.is_set() and not self.course.is_silent:
                waited = source.is_waiting
                try:
                    self._read_once(source)
                    if waited:
                        self.course.note_begun()
                except UnavailableError as error:
                    logger.warning("run_waits topic=%s error=%r", topic, error.message)
                    self.stop.wait(self.course.poll_time_after_error_s)
                except MemberFencedError as error:  # who has the partitions by now gets these records again
                    logger.warning("run_fenced topic=%s error=%r", topic, error.message)
        except BaseException as error:
            with self._lock:
                self.failure = self.failure or error
            self.stop.set()

    def _read_once(self, source: Source) -> None:
        # What is polled is handled before a stop is looked at; after a handler's error it is not stored as read.
        course = self.course
        records = source.poll(max_records=_RECORDS_PER_COMMIT, timeout=course.poll_time_s)
        for record in records:
            try:
                self.handler(record)
            except Exception:
                course.skip(record)
                continue
            with self._lock:
                course.note_handled()
        if records and course.commits:
            source.commit()


class AsyncSource(Protocol):
    async def poll(self, max_records: int = ..., timeout: float = ...) -> list[Record]: ...

    async def commit(self) -> None: ...

    @property
    def is_waiting(self) -> bool: ...


async def run_tasks(
    handler: Callable[[Record], object], course: Course, stop: asyncio.Event, sources: Mapping[str, AsyncSource]
) -> int:
    """The same in tasks. The handler may be a coroutine function."""

    async def read(topic: str, source: AsyncSource) -> None:
        while not stop.is_set() and not course.is_silent:
            waited = source.is_waiting
            try:
                await read_once(source)
                if waited:
                    course.note_begun()
            except UnavailableError as error:
                logger.warning("run_waits topic=%s error=%r", topic, error.message)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(course.poll_time_after_error_s):
                        await stop.wait()
            except MemberFencedError as error:
                logger.warning("run_fenced topic=%s error=%r", topic, error.message)

    async def read_once(source: AsyncSource) -> None:
        records = await source.poll(max_records=_RECORDS_PER_COMMIT, timeout=course.poll_time_s)
        for record in records:
            try:
                done = handler(record)
                if inspect.isawaitable(done):
                    await done
            except Exception:
                course.skip(record)
                continue
            course.note_handled()
        if records and course.commits:
            await source.commit()

    tasks = [asyncio.ensure_future(read(*one)) for one in sources.items()]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return course.handled
