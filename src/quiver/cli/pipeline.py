"""`quiver pipeline init|run`: projects of Spark Declarative Pipelines, with a table of their flows while they run.

Rule: the work is in `quiver.spark.pipeline`; here are words, tables and exit codes.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quiver.cli.options import DataDir, Servers, examples, find_cluster, say
from quiver.cli.render import print_json, table
from quiver.cli.spark_job import Conf, Master, logged, pair
from quiver.config import PORT_DEFAULT
from quiver.errors import InvalidRequestError

if TYPE_CHECKING:
    from quiver.spark.pipeline.flows import Flow

Remote = Annotated[
    str | None,
    typer.Option(metavar="URL", show_default=False, help="Run at a Spark Connect server, sc://host:15002, not here."),
]
Refresh = Annotated[
    list[str] | None,
    typer.Option("--refresh", metavar="TABLE", show_default=False, help="Only this table or flow, may be repeated."),
]

_commands = typer.Typer(no_args_is_help=True, help="Pipelines of Spark: topics in, tables and topics out.")
_COLUMNS = ("flow", "state", "rows", "rows/s", "lag", "batch s", "restarts")


def register(app: typer.Typer) -> None:
    app.add_typer(
        _commands,
        name="pipeline",
        epilog=examples(
            "quiver pipeline init weblogs", "quiver pipeline run weblogs", "quiver pipeline run --continuous"
        ),
    )


@_commands.command(epilog=examples("quiver pipeline init weblogs", "quiver pipeline init weblogs --lines access-log"))
def init(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="Folder to make.")],
    lines: Annotated[str, typer.Option(metavar="TOPIC", help="Topic of log lines to read.")] = "logs",
    dead_letters: Annotated[
        str, typer.Option(metavar="TOPIC", help="Topic for lines that do not parse.")
    ] = "dead-letters",
    counts: Annotated[str, typer.Option(metavar="TOPIC", help="Topic for the counts.")] = "counts",
    servers: Servers = None,
) -> None:
    """Write a project that parses log lines of a topic, counts them by minute, and keeps what does not parse."""
    from quiver.spark.pipeline.project import Topics, write_project

    there = servers or os.environ.get("QUIVER_SERVERS") or f"127.0.0.1:{PORT_DEFAULT}"
    written = write_project(Path(name), there, Topics(lines, dead_letters, counts))
    print(f"Made {name}: {', '.join(written)}.")
    print("Next:")
    for topic in (lines, dead_letters, counts):
        print(f"  quiver topic create {topic}")
    print(f"  quiver pipeline run {name}")


@_commands.command(
    epilog=examples(
        "quiver pipeline run",
        "quiver pipeline run weblogs --continuous --every 10",
        "quiver pipeline run weblogs --master spark://host:7077",
        "quiver pipeline run weblogs --remote sc://host:15002",
    )
)
def run(
    project: Annotated[
        Path, typer.Argument(metavar="[DIR]", show_default=False, help="Folder of the project.")
    ] = Path(),
    continuous: Annotated[
        bool, typer.Option("--continuous", help="Go on with what comes, until Ctrl-C. Else: what is there now.")
    ] = False,
    every: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="With --continuous: the pause.")] = 5.0,
    full_refresh: Annotated[
        bool, typer.Option("--full-refresh", help="Make all tables anew, from the beginning of their sources.")
    ] = False,
    refresh: Refresh = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the project, and run nothing.")] = False,
    master: Master = "local[*]",
    remote: Remote = None,
    conf: Conf = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the flows as JSON at the end.")] = False,
    servers: Servers = None,
    data_dir: DataDir = None,
) -> None:
    """Run a project: bring its tables and topics up to what its sources have. A flow that fails is started again."""
    from quiver.spark.pipeline.project import find_spec

    spec = find_spec(project)
    settings = dict(pair(one, "--conf") for one in conf or ())
    if servers or data_dir or os.environ.get("QUIVER_SERVERS"):
        settings["quiver.servers"] = find_cluster(servers, data_dir)
    if continuous and (full_refresh or refresh or dry_run):
        raise InvalidRequestError("--continuous runs all flows, update after update: leave out the other")
    with logged() as log:
        from quiver.spark.pipeline.runner import open_pipeline

        with Board() as board, open_pipeline(spec, log, settings, board.changed, master=master, remote=remote) as found:
            board.watch(found.flows.all)
            if continuous:
                with contextlib.suppress(KeyboardInterrupt):
                    found.run_on(every)
            else:
                found.run(full_refresh=full_refresh, refresh=refresh or (), dry=dry_run)
        flows = found.flows.all()
    if as_json:
        print_json([{name: getattr(flow, name) for name in flow.__slots__} for flow in flows])
    elif not dry_run:
        table(f"Pipeline {spec.parent.name}", _COLUMNS, [cells(flow) for flow in flows])
    if dry_run:
        say("the project is all right")


def cells(flow: Flow) -> tuple[Any, ...]:
    lag = "-" if flow.lag is None else flow.lag
    batch = f"{flow.batch_s:.1f}" if flow.batches else "-"
    return flow.name, flow.state.lower(), flow.rows, round(flow.rows_per_s), lag, batch, flow.restarts


class Board:
    """Flows as they run: a table on a terminal, a line for each change of state elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._flows: Any = list
        self._states: dict[str, str] = {}
        self._live: Any = None

    def watch(self, flows: Any) -> None:
        self._flows = flows

    def changed(self, flow: Flow) -> None:
        before, self._states[flow.name] = self._states.get(flow.name), flow.state
        if self._live is not None or before == flow.state:
            return
        if flow.state == "FAILED":
            say(f"{flow.name}: failed: {flow.error}")
        elif before == "FAILED":
            say(f"{flow.name}: begins again, restart {flow.restarts}")
        elif flow.state in _WORTH_A_LINE:
            say(f"{flow.name}: {flow.state.lower()}, {flow.rows:,} rows")

    def __enter__(self) -> Board:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(get_renderable=self._draw, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _draw(self) -> Any:
        from rich import box
        from rich.table import Table

        drawn = Table(box=box.SIMPLE_HEAD)
        for at, name in enumerate(_COLUMNS):
            drawn.add_column(name, justify="left" if at < 2 else "right")
        for flow in self._flows():
            drawn.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells(flow)))
        return drawn


_WORTH_A_LINE = ("COMPLETED", "SKIPPED", "STOPPED")
