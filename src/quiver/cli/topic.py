"""`quiver topic create|list|describe|alter|delete`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quiver.cli.options import AsJson, DataDir, Servers, examples, find_cluster, say
from quiver.cli.ready import EXIT_FAILED
from quiver.cli.render import print_json, table
from quiver.errors import InvalidRequestError
from quiver.topic_settings import NAMES, check_names, parse_assignments
from quiver.types import PARTITIONS_MAX, TopicInfo, check_topic_name

if TYPE_CHECKING:
    from quiver import Admin

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="Name of the topic.")]

Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", show_default=False, help=f"Setting, may be repeated: {', '.join(NAMES)}."
    ),
]

_commands = typer.Typer(no_args_is_help=True, help="Create, list, describe, alter and delete topics.")


def register(app: typer.Typer) -> None:
    app.add_typer(
        _commands, name="topic", epilog=examples("quiver topic create logs --partitions 4", "quiver topic list")
    )


def _admin(servers: str | None, data_dir: str | None) -> Admin:
    from quiver import Admin

    return Admin(find_cluster(servers, data_dir))


@_commands.command(
    epilog=examples(
        "quiver topic create logs --partitions 4",
        "quiver topic create jobs --set cleanup=consumed",
    )
)
def create(
    name: Name,
    partitions: Annotated[int, typer.Option(min=1, max=PARTITIONS_MAX, help="Number of partitions.")] = 1,
    settings: Set = None,
    servers: Servers = None,
    data_dir: DataDir = None,
) -> None:
    """Create a topic."""
    check_topic_name(name)
    told = parse_assignments(settings or ())
    with _admin(servers, data_dir) as admin:
        created = admin.create_topic(name, partitions, told)
    print(f"Created topic {created.name} with {_count(len(created.partitions), 'partition')}.")


@_commands.command("list", epilog=examples("quiver topic list", "quiver topic list --json"))
def list_(as_json: AsJson = False, servers: Servers = None, data_dir: DataDir = None) -> None:
    """Print the names of all topics, one a line."""
    with _admin(servers, data_dir) as admin:
        names = sorted(admin.list_topics())
    if as_json:
        print_json(names)
        return
    for name in names:
        print(name)


@_commands.command(epilog=examples("quiver topic describe logs", "quiver topic describe logs --json"))
def describe(name: Name, as_json: AsJson = False, servers: Servers = None, data_dir: DataDir = None) -> None:
    """Show the partitions of a topic: leader, replicas, and the offsets they hold."""
    check_topic_name(name)
    with _admin(servers, data_dir) as admin:
        rows = describe_rows(admin.describe_topic(name), admin.offsets(name))
    if as_json:
        print_json({"name": name, "partitions": rows})
        return
    table(
        f"Topic {name}",
        ("partition", "leader", "replicas", "earliest", "latest", "messages"),
        [
            (
                row["partition"],
                row["leader"],
                ", ".join(map(str, row["replicas"])),
                row["earliest"],
                row["latest"],
                row["messages"],
            )
            for row in rows
        ],
    )


@_commands.command(
    epilog=examples(
        "quiver topic alter logs --partitions 8",
        "quiver topic alter logs --set retention.ms=86400000 --unset retention.bytes",
    )
)
def alter(
    name: Name,
    partitions: Annotated[
        int | None, typer.Option(min=1, max=PARTITIONS_MAX, show_default=False, help="Number of partitions, in all.")
    ] = None,
    settings: Set = None,
    unset: Annotated[
        list[str] | None,
        typer.Option("--unset", metavar="NAME", help="Setting to be as if never set, may be repeated."),
    ] = None,
    servers: Servers = None,
    data_dir: DataDir = None,
) -> None:
    """Change a topic's settings or give it more partitions, while it is used."""
    check_topic_name(name)
    told, back = parse_assignments(settings or ()), check_names(unset or ())
    if partitions is None and not told and not back:
        raise InvalidRequestError("say what is to change: --partitions, --set or --unset")
    with _admin(servers, data_dir) as admin:
        if told or back:
            altered = admin.alter_topic(name, told, back)
        if partitions is not None:
            altered = admin.add_partitions(name, partitions)
    print(f"Topic {altered.name} has {_count(len(altered.partitions), 'partition')}{_said(altered.settings)}.")


@_commands.command(epilog=examples("quiver topic delete logs", "quiver topic delete logs --yes"))
def delete(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    servers: Servers = None,
    data_dir: DataDir = None,
) -> None:
    """Delete a topic and all its messages. Asks first when it runs in a terminal."""
    check_topic_name(name)
    if not yes and sys.stdin.isatty() and not typer.confirm(f"Delete topic {name} and all its messages?"):
        say("nothing was deleted")
        raise typer.Exit(EXIT_FAILED)
    with _admin(servers, data_dir) as admin:
        admin.delete_topic(name)
    print(f"Deleted topic {name}.")


def describe_rows(topic: TopicInfo, offsets: dict[int, tuple[int, int]]) -> list[dict[str, Any]]:
    """One row a partition; `latest` is the offset the next message gets."""
    rows = []
    for partition in topic.partitions:
        earliest, latest = offsets[partition.id]
        rows.append(
            {
                "partition": partition.id,
                "leader": partition.leader,
                "replicas": list(partition.replicas),
                "earliest": earliest,
                "latest": latest,
                "messages": latest - earliest,
            }
        )
    return rows


def _said(settings: Mapping[str, object]) -> str:
    """', with cleanup=consumed, retention.ms=5000'"""
    return "".join([", with ", ", ".join(f"{k}={shown(v)}" for k, v in settings.items())]) if settings else ""


def shown(value: object) -> str:
    """As it is typed."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
