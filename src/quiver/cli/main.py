"""The `quiver` command: gathers the command groups and turns errors into one line and an exit code.

Rule: a user's mistake or a cluster in trouble never shows a stack trace; a bug of ours does.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from quiver.cli import (
    broker,
    cluster,
    consume,
    group,
    manager,
    nginx,
    pipeline,
    produce,
    sim,
    spark,
    status,
    topic,
    wal,
)
from quiver.cli.options import EXIT_INTERRUPTED, examples, exit_code_of, say
from quiver.errors import QuiverError


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except QuiverError as error:
            say(f"error: {error.message}")
            raise typer.Exit(exit_code_of(error)) from error
        except KeyboardInterrupt as error:
            say("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from error
        except BrokenPipeError as error:
            # The reader (`| head`) has what it wanted. Python would complain about the rest once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Quiver: a message queue that stores a message before it answers.",
    epilog=examples(
        "quiver up --detach",
        "quiver topic create logs --partitions 4",
        "echo hello | quiver produce logs",
        "quiver consume logs",
        "quiver down",
    ),
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"quiver {version('quiver')}")
        except PackageNotFoundError:
            print("quiver (from its source, not installed)")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


cluster.register(app)
status.register(app)
topic.register(app)
broker.register(app)
group.register(app)
manager.register(app)
nginx.register(app)
produce.register(app)
consume.register(app)
spark.register(app)
pipeline.register(app)
sim.register(app)
wal.register(app)


def main() -> None:
    app(prog_name="quiver")


if __name__ == "__main__":
    main()
