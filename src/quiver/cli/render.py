"""How values look: tables on a terminal, JSON for programs, sizes and rates for people.

Rule: rich is imported when a table is drawn, not before.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec


def print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns that hold only numbers are set to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for at, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[at], int) for row in rows)
        drawn.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        # Text, not str: a topic or path may look like rich's markup.
        drawn.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in row))
    # A pipe has no width; cutting cells to a guessed one would lose data.
    Console(width=None if sys.stdout.isatty() else 200).print(drawn)


def human_bytes(size: int) -> str:
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
