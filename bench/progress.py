"""Tells on standard error what runs: a bar on a terminal, a line for each section elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class SectionProgress:
    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("starting", total=None)
        self._section = ""
        self._begun = 0

    def section(self, name: str, steps: int | None = None) -> None:
        """Begins a part of `steps` steps."""
        self._section, self._begun = name, 0
        self._bar.reset(self._task, total=steps, description=name)
        if self._bar.disable:
            print(f"[{time.monotonic() - self._began_s:5.1f} s] {name}", file=sys.stderr, flush=True)

    def step(self, text: str) -> None:
        """Begins a step; the one before it is done."""
        self._bar.update(self._task, completed=self._begun, description=f"{self._section}: {text}")
        self._begun += 1

    def warn(self, text: str) -> None:
        """A line that stays."""
        self._bar.console.print(text, style="bold red", markup=False, soft_wrap=True)

    def __enter__(self) -> SectionProgress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()
