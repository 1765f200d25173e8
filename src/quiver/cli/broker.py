"""`quiver broker`: runs one broker that joins a cluster, on this host or another; `list`, `add`, `remove` and
`rebalance` are about the brokers of a running cluster.

Rule: the cluster does the work. A command that waits for it may be interrupted; the work goes on.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from quiver.cli.options import AsJson, DataDir, Servers, Wait, examples, find_cluster
from quiver.cli.progress import Steps
from quiver.cli.render import print_json, table
from quiver.cli.settings import PORT_MAX
from quiver.errors import InvalidRequestError
from quiver.types import PartitionMove

if TYPE_CHECKING:
    from quiver import Admin

_LOOK_S: Final = 0.2

_commands = typer.Typer(no_args_is_help=False)


def register(app: typer.Typer) -> None:
    app.add_typer(
        _commands,
        name="broker",
        epilog=examples(
            "quiver broker --manager 127.0.0.1:9400 --id 4 --port 9404",
            "quiver broker --manager 10.0.0.5:9400 --id 2 --host 10.0.0.6 --data-dir /var/lib/quiver --insecure",
            "quiver broker list",
            "quiver broker add",
            "quiver broker --id 4 --port 9404",
            "quiver broker add 127.0.0.1:9404",
            "quiver broker remove 3",
            "quiver broker rebalance",
        ),
    )


@_commands.callback(invoke_without_command=True)
def broker(
    context: typer.Context,
    manager: Annotated[
        str | None, typer.Option(metavar="HOST:PORT,...", show_default=False, help="Managers of the cluster to join.")
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
    """Run one broker that joins the cluster of a manager, until Ctrl-C; or list, add, remove and rebalance brokers.

    Without --manager it joins the cluster that its directory remembers, else it waits until 'quiver broker add
    HOST:PORT' adds it to one.

    It keeps its messages in DATA/broker-ID. It must keep its id and its directory: one that comes back without its
    directory is taken in as a newcomer, and gets its replicas from the others.
    """
    if context.invoked_subcommand is not None:
        return
    if id_ is None:
        raise InvalidRequestError(
            "a broker needs --id N, and --manager HOST:PORT or 'quiver broker add'; 'quiver broker list' shows brokers"
        )
    from quiver.cli.node import main
    from quiver.client.cluster import parse_servers

    arguments = ["--role", "broker", "--node-id", str(id_)]
    if manager is not None:
        arguments += ["--manager", ",".join(parse_servers(manager))]
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
        moves, draining = admin.moves()
        rows = broker_rows(
            {node.id: node.address for node in admin.nodes()},
            {broker: [one.role for one in statuses] for broker, statuses in admin.replica_status().items()},
            moves,
            draining,
        )
    if as_json:
        print_json(rows)
        return
    columns = ("id", "address", "state", "replicas", "leads", "moving")
    table("Brokers", columns, [(str(row["id"]), *(row[column] for column in columns[1:])) for row in rows])


@_commands.command(
    epilog=examples(
        "quiver broker add", "quiver broker add --data-dir /var/lib/quiver", "quiver broker add 10.0.0.6:9404"
    )
)
def add(
    address: Annotated[
        str | None,
        typer.Argument(metavar="[HOST:PORT]", show_default=False, help="Where a broker waits to be added."),
    ] = None,
    servers: Servers = None,
    data_dir: DataDir = None,
) -> None:
    """Add a broker: start one more on this machine, or take in one that waits at HOST:PORT.

    Without an address it is for a cluster that 'quiver up --brokers N' or '--managers N' runs on this machine: the new
    broker runs under the same supervisor, and the next 'quiver up' starts it too. With one, start it first, on any
    host, with 'quiver broker --id N' and without --manager.
    """
    from quiver.cli.added_broker import start_broker, take_in

    number, where = start_broker(servers, data_dir) if address is None else take_in(address, servers, data_dir)
    print(
        f"Broker {number} serves {where}. New topics use it; 'quiver broker rebalance' gives it its share of the rest."
    )


@_commands.command(epilog=examples("quiver broker remove 3", "quiver broker remove 3 --no-wait"))
def remove(
    broker_id: Annotated[int, typer.Argument(metavar="ID", min=1, show_default=False, help="Number of the broker.")],
    wait: Wait = True,
    servers: Servers = None,
    data_dir: DataDir = None,
) -> None:
    """Move what a broker has to the others, then forget it. It may run or be gone for good.

    It is refused when the others could not keep its partitions. With fewer brokers left than a topic wants replicas,
    its partitions have fewer.
    """
    from quiver import Admin

    with Admin(find_cluster(servers, data_dir)) as admin:
        admin.remove_broker(broker_id)
        if not wait:
            print(f"Broker {broker_id} is being removed.")
            return
        _wait_for_moves(admin, broker_id)
    print(f"Removed broker {broker_id}.")


@_commands.command(epilog=examples("quiver broker rebalance", "quiver broker rebalance --no-wait"))
def rebalance(wait: Wait = True, servers: Servers = None, data_dir: DataDir = None) -> None:
    """Give every broker its share of replicas and leaders, a new one too, with as few moves as possible.

    Partitions that have fewer replicas than their topic wants get them.
    """
    from quiver import Admin

    with Admin(find_cluster(servers, data_dir)) as admin:
        count = len(admin.rebalance())
        if wait:
            _wait_for_moves(admin)
    if not count:
        print("Every broker has its share.")
    else:
        print(f"{count} partition{'' if count == 1 else 's'} {'moved' if wait else 'began to move'}.")


def _wait_for_moves(admin: Admin, broker_id: int = 0) -> None:
    """Until nothing moves; or until that broker is no longer being removed."""
    moves, draining = admin.moves()
    with Steps(len(moves), "partitions") as progress:
        total = len(moves)
        while broker_id in draining if broker_id else moves:
            progress.done(max(0, total - len(moves)))
            time.sleep(_LOOK_S)
            moves, draining = admin.moves()


def broker_rows(
    addresses: dict[int, str], roles: dict[int, list[str]], moves: list[PartitionMove], draining: list[int]
) -> list[dict[str, Any]]:
    """`roles` of the replicas of each broker that answers. `moving` counts partitions that change."""
    rows = []
    for broker_id, address in sorted(addresses.items()):
        state = "draining" if broker_id in draining else "online"
        rows.append(
            {
                "id": broker_id,
                "address": address,
                "state": state if broker_id in roles else "unreachable",
                "replicas": len(roles.get(broker_id, ())),
                "leads": roles.get(broker_id, []).count("leader"),
                "moving": sum(broker_id in (*move.replicas, *move.leaving) for move in moves),
            }
        )
    return rows
