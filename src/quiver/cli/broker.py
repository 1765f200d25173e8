"""`quiver broker`: runs one broker that joins a cluster, on this host or another; `quiver broker list` shows all."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from quiver.cli.options import AsJson, DataDir, Servers, examples, find_cluster
from quiver.cli.render import print_json, table
from quiver.cli.settings import PORT_MAX
from quiver.errors import InvalidRequestError

_commands = typer.Typer(no_args_is_help=False)


def register(app: typer.Typer) -> None:
    app.add_typer(
        _commands,
        name="broker",
        epilog=examples(
            "quiver broker --manager 127.0.0.1:9400 --id 4 --port 9404",
            "quiver broker --manager 10.0.0.5:9400 --id 2 --host 10.0.0.6 --data-dir /var/lib/quiver --insecure",
            "quiver broker list",
        ),
    )


@_commands.callback(invoke_without_command=True)
def broker(
    context: typer.Context,
    manager: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", show_default=False, help="Manager of the cluster to join.")
    ] = None,
    id_: Annotated[
        int | None,
        typer.Option("--id", min=1, max=2**31 - 1, show_default=False, help="Number of this broker, its for ever."),
    ] = None,
    data_dir: DataDir = None,
    host: Annotated[
        str | None, typer.Option(show_default=False, help="Address to listen on, as others reach it.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=PORT_MAX, show_default=False, help="Port; 0 takes a free one.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address that is not loopback: there is no TLS and no token.")
    ] = False,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", show_default=False, help="Settings file. Default: ./quiver.toml.")
    ] = None,
) -> None:
    """Run one broker that joins the cluster of a manager, until Ctrl-C; or list brokers.

    It keeps its messages in DATA/broker-ID. It must keep its id and its directory: one that comes back without its
    directory is taken in as a newcomer, and gets its replicas from the others.
    """
    if context.invoked_subcommand is not None:
        return
    if manager is None or id_ is None:
        raise InvalidRequestError("a broker needs --manager HOST:PORT and --id N; 'quiver broker list' shows brokers")
    from quiver.cli.node import main
    from quiver.client.cluster import parse_servers

    arguments = ["--role", "broker", "--node-id", str(id_), "--manager", parse_servers(manager)[0]]
    for flag, value in (("--data-dir", data_dir), ("--host", host), ("--port", port), ("--config", config)):
        if value is not None:
            arguments += [flag, str(value)]
    if insecure:
        arguments.append("--insecure")
    sys.stdout.flush()
    raise typer.Exit(main(arguments))


@_commands.command("list", epilog=examples("quiver broker list", "quiver broker list --json"))
def list_(as_json: AsJson = False, servers: Servers = None, data_dir: DataDir = None) -> None:
    """Show the brokers of a cluster: where they are, whether they answer, what they hold and lead."""
    from quiver import Admin

    with Admin(find_cluster(servers, data_dir)) as admin:
        rows = broker_rows(
            {node.id: node.address for node in admin.nodes()},
            {broker: [one.role for one in statuses] for broker, statuses in admin.replica_status().items()},
        )
    if as_json:
        print_json(rows)
        return
    table(
        "Brokers",
        ("id", "address", "state", "replicas", "leads"),
        [(str(row["id"]), row["address"], row["state"], row["replicas"], row["leads"]) for row in rows],
    )


def broker_rows(addresses: dict[int, str], roles: dict[int, list[str]]) -> list[dict[str, Any]]:
    """`roles` of the replicas of each broker that answers."""
    return [
        {
            "id": broker_id,
            "address": address,
            "state": "online" if broker_id in roles else "unreachable",
            "replicas": len(roles.get(broker_id, ())),
            "leads": roles.get(broker_id, []).count("leader"),
        }
        for broker_id, address in sorted(addresses.items())
    ]
