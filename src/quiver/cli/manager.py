"""`quiver manager`: runs one manager of a quorum, on this host or another."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from quiver.cli.options import DataDir, examples
from quiver.cli.settings import PORT_MAX


def register(app: typer.Typer) -> None:
    peers = "1=10.0.0.1:9400,2=10.0.0.2:9400,3=10.0.0.3:9400"
    app.command(
        epilog=examples(f"quiver manager --id 1 --peers {peers} --host 10.0.0.1 --data-dir /var/lib/quiver --insecure")
    )(manager)


def manager(
    id_: Annotated[int, typer.Option("--id", min=1, max=2**31 - 1, help="Number of this manager, its for ever.")],
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
    """Run one manager, until Ctrl-C.

    It keeps the metadata in DATA/manager-ID. A new quorum begins when all managers of the list have started once; after
    that a majority is enough. A manager that comes back without its directory is taken in as a newcomer.
    """
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
