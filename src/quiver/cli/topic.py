"""`quiver topic create|list|describe|alter|delete`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quiver.cli.options import AsJson, DataDir, Servers, examples, find_cluster, say
from quiver.cli.rates import Rates
from quiver.cli.rates import shown as shown_rate
from quiver.cli.ready import EXIT_FAILED
from quiver.cli.render import human_bytes, print_json, table
from quiver.cli.status import replica_text, topic_rows
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
def describe(
    name: Name,
    as_json: AsJson = False,
    rate_over: Annotated[
        float, typer.Option(min=0, max=60, metavar="SECONDS", help="How long to count messages for the rate; 0: none.")
    ] = 0.5,
    servers: Servers = None,
    data_dir: DataDir = None,
) -> None:
    """Show a topic's settings and its partitions: leader, replicas, offsets, size, messages a second."""
    check_topic_name(name)
    with _admin(servers, data_dir) as admin:
        topic, offsets = admin.describe_topic(name), admin.offsets(name)
        rates = Rates()
        rates.look(topic_rows(admin.replica_status(name)), time.monotonic())
        time.sleep(rate_over)
        held = topic_rows(admin.replica_status(name))
        rates.look(held if rate_over else [], time.monotonic())
    rows = describe_rows(topic, offsets, held)
    wanted = {"replication.factor": topic.replication_factor} if topic.replication_factor else {}
    settings = {**topic.settings, **wanted}
    if as_json:
        print_json({"name": name, "settings": settings, "partitions": rows})
        return
    table(f"Topic {name}", _COLUMNS, [_cells(row) for row in rows])
    if settings:
        table("Settings", ("name", "value"), [(setting, shown(value)) for setting, value in settings.items()])


_COLUMNS = ("partition", "state", "leader", "replicas", "earliest", "latest", "messages", "size", "rate/s")


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    replicas = ", ".join(
        map(replica_text, row["replica_states"]) if row["replica_states"] else map(str, row["replicas"])
    )
    numbers = (row["earliest"], row["latest"], row["messages"])
    size = "-" if row["size_bytes"] is None else human_bytes(row["size_bytes"])
    return row["partition"], row["state"], row["leader"], replicas, *numbers, size, shown_rate(row["rate"])


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


def describe_rows(
    topic: TopicInfo, offsets: dict[int, tuple[int, int]], held: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """One row a partition; `latest` is the offset the next message gets. `held` is what its brokers say of it."""
    known = {row["partition"]: row for one in held for row in one["partitions"]}
    rows = []
    for partition in topic.partitions:
        found = known.get(partition.id, {})
        earliest, latest = offsets[partition.id]
        rows.append(
            {
                "partition": partition.id,
                "leader": partition.leader,
                "replicas": list(partition.replicas),
                "earliest": earliest,
                "latest": latest,
                "messages": latest - earliest,
                "state": found.get("state", "unknown"),
                "size_bytes": found.get("size_bytes"),
                "segments": found.get("segments"),
                "rate": found.get("rate"),
                "replica_states": found.get("replicas", []),
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
