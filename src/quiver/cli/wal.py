"""`quiver wal show`: the metadata log of a manager, readably."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from quiver.cli.options import AsJson, DataDir, data_dir_of, examples
from quiver.cli.render import print_json, table
from quiver.cli.settings import load_settings
from quiver.config import NodeSettings
from quiver.errors import InvalidRequestError

_commands = typer.Typer(no_args_is_help=True, help="Look into the log of the metadata.")


def register(app: typer.Typer) -> None:
    app.add_typer(_commands, name="wal", epilog=examples("quiver wal show", "quiver wal show --manager 2 --json"))


@_commands.command("show", epilog=examples("quiver wal show", "quiver wal show --manager 2 --last 20"))
def show(
    data_dir: DataDir = None,
    manager: Annotated[int, typer.Option(min=1, help="Number of the manager.")] = 1,
    last: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Only so many. Default: all that are kept.")
    ] = None,
    metadata_url: Annotated[
        str | None,
        typer.Option(metavar="URL", show_default=False, help="Where its database is, as 'quiver up' was told."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the transactions of a manager's log: id, term, kind, payload, and whether the database has it.

    It only reads, whether the manager runs or not. A running manager writes its database a moment later than its
    log; what only its check-point still has is not listed.
    """
    from quiver.manager.wal import checkpoint_index, read_wal

    path = data_dir_of(data_dir)
    directory = path / f"manager-{manager}"
    if not (directory / "log").is_dir():
        raise InvalidRequestError(f"there is no metadata log in {directory}")
    applied = _applied(directory, load_settings({"data_dir": str(path), "metadata_url": metadata_url}), manager)
    rows: list[dict[str, Any]] = [
        {
            "transaction": found.id,
            "term": found.term,
            "kind": found.kind,
            "payload": found.payload,
            "applied": None if applied is None else found.id <= applied,
        }
        for found in read_wal(str(directory / "log"))
    ]
    rows = rows[-last:] if last else rows
    if as_json:
        print_json({"checkpoint": checkpoint_index(str(directory / "log")), "applied": applied, "transactions": rows})
        return
    said = {True: "yes", False: "no", None: "unknown"}
    shown = [
        (str(row["transaction"]), row["term"], row["kind"], _short(row["payload"]), said[row["applied"]])
        for row in rows
    ]
    table(f"Metadata log of manager {manager}", ("transaction", "term", "kind", "payload", "applied"), shown)


def _applied(directory: Path, settings: NodeSettings, manager: int) -> int | None:
    """The last transaction in the manager's database, None when that cannot be read."""
    import sqlalchemy as sa

    from quiver.metadata.store import read_applied, schema_url, sqlite_url

    url, file = settings.metadata_url, directory / "metadata.db"
    if not url:
        candidates = [sqlite_url(file)] if file.exists() else []
    elif sa.make_url(url).get_backend_name() == "postgresql":
        candidates = [schema_url(url, manager), url]  # one of several has a schema of its own, a single one has not
    else:
        candidates = [url]
    for candidate in candidates:
        with contextlib.suppress(sa.exc.SQLAlchemyError, ImportError):
            return read_applied(candidate)
    return None


def _short(payload: dict[str, Any]) -> str:
    return msgspec.json.encode(payload).decode()
