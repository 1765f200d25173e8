"""A bar on the terminal for work that takes longer than two seconds: bytes, or steps of which the number is known.

Rule: nothing is drawn, and rich is not imported, for short work or when standard error is not a terminal.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from quiver.spark.jobs.running import JobProgress

SHOW_AFTER_S = 2.0


class Progress:
    """`total_bytes` None draws how much was done instead of how much is left."""

    def __init__(self, total_bytes: int | None) -> None:
        self._total_bytes = total_bytes
        self._began_s = time.monotonic()
        self._wanted = sys.stderr.isatty()
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def update(self, messages: int, done_bytes: int) -> None:
        if not self._wanted:
            return
        elapsed_s = time.monotonic() - self._began_s
        if elapsed_s < SHOW_AFTER_S:
            return
        if self._bar is None:
            self._draw()
        assert self._bar is not None and self._task is not None
        self._bar.update(
            self._task, completed=done_bytes, messages=f"{messages:,}", rate=f"{messages / elapsed_s:,.0f}"
        )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._wanted = False

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            BarColumn(),
            DownloadColumn(binary_units=True),
            TextColumn("{task.fields[messages]} messages, {task.fields[rate]}/s"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("", total=self._total_bytes, messages="0", rate="0")
        self._bar.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Steps(Progress):
    """So many of so many, in words: `12/40 partitions`."""

    def __init__(self, total: int, noun: str) -> None:
        super().__init__(total)
        self._noun = noun

    def done(self, count: int) -> None:
        self.update(count, count)

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn(self._noun))
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=self._total_bytes)
        self._bar.start()


class SparkTasks(Progress):
    """Tasks that are done of those that Spark knows of, and messages."""

    def __init__(self) -> None:
        super().__init__(None)

    def show(self, progress: JobProgress) -> None:
        self._total_bytes = progress.tasks or None
        self.update(progress.rows, progress.tasks_done)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=self._total_bytes)

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        rows = TextColumn("tasks, {task.fields[messages]} messages, {task.fields[rate]}/s")
        columns = (BarColumn(), MofNCompleteColumn(), rows, TimeElapsedColumn())
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=self._total_bytes, messages="0", rate="0")
        self._bar.start()
