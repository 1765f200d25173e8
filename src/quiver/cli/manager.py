"""`quiver manager`: runs one manager of a quorum, on this host or another; `list`, `add` and `remove` are about the
managers of a running cluster.

Rule: the cluster does the work. A command that waits for it may be interrupted; the work goes on.
"""

from __future__ import annotations

import sys
import time
from typing import Annotated, Final

import typer

from quiver.cli.options import AsJson, DataDir, Servers, Wait, examples, find_cluster
from quiver.cli.render import print_json, table
from quiver.cli.settings import PORT_MAX
from quiver.errors import InvalidRequestError, UnavailableError

ManagerId = Annotated[
    int, typer.Argument(metavar="ID", min=1, max=2**31 - 1, show_default=False, help="Number of the manager.")
]

_LOOK_S: Final = 0.2
_LEAVE_S: Final = 60.0

_commands = typer.Typer(no_args_is_help=False)


def register(app: typer.Typer) -> None:
    peers = "1=10.0.0.1:9400,2=10.0.0.2:9400,3=10.0.0.3:9400"
    app.add_typer(
        _commands,
        name="manager",
        epilog=examples(
            f"quiver manager --id 1 --peers {peers} --host 10.0.0.1 --data-dir /var/lib/quiver --insecure",
            "quiver manager list",
            "quiver manager add 4 10.0.0.4:9400",
            "quiver manager remove 3",
        ),
    )


@_commands.callback(invoke_without_command=True)
def manager(
    context: typer.Context,
    id_: Annotated[
        int | None,
        typer.Option("--id", min=1, max=2**31 - 1, show_default=False, help="Number of this manager, its for ever."),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(metavar="ID=HOST:PORT,...", show_default=False, help="All managers of the quorum, this one too."),
    ] = None,
    data_dir: DataDir = None,
    host: Annotated[
        str | None, typer.Option(show_default=False, help="Address to listen on, as others reach it.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=PORT_MAX, show_default=False, help="Port; the one that --peers says.")
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(min=0, max=PORT_MAX, show_default=False, help="Port of the HTTP API.")
    ] = None,
    metadata_url: Annotated[
        str | None,
        typer.Option(metavar="URL", show_default=False, help="SQL database; each manager has a schema of its own."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address that is not loopback: there is no TLS and no token.")
    ] = False,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", show_default=False, help="Settings file. Default: ./quiver.toml.")
    ] = None,
) -> None:
    """Run one manager, until Ctrl-C; or list, add and remove managers.

    It keeps the metadata in DATA/manager-ID. A new quorum begins when all managers of the list have started once; after
    that a majority is enough. A manager that comes back without its directory is taken in as a newcomer.
    """
    if context.invoked_subcommand is not None:
        return
    if id_ is None:
        raise InvalidRequestError("a manager needs --id N; 'quiver manager list' shows managers")
    from quiver.cli.node import main
    from quiver.manager.founding import parse_peers

    arguments = ["--role", "manager", "--node-id", str(id_)]
    if port is None and (mine := parse_peers(peers or "").get(id_)) is not None:
        port = int(mine.rpartition(":")[2])
    flags = {"data-dir": data_dir, "host": host, "port": port, "http-port": http_port, "config": config}
    for flag, value in (flags | {"metadata-url": metadata_url, "peers": peers}).items():
        if value is not None:
            arguments += [f"--{flag}", str(value)]
    if insecure:
        arguments.append("--insecure")
    sys.stdout.flush()
    raise typer.Exit(main(arguments))


@_commands.command("list", epilog=examples("quiver manager list", "quiver manager list --json"))
def list_(as_json: AsJson = False, servers: Servers = None, data_dir: DataDir = None) -> None:
    """Show the managers of a cluster: where they are and what they are; those awaited or about to leave, too."""
    from quiver import Admin

    with Admin(find_cluster(servers, data_dir)) as admin:
        found = admin.quorum()
    if as_json:
        print_json([{"id": one.id, "address": one.address, "http": one.http, "state": one.state} for one in found])
        return
    rows = [(str(one.id), one.address, one.http, one.state) for one in found]
    table("Managers", ("id", "address", "http", "state"), rows)


@_commands.command(epilog=examples("quiver manager add 4 10.0.0.4:9400"))
def add(
    manager_id: ManagerId,
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", show_default=False, help="Where it will listen.")],
    servers: Servers = None,
    data_dir: DataDir = None,
) -> None:
    """Let a new manager join the quorum of a running cluster. Then start it, with the list that this prints.

    It votes once it has caught up. The others need no restart, and find it again after one.
    """
    from quiver import Admin

    with Admin(find_cluster(servers, data_dir)) as admin:
        found = admin.add_manager(manager_id, address)
    peers = ",".join(f"{one.id}={one.address}" for one in found if one.address and one.state != "leaving")
    print(f"Manager {manager_id} may join. Start it with: quiver manager --id {manager_id} --peers {peers}")


@_commands.command(epilog=examples("quiver manager remove 3", "quiver manager remove 3 --no-wait"))
def remove(
    manager_id: ManagerId,
    wait: Wait = True,
    servers: Servers = None,
    data_dir: DataDir = None,
) -> None:
    """Take a manager out of the quorum. It may run, and then ends by itself, or be gone for good.

    It is refused when the others could not go on without it. Removing the primary makes another one.
    """
    from quiver import Admin

    with Admin(find_cluster(servers, data_dir)) as admin:
        found = admin.remove_manager(manager_id)
        deadline_s = time.monotonic() + _LEAVE_S
        while wait and any(one.id == manager_id for one in found):
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"manager {manager_id} has not left yet; the others go on with it")
            time.sleep(_LOOK_S)
            found = admin.quorum()
    print(f"Removed manager {manager_id}." if wait else f"Manager {manager_id} is being removed.")
