"""`quiver group list|describe|reset|delete`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quiver.cli.options import AsJson, DataDir, Servers, examples, find_cluster, say
from quiver.cli.positions import parse_place
from quiver.cli.ready import EXIT_FAILED
from quiver.cli.render import print_json, table
from quiver.types import GroupInfo, GroupPosition

if TYPE_CHECKING:
    from quiver import Admin

Name = Annotated[str, typer.Argument(metavar="GROUP", show_default=False, help="Name of the group.")]

_commands = typer.Typer(no_args_is_help=True, help="List, describe, set back and delete consumer groups.")


def register(app: typer.Typer) -> None:
    app.add_typer(
        _commands,
        name="group",
        epilog=examples(
            "quiver group list", "quiver group describe readers", "quiver group reset readers --to earliest"
        ),
    )


def _admin(servers: str | None, data_dir: str | None) -> Admin:
    from quiver import Admin

    return Admin(find_cluster(servers, data_dir))


@_commands.command("list", epilog=examples("quiver group list", "quiver group list --json"))
def list_(as_json: AsJson = False, servers: Servers = None, data_dir: DataDir = None) -> None:
    """Show all groups and how many members they have."""
    with _admin(servers, data_dir) as admin:
        groups = admin.list_groups()
    if as_json:
        print_json([{"name": one.name, "members": one.member_count, "assignment": one.strategy} for one in groups])
        return
    table("Groups", ("name", "members", "assignment"), [(one.name, one.member_count, one.strategy) for one in groups])


@_commands.command(epilog=examples("quiver group describe readers", "quiver group describe readers --json"))
def describe(name: Name, as_json: AsJson = False, servers: Servers = None, data_dir: DataDir = None) -> None:
    """Show where a group is in each partition, how many messages are left, how many were removed before it read them,
    and which member reads it."""
    with _admin(servers, data_dir) as admin:
        info, positions = admin.describe_group(name)
    if as_json:
        print_json(described(info, positions))
        return
    lag = sum(one.lag for one in positions)
    table(
        f"Group {name}: {info.member_count} members, {lag:,} messages left",
        ("topic", "partition", "position", "latest", "lag", "lost", "member"),
        [
            (
                one.topic,
                one.partition,
                "-" if one.offset is None else one.offset,
                one.latest,
                one.lag,
                one.lost,
                one.owner,
            )
            for one in positions
        ],
    )


@_commands.command(
    epilog=examples(
        "quiver group reset readers --to earliest --dry-run",
        "quiver group reset readers --to 2h --topic logs",
        "quiver group reset readers --to 2026-01-31T12:00:00Z",
        "quiver group reset readers --to 42 --topic logs --partition 0",
    )
)
def reset(
    name: Name,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="PLACE",
            show_default=False,
            help="earliest, latest, an offset, an ISO time (UTC by default), or how long ago: 90s, 2h, 1d.",
        ),
    ],
    topic: Annotated[str | None, typer.Option(show_default=False, help="Only this topic.")] = None,
    partition: Annotated[int | None, typer.Option(min=0, show_default=False, help="Only this partition.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")] = False,
    as_json: AsJson = False,
    servers: Servers = None,
    data_dir: DataDir = None,
) -> None:
    """Set a group to another place. Refused while it has members."""
    place = parse_place(to, time.time_ns() // 1000)
    with _admin(servers, data_dir) as admin:
        moved = admin.reset_group(
            name,
            to=place.name,
            offset=place.offset,
            timestamp=place.timestamp_us,
            topic=topic,
            partition=partition,
            dry_run=dry_run,
        )
    if as_json:
        rows = [{"topic": m.topic, "partition": m.partition, "before": m.before, "after": m.after} for m in moved]
        print_json({"group": name, "dry_run": dry_run, "partitions": rows})
        return
    title = f"Group {name} would be set" if dry_run else f"Group {name} is set"
    rows_shown = [(m.topic, m.partition, "-" if m.before is None else m.before, m.after) for m in moved]
    table(title, ("topic", "partition", "before", "after"), rows_shown)


@_commands.command(epilog=examples("quiver group delete readers", "quiver group delete '#7' --yes"))
def delete(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    servers: Servers = None,
    data_dir: DataDir = None,
) -> None:
    """Forget a group and its positions, or a registered consumer by its number ('#7'). Refused while a group has
    members. Asks first when it runs in a terminal."""
    if not yes and sys.stdin.isatty() and not typer.confirm(f"Delete group {name} and its positions?"):
        say("nothing was deleted")
        raise typer.Exit(EXIT_FAILED)
    with _admin(servers, data_dir) as admin:
        admin.delete_group(name)
    print(f"Deleted group {name}.")


def described(info: GroupInfo, positions: list[GroupPosition]) -> dict[str, Any]:
    return {
        "name": info.name,
        "assignment": info.strategy,
        "generation": info.generation,
        "members": [
            {"id": one.id, "topics": list(one.topics), "partitions": [list(pair) for pair in one.partitions]}
            for one in info.members
        ],
        "lag": sum(one.lag for one in positions),
        "partitions": [
            {
                "topic": one.topic,
                "partition": one.partition,
                "position": one.offset,
                "earliest": one.earliest,
                "latest": one.latest,
                "lag": one.lag,
                "lost": one.lost,
                "member": one.owner,
            }
            for one in positions
        ],
    }
